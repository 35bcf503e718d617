"""From REINFORCE to decoupled PPO: each loss differs from the one above by what its equation adds.

This file decides: a loss is a [B, T] tensor of per-token terms, to be minimised; weights multiply
the terms, the rejection mask leaves terms out, and the denominator is chosen separately.
`policy_loss` puts them together for every mode:
    decoupled   w(π_old/π_rollout) · PPO(π_θ/π_old)      three policies
    bypass      PPO(π_θ/π_rollout), no weight            two policies
    reinforce   w(π_θ/π_rollout) · REINFORCE             two policies, no clip
Left out: value losses, entropy bonuses. Derivation: math/.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from correction import (OF_PROBABILITIES, Correction, RolloutCorrectionConfig, correct,
                        importance_weights, rejection_mask)
from estimators import VERLS_KL, aggregate_log_ratio, exp_ratio, kl_estimate, masked_log_ratio

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                "seq-mean-token-sum-norm")
CLIP = {"gspo": (3e-4, 4e-4)}           # ε_low, ε_high where they are not (0.2, 0.2)


# ------------------------------------------------- per token: [B, T] → [B, T], to be minimised

def reinforce_loss(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """−A log π_θ: its gradient is −A ∇log π_θ.  (eq:reinforce)

    In expectation that is −∇J (eq:policy-gradient). Off-policy, `policy_loss` multiplies it by a
    detached ρ. Source: Williams 1992.
    """
    return -advantages * log_prob


def ppo_clip_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_low: float = 0.2,
                  clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    """−min(rA, clip(r, 1−ε_low, 1+ε_high)A), r = π_θ/π_old.  (eq:ppo-clip)

    The gradient vanishes where r has left the interval in the direction that A asks for. With
    π_rollout for π_old, as in bypass mode, each end pulls π_θ towards π_rollout (eq:clip-pull).
    `dual_clip` c > 1 bounds the loss for A < 0 by −cA, where r alone would not (eq:dual-clip).
    Sources: Schulman et al. 1707.06347; Ye et al. 1912.09729 (dual clip, c = 3); DAPO 2503.14476
    (ε_high > ε_low).
    """
    ratio = exp_ratio(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def gspo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
              clip_low: float = 3e-4, clip_high: float = 4e-4,
              dual_clip: float | None = None) -> Tensor:
    """PPO's clip on the sequence's r̄ = (Π_t r_t)^{1/|y|} instead of the token's r.  (eq:gspo)

    In the form GSPO-token, sg(r̄)·π_θ/sg(π_θ): a token has the value of its sequence and the
    gradient of its own log-prob, so that a weight, a mask or an advantage of one token is no other
    token's. Where these are constant over a sequence its gradient is that of r̄ itself. To be
    aggregated by seq-mean-token-mean. At |y| = 1 it is PPO. Source: Zheng et al. 2507.18071, whose
    clip range is that narrow because r̄ is a geometric mean.
    """
    log_s = aggregate_log_ratio(log_prob - old_log_prob, response_mask, "geometric").detach()
    log_s = log_s + (log_prob - log_prob.detach())
    return ppo_clip_loss(log_s, torch.zeros_like(log_s), advantages, clip_low, clip_high, dual_clip)


def cispo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_low: float = 0.2,
               clip_high: float = 0.2) -> Tensor:
    """−sg(clip(r, 1−ε_low, 1+ε_high)) A log π_θ: the clip bounds the weight.  (eq:cispo)

    No token's gradient vanishes. At r = 1 it is REINFORCE. Source: MiniMax-M1 2506.13585, which
    sets no lower bound: that one is verl's.
    """
    weight = exp_ratio(log_prob - old_log_prob).clamp(1 - clip_low, 1 + clip_high)
    return -weight.detach() * advantages * log_prob


def sapo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, tau_positive: float = 1.0,
              tau_negative: float = 1.05) -> Tensor:
    """−A·(4/τ_A)·σ(τ_A(r − 1)): a smooth gate, not a clip; τ_A is by the sign of A.  (eq:sapo)

    The gate's slope at r = 1 is 1, so the first step is PPO's. Source: 2511.20347.
    """
    ratio = exp_ratio(log_prob - old_log_prob)
    tau = torch.where(advantages > 0, ratio.new_full((), tau_positive),
                      ratio.new_full((), tau_negative))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -gate * advantages


def centering_loss(log_prob: Tensor, rollout_log_prob: Tensor, advantages: Tensor,
                   response_mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """A Σ_v sg(μ(v) w(v)) log π_θ(v), to be added to −w A log π_θ(y).  (eq:score-centering)

    Then w ∇log π_θ(y) is less its own mean under μ, and in a sum over tokens a constant A moves
    nothing: where ρ is truncated or left out no baseline does that. w(v) is what `config` gives a
    token: weight and criteria. `log_prob`, `rollout_log_prob`: [B, T, K], of K candidates v of each
    token, −∞ under μ where there are fewer. Exact where these hold all of μ; what they leave of μ
    is taken to be in proportion to what they leave of π_θ: one more candidate. token_tv* keeps it,
    which is exact while it has at most δ under both. Source: 2609.20807.
    """
    log_prob, rollout_log_prob = (x.to(torch.promote_types(x.dtype, torch.float32))
                                  for x in (log_prob, rollout_log_prob))
    known = (rollout_log_prob > -math.inf) & response_mask.bool()[..., None]           # [B, T, K]
    p, mu = (torch.where(known, x, -math.inf).exp() for x in (log_prob, rollout_log_prob))
    rest, mu_rest = (1 - x.sum(-1, keepdim=True) for x in (p, mu))
    log_p = torch.cat([torch.where(known, log_prob, 0.0), rest.clamp(min=1e-6).log()], -1)
    mu = torch.cat([mu, mu_rest.clamp(min=0)], -1)
    asked = mu.flatten(1) > 0                                             # as if [B, T·(K + 1)]
    log_mu = torch.where(asked, mu.flatten(1), 1.0).log()
    log_rho = torch.where(asked, log_p.detach().flatten(1) - log_mu, 0.0)
    advantages = advantages[..., None].expand_as(mu)
    weights = rejection_mask(log_rho, asked, config.rollout_rs, advantages.flatten(1), log_mu)
    # The rest is many tokens: Σπ − Σμ of it is not the π − μ of any, and must not reject them.
    others = {k: bound for k, bound in config.rollout_rs.items() if k not in OF_PROBABILITIES}
    rest = rejection_mask(log_rho, asked, others).view_as(mu)[..., -1:]
    weights = torch.cat([weights.view_as(mu)[..., :-1], rest], -1)
    if config.rollout_is is not None:
        weights = weights * importance_weights(log_rho, asked, "token",
                                               config.rollout_is_threshold).view_as(mu)
    return (advantages * mu * weights * log_p).sum(-1)


# ---------------------------------------------------------------------------------- aggregation

class Counts(NamedTuple):
    """Tokens and non-empty sequences, added up over ranks and micro-batches.  (eq:aggregation)"""

    tokens: Tensor
    sequences: Tensor


def count(mask: Tensor) -> Counts:
    """Counts of a mask [B, T], as 0-dim float tensors.  (eq:aggregation)"""
    mask = mask.bool()
    return Counts(mask.sum().float(), mask.any(-1).sum().float())


def aggregate_loss(values: Tensor, mask: Tensor, mode: str, *,
                   denominator_mask: Tensor | None = None,
                   counts: Counts | None = None, horizon: int | None = None) -> Tensor:
    """Per-token values to one scalar.  (eq:aggregation)

        token-mean               Σ_i Σ_t x / Σ_i |y_i|            every token weighs the same
        token-sum                Σ_i Σ_t x                        for who divides later
        seq-mean-token-sum       (1/N) Σ_i Σ_t x                  the policy gradient: long > short
        seq-mean-token-mean      (1/N) Σ_i (1/|y_i|) Σ_t x        every sequence weighs the same
        seq-mean-token-sum-norm  (1/N) Σ_i (1/H) Σ_t x            H = horizon, default T: Dr. GRPO

    `values`, `mask`: [B, T]; `mask` says which terms are summed. `denominator_mask` (default: mask)
    says what |y_i| and N count, so that rejection need not change the step's length; where it is
    empty and `mask` is not, |y_i| counts `mask`. `counts`:
    those numbers for the whole mini-batch, over ranks and micro-batches; the results of its parts
    then add up to the full batch's. Nothing to sum: 0, with the graph attached. N counts non-empty
    sequences. Raises ValueError on another mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"mode must be one of {', '.join(AGGREGATIONS)}, not {mode!r}")
    mask = mask.bool()
    counted = mask if denominator_mask is None else denominator_mask.bool()
    tokens, sequences = count(counted) if counts is None else counts
    row = torch.where(mask, values, 0.0).sum(-1)                                      # [B]
    if mode == "token-sum":
        return row.sum()
    if mode == "token-mean":
        return row.sum() / torch.as_tensor(tokens).clamp(min=1)
    if mode == "seq-mean-token-mean":
        length = counted.sum(-1)
        length = torch.where(length > 0, length, mask.sum(-1))     # rejected, and yet summed
        row = row / length.clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        row = row / (mask.shape[-1] if horizon is None else horizon)
    return row.sum() / torch.as_tensor(sequences).clamp(min=1)


