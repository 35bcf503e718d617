"""Reject tokens and sequences, each by a criterion and its bound.

Every criterion looks at the original mask, and a token survives only if all criteria keep it. A
value equal to its bound is kept, and NaN is rejected. Bounds of k1 criteria bound ρ itself. Each
criterion is a row of CRITERIA. Derivation: math/6-correction.md and math/14-methods-and-prices.md.

    keep = rejection_mask(log_ratio, response_mask, {"seq_mean_k3": 0.01})                # [B, T]
"""

# pyright: reportUnknownMemberType=false
# (torch has no types for all_reduce)
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from three_policies.checks import choice, interval, number, same_shape
from three_policies.kl import kl_estimate
from three_policies.ratios import (SAFETY_BOUND, extremes, ratio_less_one, sequence_log_ratio,
                                   widen)


# ----------------------------------------------------------- what a criterion sees and returns

class Evidence(NamedTuple):
    """What a criterion may look at; tensors are [B, T], and None is what was not given."""

    log_rho: Tensor                                 # 0 on padding
    mask: Tensor                                    # bool
    advantages: Tensor | None = None
    rollout_log_prob: Tensor | None = None
    group: ProcessGroup | None = None


class Verdict(NamedTuple):
    """A criterion's statistic, the interval it keeps, and what lies below and above it.

    `statistic` is [B, 1] for criteria of sequences, else [B, T]; below and above may be [B, T].
    """

    statistic: Tensor
    interval: tuple[Any, Any]                       # floats, or 0-dim tensors
    below: Tensor
    above: Tensor


def at_most(statistic: Tensor, bound: Any, among: Tensor | bool = True,
            least: float | Tensor = -math.inf) -> Verdict:
    """Keep [least, bound]; reject the other values in `among`, NaN included."""
    above = ~(statistic <= bound) & among
    return Verdict(statistic, (least, bound), torch.zeros_like(above), above)


# ---------------------------------------------------------------------------------- the criteria

def over(x: Tensor, mask: Tensor, where: str) -> Tensor:
    """Return x per token [B, T], or the sum, mean or maximum of each sequence [B, 1]."""
    if where == "token":
        return x
    if where == "seq_max":
        return extremes(x, mask)[0][:, None]
    return sequence_log_ratio(x, mask, {"seq_sum": "sequence", "seq_mean": "geometric"}[where])


def ratio_within(where: str, seen: Evidence, bound: Any) -> Verdict:
    """Keep where lo ≤ ρ ≤ hi, for the ρ that `where` names.  (eq:rejection)

    That is a token's ρ, its sequence's product or geometric mean, or for seq_max every ρ of the
    sequence. The statistic is k1 = −log ρ, so the ends of ρ's interval swap. The bounds judge log ρ
    itself; the reported statistic is made of log ρ_t clamped to ±SAFETY_BOUND, as verl's is.
    Source: Liu, Li et al. 2025 (geometric mean); 2512.23075 (worst token).
    """
    limited = seen.log_rho.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    statistic = over(kl_estimate(torch.zeros_like(limited), limited, "k1"), seen.mask, where)
    least, most = (sign * math.inf if end is None else -math.log(end)
                   for end, sign in zip(reversed(bound), (-1, 1)))
    highest = lowest = over(-seen.log_rho, seen.mask, where)
    if where == "seq_max":
        lowest = extremes(-seen.log_rho, seen.mask)[1][:, None]
    return Verdict(statistic, (least, most), lowest < least, ~(highest <= most))


def divergence(where: str, kind: str, seen: Evidence, bound: Any) -> Verdict:
    """Keep where k2 = (log ρ)²/2 or k3 = ρ − 1 − log ρ is ≤ bound, in nats.  (eq:rejection)

    `where` chooses the token's value, or its sequence's sum, mean or maximum.
    """
    limited = seen.log_rho.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return at_most(over(kl_estimate(torch.zeros_like(limited), limited, kind), seen.mask, where),
                   bound)


def opsm(seen: Evidence, bound: Any) -> Verdict:
    """Reject tokens with A < 0 in sequences whose mean of −log ρ exceeds δ.  (eq:opsm)

    Source: DeepSeek-V3.2 2512.02556.
    """
    assert seen.advantages is not None
    drift = sequence_log_ratio(-seen.log_rho, seen.mask, "geometric")                    # [B, 1]
    return at_most(drift, bound, (seen.advantages < 0) | drift.isnan())


