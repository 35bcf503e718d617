"""Measure how far apart the policies are and what a correction did, in metrics that merge exactly.

This file decides
* `measure` reads what `correct` returned, once its metrics are asked for, and changes nothing.
* Every metric follows from per-sequence sufficient statistics [B]: the count, mean, spread, max and
  min of log ρ, ρ, the weights and the rejection statistics. A [B, T] tensor is thus read once, and
  micro-batches and ranks merge to the metrics of the whole.
* A metric has verl 0.9's name where it has one; interop/names.py has other systems' names.
  `rollout_is_raw_*` describes ρ before truncation, which would hide degenerate weights.
Percentiles are left out, since they cannot be merged. Derivation: math/7-diagnostics.md.

    metrics = to_host(offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask))
    print(metrics["rollout_corr/k3_kl"])
"""

# pyright: reportUnknownMemberType=false
# (torch has no types for all_reduce)
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from three_policies.estimators import chi_square, kish, perplexity
from three_policies.ratios import (OF_TOKENS, aggregate_log_ratio, exp_ratio, extremes,
                                   masked_log_ratio, outside, ratio_less_one, sequence_log_ratio,
                                   widen)
from three_policies.rejection import Criterion, Grounds, Verdict


# ---------------------------------------------------------------------------- sums that merge

class Moments(NamedTuple):
    """Per-sequence sufficient statistics of x, each [B], float64.

    They are the count n of a row's entries, their mean, Σ(x − mean)², max x and min x.
    """

    n: Tensor
    mean: Tensor
    spread: Tensor
    top: Tensor
    bottom: Tensor

    @classmethod
    def of_rows(cls, x: Tensor, n: Tensor) -> "Moments":
        """Return those of x [B], each value standing for n [B] entries of its row; n may be 0."""
        x = torch.where(n > 0, x.double(), 0.0)
        return cls(n, x, torch.zeros_like(x), x, x)

    @property
    def squares(self) -> Tensor:
        """Return Σx²."""
        return self.spread + self.n * self.mean.square()


class Counted(NamedTuple):
    """The mask of the tokens that count, and sums over them."""

    mask: Tensor                                    # [B, T], bool
    n: Tensor                                       # [B], float64: tokens that count, |y|
    rows: Tensor                                    # [B], float64: 1 if there is any, else 0

    @classmethod
    def of(cls, response_mask: Tensor) -> "Counted":
        mask = response_mask.bool()
        n = mask.sum(-1).double()
        return cls(mask, n, (n > 0).double())

    def moments(self, x: Tensor, ends: Sequence[Tensor] | None = None) -> Moments:
        """Summarise x [B, T] by sequence; x [B, 1] is one value for all tokens of a sequence.

        In float32 a spread of 1e-5 would drown in Σx², so differences from the mean are summed.
        `ends` are max and min where they are already known.
        """
        if x.shape != self.mask.shape:
            return Moments.of_rows(x.detach().squeeze(-1), self.n)
        x, n = widen(x.detach()), self.n.clamp(min=1)
        mean = torch.where(self.mask, x, 0.0).sum(-1) / n.to(x.dtype)
        apart = torch.where(self.mask, x - mean[:, None], 0.0)                           # [B, T]
        rest, squares = (torch.where(mean.isfinite(), total, 0.0)       # ∞ − ∞ is NaN
                         for total in (apart.sum(-1), apart.square().sum(-1)))
        mean, rest, squares, top, bottom = (column.double() for column in (
            mean, rest, squares, *(ends or extremes(x, self.mask))))
        return Moments(self.n, mean + rest / n, squares - rest.square() / n, top, bottom)

    def count_rows(self, found: Tensor) -> Tensor:
        """Count the tokens of each sequence that are `found`, bool [B, T] or [B, 1]: [B]."""
        if found.shape != self.mask.shape:
            return self.n * found.squeeze(-1)
        return (found & self.mask).sum(-1)

    def shares(self, count: Tensor, *, tokens: Sequence[str] = (),
               rows: Sequence[str] = ()) -> "list[Quantity]":
        """Return the share of tokens that are counted, `count` [B], and of sequences with any."""
        return [(Moments.of_rows(count / self.n, self.n), dict.fromkeys(tokens, "mean")),
                (Moments.of_rows(count > 0, self.rows), dict.fromkeys(rows, "mean"))]


Quantity = tuple[Moments, dict[str, str]]      # with its metrics: name → reduction