# ------------------------------------------------------------------------------------- the losses

def _checked(log_prob, old_log_prob, rollout_log_prob, advantages, response_mask,
             needed) -> list[Tensor | None]:
    """The four tensors of `policy_loss`, [B, T] each and 0 on padding, or a sentence."""
    if advantages is not None and advantages.shape in ((len(response_mask),),
                                                       (len(response_mask), 1)):
        advantages = advantages.reshape(-1, 1).expand_as(response_mask)
    tensors = {"log_prob": log_prob, "old_log_prob": old_log_prob,
               "rollout_log_prob": rollout_log_prob, "advantages": advantages}
    for name, x in tensors.items():
        if x is None and name in needed:
            raise ValueError(f"{name} is missing")
        if x is not None and x.shape != response_mask.shape:
            raise ValueError(f"{name} {tuple(x.shape)} and response_mask "
                             f"{tuple(response_mask.shape)} must have one shape [B, T]")
    return [None if x is None else torch.where(response_mask.bool(), x, 0.0).to(
        torch.promote_types(x.dtype, torch.float32)) for x in tensors.values()]  # before r is formed


def policy_loss(log_prob: Tensor, old_log_prob: Tensor | None, rollout_log_prob: Tensor | None,
                advantages: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig, *,
                correction: Correction | None = None, clip_low: float | None = None,
                clip_high: float | None = None, dual_clip: float | None = None,
                tau_positive: float = 1.0, tau_negative: float = 1.05, mode: str = "token-mean",
                denominator: str = "fixed", counts: Counts | None = None,
                horizon: int | None = None, nan_is_missing: bool = False,
                candidates: tuple[Tensor, Tensor] | None = None,
                ) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch in any mode, and its metrics.

    (eq:decoupled-ppo, eq:bypass, eq:off-policy, eq:batch-size)

        decoupled: E_μ[Σ_t w_t L(r_t, A_t)]      ρ = π_old/μ, r = π_θ/π_old
        bypass:    E_μ[Σ_t L(ρ_θ,t, A_t)]        ρ_θ = π_θ/μ
        reinforce: E_μ[Σ_t −w_t A_t log π_θ]     w of ρ_θ

    All tensors [B, T]; advantages may be [B] or [B, 1]. `old_log_prob`: None is this log_prob,
    detached, as in a first update; bypass mode has no π_old and does not look at it. In decoupled
    mode the ratio r is taken from π_old, and π_old is what is compared with π_rollout. In bypass
    mode r is taken from π_rollout, and this π_θ is compared with it. `rollout_log_prob`: None where
    nothing is corrected, or `correction` is given, in decoupled mode; with `nan_is_missing` a NaN
    in it is a token that the sampler gave no log-prob: ρ = 1 there.
    `correction`: as `correct` gave it for these rows; when None it is computed here, from
    old_log_prob (decoupled) or from this log_prob (bypass), and its metrics (rollout_corr/*) are
    among those returned. `clip_low`, `clip_high`: None is the loss's own. `denominator`: "fixed"
    counts the response mask, "kept" what rejection left; `counts` likewise, for the whole
    mini-batch. loss/ratio, loss/approx_kl and loss/clip_fraction (in bypass mode once more as
    loss/bypass_clip_fraction, which `diagnose` judges) are means over the kept tokens of these
    rows; with `counts` the metrics are summands, of which `loss_means` makes means.
    `candidates`: what score_centering asks for, log π_θ and log μ of `centering_loss`.
    Everything rejected: a zero loss whose graph is attached.
    Raises ValueError: unknown mode or denominator, a tensor missing, shapes that differ.
    """
    if denominator not in ("fixed", "kept"):
        raise ValueError(f"denominator must be fixed or kept, not {denominator!r}")
    corrects = config.bypass_mode or (correction is None and
                                      (config.rollout_is is not None or config.rollout_rs))
    needed = ["log_prob", "advantages", *(["rollout_log_prob"] if corrects else [])]
    log_prob, old_log_prob, rollout_log_prob, advantages = _checked(
        log_prob, None if config.bypass_mode else old_log_prob, rollout_log_prob, advantages,
        response_mask, needed)
    # Two roles: what is compared with π_rollout, and what π_θ is compared with in the ratio r.
    train_log_prob = (log_prob if old_log_prob is None else old_log_prob).detach()
    if rollout_log_prob is not None and nan_is_missing:
        rollout_log_prob = torch.where(rollout_log_prob.isnan(), train_log_prob, rollout_log_prob)
    anchor_log_prob = rollout_log_prob.detach() if config.bypass_mode else train_log_prob
    valid, corrected_here = response_mask.bool(), {}
    if correction is None and rollout_log_prob is None:
        correction = Correction(None, response_mask)
    elif correction is None:
        correction = correct(train_log_prob, rollout_log_prob, response_mask, config, advantages)
        corrected_here = correction.metrics
    clip_low, clip_high = (own if given is None else given for given, own in zip(
        (clip_low, clip_high), CLIP.get(config.loss_type, (0.2, 0.2))))
    if config.loss_type == "reinforce":
        loss = reinforce_loss(log_prob, advantages)
    elif config.loss_type == "ppo_clip":
        loss = ppo_clip_loss(log_prob, anchor_log_prob, advantages, clip_low, clip_high, dual_clip)
    elif config.loss_type == "gspo":
        loss = gspo_loss(log_prob, anchor_log_prob, advantages, valid, clip_low, clip_high,
                         dual_clip)
    elif config.loss_type == "cispo":
        loss = cispo_loss(log_prob, anchor_log_prob, advantages, clip_low, clip_high)
    else:
        loss = sapo_loss(log_prob, anchor_log_prob, advantages, tau_positive, tau_negative)
    if correction.weights is not None and not config.ratio_is_the_weight:   # or eq:double-count
        loss = loss * correction.weights
    counted = valid if denominator == "fixed" else correction.mask
    summed = correction.mask.bool()
    if config.score_centering:          # the mean is subtracted from rejected tokens, too
        if candidates is None or any(x.shape[:2] != valid.shape for x in candidates):
            raise ValueError("score_centering needs candidates, two tensors [B, T, K]")
        loss = torch.where(summed, loss, 0.0) + centering_loss(*candidates, advantages, valid,
                                                               config)
        summed = valid

    total = aggregate_loss(loss, summed, mode, denominator_mask=counted, counts=counts,
                           horizon=horizon)
    with torch.no_grad():
        log_r, kept = log_prob - anchor_log_prob, correction.mask.bool()
        stops = stopped(config.loss_type, log_r, valid, advantages, clip_low, clip_high, dual_clip)
        of_tokens = {"loss/ratio": exp_ratio(log_r), "loss/approx_kl": -log_r,
                     "loss/clip_fraction": stops.to(log_r.dtype)}
        if config.ratio_is_the_weight:     # of the mismatch alone, until π_θ has moved
            of_tokens["loss/bypass_clip_fraction"] = of_tokens["loss/clip_fraction"]
        sums = {name: torch.where(kept, x, 0.0).sum() for name, x in of_tokens.items()}
        metrics = {"loss/policy": total.detach(), **sums, "loss/kept_tokens": kept.sum().float()}
    return total, {**(loss_means(metrics) if counts is None else metrics), **corrected_here}


def stopped(loss_type: str, log_ratio: Tensor, response_mask: Tensor, advantages: Tensor,
            clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    """Tokens whose gradient, or whose weight (CISPO), the clip of this loss holds: [B, T], bool.

    (eq:ppo-clip, eq:dual-clip, eq:gspo, eq:cispo)
    """
    if loss_type in ("reinforce", "sapo"):
        return torch.zeros_like(response_mask)
    if loss_type == "gspo":
        log_ratio = aggregate_log_ratio(log_ratio, response_mask, "geometric")
    ratio = exp_ratio(log_ratio)
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    if loss_type == "cispo":
        return above | below
    if dual_clip is not None:
        below = below | (ratio > dual_clip)
    return (above & (advantages > 0)) | (below & (advantages < 0))


def loss_means(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over kept tokens from the sums of all micro-batches and ranks.  (eq:aggregation)"""
    over_kept = ("loss/ratio", "loss/approx_kl", "loss/clip_fraction", "loss/bypass_clip_fraction")
    kept = totals["loss/kept_tokens"].clamp(min=1)
    return {name: x / kept if name in over_kept else x for name, x in totals.items()
            if name != "loss/kept_tokens"}


def kl_loss(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kind: str = "k3+",
            mode: str = "token-mean", *, ratio: Tensor | None = None, counts: Counts | None = None,
            horizon: int | None = None) -> Tensor:
    """KL(π_θ‖π_ref) as a loss, aggregated.  (eq:kl-gradient, eq:kl-ratio)

    `log_prob`, `ref_log_prob`, `response_mask`: [B, T]; `kind` as in `kl_estimate`: prefer k2 or a
    "+", whose gradient is the per-token reverse KL's; k1's is zero in expectation and k3's is
    KL(π_ref‖π_θ)'s. `ratio` [B, T] multiplies the estimate when samples come from μ: detached with
    k2 or "+", or π_θ/μ with its graph with k1 or k3 (DeepSeek-V3.2 2512.02556: ∇(ratio·k3) =
    sg(ratio)·∇k2, sample by sample). With prefix products for the ratio, and their graph, k1 gives
    the gradient of the whole sequence's KL (eq:prefix).
    """
    valid = response_mask.bool()
    log_prob, ref_log_prob = (torch.where(valid, x, 0.0) for x in (log_prob, ref_log_prob))
    values = kl_estimate(log_prob, ref_log_prob, kind)
    if ratio is not None:
        values = values * torch.where(valid, ratio, 0.0)
    return aggregate_loss(values, valid, mode, counts=counts, horizon=horizon)


def kl_ratio(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, kind: str,
             level: str) -> Tensor:
    """The `ratio` of `kl_loss` for samples of π_rollout: [B, T].  (eq:kl-ratio, eq:prefix)

        token     ρ_t = π_θ/μ                what is left is ∇KL per token, in the states of μ
        prefix    ρ_{1:t} = Π_{s≤t} ρ_s      the states are those of π_θ as well

    It keeps its graph for k1 and k3, and is detached for all others, k2 and every "+". With prefix
    products k1 and k3 have the whole ∇KL, the others its per-token part (eq:kl-gradient).
    """
    log_rho = masked_log_ratio(log_prob, rollout_log_prob, response_mask)
    rho = exp_ratio(aggregate_log_ratio(log_rho, response_mask, level))
    return rho if VERLS_KL.get(kind, kind) in ("k1", "k3") else rho.detach()


def kl_penalty(old_log_prob: Tensor, ref_log_prob: Tensor, rollout_log_prob: Tensor,
               response_mask: Tensor, kind: str = "k1", level: str | None = None,
               weights: Tensor | None = None) -> Tensor:
    """What KL(π_θ‖π_ref) in the reward takes from the advantages, [B, T].  (eq:kl-gradient)

        None      Σ_{s≥t} k_s                    a reward like any other: the loss weights it
        token     ρ_t k_t / w_t                  the token's own: ∇KL per token, in the states of μ
        prefix    Σ_{s≥t} ρ_{1:s} k_s / w_t      all of ∇KL (eq:prefix)

    ρ = π_old/π_rollout. `weights` [B, T]: w, by which the loss multiplies token t; the penalty has
    weights of its own, so w is divided out, and where it is 0 nothing is left to be penalised.
    Only k1 has the gradient of the KL here. Source of None: eq:kl-gradient's first part, on-policy.
    """
    mask = response_mask.bool()
    old, ref = (torch.where(mask, x.detach(), 0.0) for x in (old_log_prob, ref_log_prob))
    kl = kl_estimate(old, ref, kind)                                                    # [B, T]
    if level is not None:
        log_rho = masked_log_ratio(old_log_prob.detach(), rollout_log_prob, mask)
        kl = kl * exp_ratio(aggregate_log_ratio(log_rho, mask, level))
    if level != "token":
        kl = torch.where(mask, kl, 0.0).flip(-1).cumsum(-1).flip(-1)
    if level is not None and weights is not None:
        kl = torch.where(weights > 0, kl / torch.where(weights > 0, weights, 1.0), 0.0)
    return torch.where(mask, kl, 0.0)