def sampled_log_probs(seen: Evidence) -> tuple[Tensor, Tensor]:
    """Return log μ and log π of each sampled token, 0 on padding: [B, T] twice."""
    assert seen.rollout_log_prob is not None
    log_mu = torch.where(seen.mask, seen.rollout_log_prob, 0.0).to(seen.log_rho.dtype)
    return log_mu, (log_mu + seen.log_rho).clamp(max=0)


def probability_moved(seen: Evidence) -> Tensor:
    """Return π − μ of each sampled token, [B, T].  (eq:total-variation)"""
    log_mu, log_pi = sampled_log_probs(seen)
    return log_pi.exp() - log_mu.exp()


def token_tv(seen: Evidence, bound: Any) -> Verdict:
    """Keep tokens with |π − μ| ≤ δ.  (eq:total-variation)   Source: IPO."""
    return at_most(probability_moved(seen).abs(), bound)


def token_tv_outward(seen: Evidence, bound: Any) -> Verdict:
    """Reject tokens with sign(A)(π − μ) > δ: A would move π further from μ.  (eq:total-variation)

    Source: DPPO 2602.04879.
    """
    assert seen.advantages is not None
    return at_most(probability_moved(seen) * seen.advantages.sign(), bound)


def seq_mean_tv(seen: Evidence, bound: Any) -> Verdict:
    """Keep sequences whose mean of |π − μ| is ≤ δ.  (eq:total-variation)   Source: OpenRLHF."""
    return at_most(over(probability_moved(seen).abs(), seen.mask, "seq_mean"), bound)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p‖q) of two outcomes, the sampled token or any other, in nats.  (eq:binary-kl)"""
    other_p, other_q = (-log_prob.clamp(max=0).expm1() for log_prob in (log_p, log_q))
    other_q = other_q.clamp(min=torch.finfo(other_q.dtype).tiny)        # 0 · log(0/0) would be NaN
    return log_p.exp() * (log_p - log_q) + torch.xlogy(other_p, other_p / other_q)


def token_binary_kl(seen: Evidence, bound: Any) -> Verdict:
    """Keep tokens with both binary KLs ≤ δ.  (eq:binary-kl)   Source: KPop, in AReaL's form."""
    log_mu, log_pi = sampled_log_probs(seen)
    return at_most(torch.maximum(binary_kl(log_mu, log_pi), binary_kl(log_pi, log_mu)), bound)


def seq_mean_binary_kl(seen: Evidence, bound: Any) -> Verdict:
    """Keep sequences whose mean binary KL(μ‖π) is ≤ δ.  (eq:binary-kl)   Source: FlashREINFORCE."""
    return at_most(over(binary_kl(*sampled_log_probs(seen)), seen.mask, "seq_mean"), bound)


def vaco(seen: Evidence, bound: Any) -> Verdict:
    """Reject tokens with A log ρ > 0 in sequences whose mean of |ρ − 1| exceeds δ.  (eq:vaco)

    Source: VACO 2603.01365, in the first form that open-instruct had.
    """
    assert seen.advantages is not None
    moved = over(ratio_less_one(seen.log_rho).abs(), seen.mask, "seq_mean")               # [B, 1]
    return at_most(moved, bound, (seen.log_rho.sign() * seen.advantages > 0) | moved.isnan())


def second_moment(seen: Evidence, bound: Any) -> Verdict:
    """Reject the largest (log ρ)² until the mean of the others is ≤ δ.  (eq:second-moment)

    The mean is over the batch, and over all ranks of the group. Source: M2PO 2510.01161, in AReaL's
    form; the paper judges only tokens with A log ρ > 0.
    """
    square = seen.log_rho.square().float()
    limit = second_moment_limit(square, seen.mask, bound, seen.group)
    return at_most(square, limit, least=torch.full_like(limit, -math.inf))