@dataclass(frozen=True)
class Statistics:
    """Means, spreads and extremes of many quantities, which merge exactly.  (eq:merge)

    A mean over micro-batches or ranks is not the mean of their means. But n, Σx and Σx² add up, and
    of max x and max −x the larger one counts. These five numbers of every quantity are merged, and
    turned into metrics at the very end. No value leaves the device before.

        Statistics.of([(moments, {"kl": "mean", "kl_max": "max"}), …]).merge(others).metrics()

    Reductions: mean; std (divided by n); sample_std (by n − 1); min; max; ess, (Σx)²/(nΣx²); z,
    Σx/√Σx², a sum in standard errors from 0 (eq:martingale). All are 0 where nothing was counted.
    Sums are float64, since Σx²/n − mean² cancels.
    """

    names: tuple[dict[str, str], ...]               # for each quantity: metric → reduction
    table: Tensor                # [quantities, 5]: n, Σx, Σx², max x, max −x

    @classmethod
    def of(cls, quantities: list[Quantity]) -> "Statistics":
        x = Moments(*map(torch.stack, zip(*(moments for moments, _ in quantities))))      # [Q, B]
        table = [x.n.sum(-1), (x.n * x.mean).sum(-1), x.squares.sum(-1),
                 extremes(x.top, x.n > 0)[0], -extremes(x.bottom, x.n > 0)[1]]
        return cls(tuple(names for _, names in quantities), torch.stack(table, -1))

    def merge(self, others: "list[Statistics]") -> "Statistics":
        """Merge the statistics of other parts of the batch, as if all were computed at once."""
        parts = torch.stack([self.table, *(other.table for other in others)])
        table = torch.cat([parts[..., :3].sum(0), parts[..., 3:].amax(0)], -1)
        return Statistics(self.names, table)

    def all_reduce(self, group: ProcessGroup) -> "Statistics":
        """Merge over the ranks of a process group, in one sum and one maximum for everything."""
        sums, peaks = (x.clone(memory_format=torch.contiguous_format)      # it reduces in place
                       for x in (self.table[:, :3], self.table[:, 3:]))
        dist.all_reduce(sums, group=group)
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
        return Statistics(self.names, torch.cat([sums, peaks], -1))

    def metrics(self) -> dict[str, Tensor]:
        """Return {"rollout_corr/…": 0-dim tensor}, on the device."""
        n, total, squares, top, negative_top = self.table.unbind(-1)                      # [Q]
        count, nothing = n.clamp(min=1), n <= 0
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        reduced = {
            "mean": mean,
            "std": variance.sqrt(),
            "sample_std": (variance * count / (count - 1).clamp(min=1)).sqrt(),
            "ess": kish(count, total, squares),
            "z": total / squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt(),
            "max": top.masked_fill(nothing, 0.0),
            "min": (-negative_top).masked_fill(nothing, 0.0),
        }
        return {f"rollout_corr/{metric}": reduced[how][i] for i, names in enumerate(self.names)
                for metric, how in names.items()}


# ----------------------------------------------------------------------- which metrics there are

class Ratios(NamedTuple):
    """The log ρ of a batch by token, and the moments of log ρ, ρ and ρ − 1 by sequence."""

    log_rho: Tensor                                 # [B, T], 0 on padding
    tokens: Counted
    of_log: Moments
    of_rho: Moments
    less_one: Moments                               # of ρ − 1, but for its ends: those of ρ

    @classmethod
    def of(cls, log_rho: Tensor, response_mask: Tensor) -> "Ratios":
        tokens = Counted.of(response_mask)
        ends = extremes(log_rho, tokens.mask)
        return cls(log_rho, tokens, tokens.moments(log_rho, ends),
                   *moments_of_ratio(log_rho, tokens, ends))


def moments_of_ratio(log_rho: Tensor, tokens: Counted,
                     ends: Sequence[Tensor]) -> tuple[Moments, Moments]:
    """Summarise ρ and ρ − 1 by sequence; the ends of both are those of ρ.

    `log_rho`: [B, T], or [B, 1] where a sequence has one; `ends`: its maximum and minimum, [B].
    In float32 a ρ near 1 has lost the digits of ρ − 1, and a ρ − 1 near −1 those of ρ. So each
    sequence sums ρ − 1 if any log ρ is above −1, else ρ; the other mean differs by 1. Where one
    log ρ is above −1 and the mean ρ is below 1e-4, the mean ρ keeps two to three digits.
    """
    near = (ends[0] > -1)[:, None]                                                        # [B, 1]
    summed = tokens.moments(torch.where(near, ratio_less_one(log_rho), exp_ratio(log_rho)), ends)
    top, bottom = (exp_ratio(end).double() for end in ends)
    summed, one = summed._replace(top=top, bottom=bottom), near.double()[:, 0]
    return (summed._replace(mean=summed.mean + one),
            summed._replace(mean=summed.mean + (one - 1)))      # not + one − 1: digits would go


