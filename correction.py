"""Decide importance weights and a rejection mask where π_rollout, which samples, is not π_old.

This file makes two separate decisions, and neither changes the other:
    weights   ρ = π_old/π_rollout (bypass mode: π_θ/π_rollout), aggregated per token, prefix,
              sequence or geometric mean; truncated at C or zeroed outside [lo, hi];
              batch-normalised or not
    mask      what rejection.py keeps; every criterion looks at the original mask
The loss's denominator is a third, separate choice, made in losses.py. metrics.py measures how far
apart the policies are, from what `correct` returns. Bounds always bound ρ; interop/dialects.py
reads the configurations of other systems. Derivation: math/.

    config = RolloutCorrectionConfig.decoupled_seq_is_rs()
    weights, mask, metrics = correct(old_log_prob, rollout_log_prob, response_mask, config)
"""

# pyright: reportUnknownMemberType=false
# (torch has no types for all_reduce)
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from three_policies.checks import choice, flag, interval, is_list, number, same_shape
from three_policies.estimators import (LEVELS, OF_TOKENS, aggregate_log_ratio, exp_ratio,
                                       masked_log_ratio, outside)
from three_policies.metrics import Grounds, Statistics, measure
from three_policies.rejection import CRITERIA, Evidence, judge_all, keep_all_agree, read_criteria
from three_policies.rejection import rejection_mask as rejection_mask      # re-exported
from three_policies.surrogates import LOSSES, Loss

NEAR_ONE = (0.999, 1.001)          # bounds on a geometric mean of ρ
Pair = tuple[float | None, float | None]
Bound = float | Pair


# ----------------------------------------------------------------------------------- the weights

def importance_weights(log_ratio: Tensor, response_mask: Tensor, level: str,
                       threshold: Bound | Tensor) -> Tensor:
    """Return min(ρ, C), or ρ·1[lo ≤ ρ ≤ hi] for a pair, at one level.  (eq:tis, eq:mis)

    `log_ratio`: log ρ per token, [B, T] → [B, T], detached (eq:detached), 0 on padding. C = inf is
    plain importance sampling, up to e^SAFETY_BOUND: E_μ[ρ f] = E_π[f] for whole responses, if μ can
    draw whatever π can (replay its cut). Truncation has the bias −E_μ[(ρ−C)₊ g]. Raises ValueError
    on an invalid threshold (a tensor is not checked), or if shapes differ.
    Sources: Ionides 2008, Yao et al. 2025 (TIS); Ring-1T 2510.18855 (IcePop: a pair at token
    level); Liu, Li et al. 2025 (MIS); Precup et al. 2000, CTPO 2605.07331 (prefix).
    """
    log_rho = aggregate_log_ratio(log_ratio.detach(), response_mask, level)
    rho = torch.where(response_mask.bool(), exp_ratio(log_rho), 0.0)
    if isinstance(threshold, Tensor):
        return rho.clamp(max=threshold)
    if not is_list(threshold):
        return rho.clamp(max=number("threshold", threshold))
    below, above = outside(log_rho, *interval("threshold", threshold))
    return torch.where(below | above, 0.0, rho)


