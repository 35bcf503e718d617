"""Compute the loss of a batch: weight the terms of surrogates.py, mask them, and divide.

Weights multiply the terms, the rejection mask leaves terms out, and the denominator is a separate
choice. `policy_loss` puts them together for every mode, and `kl_loss` aggregates the KL term of
kl.py. Derivation: math/.

    loss, metrics = policy_loss(log_prob, old_log_prob, rollout_log_prob, advantages, mask, config)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from three_policies.centering import centering_loss
from three_policies.checks import check_fields, choice, same_shape, setting
from three_policies.correction import Correction, correct
from three_policies.kl import kl_terms
from three_policies.presets import RolloutCorrectionConfig
from three_policies.ratios import aggregate_log_ratio, exp_ratio, widen
from three_policies.surrogates import (  # all but Loss are re-exported
    Loss, cispo_loss as cispo_loss, gspo_loss as gspo_loss, ppo_clip_loss as ppo_clip_loss,
    reinforce_loss as reinforce_loss, sapo_loss as sapo_loss)

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                "seq-mean-token-sum-norm")
DENOMINATORS = ("fixed", "kept")


@dataclass(frozen=True)
class LossConfig:
    """Configure how terms become a loss: the surrogate's numbers and the aggregation.

    A number that is left out (None) is the loss's own in LOSSES, and one that a loss does not take
    is ignored. Raises ValueError on an unknown word and on a number beyond its limits.
    """

    clip_low: float | None = setting(None, "ε of the clip's lower end; null: the loss's own", 0)
    clip_high: float | None = setting(None, "ε of the clip's upper end; null: the loss's own", 0)
    dual_clip: float | None = setting(
        None, "c bounds the loss for A < 0 by −cA; null: the loss's own", above=1)
    tau_positive: float | None = setting(
        None, "steepness of sapo's gate for A > 0; null: the loss's own", above=0)
    tau_negative: float | None = setting(
        None, "steepness of sapo's gate for A ≤ 0; null: the loss's own", above=0)
    aggregation: str = setting(
        "token-mean", "how the losses of tokens become one number", choices=AGGREGATIONS)
    denominator: str = setting(
        "fixed", "divide by all response tokens, or by those that rejection kept",
        choices=DENOMINATORS)
    horizon: int | None = setting(
        None, "H of seq-mean-token-sum-norm; null: the largest number of tokens", 1)

    def __post_init__(self) -> None:
        check_fields(self)

    def numbers(self, loss: Loss) -> dict[str, float | None]:
        """Return the numbers that a loss takes: these, or its own where these are None."""
        return {name: own if getattr(self, name) is None else getattr(self, name)
                for name, own in loss.own.items()}


class Counts(NamedTuple):
    """The numbers of tokens and non-empty sequences, of one mask or of all.  (eq:aggregation)"""

    tokens: Tensor
    sequences: Tensor


def count(mask: Tensor) -> Counts:
    """Count the tokens and non-empty rows of a mask [B, T]: 0-dim floats.  (eq:aggregation)"""
    mask = mask.bool()
    return Counts(mask.sum().float(), mask.any(-1).sum().float())


def aggregate_loss(values: Tensor, mask: Tensor, mode: str, *,
                   denominator_mask: Tensor | None = None,
                   counts: Counts | None = None, horizon: int | Tensor | None = None) -> Tensor:
    """Aggregate per-token values to one scalar.  (eq:aggregation)

        token-mean               Σ_i Σ_t x / Σ_i |y_i|            every token weighs the same
        token-sum                Σ_i Σ_t x                        when the caller divides
        seq-mean-token-sum       (1/N) Σ_i Σ_t x                  the policy gradient itself
        seq-mean-token-mean      (1/N) Σ_i (1/|y_i|) Σ_t x        every sequence weighs the same
        seq-mean-token-sum-norm  (1/N) Σ_i (1/H) Σ_t x            H = horizon: Dr. GRPO

    `values`, `mask`: [B, T]; `mask` says which terms are summed. `denominator_mask` (default: mask)
    says what |y_i| and N count, so that rejection need not change the size of the step. N counts
    non-empty sequences. In rows where denominator_mask is empty and `mask` is not, |y_i| counts
    `mask`. Zeros before or inside a response, such as a prompt's or a tool's tokens, are holes and
    count nowhere (eq:tool-length): H is by default T less the holes that all rows share
    (`width_without_holes`); better give the sampler's limit. `counts` are the counts of the whole
    mini-batch, over ranks and micro-batches; with them (and a `horizon`) the results of the parts
    add up to that of the whole. With nothing to sum the result is 0, graph attached. Raises
    ValueError on another mode, or if shapes differ.
    """
    choice("mode", mode, AGGREGATIONS)
    mask = mask.bool()
    counted = mask if denominator_mask is None else denominator_mask.bool()
    same_shape("[B, T]", values=values, mask=mask, denominator_mask=counted)
    tokens, sequences = count(counted) if counts is None else counts
    row = torch.where(mask, widen(values), 0.0).sum(-1)                                    # [B]
    if mode == "token-sum":
        return row.sum()
    if mode == "token-mean":
        return row.sum() / torch.as_tensor(tokens).clamp(min=1)
    if mode == "seq-mean-token-mean":
        length = counted.sum(-1)
        length = torch.where(length > 0, length, mask.sum(-1))     # rejected, but summed
        row = row / length.clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        row = row / (width_without_holes(counted) if horizon is None else horizon)
    return row.sum() / torch.as_tensor(sequences).clamp(min=1)


def width_without_holes(mask: Tensor) -> Tensor:
    """Return T less the columns of `mask` [B, T] that are 0 in all rows, before the last 1.

    Padding behind the last 1 counts, because the sampler had that room. Responses that are padded
    on the left lose theirs, so give `aggregate_loss` a horizon for these.
    """
    some = mask.bool().any(0)                                                             # [T]
    holes = ~some & some.flip(0).cumsum(0).flip(0).bool()                                 # [T]
    return (mask.shape[-1] - holes.sum()).clamp(min=1)


def policy_loss(log_prob: Tensor, old_log_prob: Tensor | None, rollout_log_prob: Tensor | None,
                advantages: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig,
                how: LossConfig = LossConfig(), *, correction: Correction | None = None,
                counts: Counts | None = None, candidates: tuple[Tensor, Tensor] | None = None,
                ) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one batch in any mode, and its metrics.

    (eq:decoupled-ppo, eq:bypass, eq:off-policy, eq:batch-size)

        decoupled: E_μ[Σ_t w_t L(r_t, A_t)]      w of ρ = π_old/μ, r = π_θ/π_old: three policies
        bypass:    E_μ[Σ_t L(ρ_θ,t, A_t)]        ρ_θ = π_θ/μ, no weight: two
        reinforce: E_μ[Σ_t −w_t A_t log π_θ]     w of ρ_θ: two, no clip

    All tensors are [B, T]; advantages may be [B] or [B, 1].
    * `old_log_prob`: that of π_old, which decoupled mode compares with π_rollout and with π_θ. None
      stands for this log_prob, detached, as in a first update. Bypass mode ignores it and compares
      π_θ with π_rollout.
    * `rollout_log_prob`: in decoupled mode None, if nothing is corrected or `correction` is given.
    * `correction`: what `correct` returned for these rows. If None it is computed here, and its
      metrics (rollout_corr/*) are among those returned. In bypass mode it must be that of this
      log_prob: ρ = π_θ/π_rollout changes with every update. Weights made elsewhere may be [B, 1].
    * `how`: see LossConfig. `counts`: tokens and sequences of the whole mini-batch, counted as
      `how.denominator` says.
    * `candidates`: log π_θ and log μ for `centering_loss`, which score_centering needs.
    The metrics loss/ratio, loss/approx_kl and loss/clip_fraction are means over the kept tokens of
    these rows; with `counts` they are sums, which `loss_means` makes means. If everything is
    rejected the loss is 0, graph attached. One NaN makes the ρ of its sequence NaN (prefix: from
    there on), and GSPO's r: reject it by a seq_* criterion. Where π_θ is 0, so is r (1 if π_old is
    too); with weight or advantage 0 it adds 0. Raises ValueError on missing or misshapen tensors.
    """
    roles = _roles(log_prob, old_log_prob, rollout_log_prob, advantages, response_mask, config,
                   corrected=correction is not None)
    correction, corrected_here = _decision(roles, response_mask, config, correction)
    kept, numbers = correction.mask.bool(), how.numbers(config.loss)

    roles = _finite(roles, kept)
    terms = _surrogate(roles, config, numbers)                                           # [B, T]
    if correction.weights is not None and not config.ratio_is_the_weight:   # else eq:double-count
        weights = correction.weights
        terms = torch.where(weights == 0, 0.0, terms * weights)      # 0 · ∞, if log π_θ is −∞

    summed = kept
    if config.score_centering:          # the mean is subtracted from rejected tokens too
        terms = torch.where(kept, terms, 0.0) + _centering(roles, candidates, config)
        summed = roles.valid

    loss = aggregate_loss(terms, summed, how.aggregation, counts=counts,
                          horizon=how.horizon or width_without_holes(response_mask),
                          denominator_mask=roles.valid if how.denominator == "fixed" else kept)
    metrics = {"loss/policy": loss.detach(), **_sums_over_kept(roles, kept, config, numbers)}
    return loss, {**(loss_means(metrics) if counts is None else metrics), **corrected_here}


