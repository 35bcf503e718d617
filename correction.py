"""Rollout correction: what to do when π_rollout, which sampled, is not π_old, which trains.

This file decides three separate things, and never lets one change another:
    weights      ρ = π_old/π_rollout (bypass mode: π_θ/π_rollout), aggregated per token, sequence or
                 geometric mean; truncated at C or zeroed outside [lo, hi]; batch-normalised or not
    mask         which tokens and sequences to reject; every criterion looks at the original mask
    metrics      how far apart the two policies are, from raw and from applied weights
The third thing that others mix in, the loss's denominator, is losses.py's.
Bounds always bound ρ. Peers that bound 1/ρ are translated by `from_dialect`.
Left out: percentiles, which cannot be merged over ranks. Derivation: math/.

    config = RolloutCorrectionConfig.decoupled_seq_is_rs()
    weights, mask, metrics = correct(old_log_prob, rollout_log_prob, response_mask, config)
"""

import difflib
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from estimators import (LEVELS, SAFETY_BOUND, RowSums, Statistics, aggregate_log_ratio, exp_ratio,
                        kl_estimate)

LOSS_TYPES = ("ppo_clip", "reinforce", "gspo", "cispo", "sapo")
CRITERIA = tuple(f"{level}_k{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max")
                 for k in (1, 2, 3)) + ("opsm",)
BLOCK = 2 ** 18                    # tokens that are worked on at a time, on a CPU
SPACE = 5                          # and the tensors of that size that it takes
GEO, SEQ, ICEPOP, VETO = (0.999, 1.001), (0.5, 2.0), (0.5, 5.0), (1e-4, None)


# ------------------------------------------------------------------------------------ config