def second_moment_limit(square: Tensor, response_mask: Tensor, bound: float,
                        group: ProcessGroup | None = None) -> Tensor:
    """Return the largest (log ρ)² up to which the mean is ≤ bound, 0-dim.  (eq:second-moment)

    `square`, `response_mask`: [B, T]. The mean of the values ≤ x never falls as x rises: the
    limit is read off the sorted values or, with a `group`, found by 31 halvings of the float32
    numbers from 0 to ∞, which are ordered as their bits are. Each halving all-reduces one sum and
    one count. Equal values stay or go together. The limit is 0 where even the smallest value is
    above the bound, and ∞ only where an infinite value meets an infinite bound. AReaL's bound is
    strict, splits ties, and keeps the smallest value when none fits.
    """
    mask, square = response_mask.bool(), square.detach().float()
    if group is None:
        ordered = torch.where(mask, square, math.nan).flatten().sort().values     # [B·T], NaN last
        count = torch.arange(1, len(ordered) + 1, device=ordered.device, dtype=torch.float64)
        last = ordered != torch.cat([ordered[1:], ordered.new_full((1,), math.nan)])    # of ties
        fits = last & (ordered.double().cumsum(0) <= bound * count)
        return torch.cat([torch.where(fits, ordered, 0.0), ordered.new_zeros(1)]).amax()
    low, high = (square.new_full((), bits, dtype=torch.int64) for bits in (0, 0x7F800000))
    for _ in range(31):
        middle = (low + high + 1) // 2
        chosen = mask & (square <= middle.int().view(torch.float32))
        sums = torch.stack([torch.where(chosen, square, 0.0).sum(dtype=torch.float64),
                            chosen.sum(dtype=torch.float64)])
        dist.all_reduce(sums, group=group)
        fits = (sums[1] == 0) | (sums[0] <= bound * sums[1])       # ∞ · 0 is NaN
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    kept = torch.where(mask & (square <= low.int().view(torch.float32)), square, 0.0)
    largest = torch.cat([kept.flatten(), kept.new_zeros(1)]).amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


# ------------------------------------------------------------------------------------ the rows

class Criterion(NamedTuple):
    """One criterion: what it compares with its bound, of what, and how."""

    statistic: str                                  # in words
    of: str                                         # "token", "sequence", "batch": what is judged
    read: Callable[[str, Any], Any]                 # `interval` on ρ, or `number`: an upper bound
    judge: Callable[[Evidence, Any], Verdict]
    needs: Mapping[str, str] = {}                   # tensor of Evidence: end of the error message
    level: str | None = None                        # of the ρ that a pair bounds


SIGN = {"advantages": "the advantages: it looks at their sign"}
PROBABILITY = {"rollout_log_prob": "rollout_log_prob: a ratio does not say how much probability "
               "has moved"}
CRITERIA = {
    "token_k1": Criterion("ρ", "token", interval, partial(ratio_within, "token"), level="token"),
    "token_k2": Criterion("k2", "token", number, partial(divergence, "token", "k2")),
    "token_k3": Criterion("k3", "token", number, partial(divergence, "token", "k3")),
    "seq_sum_k1": Criterion("product of ρ", "sequence", interval,
                            partial(ratio_within, "seq_sum"), level="sequence"),
    "seq_sum_k2": Criterion("sum of k2", "sequence", number, partial(divergence, "seq_sum", "k2")),
    "seq_sum_k3": Criterion("sum of k3", "sequence", number, partial(divergence, "seq_sum", "k3")),
    "seq_mean_k1": Criterion("geometric mean of ρ", "sequence", interval,
                             partial(ratio_within, "seq_mean"), level="geometric"),
    "seq_mean_k2": Criterion("mean k2", "sequence", number, partial(divergence, "seq_mean", "k2")),
    "seq_mean_k3": Criterion("mean k3", "sequence", number, partial(divergence, "seq_mean", "k3")),
    "seq_max_k1": Criterion("every ρ", "sequence", interval, partial(ratio_within, "seq_max")),
    "seq_max_k2": Criterion("worst k2", "sequence", number, partial(divergence, "seq_max", "k2")),
    "seq_max_k3": Criterion("worst k3", "sequence", number, partial(divergence, "seq_max", "k3")),
    "opsm": Criterion("where A < 0, mean −log ρ", "sequence", number, opsm, SIGN),
    "token_tv": Criterion("|π − μ|", "token", number, token_tv, PROBABILITY),
    "token_tv_outward": Criterion("sign(A)(π − μ)", "token", number, token_tv_outward,
                                  {**SIGN, **PROBABILITY}),
    "seq_mean_tv": Criterion("mean |π − μ|", "sequence", number, seq_mean_tv, PROBABILITY),
    "token_binary_kl": Criterion("larger binary KL", "token", number, token_binary_kl, PROBABILITY),
    "seq_mean_binary_kl": Criterion("mean binary KL(μ‖π)", "sequence", number, seq_mean_binary_kl,
                                    PROBABILITY),
    "vaco": Criterion("where A log ρ > 0, mean |ρ − 1|", "sequence", number, vaco, SIGN),
    "second_moment": Criterion("mean (log ρ)²", "batch", number, second_moment),
}