class Roles(NamedTuple):
    """Who plays which part in a loss; log-probs are [B, T], 0 on padding, float32 or wider."""

    log_prob: Tensor                    # π_θ, with its graph
    train: Tensor                       # what ρ compares with π_rollout: π_old, or π_θ
    anchor: Tensor                      # what r compares π_θ with: π_old, or π_rollout
    rollout: Tensor | None              # π_rollout
    advantages: Tensor                  # [B, T]
    valid: Tensor                       # response_mask, bool


def _roles(log_prob: Tensor, old_log_prob: Tensor | None, rollout_log_prob: Tensor | None,
           advantages: Tensor | None, response_mask: Tensor, config: RolloutCorrectionConfig,
           corrected: bool) -> Roles:
    """Cast the policies by the mode; raise ValueError if one is missing or has another shape."""
    corrects = not corrected and (config.rollout_is is not None or bool(config.rollout_rs))
    if rollout_log_prob is None and (config.bypass_mode or corrects):
        raise ValueError("rollout_log_prob is missing")
    rows = len(response_mask)
    if response_mask.ndim == 2 and advantages is not None and (
            advantages.shape in ((rows,), (rows, 1))):
        advantages = advantages.reshape(-1, 1).expand_as(response_mask)

    def on_responses(name: str, x: Tensor | None) -> Tensor:
        if x is None:
            raise ValueError(f"{name} is missing")
        same_shape("[B, T]", **{name: x, "response_mask": response_mask})
        return widen(torch.where(response_mask.bool(), x, 0.0))

    log_prob = on_responses("log_prob", log_prob)
    advantages = on_responses("advantages", advantages).detach()
    if rollout_log_prob is not None:
        rollout_log_prob = on_responses("rollout_log_prob", rollout_log_prob).detach()
    train = log_prob.detach()
    if old_log_prob is not None and not config.bypass_mode:
        train = on_responses("old_log_prob", old_log_prob).detach()

    bypass = config.bypass_mode and rollout_log_prob is not None
    anchor = rollout_log_prob if bypass and rollout_log_prob is not None else train
    return Roles(log_prob, train, anchor, rollout_log_prob, advantages, response_mask.bool())


