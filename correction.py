"""Rollout correction: what to do when π_rollout, which sampled, is not π_old, which trains.

This file decides three separate things, and never lets one change another:
    weights      ρ = π_old/π_rollout (bypass mode: π_θ/π_rollout), aggregated per token, sequence or
                 geometric mean; truncated at C or zeroed outside [lo, hi]; batch-normalised or not
    mask         which tokens and sequences to reject; every criterion looks at the original mask
    metrics      how far apart the two policies are, from raw and from applied weights
What others mix in, the loss's denominator, is losses.py's. Bounds always bound ρ; other systems'
words for all this are read by adapters/dialects.py. Derivation: math/.

    config = RolloutCorrectionConfig.decoupled_seq_is_rs()
    weights, mask, metrics = correct(old_log_prob, rollout_log_prob, response_mask, config)
"""

import difflib
import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from estimators import (LEVELS, OF_TOKENS, SAFETY_BOUND, aggregate_log_ratio, exp_ratio, extremes,
                        kl_estimate, masked_log_ratio, outside, sequence_log_ratio)
from metrics import (Ratios, Statistics, offpolicy_quantities, rejection_quantities,
                     weight_quantities)

LOSS_TYPES = ("ppo_clip", "reinforce", "gspo", "cispo", "sapo")
KL_CRITERIA = tuple(f"{level}_k{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max")
                    for k in (1, 2, 3))
OF_PROBABILITIES = ("token_tv", "token_tv_outward")     # of π − μ, not of ρ
CRITERIA = (*KL_CRITERIA, "opsm", *OF_PROBABILITIES, "second_moment")
NEAR_ONE = (0.999, 1.001)          # of a geometric mean of ρ


# ----------------------------------------------------------------------------------- the equations

def importance_weights(log_ratio: Tensor, response_mask: Tensor, level: str, threshold) -> Tensor:
    """min(ρ, C), or ρ·1[lo ≤ ρ ≤ hi] for a pair, at one level.  (eq:tis, eq:mis)

    `log_ratio`: log ρ per token, [B, T] → [B, T], detached (eq:detached), 0 on padding. C = inf is
    plain importance sampling. Truncation's bias is −E_μ[(ρ−C)₊ g]. Sources: Ionides 2008, Yao et
    al. 2025 (TIS); Ring-1T 2510.18855 (IcePop: a pair at token level); Liu, Li et al. 2025 (MIS);
    Precup et al. 2000, CTPO 2605.07331 (prefix).
    """
    log_rho = aggregate_log_ratio(log_ratio.detach(), response_mask, level)
    rho = torch.where(response_mask.bool(), exp_ratio(log_rho), 0.0)
    if not isinstance(threshold, (tuple, list)):
        return rho.clamp(max=threshold)
    below, above = outside(log_rho, *threshold)
    return torch.where(below | above, 0.0, rho)


def batch_normalize(weights: Tensor, response_mask: Tensor, level: str, group=None) -> Tensor:
    """w / mean(w): over tokens, or over sequences that have one weight.  (eq:self-normalised)

    [B, T] → [B, T]. With `group`, the mean is over all its ranks. Unchanged where it is below 1e-8:
    all weights are zero or at the floor e^−SAFETY_BOUND then, and dividing would make 1 of nothing.
    For w = ρ the bias is O(1/N). Truncated weights tend to E_μ[wf]/E_μ[w]; geometric and prefix
    ones, whose mean is not 1, are rescaled at any N. Source: verl PR 3980; Owen 2013, ch. 9.
    """
    mask, one_each = response_mask.bool(), weights
    if level not in OF_TOKENS:                          # one weight on all tokens of a sequence
        mask, one_each = mask.any(-1), weights.sum(-1) / mask.sum(-1).clamp(min=1)
    sums = torch.stack([one_each.sum(dtype=torch.float64), mask.sum(dtype=torch.float64)])
    if group is not None:
        torch.distributed.all_reduce(sums, group=group)
    mean = (sums[0] / sums[1].clamp(min=1)).to(weights.dtype)
    return weights / torch.where(mean > 1e-8, mean, 1.0)


