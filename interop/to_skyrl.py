"""What SkyRL 0.4 can express of a correction, by keys of trainer.algorithm.

Its off_policy_correction is of π_old. Around π_rollout it has two losses, without a mask.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from three_policies.interop.lacks import (
    IDLE, NO_WEIGHTS, NOTHING_MEASURED, UNSET, Lack, Recipe, Row, System, ends, is_pair,
    lacks_criterion, nothing, of_micro_batches, own_loop, without)
from three_policies.interop.readers import K1_OF_LEVEL
from three_policies.interop.readers_of_others import SKYRL_LOSSES
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA

ALGORITHM = "trainer.algorithm"
OFF_POLICY = f"{ALGORITHM}.off_policy_correction"
SKYRL_MASKS = {"token_k1": "token_mask_is_threshold", "seq_max_k1": "outlier_token_is_threshold",
               "seq_sum_k1": "product_mask", "seq_mean_k1": "geo_mask"}
METRICS = {"seq_sum_k1": "product", "seq_mean_k1": "geometric"}


def skyrl_end(name: str, end: int) -> Callable[[Config], Any]:
    """Return the maker of one end of a mask; an open one is null of outliers, else 0 or ∞."""
    def value(config: Config) -> Any:
        if name not in config.rollout_rs:
            return UNSET
        bound = config.rollout_rs[name][end]
        open_end = None if name == "seq_max_k1" else (0.0, math.inf)[end]
        return open_end if bound is None else bound
    return value


def skyrl_cap(level: str) -> Callable[[Config], Any]:
    return lambda c: c.rollout_is_threshold if skyrl_level(c) == level else UNSET


def skyrl_level(config: Config) -> str | None:
    return None if config.bypass_mode else config.rollout_is


def skyrl_metric(config: Config) -> Any:
    return next((METRICS[name] for name in config.rollout_rs if name in METRICS), UNSET)


def skyrl_loss(config: Config) -> Any:
    """Return policy_loss_type; its rollout_is has weights ρ within a pair, around π_rollout."""
    return {"ppo_clip": UNSET, "reinforce": "rollout_is"}.get(config.loss_type, config.loss_type)


def skyrl_clip(end: int) -> Callable[[Config], Any]:
    """Return the maker of eps_clip_low or eps_clip_high, by which rollout_is has its pair."""
    def value(config: Config) -> Any:
        if config.loss_type != "reinforce":
            return UNSET
        bound = ends(config)[end]
        return abs(((0.0, math.inf)[end] if bound is None else bound) - 1)
    return value


SKYRL_ROWS = (
    Row(f"{OFF_POLICY}.tis_ratio_type", "rollout_is", skyrl_level),
    *(Row(f"{OFF_POLICY}.{level}_tis_ratio_clip_high", "rollout_is_threshold", skyrl_cap(level))
      for level in ("token", "sequence")),
    Row(f"{OFF_POLICY}.sequence_mask_metric", "rollout_rs", skyrl_metric),
    *(Row(f"{OFF_POLICY}.{key}_{name}", "rollout_rs", skyrl_end(criterion, end))
      for criterion, key in SKYRL_MASKS.items() for end, name in enumerate(("low", "high"))),
    Row(f"{ALGORITHM}.policy_loss_type", "loss_type", skyrl_loss),
    Row(f"{ALGORITHM}.cispo.cispo_anchor", "bypass_mode",
        lambda c: "rollout" if c.bypass_mode and c.loss_type == "cispo" else UNSET),
    *(Row(f"{ALGORITHM}.eps_clip_{name}", "rollout_is_threshold", skyrl_clip(end))
      for end, name in enumerate(("low", "high"))),
    Row("generator.sampling_params.logprobs", "rollout_is",
        lambda c: 1 if c.corrects else UNSET))          # SkyRL does not always ask for them itself


def skyrl_bypass(config: Config) -> bool:
    """True if SkyRL has this loss around π_rollout; neither of its two goes with a mask."""
    icepop = config.loss_type == "reinforce" and config.rollout_is == "token" and is_pair(config)
    return not config.rollout_rs and (
        (icepop and inside_one(config)) or config.loss_type == "cispo")


def inside_one(config: Config) -> bool:
    """True if ρ = 1 is within the pair, strictly: an eps_clip is positive."""
    low, high = ends(config)
    return (low is None or low < 1) and (high is None or high > 1)


def pair_as_mask(config: Config) -> Config:
    """Return ρ·1[lo ≤ ρ ≤ hi] as min(ρ, hi) and a criterion: weight times mask is the same."""
    low, high = ends(config)
    return replace(config, rollout_is_threshold=math.inf if high is None else high, rollout_rs={
        **config.rollout_rs, K1_OF_LEVEL[str(config.rollout_is)]: (low, high)})


def room_for_a_mask(config: Config) -> bool:
    """True if a mask can be added: a second one of its kind, or of the other, would be too many."""
    return not set(config.rollout_rs) & {"token_k1", *METRICS}


def by_sequence(config: Config) -> bool:
    return config.rollout_is == "sequence" or bool(set(config.rollout_rs) & set(METRICS))


SKYRL_LACKS = (
    Lack("metrics_only, rollout_is and rollout_rs", lambda c: c.metrics_only,
         "SkyRL measures no weights or masks that it does not apply, so they are not written",
         NOTHING_MEASURED),
    *IDLE,
    Lack("score_centering", lambda c: c.score_centering,
         "SkyRL has no candidate tokens in its loss", without(score_centering=False)),
    Lack("loss_type", lambda c: c.loss_type not in SKYRL_LOSSES.values(),
         f"SkyRL's losses with an equal here are {', '.join(SKYRL_LOSSES)}",
         without(loss_type="ppo_clip")),
    Lack("rollout_is", lambda c: c.ratio_is_the_weight and c.rollout_is is not None,
         "it is only measured where the loss's own ratio is the weight, and is not written",
         NO_WEIGHTS, changes=False),
    Lack("rollout_is_batch_normalize", lambda c: c.rollout_is_batch_normalize,
         "SkyRL does not normalise weights", without(rollout_is_batch_normalize=False)),
    Lack("bypass_mode", lambda c: c.bypass_mode and not skyrl_bypass(c),
         "around π_rollout SkyRL has cispo (cispo_anchor) and a pair on tokens (policy_loss_type "
         "rollout_is), both without a mask, so nothing is written", nothing),
    Lack("rollout_is", lambda c: c.rollout_is in ("prefix", "geometric"),
         "SkyRL has weights of tokens and of sequences", NO_WEIGHTS),
    Lack("rollout_is_threshold and rollout_rs",
         lambda c: is_pair(c) and not c.bypass_mode and room_for_a_mask(c),
         "SkyRL's weights have an upper bound alone; the same pair as a mask beside them makes "
         "the same product of weight and mask", pair_as_mask, changes=False),
    Lack("rollout_is", lambda c: not c.bypass_mode and is_pair(c),
         "SkyRL's weights have an upper bound alone, no pair, and a mask is in the way of one that "
         "would make up for it", NO_WEIGHTS),
    *(lacks_criterion(name, "SkyRL has masks by the ratio of tokens, worst tokens, products and "
                      "geometric means") for name in CRITERIA if name not in SKYRL_MASKS),
    lacks_criterion("seq_mean_k1", "SkyRL has one sequence_mask_metric, which is seq_sum_k1's here",
                    lambda c: "seq_sum_k1" in c.rollout_rs),
    lacks_criterion("token_k1", "beside the ratio of a sequence SkyRL computes that ratio over "
                    "what token_mask_is_threshold_low and _high left", by_sequence))


def skyrl_recipe(config: Config) -> Recipe:
    if not of_micro_batches(config):
        return own_loop(config)
    return Recipe(
        "our loss in SkyRL does it", "interop/README.md#skyrl-04",
        "import functools\n\n"
        "from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss\n"
        "from three_policies import RolloutCorrectionConfig\n"
        "from three_policies.interop.skyrl import three_policies\n\n"
        "# before SkyRL's entry point, with trainer.algorithm.policy_loss_type=mine\n"
        "register_policy_loss(\"mine\")(functools.partial(\n"
        "    three_policies, correction={}))")


SKYRL = System("SkyRL 0.4", SKYRL_ROWS, SKYRL_LACKS, skyrl_recipe)