def _decision(roles: Roles, response_mask: Tensor, config: RolloutCorrectionConfig,
              correction: Correction | None) -> tuple[Correction, dict[str, Tensor]]:
    """Return the correction that was given, checked, or make it here, with its metrics."""
    made_here = correction is None and roles.rollout is not None
    if made_here:
        correction = correct(roles.train, roles.rollout, response_mask, config, roles.advantages)
    correction = correction or Correction(None, response_mask)          # nothing to correct

    if correction.mask.shape != response_mask.shape:
        raise ValueError(f"correction has {tuple(correction.mask.shape)} tokens, and these rows "
                         f"{tuple(response_mask.shape)}: take correction.rows(index)")
    if correction.weights is not None and correction.weights.shape != (len(response_mask), 1):
        same_shape("[B, T]", **{"correction.weights": correction.weights,
                                "response_mask": response_mask})
    return correction, correction.metrics if made_here else {}


def _finite(roles: Roles, kept: Tensor) -> Roles:
    """Take a rejected NaN out of the graph, and make r = 1 where π_θ and its anchor are both 0."""
    log_prob = torch.where(kept, roles.log_prob, roles.log_prob.detach())
    never = (log_prob == -math.inf) & (roles.anchor == -math.inf)
    return roles._replace(log_prob=torch.where(never, 0.0, log_prob),
                          anchor=torch.where(never, 0.0, roles.anchor))


