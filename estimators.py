"""Estimate the quality of importance weights, the distribution sampled from, and advantages.

KL divergences are estimated in kl.py, and log-ratios computed in ratios.py. Critics and GAE are
left out: the baseline is a group of samples.
Derivation: math/2-policy-gradient.md, math/3-importance-weights.md.
"""

import math

import torch
from torch import Tensor

from three_policies.checks import same_shape
from three_policies.kl import kl_estimate as kl_estimate                       # re-exported
from three_policies.ratios import SAFETY_BOUND, exp_ratio, widen
from three_policies.ratios import aggregate_log_ratio as aggregate_log_ratio   # re-exported


def kish(n: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Return ESS/N from N, Σw and Σw², all of one shape; 0 where all weights are 0.  (eq:ess)"""
    tiny = torch.finfo(squares.dtype).tiny
    return total.square() / (n * squares).clamp(min=tiny)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Return Kish's effective sample size as a share of the N valid entries.  (eq:ess)

        ESS/N = (Σw)² / (N Σw²)  ∈ [1/N, 1];   → 1/(1 + χ²) as N grows

    `weights`, `mask`: any one shape → scalar. If all weights are 0, or if there are none, the
    result is 0, not NaN. Raises ValueError if shapes differ.
    Source: Kish 1965; Martino et al. 1602.03572; χ² link 1809.04129.
    """
    same_shape("", weights=weights, mask=mask)
    weights = torch.where(mask.bool(), widen(weights), 0.0)
    tiny = weights.new_full((1,), torch.finfo(weights.dtype).tiny)
    largest = torch.cat([weights.abs().flatten(), tiny]).amax()
    weights = weights / largest                                 # scale-free: w² stays finite
    return kish(mask.bool().sum(), weights.sum(), weights.square().sum())


def chi_square(n: Tensor, squares: Tensor) -> Tensor:
    """Return χ²(π‖μ) = E_μ[ρ²] − 1, the variance of the weights, from samples of μ.  (eq:chi2)

    `n`, `squares`: the number of samples and their Σρ², of any one shape. The result is 0 where
    n = 0, and may be negative if μ alone was cut. Pass float64: in float32 the 1 drowns small χ².
    """
    return torch.where(n > 0, squares / n.clamp(min=1) - 1, 0.0)


def perplexity(log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Return exp(−mean log-prob) of each sequence.  (eq:perplexity)

    [B, T] → [B]. ppl_old/ppl_rollout = 1/(geometric mean of ρ). Raises ValueError if shapes differ.
    """
    same_shape("[B, T]", log_prob=log_prob, response_mask=response_mask)
    mask = response_mask.bool()
    mean = torch.where(mask, widen(log_prob), 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    return exp_ratio(-mean, 4 * SAFETY_BOUND)           # never squared; e^80 fits in a float32


def sampling_log_probs(logits: Tensor, temperature: float = 1.0, top_k: int = 0,
                       top_p: float = 1.0, min_p: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return log-probs of the distribution sampled from, and the mass kept.  (eq:sampling)

        q = softmax(logits/τ);   μ(v) = q(v)·1[v kept] / Σ_kept q

    Three cuts are made, in vLLM's order. Min-p keeps v where q(v) ≥ min_p·max q, and always the
    likeliest token. Top-k keeps the k likeliest, and all that tie with the last of them. Top-p
    keeps the fewest that hold a share p of the mass left so far. Min-p and top-p are exact up to
    rounding. Hugging Face applies min-p last, so its top-p sees more mass and keeps as many tokens
    or more. If the trainer scores with log q while the engine samples from μ, every token is off
    by log(mass kept).

    `logits`: [..., V] → log μ [..., V] (−inf where never sampled), and the mass [...] in (0, 1],
    both in float32 or wider; a NaN or +inf among the logits makes both NaN. Raises ValueError for a
    temperature ≤ 0, a negative top_k, a top_p outside (0, 1] or a min_p outside [0, 1].
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature!r}")
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"top_k must be ≥ 0 and top_p in (0, 1], not {top_k!r} and {top_p!r}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], not {min_p!r}")
    log_q = torch.log_softmax(widen(logits) / temperature, -1)
    if top_p == 1 and min_p == 0 and not 0 < top_k < log_q.shape[-1]:
        whole = torch.ones_like(log_q[..., 0]).masked_fill(log_q[..., 0].isnan(), torch.nan)
        return log_q, whole                                    # nothing to cut: not a digit changes

    ordered, order = log_q.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if min_p > 0:
        keep &= ordered >= ordered[..., :1] + math.log(min_p)
    if 0 < top_k < ordered.shape[-1]:
        keep &= ordered >= ordered[..., top_k - 1:top_k]
    if top_p < 1:
        kept = torch.where(keep, ordered.exp(), 0.0)
        kept = kept / kept.sum(-1, keepdim=True)
        keep &= kept.cumsum(-1) - kept < top_p                 # the mass before this token < p

    keep = torch.zeros_like(keep).scatter(-1, order, keep) | log_q.isnan()     # NaN remains NaN
    log_mass = torch.where(keep, log_q, -torch.inf).logsumexp(-1, keepdim=True)
    mass = log_mass.squeeze(-1).exp().clamp(max=1)             # rounding may have it above 1
    return torch.where(keep, log_q - log_mass, -torch.inf), mass


def _group_sums(values: Tensor, groups: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return how many rows of each row's group are kept, and the sum of their values.

    Both are [B] in float64: a rounded mean differs a little from equal rewards, and divided by a
    deviation near 0 that would be an advantage.
    """
    same_shape("[B], one number for each response", rewards=values, groups=groups,
               **({} if keep is None else {"keep": keep}))
    if values.ndim != 1:
        raise ValueError(f"rewards {tuple(values.shape)} must have the shape [B], one number for "
                         "each response")

    def total(x: Tensor) -> Tensor:
        zero = torch.zeros_like(x, dtype=torch.float64)
        return zero.index_add(0, group, x.double())[group]

    keep = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep.bool()
    group = torch.searchsorted(groups.sort().values, groups)    # one index per group, below B
    return total(keep), total(torch.where(keep, values.double(), 0.0))      # NaN × 0 is NaN


def grpo_advantages(rewards: Tensor, groups: Tensor, normalize_std: bool = True,
                    keep: Tensor | None = None) -> Tensor:
    """Return group-relative advantages: A_i = (R_i − mean_g) / std_g.  (eq:baseline)

    `rewards`: [B]; `groups`: [B], equal for samples of one prompt → [B]. std_g is the sample
    standard deviation (n − 1), plus 1e-6. `normalize_std=False` gives Dr. GRPO's
    A_i = R_i − mean_g. Its mean includes R_i itself, so it is (n−1)/n of RLOO's: a shorter step, in
    the same direction if all groups have one size. A group of one has no baseline: A = R. With
    `keep` [B], only those rows make up the baseline. Mask the others: their A may be of any size.
    Source: Shao et al. 2402.03300; Liu et al. 2503.20783.
    """
    count, total = _group_sums(rewards, groups, keep)
    mean = torch.where(count > 1, total / count.clamp(min=1), 0.0)
    advantages = rewards.double() - mean
    if normalize_std:
        _, size = _group_sums(advantages.abs() / count.clamp(min=1), groups, keep)
        size = size.clamp(min=torch.finfo(size.dtype).tiny)
        unit = size / size.frexp().mantissa     # a power of two: exact, and no square overflows
        _, squares = _group_sums((advantages / unit).square(), groups, keep)
        std = unit * (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = torch.where(count > 1, advantages / (std + 1e-6), advantages)
    return advantages.to((rewards + 0.0).dtype)                     # whole numbers, bools: float32


def rloo_advantages(rewards: Tensor, groups: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return leave-one-out advantages: R_i − mean of the group's other rewards.  (eq:baseline)

    The gradient stays unbiased. `rewards`, `groups`: [B] → [B]. A sample without others has A = R.
    With `keep` [B], only those rows count as others. Source: Kool et al. 2019; Ahmadian et al.
    2402.14740.
    """
    count, total = _group_sums(rewards, groups, keep)
    own = torch.ones_like(rewards, dtype=torch.bool) if keep is None else keep.bool()
    others = total - torch.where(own, rewards.double(), 0.0)
    advantages = rewards.double() - others / (count - own.double()).clamp(min=1)
    return advantages.to((rewards + 0.0).dtype)


def reinforce_advantages(rewards: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return rewards minus the batch's mean: A_i = R_i − mean(R).  (eq:baseline)

    `rewards`: [B] → [B]. With `keep` [B], the mean is over those rows. Source: Williams 1992.
    """
    one_group = torch.zeros_like(rewards, dtype=torch.int64)
    count, total = _group_sums(rewards, one_group, keep)
    return (rewards.double() - total / count.clamp(min=1)).to((rewards + 0.0).dtype)