def rejection_mask(log_ratio: Tensor, response_mask: Tensor, criteria: Mapping[str, Any],
                   advantages: Tensor | None = None, rollout_log_prob: Tensor | None = None,
                   group=None) -> Tensor:
    """What every criterion keeps, each on the original mask: [B, T], bool.  (eq:rejection)

    (eq:opsm, eq:total-variation, eq:second-moment)

    token_*: the token alone. seq_sum_*, seq_mean_*, seq_max_*: the sequence, by the sum, mean or
    worst token of the statistic, which is the estimate k1, k2 or k3 of KL(π_rollout‖π_old) in nats,
    for k2 and k3 from log ρ_t limited to ±SAFETY_BOUND:
        k1 = −log ρ       keep while lo ≤ ρ ≤ hi
                          (seq_sum: Πρ; seq_mean: (Πρ)^{1/|y|}; seq_max: every ρ_t)
        k2 = (log ρ)²/2, k3 = ρ − 1 − log ρ        keep while ≤ bound
    opsm: rejects tokens with A < 0 in sequences whose mean of −log ρ exceeds δ (DeepSeek-V3.2
    2512.02556). token_tv: keeps tokens with |π − μ| ≤ δ (IPO); token_tv_outward: rejects only those
    that A pushes further, sign(A)(π − μ) > δ (DPPO 2602.04879). second_moment: drops the tokens of
    the largest (log ρ)² until the mean of the others is ≤ δ, over the batch, and over the ranks of
    `group` (M2PO 2510.01161). A bound met exactly keeps. `rollout_log_prob` [B, T]: for token_tv*.
    Other sources: Liu, Li et al. 2025 (geometric mean); 2512.23075 (worst token).
    """
    keep = response_mask.bool()
    for name, bound in criteria.items():
        *_, below, above = judge(log_ratio, response_mask, name, bound, advantages,
                                 rollout_log_prob, group)
        keep = keep & ~(below | above)
    return keep


class Verdict(NamedTuple):
    """One criterion's statistic, and where it is below or above an interval.  (eq:rejection)

    [B, T] each for criteria of tokens, [B, 1] for those of sequences.
    """

    statistic: Tensor
    interval: tuple[float | Tensor, float | Tensor]
    below: Tensor
    above: Tensor