def _surrogate(roles: Roles, config: RolloutCorrectionConfig,
               numbers: Mapping[str, float | None]) -> Tensor:
    """Return the terms of config.loss, which takes what its row of LOSSES names: [B, T]."""
    given = {"old_log_prob": roles.anchor, "advantages": roles.advantages,
             "response_mask": roles.valid}
    return config.loss.function(roles.log_prob, *(given[name] for name in config.loss.takes),
                                **numbers)


def _centering(roles: Roles, candidates: tuple[Tensor, Tensor] | None,
               config: RolloutCorrectionConfig) -> Tensor:
    if candidates is None or len(candidates) != 2 or (
            candidates[0].shape != candidates[1].shape
            or candidates[0].shape[:2] != roles.valid.shape):
        raise ValueError("score_centering needs candidates, two tensors [B, T, K]")
    return centering_loss(*candidates, roles.advantages, roles.valid, config)


@torch.no_grad()
def _sums_over_kept(roles: Roles, kept: Tensor, config: RolloutCorrectionConfig,
                    numbers: Mapping[str, float | None]) -> dict[str, Tensor]:
    """Sum r, −log r and the clipped tokens over the kept tokens, and count the kept tokens."""
    log_ratio, row = roles.log_prob.detach() - roles.anchor, config.loss
    held = torch.zeros_like(roles.valid)
    if row.holds is not None and row.level is not None:
        at_level = aggregate_log_ratio(log_ratio, roles.valid, row.level)
        held = row.holds(exp_ratio(at_level), roles.advantages, **numbers)

    of_tokens = {"loss/ratio": exp_ratio(log_ratio), "loss/approx_kl": -log_ratio,
                 "loss/clip_fraction": held.to(log_ratio.dtype)}
    if config.ratio_is_the_weight:         # mismatch alone, until π_θ moves
        of_tokens["loss/bypass_clip_fraction"] = of_tokens["loss/clip_fraction"]
    sums = {name: torch.where(kept, x, 0.0).sum() for name, x in of_tokens.items()}
    return {**sums, "loss/kept_tokens": kept.sum().float()}


def loss_means(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divide sums of all micro-batches and ranks by their kept tokens.  (eq:aggregation)"""
    over_kept = ("loss/ratio", "loss/approx_kl", "loss/clip_fraction", "loss/bypass_clip_fraction")
    kept = totals["loss/kept_tokens"].clamp(min=1)
    return {name: x / kept if name in over_kept else x for name, x in totals.items()
            if name != "loss/kept_tokens"}


def kl_loss(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, kind: str = "k3+",
            mode: str = "token-mean", *, ratio: Tensor | None = None, counts: Counts | None = None,
            horizon: int | None = None) -> Tensor:
    """Return KL(π_θ‖π_ref), aggregated to a loss.  (eq:kl-gradient, eq:kl-ratio)

    `log_prob`, `ref_log_prob`, `response_mask`: [B, T]; `kind` as in `kl_estimate`. Prefer k2 or a
    "+": their gradient is that of the per-token reverse KL. The gradient of k1 is 0 in expectation,
    and that of k3 is KL(π_ref‖π_θ)'s. `ratio` [B, T], π_θ/μ, multiplies the estimate on samples of
    μ: detached for k2 and "+", with its graph for k1 and k3. With its graph
    ∇(ratio·k3) = sg(ratio)·∇k2, sample by sample (DeepSeek-V3.2 2512.02556). If the ratio is a
    prefix product with its graph, k1 and k3 give the gradient of the whole sequence's KL
    (eq:prefix). Beside a ratio a token with log π_θ = −∞ adds 0, since ρℓ is 0 there. Raises
    ValueError if shapes differ.
    """
    same_shape("[B, T]", log_prob=log_prob, ref_log_prob=ref_log_prob, response_mask=response_mask,
               **({} if ratio is None else {"ratio": ratio}))
    terms = kl_terms(log_prob, ref_log_prob, response_mask, kind, ratio)
    return aggregate_loss(terms, response_mask, mode, counts=counts, horizon=horizon)
