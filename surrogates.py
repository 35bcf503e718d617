"""Define the per-token losses, from REINFORCE to PPO and beyond; each changes an earlier one.

A loss is a [B, T] tensor of per-token terms, to be minimised. losses.py decides what weights, masks
and divides these terms. `old_log_prob` is that of the policy which π_θ is compared with: π_old with
three policies, π_rollout with two. Each loss is a row of LOSSES. Value losses and entropy bonuses
are left out. Derivation: math/.

    terms = ppo_clip_loss(log_prob, old_log_prob, advantages)                             # [B, T]
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from three_policies.ratios import aggregate_log_ratio, exp_ratio, widen


# ------------------------------------------------- per token: [B, T] → [B, T], to be minimised

def reinforce_loss(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Return −A log π_θ, whose gradient is −A ∇log π_θ.  (eq:reinforce)

    On-policy, the expectation of this gradient is −∇J (eq:policy-gradient). Off-policy,
    `policy_loss` multiplies the loss by a detached ρ. Where A = 0 it is 0, also if log π_θ is −∞.
    Source: Williams 1992.
    """
    log_prob = torch.where(advantages == 0, 0.0, log_prob)          # 0 · ∞ would be NaN
    return -advantages * log_prob


def ppo_clip_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_low: float = 0.2,
                  clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    """Return −min(rA, clip(r, 1−ε_low, 1+ε_high)A) with r = π_θ/π_old.  (eq:ppo-clip)

    The gradient vanishes where r has left the interval in the direction of the advantage. In bypass
    mode π_rollout takes the place of π_old. Both ends then pull π_θ's logits towards π_rollout's,
    the upper one while KL(π_θ‖π_rollout) ≤ log(1+ε_high) (eq:clip-pull; in numbers:
    eq:clip-one-place). `dual_clip` c > 1 bounds the loss for A < 0 by −cA (eq:dual-clip).
    Sources: Schulman et al. 1707.06347; Ye et al. 1912.09729 (dual clip, c = 3); DAPO 2503.14476
    (ε_high > ε_low).
    """
    ratio = exp_ratio(widen(log_prob) - widen(old_log_prob))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def gspo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
              clip_low: float = 3e-4, clip_high: float = 4e-4,
              dual_clip: float | None = None) -> Tensor:
    """Apply PPO's clip to the sequence's r̄ = (Π_t r_t)^{1/|y|}, not the token's r.  (eq:gspo)

    This is the form GSPO-token, sg(r̄)·π_θ/sg(π_θ): a token has the value of its sequence and the
    gradient of its own log-prob. So a token's weight, mask or advantage acts on that token alone.
    Where these are constant over a sequence the gradient is that of r̄ itself. Aggregate the terms
    with seq-mean-token-mean. |y| counts the mask, so that a tool's tokens between two turns change
    nothing (eq:tool-length). Source: Zheng et al. 2507.18071.
    """
    log_prob = widen(log_prob)
    log_r = log_prob - widen(old_log_prob)
    log_s = aggregate_log_ratio(log_r, response_mask, "geometric").detach()
    own = torch.where(log_prob == -math.inf, 0.0, log_prob)     # −∞ − (−∞) would be NaN
    log_s = log_s + (own - own.detach())
    return ppo_clip_loss(log_s, torch.zeros_like(log_s), advantages, clip_low, clip_high, dual_clip)


def cispo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_low: float = 0.2,
               clip_high: float = 0.2) -> Tensor:
    """Return −sg(clip(r, 1−ε_low, 1+ε_high)) A log π_θ: the clip bounds the weight.  (eq:cispo)

    No token's gradient vanishes. At r = 1 it is REINFORCE. The source, MiniMax-M1 2506.13585, sets
    no lower bound; the one here is verl's.
    """
    ratio = exp_ratio(widen(log_prob) - widen(old_log_prob))
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    log_prob = torch.where(advantages == 0, 0.0, log_prob)          # 0 · ∞ would be NaN
    return -weight.detach() * advantages * log_prob


def sapo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, tau_positive: float = 1.0,
              tau_negative: float = 1.05) -> Tensor:
    """Return −A·(4/τ_A)·σ(τ_A(r − 1)), a smooth gate instead of a clip.  (eq:sapo)

    τ_A depends on the sign of A. The gate's slope at r = 1 is 1, so the first step is PPO's.
    Source: 2511.20347.
    """
    ratio = exp_ratio(widen(log_prob) - widen(old_log_prob))
    tau = torch.where(advantages > 0, ratio.new_full((), tau_positive),
                      ratio.new_full((), tau_negative))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -gate * advantages


# --------------------------------- on which tokens a clip acts: [B, T] → bool [B, T], for metrics

def clipped_tokens(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float,
                   dual_clip: float | None) -> Tensor:
    """Find tokens whose gradient PPO's clip sets to 0, by r and the sign of A.  (eq:ppo-clip)"""
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    if dual_clip is not None:
        below = below | (ratio > dual_clip)                                      # (eq:dual-clip)
    return (above & (advantages > 0)) | (below & (advantages < 0))


def clipped_weights(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Find tokens whose weight CISPO's clip bounds; each keeps its gradient.  (eq:cispo)"""
    return (ratio > 1 + clip_high) | (ratio < 1 - clip_low)


# ------------------------------------------------------------------------------------ the rows

class Loss(NamedTuple):
    """One loss. `function` is called with log_prob, the tensors of `takes`, and `own` by name."""

    meaning: str
    function: Callable[..., Tensor]
    takes: tuple[str, ...]                          # of old_log_prob, advantages, response_mask
    own: Mapping[str, float | None]                 # its numbers; a LossConfig may replace them
    level: str | None = "token"                     # of its r; None: no r, so bypass mode weights
    holds: Callable[..., Tensor] | None = None      # on which tokens its clip acts: r, A, **own


LOSSES = {
    "reinforce": Loss(
        "no ratio and no clip; bypass mode only, where ρ is an explicit weight",
        reinforce_loss, ("advantages",), {}, level=None),
    "ppo_clip": Loss(
        "PPO: r is clipped to [1 − clip_low, 1 + clip_high]",
        ppo_clip_loss, ("old_log_prob", "advantages"),
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}, holds=clipped_tokens),
    "gspo": Loss(
        "PPO's clip on the geometric mean of a sequence's r",
        gspo_loss, ("old_log_prob", "advantages", "response_mask"),
        {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}, "geometric", clipped_tokens),
    "cispo": Loss(
        "REINFORCE weighted by the clipped r: no token loses its gradient",
        cispo_loss, ("old_log_prob", "advantages"),
        {"clip_low": 0.2, "clip_high": 0.2}, holds=clipped_weights),
    "sapo": Loss(
        "a smooth gate of r in place of a clip",
        sapo_loss, ("old_log_prob", "advantages"), {"tau_positive": 1.0, "tau_negative": 1.05}),
}
