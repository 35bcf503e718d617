"""What TRL 1.16 can express of a correction, by fields of its GRPOConfig.

It has weights of tokens or sequences, truncated or set to 0 outside bounds, and no other rejection.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from three_policies.interop.lacks import (
    IDLE, NO_WEIGHTS, NOTHING_MEASURED, UNSET, Lack, Recipe, Row, System, ends, is_pair,
    lacks_criterion, nothing, of_micro_batches, own_loop, without, without_criterion)
from three_policies.interop.readers import K1_OF_LEVEL
from three_policies.interop.readers_of_others import IS, TRL_LOSSES
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA


def trl_end(end: int) -> Callable[[Config], Any]:
    """Return the maker of clip_min, which is null by default, or clip_max, which is not."""
    def value(config: Config) -> Any:
        bound = ends(config)[end]
        if config.rollout_is is None:
            return UNSET
        return (UNSET, math.inf)[end] if bound is None else bound
    return value


def trl_mode(config: Config) -> Any:
    if config.rollout_is is None:
        return UNSET
    return f"{config.rollout_is}_{'mask' if is_pair(config) else 'truncate'}"


TRL_ROWS = (
    Row("use_vllm", "rollout_is", lambda c: True),
    Row(f"{IS}_correction", "rollout_is", lambda c: c.rollout_is is not None),  # TRL's default: on
    Row(f"{IS}_mode", "rollout_is", trl_mode),
    Row(f"{IS}_clip_min", "rollout_is_threshold", trl_end(0)),
    Row(f"{IS}_clip_max", "rollout_is_threshold", trl_end(1)),
    Row("loss_type", "loss_type", lambda c: UNSET if c.loss_type == "ppo_clip" else c.loss_type))


def mask_as_pair(config: Config) -> Config:
    """Return min(ρ, C) and a criterion of that ρ as ρ·1[lo ≤ ρ ≤ hi], which it is if hi ≤ C."""
    name = K1_OF_LEVEL[str(config.rollout_is)]
    return replace(without_criterion(name)(config), rollout_is_threshold=config.rollout_rs[name])


def mask_is_pair(config: Config) -> bool:
    name, cap = K1_OF_LEVEL.get(str(config.rollout_is), ""), config.rollout_is_threshold
    if name not in config.rollout_rs or isinstance(cap, tuple):
        return False
    high = config.rollout_rs[name][1]
    return (math.inf if high is None else high) <= cap


TRL_HAS = {
    "opsm": "TRL's off_policy_mask_threshold compares π_θ, not π_old, with π_rollout"}
TRL_LACKS = (
    Lack("metrics_only, rollout_is and rollout_rs", lambda c: c.metrics_only,
         "TRL measures no weights that it does not apply, so they are not written",
         NOTHING_MEASURED),
    *IDLE,
    Lack("bypass_mode", lambda c: c.bypass_mode,
         "TRL's GRPOTrainer clips around π_old (its AsyncGRPOTrainer around π_rollout), so nothing "
         "is written", nothing),
    Lack("score_centering", lambda c: c.score_centering, "TRL has no candidate tokens in its loss",
         without(score_centering=False)),
    Lack("loss_type", lambda c: c.loss_type == "gspo",
         "TRL's importance_sampling_level='sequence' differentiates through the mean ratio itself, "
         "which under weights of tokens is another gradient", without(loss_type="ppo_clip")),
    Lack("loss_type", lambda c: c.loss_type not in ("ppo_clip", *TRL_LOSSES),
         f"TRL's losses with an equal here are PPO's clip, {' and '.join(TRL_LOSSES)}",
         without(loss_type="ppo_clip")),
    Lack("rollout_is_batch_normalize", lambda c: c.rollout_is_batch_normalize,
         "TRL does not normalise weights", without(rollout_is_batch_normalize=False)),
    Lack("rollout_is", lambda c: c.rollout_is in ("prefix", "geometric"),
         "TRL has weights of tokens and of sequences", NO_WEIGHTS),
    Lack("rollout_rs and rollout_is_threshold", mask_is_pair,
         "TRL's modes *_mask set the weight outside the bounds to 0, which makes the same product "
         "of weight and mask", mask_as_pair, changes=False),
    *(lacks_criterion(name, TRL_HAS.get(name, "TRL rejects by a bound on its own weights alone"))
      for name in CRITERIA))


def trl_recipe(config: Config) -> Recipe:
    """WeightedGRPOTrainer sees whole batches, and takes PPO's clip in decoupled mode alone."""
    if not config.bypass_mode and config.loss_type == "ppo_clip":
        kind = "WeightedGRPOTrainer"
    elif of_micro_batches(config):
        kind = "PolicyLossGRPOTrainer"
    else:
        return own_loop(config)
    return Recipe(f"{kind} does it", "interop/README.md#trl-116",
                  "from three_policies import RolloutCorrectionConfig\n"
                  f"from three_policies.interop.trl import {kind}\n\n"
                  f"trainer = {kind}(…, correction={{}})")


TRL = System("TRL 1.16", TRL_ROWS, TRL_LACKS, trl_recipe, ", so TRL's default stands: weights of "
             "sequences, set to 0 above 3")