def offpolicy_quantities(ratios: Ratios, rollout_log_prob: Tensor) -> list[Quantity]:
    """Measure how far apart two policies are, of tokens and non-empty sequences.  (eq:martingale)

    bitwise_frac counts the tokens with log ρ ≠ 0, NaN included: their float32 bits differ.
    """
    _, (mask, n, rows), of_log, of_rho, less_one = ratios
    rollout_mean = torch.where(mask, widen(rollout_log_prob), 0.0).sum(-1) / n  # of a sequence: [B]
    mean, any_token = of_log.mean, n[:, None] > 0
    # k3 = ρ − 1 − log ρ; of very small log ρ the difference has fewer digits than log²ρ / 2.
    small = torch.maximum(of_log.top, -of_log.bottom) < torch.finfo(ratios.log_rho.dtype).eps ** 0.5
    k3 = torch.where(small, of_log.squares / (2 * n), less_one.mean - mean)
    means = [
        (n, k3, {"k3_kl": "mean"}),
        (n, chi_square(n, less_one.squares + n * (2 * less_one.mean + 1)), {"chi2_token": "mean"}),
        (rows, chi_square(rows, exp_ratio(n * mean).square()), {"chi2_seq": "mean"}),
        (rows, perplexity((rollout_mean + mean)[:, None], any_token), {"training_ppl": "mean"}),
        (rows, -rollout_mean - mean, {"training_log_ppl": "mean"}),
        (rows, perplexity(rollout_mean[:, None], any_token), {"rollout_ppl": "mean"}),
        (rows, -rollout_mean, {"rollout_log_ppl": "mean"}),
        (rows, -mean, {"log_ppl_diff": "mean", "log_ppl_diff_max": "max",
                       "log_ppl_diff_min": "min"}),
        (rows, mean.abs(), {"log_ppl_abs_diff": "mean"}),
        (rows, perplexity(mean[:, None], any_token), {"ppl_ratio": "mean"})]
    k1 = of_log._replace(mean=-mean)                     # its mean and its z need no extremes
    other_bits = ratios.tokens.count_rows(ratios.log_rho != 0)
    return [(k1, {"kl": "mean", "kl_z": "z"}),                  # KL(π_rollout‖π_train), by k1
            *ratios.tokens.shares(other_bits, tokens=["bitwise_frac"]),
            *((Moments.of_rows(x, of), names) for of, x, names in means),
            (of_rho, {"is_ratio_mean": "mean", "is_ratio_max": "max", "is_ratio_min": "min"}),
            (less_one, {"is_ratio_std": "sample_std", "is_ratio_z": "z"})]


# Metrics prefix_NAME of a quantity: a criterion's statistic has NATS, weights have WEIGHTS and std.
NATS = {"mean": "mean", "max": "max", "min": "min"}
WEIGHTS = NATS | {"eff_sample_size": "ess"}


def _summaries(prefix: str, x: Moments, apart: Moments,
               reductions: dict[str, str]) -> list[Quantity]:
    """Summarise x over all tokens, and the means of x over sequences.

    `apart` is x less its center, for spreads: one of 1e-8 would drown in Σx² beside a mean of 1.
    """
    rows = (x.n > 0).double()
    of_rows, rows_apart = (Moments.of_rows(of.mean, rows) for of in (x, apart))
    away = Moments.of_rows(apart.mean.abs(), rows)
    return [(x, {f"{prefix}_{name}": how for name, how in reductions.items()}),
            (apart, {f"{prefix}_std": "std"} if reductions is WEIGHTS else {}),
            (of_rows, {f"{prefix}_seq_{name}": how for name, how in reductions.items()}),
            (rows_apart, {f"{prefix}_seq_std": "sample_std"}),
            (away, {f"{prefix}_seq_max_deviation": "max"})]