def batch_normalize(weights: Tensor, response_mask: Tensor, level: str,
                    group: ProcessGroup | None = None) -> Tensor:
    """Divide weights by their mean, over tokens or over sequences.  (eq:self-normalised)

    [B, T] → [B, T], 0 on padding. The mean is over sequences where all tokens of a sequence share a
    weight. With `group`, it is over all ranks. If it is below 1e-8 the weights are returned as they
    are: nearly all have vanished, and dividing would make them ones. For w = ρ the bias is O(1/N).
    With truncated weights the estimate tends to E_μ[wf]/E_μ[w]. Geometric and prefix weights, whose
    mean is not 1, are rescaled at any N. Raises ValueError on another level, or if shapes differ.
    Source: verl PR 3980; Owen 2013, ch. 9.
    """
    same_shape("[B, T]", weights=weights, response_mask=response_mask)
    choice("level", level, LEVELS)
    mask = response_mask.bool()
    one_each = weights = torch.where(mask, weights, 0.0)
    if level not in OF_TOKENS:                          # one weight on all tokens of a sequence
        mask, one_each = mask.any(-1), weights.sum(-1) / mask.sum(-1).clamp(min=1)
    mask = mask & ~one_each.isnan()                     # a NaN leaves the mean of the others
    sums = torch.stack([one_each.nansum(dtype=torch.float64), mask.sum(dtype=torch.float64)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean = (sums[0] / sums[1].clamp(min=1)).to(weights.dtype)
    return weights / torch.where(mean > 1e-8, mean, 1.0)


# ----------------------------------------------------------------------------------- all at once

@dataclass(frozen=True)
class Correction:
    """Hold what `correct` decided; it unpacks into weights, mask, metrics.

    weights  [B, T], detached, 0 on padding; None when rollout_is is None, or under metrics_only
    mask     [B, T], response_mask without the rejected tokens, in its dtype
    grounds  what the decision rests on; None if weights and mask were made elsewhere
    metrics  {"rollout_corr/…": 0-dim tensor} on the device, measured on access; {} without grounds
    """

    weights: Tensor | None
    mask: Tensor
    grounds: Grounds | None = None

    @cached_property
    def statistics(self) -> Statistics | None:
        return None if self.grounds is None else measure(self.grounds)

    @property
    def metrics(self) -> dict[str, Tensor]:
        return {} if self.statistics is None else self.statistics.metrics()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weights, self.mask, self.metrics))

    def rows(self, index: Any) -> "Correction":
        """Return the part for a micro-batch; its metrics remain those of the whole batch."""
        return replace(self, weights=None if self.weights is None else self.weights[index],
                       mask=self.mask[index])


def correct(train_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor,
            config: "RolloutCorrectionConfig", advantages: Tensor | None = None,
            group: ProcessGroup | None = None) -> Correction:
    """Decide the weights and the mask of one batch from ρ = π_train/π_rollout.  (eq:correction)

    `train_log_prob`, `rollout_log_prob`, `response_mask`: [B, T]. `train_log_prob` is that of π_old
    in decoupled mode and of the current π_θ in bypass mode. The criteria opsm and token_tv_outward
    need `advantages` [B, T]. With `group`, a torch.distributed process group, batch normalisation
    and second_moment use all its ranks. With `config.metrics_only` everything is measured and
    nothing applied: there are no weights, and the mask is the one given. A NaN in rollout_log_prob
    makes NaN of every weight that it is a factor of: where one is missing, put train_log_prob in
    its place (ρ = 1), or mask the token. Raises ValueError if shapes differ, if there is no
    rollout_log_prob, or if a criterion lacks its advantages, [B, T].
    """
    if rollout_log_prob is None:
        raise ValueError("rollout_log_prob is missing: without the sampler's log-probs there is "
                         "nothing to correct")
    same_shape("[B, T]", train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob,
               response_mask=response_mask)
    if response_mask.ndim != 2:
        raise ValueError(f"response_mask {tuple(response_mask.shape)} must have the shape [B, T]")
    rollout_log_prob, level = rollout_log_prob.detach(), config.rollout_is

    log_rho = masked_log_ratio(train_log_prob.detach(), rollout_log_prob, response_mask)  # [B, T]
    weights = truncated = None
    if level is not None and not config.metrics_only:
        weights = truncated = importance_weights(log_rho, response_mask, level,
                                                 config.rollout_is_threshold)            # [B, T]
        if config.rollout_is_batch_normalize:
            weights = batch_normalize(truncated, response_mask, level, group)

    seen = Evidence(log_rho, response_mask.bool(), advantages, rollout_log_prob, group)
    verdicts = judge_all(seen, config.rollout_rs)
    kept, mask = seen.mask, response_mask
    if verdicts and not config.metrics_only:
        kept = keep_all_agree(seen.mask, verdicts)                                       # [B, T]
        mask = response_mask * kept

    return Correction(weights, mask, Grounds(
        seen, kept, verdicts, level, config.rollout_is_threshold, config.rollout_is_count_below,
        truncated if config.applies_weights else None, config.rollout_is_batch_normalize,
        not config.metrics_only))


# ----------------------------------------------------------------------------------- configuration

