"""The KL term: its estimators, their gradients, its ratio for samples of π_rollout, its penalty.

The log-ratio is ℓ = log π_θ − log π_ref. A good value does not imply a good gradient: a "+" keeps
the value and repairs the gradient, and a ratio repairs it for samples of another policy.
`losses.kl_loss` aggregates these terms. Derivation: math/13-kl.md.

    values = kl_estimate(log_prob, ref_log_prob, "k3+")                                  # [B, T]
"""

import math

import torch
from torch import Tensor

from three_policies.checks import same_shape
from three_policies.ratios import SAFETY_BOUND, aggregate_log_ratio, masked_log_ratio, widen

KL_KINDS = ("k1", "k2", "k3", "abs")


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Estimate KL(π_θ‖π_ref) per token from tokens sampled from π_θ, in nats.  (eq:kl-estimators)

    With ℓ = log π_θ − log π_ref:
        k1 = ℓ                  unbiased, may be negative
        k2 = ℓ²/2               biased, ≥ 0
        k3 = e^{−ℓ} − 1 + ℓ     unbiased, ≥ 0
        abs = |ℓ|
    A "+" keeps the estimator's value and replaces its gradient by that of k2, ℓ∇log π_θ, in the
    straight-through form (eq:straight-through):
        k+ = k2 − sg(k2) + sg(k)
    For one action, E_π[∇k2] = ∇KL exactly. Over a sequence it is only the per-token part of the
    gradient: how a token changes the KL of later states is missing (eq:kl-gradient).

    `log_prob`, `ref_log_prob`: [B, T] → [B, T], in float32 or wider; detach the reference. k3 is
    that of −SAFETY_BOUND for any lower ℓ. Where ℓ² is infinite a "+" is NaN. Raises ValueError if
    shapes differ, and on another kind, also `full`, which needs the vocabulary of both policies.
    Source: Schulman, "Approximating KL divergence" (values); Tang & Munos 2506.09477 (gradients).
    """
    same_shape("[B, T]", log_prob=log_prob, ref_log_prob=ref_log_prob)
    base = kind.removesuffix("+")
    ell = widen(log_prob) - widen(ref_log_prob)
    if base == "k1":
        value = ell
    elif base == "k2":
        value = ell.square() / 2
    elif base == "k3":
        limited = ell.clamp(min=-SAFETY_BOUND)
        value = torch.expm1(-limited) + limited
    elif base == "abs":
        value = ell.abs()
    else:
        why = ": that takes the whole vocabulary of both policies" if base == "full" else ""
        raise ValueError(f"kind must be one of {', '.join(KL_KINDS)}, each with an optional '+', "
                         f"not {kind!r}{why}")
    if not kind.endswith("+"):
        return value
    k2 = ell.square() / 2
    return k2 - k2.detach() + value.detach()


def kl_terms(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kind: str,
             ratio: Tensor | None = None) -> Tensor:
    """Return the terms that `kl_loss` aggregates, times their ratio: [B, T].  (eq:kl-ratio)"""
    drawable = response_mask.bool()
    if ratio is not None:
        drawable = drawable & (log_prob != -math.inf)
    log_prob, ref_log_prob = (torch.where(drawable, x, 0.0)
                              for x in (log_prob, ref_log_prob.detach()))

    if ratio is not None and kind == "k3" and ratio.requires_grad:
        return _ratio_times_k3(ratio, log_prob, ref_log_prob)
    values = kl_estimate(log_prob, ref_log_prob, kind)
    return values if ratio is None else values * ratio


def _ratio_times_k3(ratio: Tensor, log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ratio·k3 for a ratio with its graph.  (eq:kl-ratio, eq:prefix)

    The token's own gradient is sg(ratio)·ℓ. The product rule would add it up from ratio·k3 and
    ratio·(1 − e^{−ℓ}), of which float32 leaves no digit at ℓ = −19; and where k3 is clamped, the
    second term is missing. The tokens before it in a prefix product have ratio·k3, which counts at
    most ε^{−1/2}, 2900 in float32, because the token's own gradient adds and subtracts it too.
    """
    k3 = kl_estimate(log_prob, ref_log_prob, "k3+")
    limited = k3.detach().clamp(max=torch.finfo(log_prob.dtype).eps ** -0.5)
    before = ratio * (log_prob.detach() - log_prob).exp()       # without the token's own gradient
    return ratio.detach() * k3 + limited * (before - before.detach())