def ratio_quantities(ratios: Ratios, level: str, bounds: Any, by_token: bool,
                     by_prefix: Mapping[str, Tensor | None]) -> list[Quantity]:
    """Summarise ρ at a level, and count what is beyond the bounds, by token or by sequence.

    `by_prefix` says what each prefix summarises: None is ρ itself, a tensor [B, T] the weights made
    of ρ. Under every prefix the bounds are compared with ρ.
    """
    tokens, log_rho, rho, less_one = ratios.tokens, ratios.log_rho, ratios.of_rho, ratios.less_one
    if level != "token":
        aggregate, there = aggregate_log_ratio, tokens.mask
        if level not in OF_TOKENS:
            aggregate, there = sequence_log_ratio, tokens.n[:, None] > 0
        log_rho = aggregate(log_rho, tokens.mask, level)                       # [B, T] or [B, 1]
        rho, less_one = moments_of_ratio(log_rho, tokens, extremes(log_rho, there))

    found: list[Quantity] = []
    for prefix, weights in by_prefix.items():
        if weights is not None and level not in OF_TOKENS:                    # one weight a row
            weights = extremes(weights, tokens.mask)[0][:, None]
        x, apart = rho, less_one
        if weights is not None:
            x = tokens.moments(weights)
            apart = x._replace(mean=x.mean - 1)
        found += _summaries(prefix, x, apart, WEIGHTS)

    lo, hi = (default if end is None else end for end, default in zip(bounds, (0.0, math.inf)))
    far_ends = rho.mean < lo, rho.mean > hi
    for end, beyond, far in zip(("low", "high"), outside(log_rho, *bounds), far_ends):
        names = [f"{prefix}_ratio_fraction_{end}" for prefix in by_prefix]
        count = tokens.count_rows(beyond)
        found += tokens.shares(count, **{"tokens" if by_token else "rows": names})
        found.append((Moments.of_rows(far, tokens.rows),
                      {f"{prefix}_seq_fraction_{end}": "mean" for prefix in by_prefix}))
    return found


def weight_quantities(ratios: Ratios, grounds: Grounds) -> list[Quantity]:
    """Summarise weights before normalisation (rollout_is_*), and their ρ (rollout_is_raw_*).

    If no weights are applied, only ρ is summarised. With a single threshold C, ρ outside [1/C, C]
    is counted; `count_below` takes the place of the lower end. rollout_is_ratio_fraction_* counts
    sequences at sequence level, and tokens at geometric level, as verl's does:
    rollout_is_seq_fraction_* counts sequences at both. rollout_is_per_sequence is 1 where a
    sequence has one weight, 0 where each token has its own.
    """
    level, weights, threshold = grounds.level, grounds.weights, grounds.threshold
    if level is None:
        return []
    tokens, pair = ratios.tokens, isinstance(threshold, tuple)
    low, high = threshold if pair else (1 / threshold, threshold)
    bounds = (low if grounds.count_below is None else grounds.count_below, high)
    by_prefix = {"rollout_is_raw": None} | ({} if weights is None else {"rollout_is": weights})
    found = ratio_quantities(ratios, level, bounds, level != "sequence", by_prefix)
    per_sequence = level not in OF_TOKENS
    found.append((Moments.of_rows(tokens.rows * per_sequence, tokens.rows),
                  {"rollout_is_per_sequence": "mean"}))
    if weights is None:
        return found
    if grounds.normalized:
        divisor = tokens.moments(weights)
        if per_sequence:
            divisor = Moments.of_rows(divisor.mean, tokens.rows)
        found.append((divisor, {"rollout_is_batch_norm_factor": "mean"}))
    if pair:
        zero = tokens.count_rows(weights == 0)
        found += tokens.shares(zero, tokens=["rollout_is_masked_fraction"],
                               rows=["rollout_is_seq_masked_fraction"])
    return found


def criterion_quantities(ratios: Ratios, name: str, row: Criterion, bound: Any,
                         verdict: Verdict) -> list[Quantity]:
    """Summarise a criterion's statistic, in its own unit, as rollout_rs_{name}_*.

    If its pair bounds ρ, then ρ at that level is summarised as rollout_rs_{name}_rho_*. For
    k1 = −log ρ a "high" statistic is a low ρ. The standard deviation is that of the statistic
    clamped to the interval that is kept.
    """
    prefix, (least, most), tokens = f"rollout_rs_{name}", verdict.interval, ratios.tokens
    statistic, _, below, above = verdict
    whole = tokens.moments(statistic)
    low, high = whole.mean < least, whole.mean > most                                     # [B]
    within = tokens.moments(statistic.clamp(least, most), (whole.top, whole.bottom))    # for std
    found = [*_summaries(prefix, whole, whole, NATS), (within, {f"{prefix}_std": "std"}),
             *tokens.shares(tokens.count_rows(below | above), tokens=[f"{prefix}_masked_fraction"],
                            rows=[f"{prefix}_seq_masked_fraction"])]
    for end, beyond, far in (("low", below, low), ("high", above, high)):
        count = tokens.count_rows(beyond)
        name, of_rows = f"{prefix}_fraction_{end}", f"{prefix}_seq_fraction_{end}"
        if row.of == "sequence":
            found += tokens.shares(count, rows=[name, of_rows])
        else:
            found += tokens.shares(count, tokens=[name])
            found.append((Moments.of_rows(far, tokens.rows), {of_rows: "mean"}))
    if row.level is not None:
        found += ratio_quantities(ratios, row.level, bound, row.of == "token",
                                  {f"{prefix}_rho": None})
    return found