@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Configure a correction; frozen, and a wrong value raises a one-sentence ValueError.

    rollout_is                  level of ρ for the weights: None, "token", "prefix", "sequence",
                                "geometric"
    rollout_is_threshold        a number C truncates, min(ρ, C) (eq:tis); a pair [lo, hi] sets
                                weights outside it to 0 (eq:mis)
    rollout_is_count_below      metrics count ρ below it as low; None: below 1/C, or below lo. It
                                changes no weight: configurations that differ in it are equal,
                                though their metrics cannot be merged
    rollout_is_batch_normalize  divide by the mean weight, after truncation (eq:self-normalised)
    rollout_rs                  {criterion: bound}; a token must pass all (eq:rejection). Criteria
                                of k1 take a pair that bounds ρ itself, the others an upper bound,
                                in nats for k2, k3 and opsm
    bypass_mode                 False: three policies, decoupled PPO. True: two, π_old := π_rollout
    loss_type                   a row of LOSSES; reinforce in bypass mode only
    score_centering             subtract E_{v∼μ}[w(v) ∇log π(v)] (eq:score-centering); needs
                                reinforce, with weights and criteria of tokens
    metrics_only                measure weights and criteria, and apply neither: rollout_is_raw_*
                                describes ρ at the level asked for, and rollout_rs_CRITERION_* what
                                each criterion would reject

    In bypass mode only reinforce takes the weights. The other losses already have the ratio
    π_θ/π_rollout, and a weight would count it twice (eq:double-count). If rollout_is is set all
    the same, a warning says so, and its metrics are named rollout_is_raw_*.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | Pair = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    score_centering: bool = False
    metrics_only: bool = False
    rollout_is_count_below: float | None = field(default=None, compare=False)

    def __new__(cls, *given: Any, **named: Any):
        for key in named:
            if key not in cls.__dataclass_fields__:
                raise TypeError(
                    f"RolloutCorrectionConfig has no argument {key!r}; it has "
                    f"{', '.join(cls.__dataclass_fields__)}; from_dialect({{…}}) of "
                    "interop/dialects.py reads the keys of verl and SkyRL")
        return super().__new__(cls)

    def __post_init__(self):
        level: Any = self.rollout_is                    # as a configuration file has it
        if level is False:
            raise ValueError("rollout_is cannot be False: write null for no weights; to measure "
                             "without applying, name a level and set metrics_only: true")
        if self.rollout_is is not None:
            choice("rollout_is", self.rollout_is, LEVELS)
        flag("rollout_is_batch_normalize", self.rollout_is_batch_normalize)
        flag("bypass_mode", self.bypass_mode)
        choice("loss_type", self.loss_type, LOSSES)
        if self.loss.level is None and not self.bypass_mode:
            raise ValueError(f"loss_type {self.loss_type!r} needs bypass_mode true: without a clip "
                             "there is no use for a third policy")
        bound = self.rollout_is_threshold
        read = interval if is_list(bound) else number
        object.__setattr__(self, "rollout_is_threshold", read("rollout_is_threshold", bound))
        low: Any = self.rollout_is_count_below
        if low is not None:                             # 0: nothing counts as low
            zero = type(low) in (int, float) and low == 0
            object.__setattr__(self, "rollout_is_count_below",
                               0.0 if zero else number("rollout_is_count_below", low))
        given: Any = self.rollout_rs                    # as a configuration file has it
        criteria: Mapping[str, Any] = {} if given is None else given
        if not isinstance(given, (Mapping, NoneType)):
            text = " (from_dialect of interop/dialects.py reads verl's text)"
            raise ValueError(f"rollout_rs must be a mapping from criterion to bound, such as "
                             f"{{seq_mean_k3: 0.01}}, not {given!r}{text * isinstance(given, str)}")
        object.__setattr__(self, "rollout_rs", read_criteria(criteria))
        flag("metrics_only", self.metrics_only)
        if flag("score_centering", self.score_centering):
            self._check_centering()
        if self.rollout_is is not None and self.ratio_is_the_weight and not self.metrics_only:
            warnings.warn(f"rollout_is={self.rollout_is} is not applied with bypass_mode and "
                          f"loss_type={self.loss_type}, whose ratio already is π_θ/π_rollout "
                          "(eq:double-count): its metrics are rollout_is_raw_*", stacklevel=3)

    def _check_centering(self):
        criteria = [name for name in self.rollout_rs if CRITERIA[name].of != "token"]
        if self.loss.level is not None:
            raise ValueError("score_centering needs loss_type reinforce: a clipped ratio has "
                             "another mean under μ")
        if self.metrics_only:
            raise ValueError("score_centering needs metrics_only false: it centers the weighted "
                             "scores, and metrics_only applies no weight")
        if self.rollout_is not in (None, "token") or self.rollout_is_batch_normalize or criteria:
            raise ValueError("score_centering lists the other tokens that might have been drawn, "
                             "not other sequences or batches: it needs rollout_is null or token, "
                             "no rollout_is_batch_normalize, and criteria token_*")

    @property
    def of_whole_batches(self) -> bool:
        """Say whether a token's weight or mask depends on the whole (mini-)batch."""
        return (self.rollout_is_batch_normalize and not self.metrics_only) or any(
            CRITERIA[name].of == "batch" for name in self.rollout_rs)

    @property
    def loss(self) -> Loss:
        """Return the row of LOSSES that loss_type names."""
        return LOSSES[self.loss_type]

    @property
    def ratio_is_the_weight(self) -> bool:
        """Say whether the loss's own ratio already is π_θ/π_rollout.  (eq:double-count)"""
        return self.bypass_mode and self.loss.level is not None

    @property
    def applies_weights(self) -> bool:
        """Say whether the loss is multiplied by weights."""
        return (self.rollout_is is not None and not self.ratio_is_the_weight
                and not self.metrics_only)

    @property
    def corrects(self) -> bool:
        """Say whether anything is done about ρ: by weights, by rejection or by the loss's ratio."""
        return self.bypass_mode or self.applies_weights or (
            bool(self.rollout_rs) and not self.metrics_only)

    # Presets have the arguments of verl's documents. `threshold` or `is_threshold` is the weights'
    # C, for IcePop their upper bound, or a pair. `rs_threshold` bounds the criterion: on ρ a pair,
    # or an upper end u that means [1/u, u] unless `rs_threshold_lower` is given. `veto_threshold`:
    # the least ρ.

    # Three policies, ρ = π_old/π_rollout.

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0):
        """Truncate each token's ρ."""
        return cls("token", threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0):
        """Truncate each sequence's product of ρ."""
        return cls("sequence", threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: float = 2.0, rs_threshold: Bound = (0.5, 2.0),
                            rs_threshold_lower: float | None = None):
        """Truncate the product of ρ, and reject sequences outside an interval of it."""
        return cls("sequence", is_threshold,
                   rollout_rs={"seq_sum_k1": _bounds(rs_threshold, rs_threshold_lower)})

    @classmethod
    def decoupled_token_icepop(cls, threshold: Bound = 5.0, threshold_lower: float | None = None):
        """Set the weight of tokens outside an interval of ρ to 0."""
        return cls("token", _bounds(threshold, threshold_lower, "threshold", 0.5))

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Bound = NEAR_ONE,
                         rs_threshold_lower: float | None = None,
                         veto_threshold: float | None = None):
        """Reject sequences by the geometric mean of ρ."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: Bound = NEAR_ONE):
        """Reject sequences by the geometric mean of ρ, and truncate the product of ρ."""
        return cls("sequence", is_threshold, rollout_rs=_geometric(rs_threshold))

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: Bound = NEAR_ONE):
        """Reject sequences by the geometric mean of ρ, and truncate each token's ρ."""
        return cls("token", is_threshold, rollout_rs=_geometric(rs_threshold))

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01):
        """Reject sequences by their mean k3."""
        return cls(rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01):
        """Reject sequences by their mean k3, and truncate the product of ρ."""
        return cls("sequence", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01):
        """Reject sequences by their mean k3, and truncate each token's ρ."""
        return cls("token", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    # Two policies, PPO's clip around π_rollout.

    @classmethod
    def bypass_ppo_clip(cls, threshold: float = 2.0):
        """Apply PPO's clip to π_θ/π_rollout, which is the weight; threshold has no effect."""
        return cls(None, threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Bound = NEAR_ONE,
                               rs_threshold_lower: float | None = None,
                               veto_threshold: float | None = None):
        """Do as `bypass_ppo_clip`, and reject sequences by the geometric mean of ρ."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold),
                   bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01):
        """Do as `bypass_ppo_clip`, and reject sequences by their mean k3."""
        return cls(rollout_rs={"seq_mean_k3": rs_threshold}, bypass_mode=True)

    # Two policies without a clip: ρ = π_θ/π_rollout is an explicit weight.

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0):
        """Weight REINFORCE by the truncated product of ρ."""
        return cls("sequence", threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: Bound = 5.0, threshold_lower: float | None = None):
        """Weight REINFORCE by each token's ρ, or by 0 outside an interval."""
        return cls("token", _bounds(threshold, threshold_lower, "threshold", 0.5),
                   bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Bound = NEAR_ONE,
                         rs_threshold_lower: float | None = None,
                         veto_threshold: float | None = None):
        """Use REINFORCE without weights; reject sequences by the geometric mean of ρ."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold),
                   bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: Bound = NEAR_ONE):
        """Do as `bypass_pg_geo_rs`, with the truncated product of ρ as the weight."""
        return cls("sequence", is_threshold, rollout_rs=_geometric(rs_threshold),
                   bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: Bound = NEAR_ONE):
        """Do as `bypass_pg_geo_rs`, with each token's truncated ρ as the weight."""
        return cls("token", is_threshold, rollout_rs=_geometric(rs_threshold), bypass_mode=True,
                   loss_type="reinforce")

    @classmethod
    def disabled(cls):
        """Correct nothing, but measure the mismatch."""
        return cls()

    # Presets of verl 0.6, where one token with ρ < 1e-4 vetoes its sequence, and its older names.

    @classmethod
    def geo_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: float | None = None,
               veto_threshold: float | None = 1e-4):
        """Do as `decoupled_geo_rs`, and reject sequences with a ρ below 1e-4, the veto."""
        return cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def pg_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: float | None = None,
              veto_threshold: float | None = 1e-4):
        """Do as `bypass_pg_geo_rs`, and reject sequences with a ρ below 1e-4, the veto."""
        return cls.bypass_pg_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def seq_mis(cls, threshold: float = 2.0):
        """Weight by the product of ρ, and reject sequences in which it is above the threshold."""
        threshold = number("threshold", threshold)
        return cls("sequence", threshold, rollout_rs={"seq_sum_k1": (None, threshold)})

    @classmethod
    def ppo_is_bypass(cls, threshold: float = 2.0):
        """Do as `bypass_ppo_clip`, and measure the ρ of tokens, which PPO's ratio applies."""
        return cls("token", threshold, bypass_mode=True, metrics_only=True)

    token_is = token_tis = decoupled_token_is
    seq_is, seq_is_rs, geo_mis = decoupled_seq_is, decoupled_seq_is_rs, geo_rs
    pure_is, pg_is, pure_rs = bypass_pg_is, bypass_pg_is, pg_rs


def _bounds(upper: Bound, lower: float | None = None, key: str = "rs_threshold",
            least: float | None = None) -> Pair:
    """Return a pair as it is, a number as [lower, upper], else [least, upper] or [1/upper, upper].
    """
    if is_list(upper):
        if lower is not None:
            raise ValueError(f"{key} {upper!r} has a lower end: leave {key}_lower out")
        return interval(key, upper)
    high = number(f"{key}, unless it is a pair [lo, hi],", upper)
    if lower is None:
        lower = 1 / high if least is None else least
    return lower, high


def _geometric(upper: Bound, lower: float | None = None,
               veto: float | None = None) -> dict[str, Pair]:
    return {"seq_mean_k1": _bounds(upper, lower)} | (
        {} if veto is None else {"seq_max_k1": (veto, None)})


# PRESETS has every preset by name, in the order above; HISTORICAL says what older names stand for.
PRESETS = {name: getattr(RolloutCorrectionConfig, name)
           for name, made in vars(RolloutCorrectionConfig).items() if isinstance(made, classmethod)}
HISTORICAL = {name: preset.__name__ for name, preset in PRESETS.items()
              if name != preset.__name__}