def kl_ratio(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, kind: str,
             level: str) -> Tensor:
    """Return the `ratio` of `kl_loss` for samples of π_rollout: [B, T].  (eq:kl-ratio, eq:prefix)

        token     ρ_t = π_θ/μ                gives ∇KL per token, in the states of μ
        prefix    ρ_{1:t} = Π_{s≤t} ρ_s      takes the states from π_θ as well

    The ratio keeps its graph for k1 and k3, and is detached for k2 and every "+". With prefix
    products k1 and k3 give the whole ∇KL, k2 and every "+" its per-token part (eq:kl-gradient).
    Only the value is clamped, at e^SAFETY_BOUND. The graph stays, because what is left of ∇(ρ·k)
    without ∇ρ may have the wrong sign.
    """
    log_rho = masked_log_ratio(log_prob, rollout_log_prob.detach(), response_mask)
    log_rho = aggregate_log_ratio(log_rho, response_mask, level)
    rho = log_rho.detach().clamp(max=SAFETY_BOUND).exp()
    if kind not in ("k1", "k3"):
        return rho
    log_rho = log_rho.clamp(-1e30, 1e30)                    # ∞ − ∞ would be NaN
    return rho * (1 + (log_rho - log_rho.detach()))


def kl_penalty(old_log_prob: Tensor, ref_log_prob: Tensor, rollout_log_prob: Tensor,
               response_mask: Tensor, kind: str = "k1", level: str | None = None,
               weights: Tensor | None = None) -> Tensor:
    """Return what KL(π_θ‖π_ref) in the reward subtracts from advantages: [B, T].  (eq:kl-gradient)

        None      Σ_{s≥t} k_s                    a reward like any other: the loss weights it
        token     ρ_t k_t / w_t                  the token's own: ∇KL per token, in the states of μ
        prefix    Σ_{s≥t} ρ_{1:s} k_s / w_t      all of ∇KL (eq:prefix)

    ρ = π_old/π_rollout. `weights` [B, T] or [B, 1] are the w by which the loss multiplies token t.
    The penalty has weights of its own, so w is divided out; where w or ρ is 0 the penalty is 0.
    Only k1 gives the gradient of the KL here. Level None is the first part of eq:kl-gradient,
    on-policy. Raises ValueError if shapes differ.
    """
    mask = response_mask.bool()
    if weights is not None and weights.shape == (len(mask), 1):
        weights = weights.expand_as(mask)
    same_shape("[B, T]", old_log_prob=old_log_prob, ref_log_prob=ref_log_prob,
               response_mask=response_mask, **({} if weights is None else {"weights": weights}))
    kl = kl_estimate(old_log_prob.detach(), ref_log_prob.detach(), kind)                # [B, T]
    if level is not None:
        log_rho = masked_log_ratio(old_log_prob.detach(), rollout_log_prob.detach(), mask)
        rho = aggregate_log_ratio(log_rho, mask, level).clamp(max=SAFETY_BOUND).exp()
        kl = torch.where(rho == 0, 0.0, kl * rho)
    if level != "token":
        kl = torch.where(mask, kl, 0.0).flip(-1).cumsum(-1).flip(-1)
    if level is not None and weights is not None:
        kl = torch.where(weights > 0, kl / torch.where(weights > 0, weights, 1.0), 0.0)
    return torch.where(mask, kl, 0.0)