def rejection_quantities(ratios: Ratios, grounds: Grounds) -> list[Quantity]:
    """Measure what each criterion rejects, and what all of them keep.

    The veto is the lower bound of seq_max_k1: tokens below it are counted, and sequences with any.
    """
    tokens, verdicts = ratios.tokens, grounds.verdicts
    found = [x for name, (row, bound, verdict) in verdicts.items()
             for x in criterion_quantities(ratios, name, row, bound, verdict)]
    left = tokens.count_rows(grounds.kept) if verdicts else tokens.n                           # [B]
    veto = verdicts["seq_max_k1"][1][0] if "seq_max_k1" in verdicts else None
    vetoed = torch.zeros_like(tokens.n)
    if veto is not None:
        vetoed = tokens.count_rows(outside(ratios.log_rho, veto, None)[0])
    return [
        *found,
        *tokens.shares(vetoed, tokens=["rollout_is_catastrophic_token_fraction"],
                       rows=["rollout_is_veto_fraction"]),
        *tokens.shares(tokens.n - left, tokens=["rollout_rs_masked_fraction"],
                       rows=["rollout_rs_seq_masked_fraction"]),
        (Moments.of_rows(left == 0, tokens.rows), {"all_rejected": "min"})]


def measure(grounds: Grounds) -> Statistics:
    """Measure all metrics of one correction, as sums that merge.  (eq:merge)"""
    seen = grounds.seen
    assert seen.rollout_log_prob is not None
    ratios = Ratios.of(seen.log_rho, seen.mask)
    return Statistics.of([*offpolicy_quantities(ratios, seen.rollout_log_prob),
                          *weight_quantities(ratios, grounds),
                          *rejection_quantities(ratios, grounds)])


def offpolicy_metrics(train_log_prob: Tensor, rollout_log_prob: Tensor,
                      response_mask: Tensor) -> dict[str, Tensor]:
    """Measure how far π_train is from π_rollout on one batch, without a correction.

    [B, T] each → {"rollout_corr/kl", "…/k3_kl", "…/chi2_token", "…/chi2_seq", "…/ppl_ratio", …}.
    """
    train_log_prob, rollout_log_prob = train_log_prob.detach(), rollout_log_prob.detach()
    log_rho = masked_log_ratio(train_log_prob, rollout_log_prob, response_mask)
    ratios = Ratios.of(log_rho, response_mask)
    return Statistics.of(offpolicy_quantities(ratios, rollout_log_prob)).metrics()


def merge(corrections: Sequence[Any], group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Merge the metrics of several micro-batches, and of all ranks of `group`.  (eq:merge)

    `corrections`: what `correct` returned for each. Parts of one correction (`.rows`) have the
    metrics of the whole, so all of them count once. Raises ValueError without corrections, or if
    their configurations differ.
    """
    parts = [*{id(x.grounds): x for x in [*corrections]}.values()]      # rows share their grounds
    made_by = {x.grounds and x.grounds.configuration for x in parts}
    if len(made_by) != 1 or None in made_by:
        raise ValueError("merge needs corrections that `correct` made by one configuration")
    first, *others = (x.statistics for x in parts)
    statistics: Statistics = first.merge(others)
    return (statistics if group is None else statistics.all_reduce(group)).metrics()


def to_host(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the metrics as floats, with one transfer for all tensors."""
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    floats: dict[str, float] = {
        name: value for name, value in metrics.items() if not isinstance(value, Tensor)}
    if not tensors:
        return floats
    device = max((x.device for x in tensors.values()), key=lambda device: device.type != "cpu")
    moved = torch.stack([x.detach().double().to(device) for x in tensors.values()])
    floats |= {name: x.item() for name, x in zip(tensors, moved.cpu())}
    return {name: floats[name] for name in metrics}