def judge(log_ratio: Tensor, response_mask: Tensor, name: str, bound,
          advantages: Tensor | None = None, rollout_log_prob: Tensor | None = None,
          group=None) -> Verdict:
    """One criterion of `rejection_mask`, on its own.

    (eq:rejection, eq:opsm, eq:total-variation, eq:second-moment)
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0.0)
    if name == "opsm":
        drift = sequence_log_ratio(-log_ratio, mask, "geometric")                        # [B, 1]
        return _at_most(drift, bound, advantages < 0)
    if name == "second_moment":
        square = log_ratio.square().float()
        limit = second_moment_limit(square, mask, bound, group)
        return _at_most(square, limit, least=torch.full_like(limit, -math.inf))
    if name in OF_PROBABILITIES:
        if rollout_log_prob is None:
            raise ValueError(f"rollout_rs.{name} needs rollout_log_prob: a ratio does not say how "
                             "much probability has moved")
        log_mu = torch.where(mask, rollout_log_prob, 0.0).to(log_ratio.dtype)
        apart = (log_mu + log_ratio).clamp(max=0).exp() - log_mu.exp()                   # π − μ
        return _at_most(apart.abs() if name == "token_tv" else apart * advantages.sign(), bound)
    where, kind = name.rsplit("_", 1)
    limited = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    statistic = _over(kl_estimate(torch.zeros_like(limited), limited, kind), mask, where)
    if kind != "k1":
        return _at_most(statistic, bound)
    # −log ρ: the ends of ρ's interval swap. Nothing is exponentiated, so the bounds judge log ρ as
    # it is; what is reported of it is limited, as verl's metrics are.
    least, most = (sign * math.inf if end is None else -math.log(end)
                   for end, sign in zip(reversed(bound), (-1, 1)))
    highest = lowest = _over(-log_ratio, mask, where)
    if where == "seq_max":
        lowest = extremes(-log_ratio, mask)[1][:, None]
    return Verdict(statistic, (least, most), lowest < least, ~(highest <= most))


def _over(x: Tensor, mask: Tensor, where: str) -> Tensor:
    """x per token [B, T], or the sum, mean or largest of each sequence [B, 1]."""
    if where == "token":
        return x
    if where == "seq_max":
        return extremes(x, mask)[0][:, None]
    return sequence_log_ratio(x, mask, {"seq_sum": "sequence", "seq_mean": "geometric"}[where])


def _at_most(statistic: Tensor, bound, among=True, least=-math.inf) -> Verdict:
    above = ~(statistic <= bound) & among               # what is not a number is not within a bound
    return Verdict(statistic, (least, bound), torch.zeros_like(above), above)


def second_moment_limit(square: Tensor, response_mask: Tensor, bound: float, group=None) -> Tensor:
    """The largest (log ρ)² for which the mean of those up to it is ≤ bound: 0-dim, float32.

    (eq:second-moment)

    `square`, `response_mask`: [B, T]. Equal values stay or go together; 0 where even the smallest
    is above the bound. The mean of those ≤ x never falls as x rises, so 31 halvings find where it
    crosses the bound among the float32 numbers from 0 to ∞, which are ordered as their bits are. Of
    other ranks they take a sum and a count, whatever the shapes there. AReaL's M2PO differs in
    three ways: its bound is strict, it splits ties, and it keeps the smallest when none fits.
    """
    mask, square = response_mask.bool(), square.detach().float()
    low, high = (square.new_full((), bits, dtype=torch.int64) for bits in (0, 0x7F800000))
    for _ in range(31):
        middle = (low + high + 1) // 2
        chosen = mask & (square <= middle.int().view(torch.float32))
        sums = torch.stack([torch.where(chosen, square, 0.0).sum(dtype=torch.float64),
                            chosen.sum(dtype=torch.float64)])
        if group is not None:
            torch.distributed.all_reduce(sums, group=group)
        fits = sums[0] <= bound * sums[1]
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    kept = torch.where(mask & (square <= low.int().view(torch.float32)), square, 0.0)
    largest = torch.cat([kept.flatten(), kept.new_zeros(1)]).amax()
    if group is not None:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return largest


# -------------------------------------------------------------------------------- all of it at once

@dataclass(frozen=True)
class Correction:
    """What `correct` returns; unpacks into weights, mask, metrics.  (eq:correction)

    weights [B, T]: detached, 0 on padding, None when rollout_is is None. mask [B, T]: response_mask
    without the rejected, in its dtype. metrics: {"rollout_corr/…": 0-dim tensor}, on the device;
    none where weights and mask were made elsewhere, and there are no statistics.
    """

    weights: Tensor | None
    mask: Tensor
    statistics: Statistics | None = None

    @property
    def metrics(self) -> dict[str, Tensor]:
        return {} if self.statistics is None else self.statistics.metrics()

    def __iter__(self):
        return iter((self.weights, self.mask, self.metrics))

    def rows(self, index) -> "Correction":
        """A micro-batch of it. The statistics stay those of the whole."""
        return replace(self, weights=None if self.weights is None else self.weights[index],
                       mask=self.mask[index])


def correct(train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor,
            config: "RolloutCorrectionConfig", advantages: Tensor | None = None,
            group=None) -> Correction:
    """Weights, mask and metrics of one batch, from ρ = π_train/π_rollout.  (eq:correction)

    `train_log_prob`: π_old in decoupled mode, the current π_θ in bypass mode. It,
    `rollout_log_prob` and `response_mask`: [B, T]. `advantages` [B, T] is what opsm and
    token_tv_outward ask for. With `group`, a torch.distributed process group, batch normalisation
    and second moment are of all its ranks. Raises ValueError: shapes that differ, no
    rollout_log_prob, no advantages where they are asked for.
    """
    _check_batch(train_log_prob, rollout_log_prob, response_mask, config, advantages)
    train, rollout = train_log_prob.detach(), rollout_log_prob.detach()
    level, threshold, weights = config.rollout_is, config.rollout_is_threshold, None

    log_rho = masked_log_ratio(train, rollout, response_mask)                            # [B, T]
    if level is not None:
        weights = importance_weights(log_rho, response_mask, level, threshold)           # [B, T]
    kept = rejection_mask(log_rho, response_mask, config.rollout_rs, advantages, rollout,
                          group)                                                         # [B, T]

    ratios = Ratios.of(log_rho, response_mask)
    quantities = offpolicy_quantities(ratios, rollout)
    if level is not None:
        applied, normalize = config.applies_weights, config.rollout_is_batch_normalize
        quantities += weight_quantities(ratios, weights if applied else None, level, threshold,
                                        normalize)
        weights = batch_normalize(weights, response_mask, level, group) if normalize else weights
    verdicts = {name: judge(log_rho, response_mask, name, bound, advantages, rollout, group)
                for name, bound in config.rollout_rs.items()}
    quantities += rejection_quantities(ratios, kept, config.rollout_rs, verdicts)
    mask = response_mask * kept if config.rollout_rs else response_mask
    return Correction(weights, mask, Statistics.of(quantities))


def _check_batch(train_log_prob, rollout_log_prob, response_mask, config, advantages) -> None:
    if rollout_log_prob is None:
        raise ValueError("rollout_log_prob is missing: without the sampler's log-probs there is "
                         "nothing to correct")
    if not train_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(f"train_log_prob {tuple(train_log_prob.shape)}, rollout_log_prob "
                         f"{tuple(rollout_log_prob.shape)} and response_mask "
                         f"{tuple(response_mask.shape)} must have one shape [B, T]")
    for name in {"opsm", "token_tv_outward"} & set(config.rollout_rs):
        if advantages is None:
            raise ValueError(f"rollout_rs.{name} needs the advantages: it looks at their sign")


# ----------------------------------------------------------------------------------- configuration

def nearest(word: Any, allowed) -> str:
    close = difflib.get_close_matches(str(word), [str(a) for a in allowed], n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; allowed: {', '.join(map(str, allowed))}"


def number(key: str, value: Any) -> float:
    """A positive number, or one sentence that names the key."""
    with suppress(ValueError, OverflowError):                       # float("0.5_2") would be 0.52
        known = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        if known and "_" not in str(value) and float(value) > 0:
            return float(value)
    raise ValueError(f"{key} must be a positive number, not {value!r}")


def interval(key: str, value: Any) -> tuple[float | None, float | None]:
    """[lo, hi] with either end open (null), lo ≤ hi, at least one end given."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{key} must be a pair [lo, hi] of bounds on ρ, either of which may be "
                         f"null, not {value!r}")
    lo, hi = (None if end is None else number(key, end) for end in value)
    if lo is None and hi is None:
        raise ValueError(f"{key} must have at least one bound that is not null")
    if lo is not None and hi is not None and lo > hi:
        raise ValueError(f"{key} must have lo ≤ hi, not [{lo:g}, {hi:g}]")
    return lo, hi