def read_criteria(criteria: Mapping[str, Any]) -> dict[str, Any]:
    """Return each bound as its criterion's row reads it; ValueError on a wrong name or bound."""
    for name in criteria:
        choice("rollout_rs criterion", name, CRITERIA)
    return {name: CRITERIA[name].read(f"rollout_rs.{name}", bound)
            for name, bound in criteria.items()}


# ----------------------------------------------------------------------------------- all at once

Verdicts = Mapping[str, tuple[Criterion, Any, Verdict]]         # by criterion: row, bound, verdict


def judge_all(seen: Evidence, criteria: Mapping[str, Any]) -> Verdicts:
    """Apply each criterion to the original mask.  (eq:rejection)"""
    verdicts: dict[str, tuple[Criterion, Any, Verdict]] = {}
    for name, bound in criteria.items():
        row = CRITERIA[name]
        for argument, reason in row.needs.items():
            given = getattr(seen, argument)
            if given is None:
                raise ValueError(f"rollout_rs.{name} needs {reason}")
            if given.shape != seen.mask.shape:
                raise ValueError(f"rollout_rs.{name} needs {argument} for each token, "
                                 f"{tuple(seen.mask.shape)}, not {tuple(given.shape)}")
        verdicts[name] = row, bound, row.judge(seen, bound)
    return verdicts


def keep_all_agree(mask: Tensor, verdicts: Verdicts) -> Tensor:
    """Return the tokens of a mask that no criterion rejects: [B, T], bool.  (eq:rejection)"""
    kept = mask.bool()
    for _, _, verdict in verdicts.values():
        kept = kept & ~(verdict.below | verdict.above)
    return kept


def rejection_mask(log_ratio: Tensor, response_mask: Tensor, criteria: Mapping[str, Any],
                   advantages: Tensor | None = None, rollout_log_prob: Tensor | None = None,
                   group: ProcessGroup | None = None) -> Tensor:
    """Return the tokens that every criterion keeps: [B, T], bool.  (eq:rejection)

    `log_ratio` (log ρ), `response_mask`, `advantages`, `rollout_log_prob`: [B, T]. `criteria` maps
    the name of a row of CRITERIA to its bound. With `group`, a criterion of the batch looks at all
    its ranks. Raises ValueError on an unknown criterion, an invalid bound, or where a criterion
    needs a tensor that is not given, or has another shape.
    """
    criteria = read_criteria(criteria)
    same_shape("[B, T]", log_ratio=log_ratio, response_mask=response_mask)
    log_ratio, mask = widen(log_ratio), response_mask.bool()
    seen = Evidence(torch.where(mask, log_ratio, 0.0), mask, advantages, rollout_log_prob, group)
    return keep_all_agree(mask, judge_all(seen, criteria))


# --------------------------------------------------------------------- what metrics.py measures

class Grounds(NamedTuple):
    """The inputs of a decision of `correct`, and its weights before normalisation."""

    seen: Evidence
    kept: Tensor                                    # [B, T], bool
    verdicts: Verdicts
    level: str | None = None                        # of the weights; None: no weights
    threshold: Any = None                           # C, or a pair
    count_below: float | None = None                # ρ that counts as low; None: 1/C, or lo
    weights: Tensor | None = None                   # [B, T]; None: nothing multiplies the loss
    normalized: bool = False
    applied: bool = True                            # False: weights and criteria are only measured

    @property
    def configuration(self) -> tuple[Any, ...]:
        """Return what must be equal for metrics to merge."""
        return (self.level, self.threshold, self.count_below, self.weights is None,
                self.normalized, self.applied,
                *((name, bound) for name, (_, bound, _) in self.verdicts.items()))
