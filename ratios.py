"""Log-ratios of two policies, per token and at each level.

Every log-probability is in nats, at the sampling temperature, of one sampled token. Tensors of
tokens are [B, T] and come with a mask that is 1 on response tokens. Padding is replaced by 0 before
anything is computed from it, NaN included. Two ratios occur, ρ = π_old/π_rollout and
r = π_θ/π_old. math/ has the derivations, under the labels (eq:…) that docstrings cite.

    log_rho = masked_log_ratio(old_log_prob, rollout_log_prob, response_mask)             # [B, T]
"""

import math

import torch
from torch import Tensor

from three_policies.checks import same_shape

# In nats: log-ratios are clamped to ±20 before they are exponentiated. Beyond e^20 ≈ 4.9e8 the
# size of a ratio says nothing more. Its square, which χ² and ESS need, still fits in a float32.
SAFETY_BOUND = 20.0

LEVELS = ("token", "prefix", "sequence", "geometric")
OF_TOKENS = ("token", "prefix")         # levels with a ρ of its own for each token


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or as it is if wider: sums and differences of 16 bits lose too much."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_log_ratio(log_prob: Tensor, other_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Return log(π/π') per token, 0 on padding, in float32 or wider.  (eq:ratio)

    `log_prob`, `other_log_prob`, `response_mask`: [B, T] → [B, T]. NaN or ±inf in the padding
    reaches neither value nor gradient: a difference has slope 1 even there, so masking gives 0.
    Raises ValueError if shapes differ.
    """
    same_shape("[B, T]", log_prob=log_prob, other_log_prob=other_log_prob,
               response_mask=response_mask)
    return torch.where(response_mask.bool(), widen(log_prob) - widen(other_log_prob), 0.0)


def exp_ratio(log_ratio: Tensor, bound: float = SAFETY_BOUND) -> Tensor:
    """Return ρ = exp(log ρ), log ρ clamped to ±bound; finite if the input is.  (eq:ratio)"""
    return widen(log_ratio).clamp(-bound, bound).exp()


def ratio_less_one(log_ratio: Tensor, bound: float = SAFETY_BOUND) -> Tensor:
    """Return ρ − 1, log ρ clamped to ±bound; where ρ is near 1, `exp_ratio` would round it away."""
    return widen(log_ratio).clamp(-bound, bound).expm1()


def aggregate_log_ratio(log_ratio: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """Return log ρ of each token, prefix, sequence or sequence mean, by `level`.  (eq:levels)

        token:      log ρ_t
        prefix:     Σ_{s≤t} log ρ_s        the tokens up to t, t included (eq:prefix)
        sequence:   Σ_s log ρ_s            the product of ratios: exp of the sum, not sum of exps
        geometric:  (1/|y|) Σ_s log ρ_s    the length-normalised ratio, (Π ρ)^{1/|y|}

    `log_ratio`, `response_mask`: [B, T] → [B, T], 0 on padding. Padding may stand between tokens:
    in such holes, a tool's output, nothing is read (eq:trajectory). Raises ValueError on another
    level, or if shapes differ.
    """
    same_shape("[B, T]", log_ratio=log_ratio, response_mask=response_mask)
    log_ratio, mask = widen(log_ratio), response_mask.bool()
    if level == "token":
        return torch.where(mask, log_ratio, 0.0)
    if level == "prefix":
        return torch.where(mask, torch.where(mask, log_ratio, 0.0).cumsum(-1), 0.0)
    return torch.where(mask, sequence_log_ratio(log_ratio, mask, level), 0.0)


def sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """Return the sum ("sequence") or mean ("geometric") of each sequence's log ρ.  (eq:levels)

    `log_ratio`, `response_mask`: [B, T] → [B, 1]. Raises ValueError on another level or shape.
    """
    same_shape("[B, T]", log_ratio=log_ratio, response_mask=response_mask)
    mask = response_mask.bool()
    total = torch.where(mask, widen(log_ratio), 0.0).sum(-1, keepdim=True)
    if level == "sequence":
        return total
    if level == "geometric":
        return total / mask.sum(-1, keepdim=True).clamp(min=1)
    raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}" if level not in
                     OF_TOKENS else f"level must be sequence or geometric, not {level!r}")


def outside(log_rho: Tensor, lo: float | None, hi: float | None) -> tuple[Tensor, Tensor]:
    """Find where ρ < lo and where ρ > hi.  (eq:mis, eq:rejection)

    `log_rho`: [B, T] → bool [B, T] twice. The bounds are on ρ and are compared as logarithms. A
    value equal to its bound is inside. A bound of None is open.
    """
    return (log_rho < (math.log(lo) if lo else -math.inf),
            log_rho > (math.inf if hi is None else math.log(hi)))


def extremes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and smallest x of each row, ∓∞ if it is empty: [B] twice.  (eq:merge)"""
    if not x.shape[-1]:
        nothing = x.new_full(x.shape[:-1], math.inf)
        return -nothing, nothing
    return torch.where(mask, x, -math.inf).amax(-1), torch.where(mask, x, math.inf).amin(-1)