def _nearest(word: Any, allowed) -> str:
    close = difflib.get_close_matches(str(word), [str(a) for a in allowed], n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; allowed: {', '.join(map(str, allowed))}"


def _number(key: str, value: Any) -> float:
    """A positive number, or one sentence that names the key."""
    try:
        if not isinstance(value, (int, float, str)) or isinstance(value, bool) or "_" in str(value):
            raise TypeError                                         # float("0.5_2") would be 0.52
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{key} must be a positive number, not {value!r}") from None
    if not number > 0:
        raise ValueError(f"{key} must be a positive number, not {value!r}")
    return number


def _interval(key: str, value: Any) -> tuple[float | None, float | None]:
    """[lo, hi] with either end open (null), lo ≤ hi, at least one end given."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{key} must be a pair [lo, hi] of bounds on ρ, either of which may be "
                         f"null, not {value!r}")
    lo, hi = (None if end is None else _number(key, end) for end in value)
    if lo is None and hi is None:
        raise ValueError(f"{key} must have at least one bound that is not null")
    if lo is not None and hi is not None and lo > hi:
        raise ValueError(f"{key} must have lo ≤ hi, not [{lo:g}, {hi:g}]")
    return lo, hi


def _choice(key: str, value: Any, allowed: tuple) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key} cannot be {value!r}{_nearest(value, allowed)}")


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return value


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What to correct, and how. Frozen and validated: a wrong value is one ValueError sentence.

    rollout_is                  level of ρ for the weights: None, "token", "sequence", "geometric"
    rollout_is_threshold        C truncates, min(ρ, C) (eq:tis); [lo, hi] zeroes outside (eq:mis)
    rollout_is_batch_normalize  divide by the mean weight, after truncation (eq:self-normalised)
    rollout_rs                  {criterion: bound}, all ANDed (eq:rejection): k1 ones take a pair
                                that bounds ρ itself (token ρ, Πρ for seq_sum, (Πρ)^{1/T} for
                                seq_mean, every token's ρ for seq_max), k2 and k3 an upper bound
                                in nats, opsm its δ in nats (eq:opsm)
    bypass_mode                 False: three policies, decoupled PPO. True: two, π_old := π_rollout
    loss_type                   ppo_clip, gspo, cispo, sapo; reinforce in bypass mode only

    In bypass mode only reinforce takes the weights: the ratio of the others already is
    π_θ/π_rollout, and weighting it once more would count it twice (eq:double-count).
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | tuple[float | None, float | None] = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: Mapping[str, Any] = field(default_factory=dict)
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    def __post_init__(self):
        if self.rollout_is is not None:
            _choice("rollout_is", self.rollout_is, LEVELS)
        _flag("rollout_is_batch_normalize", self.rollout_is_batch_normalize)
        _flag("bypass_mode", self.bypass_mode)
        _choice("loss_type", self.loss_type, LOSS_TYPES)
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type 'reinforce' needs bypass_mode true: without a clip there "
                             "is no use for a third policy")
        bound = self.rollout_is_threshold
        read = _interval if isinstance(bound, (list, tuple)) else _number
        object.__setattr__(self, "rollout_is_threshold", read("rollout_is_threshold", bound))
        criteria = {} if self.rollout_rs is None else self.rollout_rs
        if not isinstance(criteria, Mapping):
            raise ValueError(f"rollout_rs must be a mapping from criterion to bound, such as "
                             f"{{seq_mean_k3: 0.01}}, not {criteria!r}")
        for name in criteria:
            _choice("rollout_rs criterion", name, CRITERIA)
        object.__setattr__(self, "rollout_rs", {
            name: (_interval if name.endswith("k1") else _number)(f"rollout_rs.{name}", bound)
            for name, bound in criteria.items()})

    # Presets of the decoupled mode: three policies, ρ = π_old/π_rollout.
    @classmethod
    def decoupled_token_is(cls, threshold=2.0):
        return cls("token", threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold=2.0):
        return cls("sequence", threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold=2.0, rs_threshold=SEQ):
        return cls("sequence", is_threshold, rollout_rs={"seq_sum_k1": rs_threshold})

    @classmethod
    def decoupled_token_icepop(cls, threshold=ICEPOP[1], threshold_lower=ICEPOP[0]):
        return cls("token", (threshold_lower, threshold))

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold=GEO):
        return cls(rollout_rs={"seq_mean_k1": rs_threshold})

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=GEO):
        return cls("sequence", is_threshold, rollout_rs={"seq_mean_k1": rs_threshold})

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold=2.0, rs_threshold=GEO):
        return cls("token", is_threshold, rollout_rs={"seq_mean_k1": rs_threshold})

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold=0.01):
        return cls(rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=0.01):
        return cls("sequence", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold=2.0, rs_threshold=0.01):
        return cls("token", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    # Presets of the bypass mode: two policies, ρ = π_θ/π_rollout; PPO clips against π_rollout …
    @classmethod
    def bypass_ppo_clip(cls):
        return cls(bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold=GEO):
        return cls(rollout_rs={"seq_mean_k1": rs_threshold}, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold=0.01):
        return cls(rollout_rs={"seq_mean_k3": rs_threshold}, bypass_mode=True)

    # … or nothing is clipped, and ρ is an explicit weight: off-policy REINFORCE.
    @classmethod
    def bypass_pg_is(cls, threshold=2.0):
        return cls("sequence", threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold=ICEPOP[1], threshold_lower=ICEPOP[0]):
        return cls("token", (threshold_lower, threshold), bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold=GEO):
        return cls(None, 2.0, False, {"seq_mean_k1": rs_threshold}, True, "reinforce")

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=GEO):
        criteria = {"seq_mean_k1": rs_threshold}
        return cls("sequence", is_threshold, False, criteria, True, "reinforce")

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold=2.0, rs_threshold=GEO):
        return cls("token", is_threshold, False, {"seq_mean_k1": rs_threshold}, True, "reinforce")

    @classmethod
    def disabled(cls):
        """Metrics only."""
        return cls()

    # What verl 0.6 called geo_rs and pg_rs also vetoed a sequence for one token below 1e-4.
    @classmethod
    def geo_rs(cls, rs_threshold=GEO, veto=VETO):
        return cls(rollout_rs={"seq_mean_k1": rs_threshold, "seq_max_k1": veto})

    @classmethod
    def pg_rs(cls, rs_threshold=GEO, veto=VETO):
        return replace(cls.geo_rs(rs_threshold, veto), bypass_mode=True, loss_type="reinforce")


HISTORICAL = {"token_is": "decoupled_token_is", "token_tis": "decoupled_token_is",
              "seq_is": "decoupled_seq_is", "seq_is_rs": "decoupled_seq_is_rs",
              "seq_mis": "decoupled_seq_is_rs", "geo_mis": "geo_rs",
              "ppo_is_bypass": "bypass_ppo_clip", "pure_is": "bypass_pg_is",
              "pg_is": "bypass_pg_is", "pure_rs": "pg_rs"}
PRESETS = {name: getattr(RolloutCorrectionConfig, name)
           for name, member in vars(RolloutCorrectionConfig).items()
           if isinstance(member, classmethod)}
PRESETS |= {old: PRESETS[new] for old, new in HISTORICAL.items()}


# --------------------------------------------------------------------------------- correction

@dataclass(frozen=True)
class Correction:
    """What `correct` returns; unpacks into weights, mask, metrics.  (eq:correction)

    weights [B, T]: detached, 0 on padding, None when rollout_is is None. mask [B, T]: response_mask
    without the rejected, in its dtype; with no rollout_rs, response_mask itself. metrics:
    {"rollout_corr/…": 0-dim tensor}, on the device.
    """

    weights: Tensor | None
    mask: Tensor
    statistics: Statistics

    @property
    def metrics(self) -> dict[str, Tensor]:
        return {f"rollout_corr/{name}": value for name, value in self.statistics.metrics().items()}

    def __iter__(self):
        return iter((self.weights, self.mask, self.metrics))

    def rows(self, index) -> "Correction":
        """A micro-batch of it. The statistics stay those of the whole."""
        return replace(self, weights=None if self.weights is None else self.weights[index],
                       mask=self.mask[index])


def correct(train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor,
            config: RolloutCorrectionConfig, advantages: Tensor | None = None,
            group=None, compiled: bool = False) -> Correction:
    """Weights, mask and metrics of one batch, from ρ = π_train/π_rollout.  (eq:correction)

    `train_log_prob`: π_old in decoupled mode, the current π_θ in bypass mode. It,
    `rollout_log_prob` and `response_mask`: [B, T]. `advantages` [B, T] is what the opsm criterion
    asks for. With `group`, a torch.distributed process group, the batch normalisation is over all
    its ranks. `compiled`: by one kernel of torch.compile, whose sums are rounded differently; its
    first calls take seconds and, on a CPU, a C++ compiler. Raises ValueError: shapes that differ,
    no rollout_log_prob, opsm without advantages.
    """
    if rollout_log_prob is None:
        raise ValueError("rollout_log_prob is missing: without the sampler's log-probs there is "
                         "nothing to correct")
    if not train_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(f"train_log_prob {tuple(train_log_prob.shape)}, rollout_log_prob "
                         f"{tuple(rollout_log_prob.shape)} and response_mask "
                         f"{tuple(response_mask.shape)} must have one shape [B, T]")
    if advantages is None and "opsm" in config.rollout_rs:
        raise ValueError("rollout_rs.opsm needs the advantages: it looks at A < 0 alone")
    if not response_mask.shape[1]:                          # T = 0: as one column of padding
        padded = (None if x is None else F.pad(x, (0, 1))
                  for x in (train_log_prob, rollout_log_prob, response_mask, advantages))
        train, rollout, mask, advantages = padded
        result = correct(train, rollout, mask, config, advantages, group, compiled)
        return result.rows((slice(None), slice(0)))
    is_bool = response_mask.dtype == torch.bool             # arithmetic on those is not vectorised
    given = (train_log_prob.detach(), rollout_log_prob.detach(),
             response_mask.view(torch.uint8) if is_bool else response_mask, advantages)
    weights, mask, sums = (_compiled if compiled else _in_blocks)(*given, config)
    mask = (_reject_rows(config.rollout_rs, sums, mask).view(response_mask.dtype)
            if config.rollout_rs else response_mask)
    sums = dict(zip(sums, torch.stack(list(sums.values())).double()))               # [B] each
    statistics = _statistics(sums, config)
    if config.rollout_is_batch_normalize and weights is not None:
        weights = batch_normalize(weights, config.rollout_is, statistics, group)
    return Correction(weights, mask, statistics)


def _precision(train: Tensor, rollout: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(train.dtype, rollout.dtype), torch.float32)


def _in_blocks(train, rollout, response_mask, advantages, config):
    """`_pass` over a few rows at a time, while they are in cache."""
    weights, mask, parts, blocks = None, response_mask, [], _blocks(response_mask)
    dtype = _precision(train, rollout)
    if config.rollout_is is not None:
        weights = torch.empty_like(response_mask, dtype=dtype)
    if any(map(_of_tokens, config.rollout_rs)):
        mask = torch.empty_like(response_mask)
    space = response_mask.new_empty((SPACE, *response_mask[blocks[0]].shape), dtype=dtype)
    for rows in blocks:
        *given, w, m = (None if x is None else x[rows]
                        for x in (train, rollout, response_mask, advantages, weights, mask))
        _, _, sums = _pass(*given, config, 0.0, space[:, :len(m)], w, m)
        parts.append(torch.stack(list(sums.values())))
    return weights, mask, dict(zip(sums, torch.cat(parts, -1)))


def _compiled(train, rollout, response_mask, advantages, config):
    """`_pass` over all rows, by one kernel."""
    zero = train.new_zeros((len(train), 1))
    return _kernel()(train, rollout, response_mask, advantages, config, zero)


@functools.cache
def _kernel():
    return torch.compile(_pass, fullgraph=True, recompile_limit=64,         # of configurations
                         options={"cpp.max_horizontal_fusion_size": 64})    # sums in one loop


def _pass(train: Tensor, rollout: Tensor, response_mask: Tensor, advantages: Tensor | None,
          config: RolloutCorrectionConfig, zero, space=(None,) * SPACE, weights=None, mask=None):
    """Weights and mask [R, T], which knows rejected tokens, not yet rows; and sums, name → [R].

    Into `weights` and `mask` and through `space`, if given; a compiled kernel works in registers,
    and gets its `zero` as [R, 1]: what depends on the row keeps the loop over tokens inside the
    loop over rows, so that all is one loop, and not one for the weights and one for the sums.
    """
    dtype = _precision(train, rollout)
    rho = weights if config.rollout_is == "token" else None
    block = _Block(space, train.to(dtype), rollout.to(dtype), response_mask, zero, rho)
    if config.rollout_is is not None:
        weights = block.weigh(config, weights)
    mask = block.reject(config.rollout_rs, advantages, response_mask, mask)
    return weights, mask, {name: x.flatten() for name, x in block.sums.items()}


def _blocks(mask: Tensor) -> list[slice]:
    """Rows that stay in a core's cache together; on an accelerator, an eighth of all rows."""
    rows, length = mask.shape
    size = BLOCK // max(1, length) if mask.device.type == "cpu" else -(-rows // 8)
    size = max(1, size)
    return [slice(first, first + size) for first in range(0, max(1, rows), size)]


def importance_weights(log_ratio: Tensor, response_mask: Tensor, level: str, threshold) -> Tensor:
    """min(ρ, C), or ρ·1[lo ≤ ρ ≤ hi] for a pair, at one level.  (eq:tis, eq:mis)

    `log_ratio`: log ρ per token, [B, T] → [B, T], detached (eq:detached), 0 on padding. C = inf is
    plain importance sampling. Truncation's bias is −E_μ[(ρ−C)₊ g]. Sources: Ionides 2008, Yao et
    al. 2025 (TIS); Ring-1T 2510.18855 (IcePop: a pair at token level); Liu, Li et al. 2025 (MIS).
    """
    log_rho = aggregate_log_ratio(log_ratio.detach(), response_mask, level)
    rho = torch.where(response_mask.bool(), exp_ratio(log_rho), 0.0)
    return _bounded(rho, log_rho, threshold)


def _bounded(rho: Tensor, log_rho: Tensor, threshold, out: Tensor | None = None) -> Tensor:
    if not isinstance(threshold, tuple):
        return torch.clamp(rho, max=threshold, out=out)
    below, above = _outside(log_rho, *threshold)
    return torch.where(below | above, torch.zeros_like(rho), rho, out=out)


def batch_normalize(weights: Tensor, level: str, statistics: Statistics, group=None) -> Tensor:
    """w / mean(w): over tokens for token weights, over sequences for others.  (eq:self-normalised)

    [B, T] → [B, T]; `statistics` already hold the mean, which `group`, if any, merges. Unchanged
    where it is below 1e-8: all weights are zero or at the floor e^−SAFETY_BOUND then, and dividing
    would make 1 of nothing. Bias O(1/N). Source: verl PR 3980; Owen 2013, ch. 9.
    """
    name = "rollout_is_mean" if level == "token" else "rollout_is_seq_mean"
    found = next(i for i, out in enumerate(statistics.outputs) if out.get("mean") == name)
    mean = Statistics()
    mean.tables, mean.outputs = [torch.cat(statistics.tables)[found:found + 1]], [{"mean": "mean"}]
    statistics.tables += mean.tables
    statistics.outputs.append({"mean": "rollout_is_batch_norm_factor"})
    mean = mean if group is None else mean.all_reduce(group)
    factor = mean.metrics()["mean"].to(weights.dtype)
    return weights.div_(torch.where(factor > 1e-8, factor, 1.0))


def rejection_mask(log_ratio: Tensor, response_mask: Tensor, criteria: Mapping[str, Any],
                   advantages: Tensor | None = None) -> Tensor:
    """What every criterion keeps, each on the original mask: [B, T], bool.  (eq:rejection, eq:opsm)

    token_*: the token alone. seq_sum_*, seq_mean_*, seq_max_*: the sequence, by the sum, mean or
    worst token of the statistic, which is the estimate k1, k2 or k3 of KL(π_rollout‖π_old) in nats,
    from log ρ_t limited to ±SAFETY_BOUND:
        k1 = −log ρ       keep while lo ≤ ρ ≤ hi
                          (seq_sum: Πρ; seq_mean: (Πρ)^{1/T}; seq_max: every ρ_t)
        k2 = (log ρ)²/2, k3 = ρ − 1 − log ρ        keep while ≤ bound
    opsm: rejects tokens with A < 0 in sequences whose mean of −log ρ exceeds δ (DeepSeek-V3.2
    2512.02556). A bound met exactly keeps. Other sources: Liu, Li et al. 2025 (geometric mean);
    2512.23075 (worst token).
    """
    config = RolloutCorrectionConfig(rollout_rs=criteria)
    zero, valid = torch.zeros_like(log_ratio), response_mask.bool()
    return correct(log_ratio, zero, valid, config, advantages).mask


# ------------------------------------------------------------------------- one pass over tokens

def _log(bound: float | None, default: float) -> float:
    """log of a bound; an open end is the `default` (0 for a lower one), and is never crossed."""
    bound = default if bound is None else bound
    return math.log(bound) if bound else -math.inf


def _outside(log_value: Tensor, lo: float | None, hi: float | None) -> tuple[Tensor, Tensor]:
    """Where a logarithm is below log lo, and where above log hi; bool."""
    return log_value < _log(lo, 0), log_value > _log(hi, math.inf)


# −∞ as the integer of the same bits.
MINUS_INFINITY = {torch.float32: (torch.int32, -(2 ** 23)),
                  torch.float64: (torch.int64, -(2 ** 52))}


class _Block:
    """A few rows while they are in cache: their weights, their mask, and their sums for metrics.

    Tokens are [R, T]; what belongs to a sequence is [R, 1]. `sums`: name → [R], from which
    `_statistics` makes every metric. Four things make this fast on a CPU, and none is slow
    elsewhere: the same few tensors in `space` hold every block's intermediate results; a mask is
    bits, all 1 or all 0, since `torch.where` and bools are not vectorised; what is equal for all
    tokens of a row is computed for the row; and nothing is summed that follows from other sums,
    such as Σk3 = Σ(ρ − 1) − Σ log ρ. Compiled, the first two are the compiler's business: `out` is
    None, and a mask is a mask.
    """

    def __init__(self, space, train: Tensor, rollout: Tensor, response_mask: Tensor, zero,
                 rho=None):
        """`space`: SPACE tensors [R, T]. `rho` [R, T]: where ρ stays; else ρ − 1 is in its place."""
        x, excess, valid, padding, self.scratch = space
        self.zero = zero
        self.set_valid(response_mask, valid, padding, train.dtype)
        self.log_ratio = x = self.only(torch.sub(train, rollout, out=x))    # NaN on padding ends
        rho = torch.clamp(x, -SAFETY_BOUND, SAFETY_BOUND, out=excess if rho is None else rho)
        self.rho = rho.exp_()                                               # 1 on padding
        self.excess = torch.sub(rho, 1, out=excess)                         # 0 on padding
        self.total = x.sum(-1, keepdim=True)
        self.top = self.highest(x).amax(-1, keepdim=True)
        self.bottom = self.lowest(x).amin(-1, keepdim=True)
        self.sums = {
            "n": self.n, "log_ratio": self.total, "top": self.top, "bottom": self.bottom,
            "rollout": self.only(rollout, out=self.scratch).sum(-1),
            "excess": self.excess.sum(-1, keepdim=True), "squares": self.squares(self.excess)}

    def set_valid(self, response_mask: Tensor, valid, padding, dtype) -> None:
        """Which tokens are valid; `padding`, 0 on them and −∞ elsewhere; n, how many there are."""
        if torch.compiler.is_compiling():
            self.valid = response_mask.to(dtype) != 0               # .bool() is thrice as slow
            self.padding = torch.where(self.valid, 0.0, -math.inf)
            self.n = self.valid.to(dtype).sum(-1, keepdim=True)
            return
        integer, infinity = MINUS_INFINITY[dtype]
        self.valid = valid.view(integer).copy_(response_mask.bool()).neg_()     # −1: all bits 1
        torch.add(self.valid.new_full((), infinity), self.valid, alpha=infinity,
                  out=padding.view(integer))
        self.padding = padding
        self.n = -self.valid.sum(-1, keepdim=True, dtype=integer).to(dtype)

    def only(self, x: Tensor, out=None) -> Tensor:
        """x, and 0 on padding, whatever stood there; in place without `out`."""
        if torch.compiler.is_compiling():
            return torch.where(self.valid, x, self.zero)
        out, integer = x if out is None else out, self.valid.dtype
        torch.bitwise_and(x.view(integer), self.valid, out=out.view(integer))
        return out

    def highest(self, x: Tensor) -> Tensor:
        """x with −∞ for the padding's 0: never the largest."""
        return torch.add(x, self.padding, out=self.scratch)

    def lowest(self, x: Tensor) -> Tensor:
        """x with +∞ for the padding's 0: never the smallest."""
        return torch.sub(x, self.padding, out=self.scratch)

    def squares(self, x: Tensor) -> Tensor:
        return torch.mul(x, x, out=self.scratch).sum(-1)

    def below(self, x: Tensor, bound: float) -> Tensor:
        """1 where a token's x is below the bound, else 0; on padding, where x is 0, always 0."""
        found = torch.lt(x, bound, out=self.scratch).to(x.dtype)
        return self.only(found) if bound > 0 else found

    def above(self, x: Tensor, bound: float) -> Tensor:
        found = torch.gt(x, bound, out=self.scratch).to(x.dtype)
        return self.only(found) if bound < 0 else found

    def weigh(self, config: RolloutCorrectionConfig, out: Tensor | None) -> Tensor:
        """The weights of these rows, as `importance_weights` has them: [R, T]. In place of ρ."""
        level, threshold = config.rollout_is, config.rollout_is_threshold
        if level != "token":
            log_rho = self.total / (self.n.clamp(min=1) if level == "geometric" else 1)     # [R, 1]
            weights = _bounded(exp_ratio(log_rho), log_rho, threshold)
            self.sums |= {"log_rho": log_rho, "weight": weights}
            weights = weights.expand(self.excess.shape)
            return self.only(weights if out is None else out.copy_(weights))
        lo, hi = _metric_bounds(threshold)
        self.sums["above"] = self.above(self.log_ratio, _log(hi, math.inf)).sum(-1)
        self.sums["below"] = self.below(self.log_ratio, _log(lo, 0)).sum(-1)
        weights = self.only(_bounded(self.rho, self.log_ratio, threshold, out), out)
        if isinstance(threshold, tuple):
            self.sums["weight.top"] = self.highest(weights).amax(-1)
            self.sums["weight.bottom"] = self.lowest(weights).amin(-1)
            excess = torch.sub(weights, 1, out=self.scratch)
        else:
            excess = torch.clamp(self.excess, max=threshold - 1, out=self.scratch)
        excess = self.only(excess)
        self.sums["weight.excess"] = excess.sum(-1)
        self.sums["weight.squares"] = self.squares(excess)
        return weights

    def reject(self, criteria: Mapping[str, Any], advantages: Tensor | None, response_mask: Tensor,
               out: Tensor | None) -> Tensor:
        """`response_mask` without rejected tokens, [R, T]; and the sums `_reject_rows` asks for."""
        veto = criteria["seq_max_k1"][0] if "seq_max_k1" in criteria else None
        if veto:
            self.sums["catastrophic"] = self.below(self.log_ratio, math.log(veto)).sum(-1)
        if any(name.startswith(("seq_sum", "seq_mean")) for name in criteria):
            limited = torch.clamp(self.log_ratio, -SAFETY_BOUND, SAFETY_BOUND, out=self.scratch)
            self.sums["limited"] = limited.sum(-1)
            if any(name.endswith("k2") for name in criteria):
                self.sums["limited.squares"] = self.squares(limited)
        of_tokens, hit = [name for name in criteria if _of_tokens(name)], None
        for name in of_tokens:
            found = (self.opsm(criteria[name], advantages) if name == "opsm" else
                     self.token_criterion(name, criteria[name]))                    # [R, T]
            hit = found if hit is None else torch.maximum(hit, found, out=hit)
        if hit is None:
            return response_mask
        self.sums["hit"] = hit.sum(-1) if len(of_tokens) > 1 else self.sums[f"{of_tokens[0]}.rejected"]
        return torch.mul(response_mask, hit.eq_(0).to(response_mask.dtype), out=out)

    def opsm(self, bound: float, advantages: Tensor | None) -> Tensor:
        """Where opsm rejects, 0 or 1: [R, T]"""
        drifted = -self.total / self.n.clamp(min=1) > bound                                 # [R, 1]
        found = self.only((drifted & (advantages < 0)).to(self.total.dtype))
        self.sums["opsm.rejected"] = found.sum(-1)
        return found

    def token_criterion(self, name: str, bound) -> Tensor:
        """Which tokens a criterion rejects, 0 or 1: [R, T]. NaN is kept: it must be seen."""
        (least, most), kind = _nats(name, bound), name[-2:]
        x = self.log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        if kind == "k1":
            x.neg_()
        elif kind == "k2":
            x.square_().div_(2)
        else:
            torch.sub(self.excess, x, out=x)
        shared = kind == "k1" and "limited" in self.sums
        sums = {"total": -self.sums["limited"] if shared else x.sum(-1)}
        if kind != "k1":
            sums["bottom"] = self.lowest(x).amin(-1)
        within = torch.clamp(x, least, most, out=self.scratch)
        if not least <= 0 <= most:
            within = self.only(within)
        sums |= {"within": within.sum(-1), "squares": self.squares(within)}
        above = self.above(x, most)
        sums["above"] = above.sum(-1)
        below = x.lt_(least)
        if least > 0:
            below = self.only(below)
        found = below.add_(above)
        sums["rejected"] = found.sum(-1)
        sums["below"] = sums["rejected"] - sums["above"]
        self.sums |= {f"{name}.{field}": values for field, values in sums.items()}
        return found


def _of_tokens(criterion: str) -> bool:
    """Whether it rejects single tokens, and not sequences."""
    return criterion == "opsm" or criterion.startswith("token")


def _reject_rows(criteria: Mapping[str, Any], sums: dict[str, Tensor], mask: Tensor) -> Tensor:
    """`mask` without the sequences that a criterion rejects; what it finds is added to `sums`, [B].

    Apart from `_Block.reject`, since a sequence's fate is known when all its tokens are summed.
    """
    kept, of_rows = torch.ones_like(sums["n"]), [name for name in criteria if not _of_tokens(name)]
    for name in of_rows:
        (bottom, top), (least, most) = _row_statistic(name, sums), _nats(name, criteria[name])
        below, above = (bottom < least).to(kept.dtype), (top > most).to(kept.dtype)
        rejected = torch.maximum(below, above)
        found = {"statistic": top, "below": below, "above": above, "rejected": rejected * sums["n"]}
        sums |= {f"{name}.{field}": values for field, values in found.items()}
        kept = kept * (1 - rejected)
    sums["kept"] = (sums["n"] - sums.get("hit", 0)) * kept
    if not of_rows:
        return mask
    keep = kept[:, None].to(mask.dtype)
    given = len(of_rows) == len(criteria)                           # the mask is still the caller's
    return mask * keep if given else mask.mul_(keep)


def _row_statistic(name: str, sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A criterion's statistic of each sequence, [B]: the smallest and largest that it looks at."""
    where, kind = name.rsplit("_", 1)
    if where == "seq_max":
        return _ends(kind, sums["bottom"], sums["top"])
    if kind == "k2":
        total = sums["limited.squares"] / 2
    else:                                           # Σ(−log ρ), or Σ(ρ − 1 − log ρ)
        total = (0 if kind == "k1" else sums["excess"]) - sums["limited"]
    mean = total / sums["n"].clamp(min=1) if where == "seq_mean" else total
    return mean, mean


def _ends(kind: str, bottom: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest (of k1 alone) and the largest estimate, from a row's smallest and largest log ρ.

    k1 falls with log ρ, and k2 and k3 are convex in it: the largest is at one of the two ends.
    """
    ends = torch.stack([bottom, top]).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    at_ends = kl_estimate(torch.zeros_like(ends), ends, kind)
    return at_ends.amin(0), at_ends.amax(0)


# ------------------------------------------------------------------------------------ metrics

def offpolicy_metrics(train_log_prob: Tensor, rollout_log_prob: Tensor,
                      response_mask: Tensor) -> dict[str, Tensor]:
    """How far π_train is from π_rollout, with nothing corrected.

    [B, T] each → {"rollout_corr/kl", "…/k3_kl", "…/chi2_token", "…/chi2_seq", "…/ppl_ratio", …}.
    (eq:kl-estimators, eq:chi2, eq:perplexity)
    """
    nothing = RolloutCorrectionConfig()
    return correct(train_log_prob, rollout_log_prob, response_mask, nothing).metrics


def merge(corrections: list[Correction], group=None) -> dict[str, Tensor]:
    """Metrics of several micro-batches and all ranks of `group`, as of one batch.  (eq:merge)"""
    statistics = corrections[0].statistics.merge([c.statistics for c in corrections[1:]])
    if group is not None:
        statistics = statistics.all_reduce(group)
    return {f"rollout_corr/{name}": value for name, value in statistics.metrics().items()}


def to_host(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The metrics as floats, in one transfer from the device for all of them.  (eq:merge)"""
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    moved = torch.stack([v.detach().double() for v in tensors.values()]).tolist() if tensors else []
    return {**metrics, **dict(zip(tensors, moved))}


class _Table:
    """Quantities on their way into Statistics, which reduces all of a kind at once."""

    def __init__(self):
        self.tokens, self.rows, self.counts = [], [], []

    def of_tokens(self, sums: RowSums, **outputs) -> None:
        self.tokens.append((sums, outputs))

    def of_rows(self, values: Tensor, **outputs) -> None:
        """`values`: float64 [B]; stacking other types with them would be slow."""
        self.rows.append((values, outputs))

    def of_counts(self, count: Tensor, tokens=(), rows=()) -> None:
        """Names of the fraction of tokens, of which a row has `count` [B], and of rows with any."""
        self.counts.append((count, tokens, rows))

    def statistics(self, n: Tensor) -> Statistics:
        """n: how many tokens a row has, [B]; a row without any does not count."""
        found = torch.stack([count for count, _, _ in self.counts]).double()    # [counts, B]
        for count, some, (_, tokens, rows) in zip(found, (found > 0).double(), self.counts):
            self.of_tokens(RowSums(count), mean=tokens)
            self.of_rows(some, mean=rows)
        statistics = Statistics()
        statistics.add_sums(self.tokens, n)
        statistics.add_rows(self.rows, n > 0)
        return statistics


def _statistics(sums: dict[str, Tensor], config: RolloutCorrectionConfig) -> Statistics:
    """Every metric from what `_Block` has summed; means are over valid tokens or non-empty rows."""
    table, n = _Table(), sums["n"]
    sums["length"] = n.clamp(min=1)
    rho = RowSums.around_one(sums["excess"], sums["squares"], n, exp_ratio(sums["top"]),
                             exp_ratio(sums["bottom"]))
    _offpolicy_statistics(table, sums, rho)
    if config.rollout_is is not None:
        _weight_statistics(table, sums, rho, config)
    first_k1 = next((name for name in config.rollout_rs
                     if name.endswith("k1") and name != "seq_max_k1"), None)
    for name, bound in config.rollout_rs.items():
        if name != "opsm":
            _criterion_statistics(table, sums, name, bound)
        if name == first_k1:
            _first_k1_statistics(table, sums, rho, name, bound)
        _rejected_statistics(table, f"rollout_rs_{name}_", sums[f"{name}.rejected"])
    table.of_counts(sums.get("catastrophic", torch.zeros_like(n)),
                    "rollout_is_catastrophic_token_fraction", "rollout_is_veto_fraction")
    rejected = n - sums.get("kept", n)
    _rejected_statistics(table, "rollout_rs_", rejected)
    table.of_rows((rejected == n).double(), min="all_rejected")    # in every row with a token
    return table.statistics(n)


def _rejected_statistics(table: _Table, prefix: str, rejected: Tensor) -> None:
    table.of_counts(rejected, f"{prefix}masked_fraction", f"{prefix}seq_masked_fraction")


def _offpolicy_statistics(table: _Table, sums: dict[str, Tensor], rho: RowSums) -> None:
    """verl's rollout_corr/* diagnostics, with δ = ρ − 1: k3 = δ − log ρ and ρ² − 1 = δ² + 2δ."""
    total, excess, squares = sums["log_ratio"], sums["excess"], sums["squares"]
    table.of_tokens(RowSums(-total), mean="kl")                 # KL(π_rollout‖π_train), by k1
    table.of_tokens(RowSums(excess - total), mean="k3_kl")
    table.of_tokens(RowSums(squares + 2 * excess), mean="chi2_token")
    table.of_tokens(rho, mean="is_ratio_mean", sample_std="is_ratio_std", max="is_ratio_max",
                    min="is_ratio_min")
    add = table.of_rows
    add(torch.expm1(2 * total.clamp(-SAFETY_BOUND, SAFETY_BOUND)), mean="chi2_seq")
    for name, log_prob in (("training", sums["rollout"] + total), ("rollout", sums["rollout"])):
        log_ppl = -log_prob / sums["length"]
        add(log_ppl, mean=f"{name}_log_ppl")
        add(exp_ratio(log_ppl, 4 * SAFETY_BOUND), mean=f"{name}_ppl")           # never squared
    difference = -total / sums["length"]                        # log ppl_train − log ppl_rollout
    add(difference, mean="log_ppl_diff", max="log_ppl_diff_max", min="log_ppl_diff_min")
    add(difference.abs(), mean="log_ppl_abs_diff")
    add(exp_ratio(difference, 4 * SAFETY_BOUND), mean="ppl_ratio")


def _metric_bounds(threshold) -> tuple[float | None, float | None]:
    """What counts as a low and as a high weight: the pair, or [1/C, C]."""
    return threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)


def _weight_statistics(table: _Table, sums: dict[str, Tensor], raw: RowSums, config) -> None:
    """rollout_is_*: of the applied weights; rollout_is_raw_*: of ρ before truncation or zeroing.

    Two of verl's habits are kept under verl's names: above token level rollout_is_max and _min are
    those of ρ, and the fractions beyond the bounds always are.
    """
    level, threshold, n = config.rollout_is, config.rollout_is_threshold, sums["n"]
    lo, hi = _metric_bounds(threshold)
    if level == "token":
        below, above = sums["below"], sums["above"]
        if isinstance(threshold, tuple):
            top, bottom = sums["weight.top"], sums["weight.bottom"]
        else:
            top, bottom = raw.top.clamp(max=threshold), raw.bottom.clamp(max=threshold)
        applied = RowSums.around_one(sums["weight.excess"], sums["weight.squares"], n, top, bottom)
    else:
        rho = exp_ratio(sums["log_rho"])
        raw, applied = RowSums.constant(rho, n), RowSums.constant(sums["weight"], n)
        applied = applied._replace(top=rho, bottom=rho)
        below, above = (n * outside for outside in _outside(sums["log_rho"], lo, hi))
    per_row = level == "sequence"
    _ratio_statistics(table, "rollout_is_raw", raw, sums)
    _ratio_statistics(table, "rollout_is", applied, sums)
    _beyond_statistics(table, ("rollout_is_raw", "rollout_is"), raw, sums, lo, hi, below, above,
                       per_row)
    if level != "geometric":                                                    # SkyRL's name
        name = "tis_token_clip_high_ratio" if level == "token" else "tis_seq_clip_high_ratio"
        table.of_counts(above, **_kind(per_row, name))
    if isinstance(threshold, tuple):
        table.of_counts(below + above, ("rollout_is_masked_fraction", "rollout_is_oob_ratio"),
                        "rollout_is_seq_masked_fraction")


def _kind(per_row: bool, name) -> dict:
    """The fraction of rows that have such a token, or of the tokens themselves."""
    return {"rows" if per_row else "tokens": name}


def _ratio_statistics(table: _Table, prefix: str, weights: RowSums, sums: dict[str, Tensor]):
    """Of weights and their sequences' means."""
    table.of_tokens(weights, mean=f"{prefix}_mean", std=f"{prefix}_std",
                    ess=f"{prefix}_eff_sample_size", max=f"{prefix}_max", min=f"{prefix}_min")
    row = weights.total / sums["length"]
    table.of_rows(row, mean=f"{prefix}_seq_mean", sample_std=f"{prefix}_seq_std",
                  max=f"{prefix}_seq_max", min=f"{prefix}_seq_min",
                  ess=f"{prefix}_seq_eff_sample_size")
    table.of_rows((row - 1).abs(), max=f"{prefix}_seq_max_deviation")


def _beyond_statistics(table: _Table, prefixes: tuple[str, ...], rho: RowSums, sums, lo, hi, below,
                       above, per_row: bool) -> None:
    """How many ρ and sequences' means of ρ are beyond the bounds; `below`, `above` [B]: a row's."""
    row = rho.total / sums["length"]
    for end, count, far in (("high", above, row > (math.inf if hi is None else hi)),
                            ("low", below, row < (0.0 if lo is None else lo))):
        names = tuple(f"{prefix}_ratio_fraction_{end}" for prefix in prefixes)
        table.of_counts(count, **_kind(per_row, names))
        names = tuple(f"{prefix}_seq_fraction_{end}" for prefix in prefixes)
        table.of_rows(far.double(), mean=names)


def _nats(name: str, bound) -> tuple[float, float]:
    """The interval in which a criterion's statistic keeps; for k1 = −log ρ the ends swap."""
    if not name.endswith("k1"):
        return -math.inf, bound
    lo, hi = bound
    return (-math.inf if hi is None else -math.log(hi)), (math.inf if lo is None else -math.log(lo))


def _first_k1_statistics(table: _Table, sums: dict[str, Tensor], rho: RowSums, name, bound) -> None:
    """verl 0.6's rollout_rs_*, statistics of ρ itself: those of the first such criterion."""
    per_row, (lo, hi), n = not name.startswith("token"), bound, sums["n"]
    if per_row:
        log_rho = sums["log_ratio"] / (sums["length"] if name == "seq_mean_k1" else 1)
        rho = RowSums.constant(exp_ratio(log_rho), n)
        below, above = (n * outside for outside in _outside(log_rho, lo, hi))
    else:
        below, above = sums[f"{name}.above"], sums[f"{name}.below"]
    _ratio_statistics(table, "rollout_rs", rho, sums)
    _beyond_statistics(table, ("rollout_rs",), rho, sums, lo, hi, below, above, per_row)


SKYRL_MASKS = {"seq_max_k1": "outlier_seq", "seq_sum_k1": "product_sequence_mask",
               "seq_mean_k1": "geo_sequence_mask"}


def _criterion_statistics(table: _Table, sums: dict[str, Tensor], name: str, bound) -> None:
    """rollout_rs_{criterion}_*, in nats. For k1, verl's "high" is a high −log ρ: a low ρ."""
    prefix, (least, most), n = f"rollout_rs_{name}", _nats(name, bound), sums["n"]
    get, per_token = (lambda field: sums[f"{name}.{field}"]), name.startswith("token")
    if per_token:
        bottom, top = _ends(name[-2:], sums["bottom"], sums["top"])
        whole = RowSums(get("total"), None, top, sums.get(f"{name}.bottom", bottom))
        within = RowSums(get("within"), get("squares"))
        row = get("total") / sums["length"]
    else:
        row = get("statistic")
        whole, within = RowSums.constant(row, n), RowSums.constant(row.clamp(least, most), n)
    table.of_tokens(whole, mean=f"{prefix}_mean", max=f"{prefix}_max", min=f"{prefix}_min")
    table.of_tokens(within, std=f"{prefix}_std")                    # verl's: within the bounds
    table.of_rows(row, mean=f"{prefix}_seq_mean", sample_std=f"{prefix}_seq_std",
                  max=f"{prefix}_seq_max", min=f"{prefix}_seq_min")
    table.of_rows(row.abs(), max=f"{prefix}_seq_max_deviation")
    skyrl = SKYRL_MASKS.get(name)
    for count, end, skyrls_end in ((get("above"), "high", "under_low"),
                                   (get("below"), "low", "over_high")):
        beyond, rows = f"{prefix}_fraction_{end}", f"{prefix}_seq_fraction_{end}"
        if per_token:
            table.of_counts(count, tokens=beyond)
            far = row > most if end == "high" else row < least
            table.of_rows(far.double(), mean=rows)
        else:
            skyrls = (f"{skyrl}_{skyrls_end}_ratio",) if skyrl else ()
            table.of_counts(count, rows=(beyond, rows, *skyrls))
    if skyrl:
        table.of_counts(get("rejected"), rows=f"{skyrl}_masked_ratio")
    if name == "token_k1":
        table.of_counts(get("rejected"), tokens="token_mask_ratio")


# ----------------------------------------------------------------------------------- dialects

WRAPPERS = ("trainer", "algorithm", "actor_rollout_ref", "actor", "rollout", "rollout_correction",
            "off_policy_correction")
VERL_TIS = ("use_tis", "tis_imp_ratio_cap")
VERL_060 = ("rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold",
            "rollout_is_threshold_lower", "rollout_is_veto_threshold", "rollout_is_batch_normalize")
VERL = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
        "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold",
        "bypass_mode", "bypass_old_logprob_for_rollout", "loss_type", "use_policy_gradient",
        "use_pure_rollout_correction")
SKYRL = VERL_TIS + (
    "tis_ratio_type", "token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high",
    "sequence_mask_metric", "product_mask_low", "product_mask_high", "geo_mask_low",
    "geo_mask_high", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low", "token_mask_is_threshold_high")
OWN = ("preset", *(f.name for f in fields(RolloutCorrectionConfig)))


def from_dialect(mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """A configuration block of verl or SkyRL, as their documents have it, as ours.  (eq:correction)

    Takes, flat or inside their sections (algorithm.rollout_correction, off_policy_correction, …):
        verl PR 2953   tis_imp_ratio_cap
        verl 0.6.0     rollout_is_level, rollout_is_mode, rollout_is_threshold(_lower), …
        verl 0.6.1     rollout_rs: token | sequence | geometric, rollout_rs_threshold(_lower), …
        verl 0.9       rollout_rs: "token_k1,seq_mean_k3", rollout_rs_threshold: "0.5_2.0,0.01"
        SkyRL          tis_ratio_type, sequence_mask_metric, outlier_token_is_threshold_low, …
        this project   preset: NAME and/or the fields of RolloutCorrectionConfig
    and reproduces what *they* do. verl 0.9's k1 bounds are on 1/ρ: they are inverted, with a
    warning where that makes a difference. Raises ValueError, naming the key, for anything else.
    """
    block = _flatten(mapping, {})
    keys = set(block) - {"calculate_log_probs"}
    if "preset" in keys or isinstance(block.get("rollout_rs"), Mapping) \
            or isinstance(block.get("rollout_is_threshold"), (list, tuple)):
        read, allowed = _from_own, OWN
    elif keys & set(SKYRL) - set(VERL_TIS) or "use_tis" in keys:
        read, allowed = _from_skyrl, SKYRL
    elif "tis_imp_ratio_cap" in keys:
        read, allowed = _from_verl_tis, VERL_TIS
    elif keys & set(VERL_060) - set(VERL) or isinstance(block.get("rollout_is"), bool):
        read, allowed = _from_verl_060, VERL_060
    else:
        read, allowed = _from_verl, VERL
    for key in keys:
        if key not in allowed:
            known = (*OWN, *VERL, *VERL_060, *SKYRL)
            mixed = " here: it belongs to another dialect" if key in known else _nearest(key, known)
            raise ValueError(f"correction has no key {key!r}{mixed}")
    config = read(block)
    corrects = config.rollout_is or config.rollout_rs or config.bypass_mode
    if block.get("calculate_log_probs") is False and corrects:
        raise ValueError("calculate_log_probs is false, but a correction needs the rollout's "
                         "log-probs")
    return config


def _flatten(mapping: Any, into: dict) -> dict:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"correction must be a mapping of settings, not {mapping!r}")
    for key, value in mapping.items():
        if key in WRAPPERS:
            _flatten({} if value is None else value, into)
        elif not isinstance(key, str) or key in into:
            fault = "given twice" if isinstance(key, str) else "no name"
            raise ValueError(f"correction key {key!r} is {fault}")
        else:
            into[key] = value
    return into


def _from_own(block: Mapping) -> RolloutCorrectionConfig:
    config = RolloutCorrectionConfig()
    if block.get("preset") is not None:
        _choice("correction.preset", block["preset"], tuple(PRESETS))
        config = PRESETS[block["preset"]]()
    return replace(config, **{key: block[key] for key in OWN[1:] if key in block})


def _from_verl_tis(block: Mapping) -> RolloutCorrectionConfig:
    cap = block["tis_imp_ratio_cap"]
    off = cap is None or (isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap <= 0)
    return RolloutCorrectionConfig() if off else RolloutCorrectionConfig(
        "token", _number("tis_imp_ratio_cap", cap))


def _from_verl_060(block: Mapping) -> RolloutCorrectionConfig:
    upper, lower = block.get("rollout_is_threshold"), block.get("rollout_is_threshold_lower")
    veto, mode = block.get("rollout_is_veto_threshold"), block.get("rollout_is_mode", "truncate")
    level = block.get("rollout_is_level", "token")
    _choice("rollout_is_level", level, LEVELS)
    _choice("rollout_is_mode", mode, ("truncate", "clip", "mask"))
    normalize = _flag("rollout_is_batch_normalize", block.get("rollout_is_batch_normalize", False))
    if upper is None or not _flag("rollout_is", block.get("rollout_is", True)):
        return RolloutCorrectionConfig()                            # off, or metrics only
    threshold = _number("rollout_is_threshold", upper)
    if mode == "mask":
        lower = 1 / threshold if lower is None else lower
        threshold = _interval("rollout_is_threshold_lower", (lower, threshold))
    criteria = {}
    if veto is not None:
        criteria["seq_max_k1"] = (_number("rollout_is_veto_threshold", veto), None)
    return RolloutCorrectionConfig(level, threshold, normalize, criteria)


def _from_verl(block: Mapping) -> RolloutCorrectionConfig:
    get = block.get
    level, threshold = get("rollout_is"), get("rollout_is_threshold", 2.0)
    if isinstance(threshold, str) and "_" in threshold:
        threshold = _interval("rollout_is_threshold", threshold.split("_"))
    if threshold is None:
        level, threshold = None, 2.0                                # verl: no threshold, no weights
    bypass = any([_flag(key, get(key, False))
                  for key in ("bypass_mode", "bypass_old_logprob_for_rollout")])
    loss_type = "ppo_clip" if get("loss_type") is None else get("loss_type")
    for key in ("use_policy_gradient", "use_pure_rollout_correction"):
        if _flag(key, get(key, False)):
            if not bypass:
                raise ValueError(f"{key} needs bypass_mode true")
            loss_type = "reinforce"
    return RolloutCorrectionConfig(level, threshold, get("rollout_is_batch_normalize", False),
                                   _verl_rejection(block), bypass, loss_type)


def _verl_rejection(block: Mapping) -> dict[str, Any]:
    """rollout_rs of verl 0.6.1 (levels, bounds on ρ) or of 0.9 (criteria, k1 bounds on 1/ρ)."""
    given, bound = block.get("rollout_rs"), block.get("rollout_rs_threshold")
    lower, veto = block.get("rollout_rs_threshold_lower"), block.get("rollout_token_veto_threshold")
    criteria = {}
    if given is not None:
        if not isinstance(given, str) or not given.replace(",", "").strip():
            raise ValueError(f"rollout_rs must name its criteria, such as 'token_k1,seq_mean_k3', "
                             f"not {given!r}")
        if bound is None:
            raise ValueError(f"rollout_rs is {given!r}, but rollout_rs_threshold is missing")
        if given in VERL_061_LEVELS:
            upper = _number("rollout_rs_threshold", bound)
            lower = 1 / upper if lower is None else lower
            pair = _interval("rollout_rs_threshold_lower", (lower, upper))
            criteria[VERL_061_LEVELS[given]] = pair
        elif lower is not None:
            raise ValueError("rollout_rs_threshold_lower goes with rollout_rs: token, sequence or "
                             "geometric alone")
        else:
            criteria = _verl_criteria(given, str(bound))
    if veto is not None:
        criteria["seq_max_k1"] = (_number("rollout_token_veto_threshold", veto), None)
    return criteria


VERL_061_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
VERL_CRITERIA = tuple(name for name in CRITERIA if name not in ("opsm", "seq_max_k1"))


def _verl_criteria(names: str, bounds: str) -> dict[str, Any]:
    """"token_k1,seq_mean_k3" and "0.5_2.0,0.01", or one bound for all of them."""
    names = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    parts = [part.strip() for part in bounds.split(",") if part.strip()]
    if len(parts) == 1:
        parts = parts * len(names)
    if len(parts) != len(names):
        raise ValueError(f"rollout_rs_threshold needs one bound or {len(names)}, one for each of "
                         f"rollout_rs, not {bounds!r}")
    for name in names:
        _choice("rollout_rs", name, VERL_CRITERIA)
    return {name: _on_rho(part) if name.endswith("k1") else _number("rollout_rs_threshold", part)
            for name, part in zip(names, parts)}


def _on_rho(text: str) -> tuple[float, float]:
    """verl 0.9 bounds −log ρ by (log lo, log hi): on ρ that is [1/hi, 1/lo]."""
    key = "rollout_rs_threshold"
    lo, hi = text.split("_", 1) if "_" in text else (1 / _number(key, text), text)
    lo, hi = _interval(key, (lo, hi))
    if not math.isclose(lo * hi, 1, rel_tol=1e-9):
        warnings.warn(f"{key} {text!r}: verl 0.9 bounds 1/ρ with it, which on ρ is [{1 / hi:.6g}, "
                      f"{1 / lo:.6g}]; write rollout_rs as a mapping to bound ρ itself",
                      stacklevel=2)
    return 1 / hi, 1 / lo


def _from_skyrl(block: Mapping) -> RolloutCorrectionConfig:
    get, criteria, cap = block.get, {}, 2.0
    level, metric = get("tis_ratio_type"), get("sequence_mask_metric")
    if _flag("use_tis", get("use_tis", False)):
        level, cap = "token", _number("tis_imp_ratio_cap", get("tis_imp_ratio_cap"))
    elif level is not None:
        _choice("tis_ratio_type", level, ("token", "sequence"))
        key, default = {"token": ("token_tis_ratio_clip_high", 2.0),
                        "sequence": ("sequence_tis_ratio_clip_high", 5.0)}[level]
        cap = _number(key, get(key, default))
    low, high = get("outlier_token_is_threshold_low"), get("outlier_token_is_threshold_high")
    if low is not None or high is not None:
        criteria["seq_max_k1"] = _interval("outlier_token_is_threshold_low", (low, high))
    low, high = get("token_mask_is_threshold_low"), get("token_mask_is_threshold_high")
    if low is not None and high is not None:
        criteria["token_k1"] = _interval("token_mask_is_threshold_low", (low, high))
    elif low is not None or high is not None:
        raise ValueError("token_mask_is_threshold_low and token_mask_is_threshold_high go "
                         "together: SkyRL ignores one alone")
    if metric is not None:
        _choice("sequence_mask_metric", metric, ("product", "geometric"))
        name, prefix, low, high = {"product": ("seq_sum_k1", "product_mask", *SEQ),
                                   "geometric": ("seq_mean_k1", "geo_mask", 0.99, 1.01)}[metric]
        pair = get(f"{prefix}_low", low), get(f"{prefix}_high", high)
        criteria[name] = _interval(f"{prefix}_low", pair)
    return RolloutCorrectionConfig(level, cap, rollout_rs=criteria)


# ----------------------------------------------------------------------------------- diagnosis

# Metric, healthy from, to, what it means to be outside, what to turn; the limits are verl's. Its
# advice to raise the veto's bound when it rejects too much is the wrong way round: lower it.
HEALTHY = (
    ("all_rejected", 0, 0, "every token was rejected, so the step taught nothing",
     "widen the bounds of rollout_rs, or look for a bug that makes the two policies differ"),
    ("rollout_is_mean", 0.5, 2, "the mean weight is far from 1, so ρ is systematically off",
     "check that both log-probs are processed ones at the sampling temperature, then lower "
     "rollout.staleness"),
    ("rollout_is_raw_eff_sample_size", 0.3, 1, "few samples carry all the weight",
     "use token instead of sequence weights, reject outliers with seq_mean_k1, or lower "
     "rollout.staleness"),
    ("rollout_is_std", 0, 1, "the weights scatter widely, so the gradient is noisy",
     "lower rollout_is_threshold, or use rollout_is: token"),
    ("rollout_is_catastrophic_token_fraction", 0, 0.01,
     "many tokens are near impossible under the trained policy",
     "compare the engine's log-probs with the trainer's on one prompt: a template, dtype or "
     "temperature differs"),
    ("rollout_is_veto_fraction", 0, 0.1, "the veto rejects many sequences",
     "check the log-probs first; then lower the bound of seq_max_k1 (1e-4 → 1e-6)"),
    ("rollout_rs_seq_masked_fraction", 0, 0.5,
     "more than half of the sequences lose tokens to rejection",
     "widen the bounds of rollout_rs: 0.1 % (0.999–1.001) suits long responses and small mismatch "
     "only"),
    ("k3_kl", 0, 0.1, "π_rollout and π_old are far apart",
     "lower rollout.staleness, raise rollout.dtype or rollout.quantize_bits"),
    ("chi2_token", -1, 1, "a severe shift: at χ² = 1 half of the samples are lost",
     "lower rollout.staleness, or truncate with rollout_is_threshold"),
    ("ppl_ratio", 0.8, 1.25, "the two policies differ in confidence, not only in noise",
     "check temperature, top-p and top-k on both sides"),
)


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """What looks wrong, and which knob to turn; [] when nothing does.  (eq:ess, eq:chi2)

    `metrics`: as `correct` returns them, tensors or floats, with or without "rollout_corr/"; those
    that are missing are not judged. A value that is not finite is always named.
    """
    values = {name.removeprefix("rollout_corr/"): value for name, value in to_host(metrics).items()}
    found = []
    for name, low, high, meaning, remedy in HEALTHY:
        value = values.get(name)
        if value is not None and not low <= value <= high:
            found.append(f"{name} is {value:.3g} (healthy: {low:g} to {high:g}): {meaning}; "
                         f"{remedy}.")
    known = {row[0] for row in HEALTHY}
    found += [f"{name} is {value}: a log-prob was not finite; look at the engine's output first."
              for name, value in values.items()
              if name not in known and isinstance(value, float) and not math.isfinite(value)]
    return found