def choice(key: str, value: Any, allowed: tuple) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key} cannot be {value!r}{nearest(value, allowed)}")


def flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return value


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What to correct, and how. Frozen and validated: a wrong value is one ValueError sentence.

    rollout_is                  level of ρ for the weights: None, "token", "prefix", "sequence",
                                "geometric"
    rollout_is_threshold        C truncates, min(ρ, C) (eq:tis); [lo, hi] zeroes outside (eq:mis)
    rollout_is_batch_normalize  divide by the mean weight, after truncation (eq:self-normalised)
    rollout_rs                  {criterion: bound}, all ANDed (eq:rejection): k1 ones take a pair
                                that bounds ρ itself (token ρ, Πρ for seq_sum, (Πρ)^{1/|y|} for
                                seq_mean, every token's ρ for seq_max), k2 and k3 an upper bound
                                in nats, opsm its δ in nats (eq:opsm), token_tv and
                                token_tv_outward one of |π − μ| (eq:total-variation),
                                second_moment one of the mean (log ρ)² (eq:second-moment)
    bypass_mode                 False: three policies, decoupled PPO. True: two, π_old := π_rollout
    loss_type                   ppo_clip, gspo, cispo, sapo; reinforce in bypass mode only
    score_centering             with reinforce, whose weights and criteria are then of tokens:
                                subtract E_{v∼μ}[w(v) ∇log π(v)] (eq:score-centering)

    In bypass mode only reinforce takes the weights: the ratio of the others already is
    π_θ/π_rollout, and weighting it once more would count it twice (eq:double-count). A warning
    says so, and the metrics of such weights are not called applied.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | tuple[float | None, float | None] = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: Mapping[str, Any] = field(default_factory=dict)
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    score_centering: bool = False

    def __post_init__(self):
        if self.rollout_is is not None:
            choice("rollout_is", self.rollout_is, LEVELS)
        flag("rollout_is_batch_normalize", self.rollout_is_batch_normalize)
        flag("bypass_mode", self.bypass_mode)
        choice("loss_type", self.loss_type, LOSS_TYPES)
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type 'reinforce' needs bypass_mode true: without a clip there "
                             "is no use for a third policy")
        bound = self.rollout_is_threshold
        read = interval if isinstance(bound, (list, tuple)) else number
        object.__setattr__(self, "rollout_is_threshold", read("rollout_is_threshold", bound))
        criteria = {} if self.rollout_rs is None else self.rollout_rs
        if not isinstance(criteria, Mapping):
            raise ValueError(f"rollout_rs must be a mapping from criterion to bound, such as "
                             f"{{seq_mean_k3: 0.01}}, not {criteria!r}")
        for name in criteria:
            choice("rollout_rs criterion", name, CRITERIA)
        object.__setattr__(self, "rollout_rs", {
            name: (interval if name.endswith("k1") else number)(f"rollout_rs.{name}", bound)
            for name, bound in criteria.items()})
        if flag("score_centering", self.score_centering):
            self._check_centering()
        if self.rollout_is is not None and not self.applies_weights:
            warnings.warn(f"rollout_is={self.rollout_is} is not applied with bypass_mode and "
                          f"loss_type={self.loss_type}, whose ratio already is π_θ/π_rollout "
                          "(eq:double-count): its metrics are rollout_is_raw_*", stacklevel=3)

    def _check_centering(self):
        criteria = [name for name in self.rollout_rs if not name.startswith("token_")]
        if self.loss_type != "reinforce":
            raise ValueError("score_centering needs loss_type reinforce: a clipped ratio has "
                             "another mean under μ")
        if self.rollout_is not in (None, "token") or self.rollout_is_batch_normalize or criteria:
            raise ValueError("score_centering knows what else a token might have been, not what "
                             "else its sequence or batch: it needs rollout_is null or token, no "
                             "rollout_is_batch_normalize, and criteria token_*")

    @property
    def of_whole_batches(self) -> bool:
        """Whether weights or mask of a token depend on the whole (mini-)batch."""
        return self.rollout_is_batch_normalize or "second_moment" in self.rollout_rs

    @property
    def ratio_is_the_weight(self) -> bool:
        return self.bypass_mode and self.loss_type != "reinforce"

    @property
    def applies_weights(self) -> bool:
        return self.rollout_is is not None and not self.ratio_is_the_weight

    # Presets, with the arguments of verl's documents: `threshold` or `is_threshold` is C of the
    # weights; `rs_threshold` the criterion's bound, of ρ a pair or its upper end u, which means
    # [1/u, u] where no `rs_threshold_lower` is given; `veto_threshold` the lower bound of every ρ.

    # Three policies, ρ = π_old/π_rollout.

    @classmethod
    def decoupled_token_is(cls, threshold=2.0):
        """Truncate each token's ρ."""
        return cls("token", threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold=2.0):
        """Truncate each sequence's product of ρ."""
        return cls("sequence", threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold=2.0, rs_threshold=(0.5, 2.0)):
        """Truncate the product of ρ, and reject sequences outside an interval of it."""
        return cls("sequence", is_threshold, rollout_rs={"seq_sum_k1": _bounds(rs_threshold)})

    @classmethod
    def decoupled_token_icepop(cls, threshold=5.0, threshold_lower=0.5):
        """Set the weight of tokens outside an interval of ρ to 0."""
        return cls("token", _bounds(threshold, threshold_lower))

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold=NEAR_ONE, rs_threshold_lower=None, veto_threshold=None):
        """Reject sequences by the geometric mean of ρ."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=NEAR_ONE):
        """Reject by the geometric mean of ρ, and truncate its product."""
        return cls("sequence", is_threshold, rollout_rs=_geometric(rs_threshold))

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold=2.0, rs_threshold=NEAR_ONE):
        """Reject by the geometric mean of ρ, and truncate each token's."""
        return cls("token", is_threshold, rollout_rs=_geometric(rs_threshold))

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold=0.01):
        """Reject sequences by their mean k3."""
        return cls(rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=0.01):
        """Reject by the mean k3, and truncate the product of ρ."""
        return cls("sequence", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold=2.0, rs_threshold=0.01):
        """Reject by the mean k3, and truncate each token's ρ."""
        return cls("token", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    # Two policies, PPO's clip around π_rollout.

    @classmethod
    def bypass_ppo_clip(cls, threshold=2.0):
        """Take π_rollout for π_old. The clip's ratio is the weight already: threshold acts on none."""
        return cls(None, threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold=NEAR_ONE, rs_threshold_lower=None,
                               veto_threshold=None):
        """The same, less sequences rejected by the geometric mean of ρ."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold),
                   bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold=0.01):
        """The same, less sequences rejected by their mean k3."""
        return cls(rollout_rs={"seq_mean_k3": rs_threshold}, bypass_mode=True)

    # Two policies, nothing is clipped: ρ = π_θ/π_rollout is an explicit weight.

    @classmethod
    def bypass_pg_is(cls, threshold=2.0):
        """REINFORCE with the truncated product of ρ."""
        return cls("sequence", threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold=5.0, threshold_lower=0.5):
        """REINFORCE with each token's ρ, 0 outside an interval."""
        return cls("token", _bounds(threshold, threshold_lower), bypass_mode=True,
                   loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold=NEAR_ONE, rs_threshold_lower=None, veto_threshold=None):
        """REINFORCE without weights, less sequences rejected by the geometric mean of ρ."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold),
                   bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls, is_threshold=2.0, rs_threshold=NEAR_ONE):
        """The same with the truncated product of ρ as the weight."""
        return cls("sequence", is_threshold, rollout_rs=_geometric(rs_threshold),
                   bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold=2.0, rs_threshold=NEAR_ONE):
        """The same with each token's truncated ρ as the weight."""
        return cls("token", is_threshold, rollout_rs=_geometric(rs_threshold), bypass_mode=True,
                   loss_type="reinforce")

    @classmethod
    def disabled(cls):
        """Correct nothing, and measure all the same."""
        return cls()

    # verl 0.6: one token below 1e-4 vetoes its sequence; and its older names.

    @classmethod
    def geo_rs(cls, rs_threshold=NEAR_ONE, rs_threshold_lower=None, veto_threshold=1e-4):
        """`decoupled_geo_rs` with the veto."""
        return cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def pg_rs(cls, rs_threshold=NEAR_ONE, rs_threshold_lower=None, veto_threshold=1e-4):
        """`bypass_pg_geo_rs` with the veto."""
        return cls.bypass_pg_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def seq_mis(cls, threshold=2.0):
        """`decoupled_seq_is_rs` with its first argument under another name."""
        return cls.decoupled_seq_is_rs(threshold)

    token_is = token_tis = decoupled_token_is
    seq_is, seq_is_rs, geo_mis = decoupled_seq_is, decoupled_seq_is_rs, geo_rs
    ppo_is_bypass, pure_is, pg_is, pure_rs = bypass_ppo_clip, bypass_pg_is, bypass_pg_is, pg_rs


def _bounds(upper, lower=None) -> tuple:
    """A pair as it is, or [lower, upper], or [1/upper, upper]."""
    if isinstance(upper, (tuple, list)):
        return tuple(upper)
    return (1 / number("rs_threshold", upper) if lower is None else lower), upper


def _geometric(upper, lower=None, veto=None) -> dict[str, tuple]:
    return {"seq_mean_k1": _bounds(upper, lower)} | (
        {} if veto is None else {"seq_max_k1": (veto, None)})


# Every preset by name, as `def`s have them and in their order; and what an older name stands for.
PRESETS = {name: getattr(RolloutCorrectionConfig, name)
           for name, made in vars(RolloutCorrectionConfig).items() if isinstance(made, classmethod)}
HISTORICAL = {"seq_mis": "decoupled_seq_is_rs"} | {
    name: preset.__name__ for name, preset in PRESETS.items() if name != preset.__name__}
