"""Configure a correction: RolloutCorrectionConfig, checked and frozen, and a preset a `def`.

    config = RolloutCorrectionConfig.decoupled_seq_is_rs()

interop/dialects.py reads the configurations of other systems. Derivation: math/6-correction.md.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from three_policies.checks import choice, flag, interval, is_list, number
from three_policies.ratios import LEVELS
from three_policies.rejection import CRITERIA, read_criteria
from three_policies.surrogates import LOSSES, Loss

NEAR_ONE = (0.999, 1.001)          # bounds on a geometric mean of ρ
End = float | None                 # of an interval; None is open
Pair = tuple[End, End]
Bound = float | Pair


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
    metrics_only                measure weights and criteria, and apply neither: see
                                rollout_is_raw_* and rollout_rs_CRITERION_*

    In bypass mode only reinforce takes the weights. The other losses already have the ratio
    π_θ/π_rollout, and a weight would count it twice (eq:double-count); a warning says so.
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
                raise TypeError(f"RolloutCorrectionConfig has no argument {key!r}; it has "
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
            raise ValueError("score_centering works token by token: rollout_is must be null or "
                             "token, rollout_is_batch_normalize false, each criterion a token_*")

    @property
    def of_whole_batches(self) -> bool:
        """True if a token's weight or mask depends on the whole (mini-)batch."""
        return (self.rollout_is_batch_normalize and not self.metrics_only) or any(
            CRITERIA[name].of == "batch" for name in self.rollout_rs)

    @property
    def loss(self) -> Loss:
        """Return the row of LOSSES that loss_type names."""
        return LOSSES[self.loss_type]

    @property
    def ratio_is_the_weight(self) -> bool:
        """True if the loss's own ratio already is π_θ/π_rollout.  (eq:double-count)"""
        return self.bypass_mode and self.loss.level is not None

    @property
    def applies_weights(self) -> bool:
        """True if the loss is multiplied by weights."""
        return (self.rollout_is is not None and not self.ratio_is_the_weight
                and not self.metrics_only)

    @property
    def corrects(self) -> bool:
        """True if anything is done about ρ: by weights, by rejection or by the loss's ratio."""
        return self.bypass_mode or self.applies_weights or (
            bool(self.rollout_rs) and not self.metrics_only)

    # Presets have the arguments of verl's documents. `threshold` or `is_threshold` is the weights'
    # C, for IcePop their upper bound, or a pair. `rs_threshold` bounds the criterion: on ρ a pair,
    # or an upper end u that means [1/u, u]. `veto_threshold`: the least ρ. T is the length.

    # Three policies, ρ = π_old/π_rollout.

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0):
        """Truncate each token's ρ: w_t = min(ρ_t, C)."""
        return cls("token", threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0):
        """Truncate each sequence's product of ρ: w = min(Πρ, C)."""
        return cls("sequence", threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: float = 2.0, rs_threshold: Bound = (0.5, 2.0),
                            rs_threshold_lower: End = None):
        """Truncate the product of ρ, and keep it in an interval: min(Πρ, C)·1[lo ≤ Πρ ≤ hi]."""
        return cls("sequence", is_threshold,
                   rollout_rs={"seq_sum_k1": _bounds(rs_threshold, rs_threshold_lower)})

    @classmethod
    def decoupled_token_icepop(cls, threshold: Bound = 5.0, threshold_lower: End = None):
        """Set the weight of tokens outside an interval to 0: w_t = ρ_t·1[lo ≤ ρ_t ≤ hi]."""
        return cls("token", _bounds(threshold, threshold_lower, "threshold", 0.5))

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: End = None,
                         veto_threshold: End = None):
        """Reject sequences by the geometric mean of ρ: keep lo ≤ (Πρ)^(1/T) ≤ hi."""
        return cls(rollout_rs=_geometric(rs_threshold, rs_threshold_lower, veto_threshold))

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: Bound = NEAR_ONE):
        """Reject sequences by the geometric mean of ρ, and truncate the product: w = min(Πρ, C)."""
        return cls("sequence", is_threshold, rollout_rs=_geometric(rs_threshold))

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: Bound = NEAR_ONE):
        """Reject sequences by the geometric mean of ρ, and truncate tokens: w_t = min(ρ_t, C)."""
        return cls("token", is_threshold, rollout_rs=_geometric(rs_threshold))

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01):
        """Reject sequences by their mean k3: keep Σk3/T ≤ C."""
        return cls(rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01):
        """Reject sequences by their mean k3, and truncate the product of ρ: w = min(Πρ, C)."""
        return cls("sequence", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01):
        """Reject sequences by their mean k3, and truncate each token's ρ: w_t = min(ρ_t, C)."""
        return cls("token", is_threshold, rollout_rs={"seq_mean_k3": rs_threshold})

    # Two policies, PPO's clip around π_rollout.

    @classmethod
    def bypass_ppo_clip(cls, threshold: float = 2.0):
        """Clip π_θ/π_rollout as PPO does: min(ρA, clip(ρ)A). threshold has no effect."""
        return cls(None, threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: End = None,
                               veto_threshold: End = None):
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
        """Weight REINFORCE by the truncated product of ρ: −min(Πρ, C) A log π_θ."""
        return cls("sequence", threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: Bound = 5.0, threshold_lower: End = None):
        """Weight REINFORCE by each token's ρ in an interval: −ρ_t·1[lo ≤ ρ_t ≤ hi] A log π_θ."""
        return cls("token", _bounds(threshold, threshold_lower, "threshold", 0.5),
                   bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: End = None,
                         veto_threshold: End = None):
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
    def geo_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: End = None,
               veto_threshold: End = 1e-4):
        """Do as `decoupled_geo_rs`, and reject sequences with a ρ below 1e-4, the veto."""
        return cls.decoupled_geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def pg_rs(cls, rs_threshold: Bound = NEAR_ONE, rs_threshold_lower: End = None,
              veto_threshold: End = 1e-4):
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


def _bounds(upper: Bound, lower: End = None, key: str = "rs_threshold", least: End = None) -> Pair:
    """Return a pair as it is, or [lower, upper]; `lower` defaults to `least`, else to 1/upper."""
    if is_list(upper):
        if lower is not None:
            raise ValueError(f"{key} {upper!r} has a lower end: leave {key}_lower out")
        return interval(key, upper)
    high = number(f"{key}, unless it is a pair [lo, hi],", upper)
    if lower is None:
        lower = 1 / high if least is None else least
    return lower, high


def _geometric(upper: Bound, lower: End = None, veto: End = None) -> dict[str, Pair]:
    return {"seq_mean_k1": _bounds(upper, lower)} | (
        {} if veto is None else {"seq_max_k1": (veto, None)})


# PRESETS has every preset by name, in the order above; HISTORICAL says what older names stand for.
PRESETS = {name: getattr(RolloutCorrectionConfig, name)
           for name, made in vars(RolloutCorrectionConfig).items() if isinstance(made, classmethod)}
HISTORICAL = {name: preset.__name__ for name, preset in PRESETS.items()
              if name != preset.__name__}
