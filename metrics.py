"""How far apart the policies are: sums per sequence, exact merging, metrics by name, a diagnosis.

This file decides
* Every metric follows from a few sums and extremes of a row: its count, Σx, Σx², max x, min x, of
  log ρ, ρ, the weights and the statistics of rejection. They are [B], so that a [B, T] tensor is
  read once; and they add up, so that micro-batches and ranks have the metrics of the whole.
* A metric is called what verl calls it; where SkyRL or an older verl has a name of its own, that
  stands beside it. `rollout_is_raw_*` is of ρ before truncation, which hides degeneracy.
Left out: percentiles, which cannot be merged. Derivation: math/8-diagnostics.md.

    metrics = to_host(offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask))
    print(*diagnose(metrics), sep="\\n")
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from estimators import (OF_TOKENS, SAFETY_BOUND, aggregate_log_ratio, exp_ratio, extremes, kish,
                        masked_log_ratio, outside, sequence_log_ratio)


# ---------------------------------------------------------------------------- sums that merge

class Sums(NamedTuple):
    """What the mean, the spread and the extremes of x follow from, by sequence.  (eq:merge)

    Their number n, Σx, Σx², max x and min x of a row's entries that count: [B] each, float64.
    """

    n: Tensor
    total: Tensor
    squares: Tensor
    top: Tensor
    bottom: Tensor

    @classmethod
    def of_rows(cls, x: Tensor, n: Tensor) -> "Sums":
        """Of one value, or a mean, x [B] on n [B] entries of each row; n may be 0."""
        x = torch.where(n > 0, x.double(), 0.0)
        return cls(n, n * x, n * x.square(), x, x)


class Tokens(NamedTuple):
    """The tokens that count, and what is summed over them.  (eq:merge)"""

    mask: Tensor                                    # [B, T], bool
    n: Tensor                                       # [B], float64: |y|, those that count
    rows: Tensor                                    # [B], float64: 1 where it has any, else 0

    @classmethod
    def of(cls, response_mask: Tensor) -> "Tokens":
        mask = response_mask.bool()
        n = mask.sum(-1).double()
        return cls(mask, n, (n > 0).double())

    def sums(self, x: Tensor, ends=None) -> Sums:
        """Of x [B, T]; or of x [B, 1], the value of all tokens of a sequence.

        In float32 a spread of 1e-5 would drown in Σx², and ρ − 1 − log ρ in Σρ. So both are summed
        as differences from the sequence's mean, and put together in float64. `ends`: max and min,
        where they follow from others.
        """
        if x.shape != self.mask.shape:
            return Sums.of_rows(x.detach().squeeze(-1), self.n)
        x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        mean = torch.where(self.mask, x, 0.0).sum(-1) / self.n.clamp(min=1).to(x.dtype)
        apart = torch.where(self.mask, x - mean[:, None], 0.0)                           # [B, T]
        mean, rest, squares, top, bottom = (column.double() for column in (
            mean, apart.sum(-1), apart.square().sum(-1), *(ends or extremes(x, self.mask))))
        total = self.n * mean + rest
        return Sums(self.n, total, squares + mean * (total + rest), top, bottom)

    def count(self, found: Tensor) -> Tensor:
        """How many of each sequence are `found`, [B, T] or [B, 1] bool: [B]"""
        if found.shape != self.mask.shape:
            return self.n * found.squeeze(-1)
        return (found & self.mask).sum(-1)

    def shares(self, count: Tensor, *, tokens=(), rows=()) -> "list[Quantity]":
        """The share of tokens of which a sequence has `count` [B], and of sequences with any."""
        return [(Sums.of_rows(count / self.n, self.n), dict.fromkeys(tokens, "mean")),
                (Sums.of_rows(count > 0, self.rows), dict.fromkeys(rows, "mean"))]


Quantity = tuple[Sums, dict[str, str]]      # and the metrics made of it: name → reduction


@dataclass(frozen=True)
class Statistics:
    """Means, spreads and extremes of many quantities that merge exactly.  (eq:merge)

    A mean over micro-batches or ranks is not the mean of their means. What does add up is
    (n, Σx, Σx²), and what does compare is (max x, max −x): these five numbers of every quantity
    are merged, and turned into metrics at the very end. No value leaves the device before.

        Statistics.of([(sums, {"kl": "mean", "kl_max": "max"}), …]).merge(others).metrics()

    Reductions: mean; std (n below it); sample_std (n − 1 below it); min; max; ess, (Σx)²/(nΣx²); z,
    Σx/√Σx², the error of a mean of 0 (eq:martingale).
    Of nothing at all they are 0. Sums are float64, since Σx²/n − mean² cancels.
    """

    names: tuple[dict[str, str], ...]               # of each quantity: metric → reduction
    table: Tensor                                   # [quantities, 5]

    @classmethod
    def of(cls, quantities: list[Quantity]) -> "Statistics":
        n, total, squares, top, bottom = (
            torch.stack(column) for column in zip(*(sums for sums, _ in quantities)))     # [Q, B]
        table = [n.sum(-1), total.sum(-1), squares.sum(-1), extremes(top, n > 0)[0],
                 -extremes(bottom, n > 0)[1]]
        return cls(tuple(names for _, names in quantities), torch.stack(table, -1))

    def merge(self, others: "list[Statistics]") -> "Statistics":
        """These statistics and those of other parts of the batch, as if computed at once."""
        parts = torch.stack([self.table, *(other.table for other in others)])
        table = torch.cat([parts[..., :3].sum(0), parts[..., 3:].amax(0)], -1)
        return Statistics(self.names, table)

    def all_reduce(self, group) -> "Statistics":
        """The same over the ranks of a process group: one sum and one maximum for everything."""
        sums, peaks = (x.clone(memory_format=torch.contiguous_format)
                       for x in self.table.split([3, 2], 1))
        torch.distributed.all_reduce(sums, group=group)
        torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX, group=group)
        return Statistics(self.names, torch.cat([sums, peaks], -1))

    def metrics(self) -> dict[str, Tensor]:
        """{"rollout_corr/…": 0-dim tensor}, on the device."""
        n, total, squares, top, bottom = self.table.unbind(-1)                            # [Q]
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
            "min": (-bottom).masked_fill(nothing, 0.0),
        }
        return {f"rollout_corr/{metric}": reduced[how][i] for i, names in enumerate(self.names)
                for metric, how in names.items()}


# ----------------------------------------------------------------------- which metrics there are

class Ratios(NamedTuple):
    """ρ of one batch, per token, and its sums by sequence.  (eq:ratio)"""

    log_rho: Tensor                                 # [B, T], 0 on padding
    tokens: Tokens
    of_log: Sums                                    # of log ρ
    of_rho: Sums

    @classmethod
    def of(cls, log_rho: Tensor, response_mask: Tensor) -> "Ratios":
        tokens = Tokens.of(response_mask)
        ends = extremes(log_rho, tokens.mask)
        of_rho = tokens.sums(exp_ratio(log_rho), [exp_ratio(end) for end in ends])
        return cls(log_rho, tokens, tokens.sums(log_rho, ends), of_rho)


def offpolicy_quantities(ratios: Ratios, rollout_log_prob: Tensor) -> list[Quantity]:
    """How far apart two policies are: means over tokens, or over the sequences that have any.

    (eq:kl-estimators, eq:chi2, eq:perplexity, eq:martingale)
    """
    _, (mask, n, rows), of_log, of_rho = ratios
    rollout = torch.where(mask, rollout_log_prob, 0.0).sum(-1) / n            # mean log μ, [B]
    log_rho, limited = of_log.total / n, of_log.total.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    means = [
        (n, of_rho.total / n - 1 - log_rho, {"k3_kl": "mean"}),
        (n, of_rho.squares / n - 1, {"chi2_token": "mean"}),
        (rows, torch.expm1(2 * limited), {"chi2_seq": "mean"}),
        (rows, exp_ratio(-rollout - log_rho, 4 * SAFETY_BOUND), {"training_ppl": "mean"}),
        (rows, -rollout - log_rho, {"training_log_ppl": "mean"}),
        (rows, exp_ratio(-rollout, 4 * SAFETY_BOUND), {"rollout_ppl": "mean"}),
        (rows, -rollout, {"rollout_log_ppl": "mean"}),
        (rows, -log_rho, {"log_ppl_diff": "mean", "log_ppl_diff_max": "max",
                          "log_ppl_diff_min": "min"}),
        (rows, log_rho.abs(), {"log_ppl_abs_diff": "mean"}),
        (rows, exp_ratio(-log_rho, 4 * SAFETY_BOUND), {"ppl_ratio": "mean"})]
    k1 = of_log._replace(total=-of_log.total, top=-of_log.bottom, bottom=-of_log.top)
    less_one = Sums(n, of_rho.total - n, of_rho.squares - 2 * of_rho.total + n, of_rho.top - 1,
                    of_rho.bottom - 1)
    return [(k1, {"kl": "mean", "kl_z": "z"}),                  # KL(π_rollout‖π_train), by k1
            *((Sums.of_rows(x, of), names) for of, x, names in means),
            (of_rho, {"is_ratio_mean": "mean", "is_ratio_std": "sample_std", "is_ratio_max": "max",
                      "is_ratio_min": "min"}),
            (less_one, {"is_ratio_z": "z"})]


# Of a quantity x, under prefix_NAME: nats of a criterion have these, weights all of them.
NATS = {"mean": "mean", "max": "max", "min": "min"}
WEIGHTS = NATS | {"std": "std", "eff_sample_size": "ess"}


def _spread(prefix: str, x: Sums, center: float, reductions: dict[str, str]) -> list[Quantity]:
    """Of x over all tokens, and of its mean in each sequence."""
    row, rows = x.total / x.n, (x.n > 0).double()
    by_row = {f"{prefix}_seq_{name}": how for name, how in reductions.items()}
    by_row[f"{prefix}_seq_std"] = "sample_std"
    return [(x, {f"{prefix}_{name}": how for name, how in reductions.items()}),
            (Sums.of_rows(row, rows), by_row),
            (Sums.of_rows((row - center).abs(), rows), {f"{prefix}_seq_max_deviation": "max"})]


def _also(quantities: list[Quantity], aliases: dict[str, str]) -> list[Quantity]:
    """The same, with a second name for some metrics: {ours: another system's}."""
    return [(sums, names | {aliases[ours]: how for ours, how in names.items() if ours in aliases})
            for sums, names in quantities]


def ratio_quantities(ratios: Ratios, level: str, bounds, prefix: str,
                     weights: Tensor | None = None) -> list[Quantity]:
    """Of ρ at a level; or of the `weights` made of it, beside ρ as prefix_raw.  (eq:levels, eq:ess)

    What is beyond the bounds is counted by token, but by sequence for products and for rejection by
    sequences. Two of verl's habits are kept under verl's names: it always counts ρ; and above token
    level the extremes of the weights are those of ρ.
    """
    tokens, log_rho, rho = ratios.tokens, ratios.log_rho, ratios.of_rho
    if level != "token":
        aggregate = aggregate_log_ratio if level in OF_TOKENS else sequence_log_ratio
        log_rho = aggregate(log_rho, tokens.mask, level)                       # [B, T] or [B, 1]
        rho = tokens.sums(exp_ratio(log_rho))
    described = {prefix: rho}
    if weights is not None:
        one_each = weights if level in OF_TOKENS else extremes(weights, tokens.mask)[0][:, None]
        applied = tokens.sums(one_each)
        ends = applied if level in OF_TOKENS else rho
        applied = applied._replace(top=ends.top, bottom=ends.bottom)
        described = {f"{prefix}_raw": rho, prefix: applied}
    found = [x for name, sums in described.items() for x in _spread(name, sums, 1.0, WEIGHTS)]
    lo, hi = (default if end is None else end for end, default in zip(bounds, (0.0, math.inf)))
    per_token = level in OF_TOKENS or (level == "geometric" and prefix != "rollout_rs")
    row, by = rho.total / tokens.n, "tokens" if per_token else "rows"
    for end, beyond, far in zip(("low", "high"), outside(log_rho, *bounds), (row < lo, row > hi)):
        names = [f"{name}_ratio_fraction_{end}" for name in described]
        found += tokens.shares(tokens.count(beyond), **{by: names})
        found.append((Sums.of_rows(far, tokens.rows),
                      {f"{name}_seq_fraction_{end}": "mean" for name in described}))
    return found


def weight_quantities(ratios: Ratios, weights: Tensor | None, level: str, threshold,
                      normalized: bool) -> list[Quantity]:
    """rollout_is_*: of the weights [B, T] before they are `normalized`; rollout_is_raw_*: of ρ.

    (eq:tis, eq:mis, eq:self-normalised)

    Without weights that are applied, of ρ alone. With a single threshold C, verl counts what is
    outside [1/C, C].
    """
    tokens, pair = ratios.tokens, isinstance(threshold, tuple)
    bounds = threshold if pair else (1 / threshold, threshold)
    if weights is None:
        return ratio_quantities(ratios, level, bounds, "rollout_is_raw")
    found = ratio_quantities(ratios, level, bounds, "rollout_is", weights)
    if pair:
        found += tokens.shares(tokens.count(weights == 0), rows=["rollout_is_seq_masked_fraction"],
                               tokens=["rollout_is_masked_fraction", "rollout_is_oob_ratio"])
    aliases = {"token": {"rollout_is_ratio_fraction_high": "tis_token_clip_high_ratio"},
               "sequence": {"rollout_is_ratio_fraction_high": "tis_seq_clip_high_ratio"},
               "prefix": {}, "geometric": {}}[level]
    if normalized:
        mean = "rollout_is_mean" if level in OF_TOKENS else "rollout_is_seq_mean"
        aliases = aliases | {mean: "rollout_is_batch_norm_factor"}
    return _also(found, aliases)


def criterion_quantities(ratios: Ratios, name: str, statistic: Tensor, interval: tuple,
                         below: Tensor, above: Tensor) -> list[Quantity]:
    """rollout_rs_{criterion}_*: of its statistic [B, T], in nats, to be kept within an interval.

    (eq:rejection)

    `below`, `above` [B, T]: the tokens that it rejects at either end; for k1 = −log ρ verl's "high"
    is a low ρ. The standard deviation is verl's, too: of what is limited to the interval.
    """
    prefix, (least, most), tokens = f"rollout_rs_{name}", interval, ratios.tokens
    whole = tokens.sums(statistic)
    within = tokens.sums(statistic.clamp(least, most), (whole.top, whole.bottom))    # for std
    row = whole.total / whole.n
    quantities = [*_spread(prefix, whole, 0.0, NATS), (within, {f"{prefix}_std": "std"}),
                  *tokens.shares(tokens.count(below | above), tokens=[f"{prefix}_masked_fraction"],
                                 rows=[f"{prefix}_seq_masked_fraction"])]
    for end, beyond, far in (("low", below, row < least), ("high", above, row > most)):
        count = tokens.count(beyond)
        names = [f"{prefix}_fraction_{end}", f"{prefix}_seq_fraction_{end}"]
        if name.startswith("token") or name == "second_moment":
            quantities += tokens.shares(count, tokens=names[:1])
            quantities.append((Sums.of_rows(far, tokens.rows), {names[1]: "mean"}))
        else:
            quantities += tokens.shares(count, rows=names)
    return quantities


LEVEL_OF_K1 = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
SKYRLS = {"rollout_rs_token_k1_masked_fraction": "token_mask_ratio"} | {
    f"rollout_rs_{ours}_{name}": f"{skyrls}_{ratio}_ratio"
    for ours, skyrls in (("seq_max_k1", "outlier_seq"), ("seq_sum_k1", "product_sequence_mask"),
                         ("seq_mean_k1", "geo_sequence_mask"))
    for name, ratio in (("fraction_high", "under_low"), ("fraction_low", "over_high"),
                        ("seq_masked_fraction", "masked"))}


def rejection_quantities(ratios: Ratios, kept: Tensor, criteria: Mapping[str, Any],
                         verdicts: Mapping[str, tuple]) -> list[Quantity]:
    """Of what all criteria keep, [B, T] bool, and of each verdict.  (eq:rejection)

    verl 0.6's rollout_rs_* are statistics of ρ itself: of the first criterion that bounds it.
    """
    quantities = [x for name, verdict in verdicts.items()
                  for x in criterion_quantities(ratios, name, *verdict)]
    for name in [name for name in criteria if name in LEVEL_OF_K1][:1]:
        quantities += ratio_quantities(ratios, LEVEL_OF_K1[name], criteria[name], "rollout_rs")
    tokens, (veto, _) = ratios.tokens, criteria.get("seq_max_k1", (None, None))
    left = tokens.count(kept) if criteria else tokens.n                                   # [B]
    vetoed = torch.zeros_like(tokens.n)
    if veto is not None:
        vetoed = tokens.count(outside(ratios.log_rho, veto, None)[0])
    return _also([
        *quantities,
        *tokens.shares(vetoed, tokens=["rollout_is_catastrophic_token_fraction"],
                       rows=["rollout_is_veto_fraction"]),
        *tokens.shares(tokens.n - left, tokens=["rollout_rs_masked_fraction"],
                       rows=["rollout_rs_seq_masked_fraction"]),
        (Sums.of_rows(left == 0, tokens.rows), {"all_rejected": "min"})], SKYRLS)


def offpolicy_metrics(train_log_prob: Tensor, rollout_log_prob: Tensor,
                      response_mask: Tensor) -> dict[str, Tensor]:
    """How far π_train is from π_rollout.  (eq:kl-estimators, eq:chi2, eq:perplexity)

    [B, T] each → {"rollout_corr/kl", "…/k3_kl", "…/chi2_token", "…/chi2_seq", "…/ppl_ratio", …}.
    """
    log_rho = masked_log_ratio(train_log_prob, rollout_log_prob, response_mask)
    ratios = Ratios.of(log_rho, response_mask)
    return Statistics.of(offpolicy_quantities(ratios, rollout_log_prob)).metrics()


def merge(corrections: list, group=None) -> dict[str, Tensor]:
    """Metrics of several micro-batches and all ranks of `group`, as of one batch.  (eq:merge)"""
    statistics = corrections[0].statistics.merge([c.statistics for c in corrections[1:]])
    return (statistics if group is None else statistics.all_reduce(group)).metrics()


def to_host(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The metrics as floats, in one transfer for all of them, wherever each is.  (eq:merge)"""
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    if not tensors:
        return dict(metrics)
    device = max((x.device for x in tensors.values()), key=lambda device: device.type != "cpu")
    moved = torch.stack([x.detach().double().to(device) for x in tensors.values()]).tolist()
    return {**metrics, **dict(zip(tensors, moved))}


# -------------------------------------------------------------------------------------- diagnosis

# Metric, healthy from, to, what it means to be outside, what to turn. How many runs of chapter 10
# each of them warned of, and of how many in vain, is a table of chapter 8. verl's advice to raise
# the veto's bound when it rejects too much is the wrong way round: lower it.
HEALTHY = (
    ("all_rejected", 0, 0, "every token was rejected, so the step taught nothing",
     "widen rollout_rs, take a larger batch or new rollouts; or a bug makes the policies differ"),
    ("train/empty_updates", 0, 0, "of some mini-batches nothing was kept; they took no step",
     "widen rollout_rs, or take fewer and larger mini-batches"),
    ("rollout_is_mean", 0.1, 2, "the weights are far from their mean of 1: a cap takes the rest of "
     "it, or a heavy tail that this batch has not met",
     "take token instead of sequence weights, or lower rollout.staleness"),
    ("rollout_is_raw_eff_sample_size", 0.005, 1, "one sample or two carry all the weight",
     "take token instead of sequence weights, reject with seq_mean_k1, or lower rollout.staleness"),
    ("rollout_is_std", 0, 1, "the weights scatter widely, so the gradient is noisy",
     "lower rollout_is_threshold (token 1.5–5, sequence 2–10, geometric 1.0002–1.001)"),
    ("rollout_is_masked_fraction", 0, 0.5, "most tokens have the weight 0 and teach nothing",
     "widen the pair of rollout_is_threshold, or truncate with a single number"),
    ("rollout_is_catastrophic_token_fraction", 0, 0.01, "π_train finds many tokens near impossible",
     "compare both log-probs on one prompt: a template, dtype or temperature differs"),
    ("rollout_is_veto_fraction", 0, 0.1, "the veto rejects many sequences",
     "check the log-probs first; then lower the bound of seq_max_k1 (1e-4 → 1e-6)"),
    ("rollout_rs_seq_masked_fraction", 0, 0.5, "over half of the sequences lose tokens",
     "widen rollout_rs: 0.1 % (0.999–1.001) suits long responses and small mismatch only"),
    ("rollout_rs_masked_fraction", 0, 0.9, "fewer than one token in ten is left to learn from",
     "widen rollout_rs: of chapter 10's 47 nine-token runs with so few one ended above its start"),
    ("loss/bypass_clip_fraction", 0, 0.005, "bypass mode's clip acts on the mismatch, and pulls "
     "π_θ towards π_rollout: a brake if that is an old policy, ruin if it is a rounded one",
     "recompute π_old (bypass_mode false), take a loss without a clip (preset bypass_pg_is), or "
     "open it: loss.clip_low=1, loss.clip_high=1e9"),
    ("k3_kl", 0, 0.15, "π_rollout and π_old are far apart",
     "lower rollout.staleness, raise rollout.dtype or rollout.quantize_bits"),
    ("chi2_token", -1, 5, "a large shift: at χ² = 5 five samples of six are lost",
     "lower rollout.staleness, or truncate with rollout_is_threshold"),
    ("ppl_ratio", 0.8, 1.25, "one policy finds the samples far likelier than the other",
     "check temperature, top-p and top-k on both sides"),
)


SEVERE = {"chi2_token": (10, "a severe shift: more than nine samples in ten are lost",
                         "sample anew with today's weights; no bound repairs such a batch")}
UNCORRECTED = 0.002     # k3 per token that nothing corrects: above chapter 10's runs of six bits


def _improper(values: Mapping[str, float]) -> list[str]:
    """What cannot be so for samples of μ, whatever the policies.  (eq:martingale)

    Two exact tests: z is a standard normal number where π is a distribution over what μ sampled.
    The other condition of each keeps rounding out.
    """
    found, (mean, z) = [], (values.get(x, 0.0) for x in ("is_ratio_mean", "is_ratio_z"))
    if abs(z) > 5 and abs(mean - 1) > 0.002:
        found.append(
            f"is_ratio_mean is {mean:.4g}, {abs(z):.1f} standard errors from 1: π_train is not a "
            "distribution over what π_rollout sampled, and no weight repairs that; "
            + ("replay what top-p, top-k or min-p kept, or leave them out." if mean < 1 else
               "look for a wrong record of log μ: raw, shifted, of another prompt."))
    kl, z = (values.get(x, 0.0) for x in ("kl", "kl_z"))
    if z < -5 and kl < -1e-4:
        found.append(f"kl is {kl:.2g}, {-z:.1f} standard errors below 0: on average, samples of "
                     "π_rollout cannot be likelier under π_train; π_rollout's log-probs are not of "
                     "the distribution that was sampled from: check its temperature.")
    return found


# Why a step can teach nothing, whatever the policies: the first line that holds is said. Each
# metric with the value that it then has, what that means, and what to turn.
NO_LESSON = (
    ({"response/learned_fraction": 0, "response/truncated_fraction": 1}, "every response was cut, "
     "and rollout.mask_truncated leaves out those", "raise rollout.max_tokens"),
    ({"response/learned_fraction": 0}, "no response has a token to learn from",
     "look at the engine's output: are the responses empty?"),
    ({"response/truncated_fraction": 1}, "every response was cut at rollout.max_tokens, before it "
     "came to its end", "raise rollout.max_tokens, or ask for less by task.instruction"),
    ({"reward/advantage_max": 0, "reward/mean": 0}, "no response was right, so none is better than "
     "another", "ask easier questions, raise rollout.samples or rollout.max_tokens, and look in "
     "eval.jsonl whether only the form of the responses is wrong"),
    ({"reward/advantage_max": 0, "reward/mean": 1}, "every response was right, so none is better "
     "than another", "ask harder questions"),
    ({"reward/advantage_max": 0}, "in each group all rewards are equal, so none is better than "
     "another", "raise rollout.samples or rollout.temperature, or take advantage.kind=reinforce"),
    ({"grad_norm": 0, "all_rejected": 0, "train/empty_updates": 0}, "rewards differ and tokens "
     "were kept, and yet nothing moves", "look at the weights (rollout_is_max) and at the clip"),
)


def _no_lesson(values: Mapping[str, float]) -> list[str]:
    for metrics, meaning, remedy in NO_LESSON:
        if all(values.get(name) == value for name, value in metrics.items()):
            name, value = next(iter(metrics.items()))
            return [f"{name} is {value}: {meaning}; {remedy}."]
    return []


def _collapsed(values: Mapping[str, float]) -> list[str]:
    """A mean reward below a tenth of the best so far, where 25 right responses were to be expected.

    By chance that happens less than once in 10⁸ steps: P(Poisson(25) ≤ 2).
    """
    mean, best, n = (values.get(x, 0.0) for x in ("reward/mean", "reward/best", "response/count"))
    if not (10 * mean < best and n * best >= 25):
        return []
    return [f"reward/mean is {mean:.3g}, and was {best:.3g}: the policy has collapsed; go back to "
            "a checkpoint, with a smaller train.lr, fewer train.epochs or another correction."]


def _uncorrected(values: Mapping[str, float]) -> list[str]:
    """A mismatch that neither weights nor rejection nor a ratio to π_rollout acts on."""
    acts = {"rollout_is_mean", "loss/bypass_clip_fraction"} & set(values)
    k3 = values.get("k3_kl", 0.0)
    if acts or values.get("rollout_rs_masked_fraction", 1.0) > 0 or not k3 > UNCORRECTED:
        return []
    return [f"k3_kl is {k3:.2g} and nothing corrects it (healthy: 0 to {UNCORRECTED:g}): the step "
            "is that of another objective; take weights (correction.preset=decoupled_token_is)."]


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """What looks wrong, and which knob to turn; [] when nothing does.

    (eq:ess, eq:chi2, eq:martingale)

    `metrics`: as `correct` and `policy_loss` return them, tensors or floats, with or without
    "rollout_corr/"; what is missing is not judged. A value that is not finite is always named.
    Of loss/bypass_clip_fraction give the first mini-batch's: later ones move by learning as well.
    """
    values = {name.removeprefix("rollout_corr/"): value for name, value in to_host(metrics).items()}
    if values.get("response/learned_fraction") == 0:         # all else would be judged of nothing
        return _no_lesson(values)
    found = [*_no_lesson(values), *_collapsed(values), *_improper(values), *_uncorrected(values)]
    for name, low, high, meaning, remedy in HEALTHY:
        value, (limit, *words) = values.get(name), SEVERE.get(name, (math.inf, meaning, remedy))
        if value is not None and value >= limit:
            meaning, remedy = words
        if value is not None and not low - 1e-6 <= value <= high:      # a k3 of −1e-9 is rounding
            found.append(f"{name} is {value:.3g} (healthy: {low:g} to {high:g}): {meaning}; "
                         f"{remedy}.")
    known = {row[0] for row in HEALTHY}
    found += [f"{name} is {value}: a log-prob was not finite; look at the engine's output first."
              for name, value in values.items()
              if name not in known and isinstance(value, float) and not math.isfinite(value)]
    return found
