"""Decide importance weights and a rejection mask where π_rollout, which samples, is not π_old.

This file makes two separate decisions, and neither changes the other:
    weights   ρ = π_old/π_rollout (bypass mode: π_θ/π_rollout), aggregated per token, prefix,
              sequence or geometric mean; truncated at C or zeroed outside [lo, hi];
              batch-normalised or not
    mask      what rejection.py keeps; every criterion looks at the original mask
The loss's denominator is a third, separate choice, made in losses.py. metrics.py measures how far
apart the policies are, from what `correct` returns. Bounds always bound ρ. presets.py has the
configuration. Derivation: math/6-correction.md.

    config = RolloutCorrectionConfig.decoupled_seq_is_rs()
    weights, mask, metrics = correct(old_log_prob, rollout_log_prob, response_mask, config)
"""

# pyright: reportUnknownMemberType=false
# (torch has no types for all_reduce)
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from three_policies.checks import choice, interval, is_list, number, same_shape
from three_policies.presets import PRESETS as PRESETS                      # re-exported
from three_policies.presets import Bound, RolloutCorrectionConfig
from three_policies.ratios import (LEVELS, OF_TOKENS, aggregate_log_ratio, exp_ratio,
                                   masked_log_ratio, outside)
from three_policies.rejection import (Evidence, Grounds, judge_all, keep_all_agree,
                                      rejection_mask as rejection_mask)

if TYPE_CHECKING:
    from three_policies.metrics import Statistics


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


@dataclass(frozen=True)
class Correction:
    """The result of `correct`; it unpacks into weights, mask, metrics.

    weights  [B, T], detached, 0 on padding; None when rollout_is is None, or under metrics_only
    mask     [B, T], response_mask without the rejected tokens, in its dtype
    grounds  what the decision rests on; None if weights and mask were made elsewhere
    metrics  {"rollout_corr/…": 0-dim tensor} on the device, measured on access; {} without grounds
    """

    weights: Tensor | None
    mask: Tensor
    grounds: Grounds | None = None

    @cached_property
    def statistics(self) -> "Statistics | None":
        from three_policies.metrics import measure      # when asked for: deciding needs none of it
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
            config: RolloutCorrectionConfig, advantages: Tensor | None = None,
            group: ProcessGroup | None = None) -> Correction:
    """Decide the weights and the mask of one batch from ρ = π_train/π_rollout.  (eq:correction)

    `train_log_prob`, `rollout_log_prob`, `response_mask`: [B, T]. `train_log_prob` is that of π_old
    in decoupled mode and of the current π_θ in bypass mode. Criteria that look at the sign of A
    need `advantages` [B, T]. With `group`, a torch.distributed process group, batch normalisation
    and second_moment use all its ranks. With `config.metrics_only` nothing is applied. A NaN in
    rollout_log_prob makes NaN of every weight that it is a factor of: put train_log_prob in its
    place (ρ = 1), or mask the token. Raises ValueError if shapes differ, if there is no
    rollout_log_prob, or if a criterion lacks its advantages.
    """
    if rollout_log_prob is None:
        raise ValueError("rollout_log_prob is missing: without the sampler's log-probs there is "
                         "nothing to correct")
    same_shape("[B, T]", train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob,
               response_mask=response_mask)
    if response_mask.ndim != 2:
        raise ValueError(f"response_mask {tuple(response_mask.shape)} must have the shape [B, T]")
    rollout_log_prob, drawn = rollout_log_prob.detach(), response_mask.bool()             # [B, T]
    level = config.rollout_is

    log_rho = masked_log_ratio(train_log_prob.detach(), rollout_log_prob, drawn)          # [B, T]
    weights = truncated = None
    if level is not None and not config.metrics_only:
        weights = truncated = importance_weights(log_rho, drawn, level,
                                                 config.rollout_is_threshold)            # [B, T]
        if config.rollout_is_batch_normalize:
            weights = batch_normalize(truncated, drawn, level, group)

    seen = Evidence(log_rho, drawn, advantages, rollout_log_prob, group)
    verdicts = judge_all(seen, config.rollout_rs)
    kept, mask = drawn, response_mask
    if verdicts and not config.metrics_only:
        kept = keep_all_agree(drawn, verdicts)                                           # [B, T]
        mask = response_mask * kept

    return Correction(weights, mask, Grounds(
        seen, kept, verdicts, level, config.rollout_is_threshold, config.rollout_is_count_below,
        truncated if config.applies_weights else None, config.rollout_is_batch_normalize,
        not config.metrics_only))
