"""What NeMo-RL can express of a correction, by keys of loss_fn.

It has weights of tokens and, with GSPO's ratio, of sequences, truncated or 0 outside a pair; and a
mask by the geometric mean of ρ beside token weights that nothing caps.
"""

import math
from typing import Any

from three_policies.interop.lacks import (
    IDLE, NO_WEIGHTS, NOTHING_MEASURED, UNSET, Lack, Row, System, ends, is_pair, lacks_criterion,
    nothing, own_loop, without)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA

LOSS, OF = "loss_fn", "loss_fn.truncated_importance_sampling"
LEVELS = {"token": ("ppo_clip", "cispo"), "sequence": ("gspo",)}


def pair_of(config: Config) -> tuple[float | None, float | None] | None:
    if "seq_mean_k1" in config.rollout_rs:
        return config.rollout_rs["seq_mean_k1"]
    return ends(config) if is_pair(config) and config.rollout_is is not None else None


def kind(config: Config) -> Any:
    if config.rollout_rs:
        return "seq-mask-tis"
    capped = config.rollout_is is not None and config.rollout_is_threshold != math.inf
    return ("icepop" if is_pair(config) else "tis") if capped else UNSET


def upper(config: Config) -> Any:
    if kind(config) is UNSET:
        return UNSET if config.rollout_is is None else None
    high = (pair_of(config) or ends(config))[1]
    return math.inf if high is None else high


def lower(config: Config) -> Any:
    pair = pair_of(config)
    return UNSET if pair is None else 0.0 if pair[0] is None else pair[0]


NEMO_RL_ROWS = (
    Row(f"{LOSS}.use_importance_sampling_correction", "rollout_is",
        lambda c: c.rollout_is is not None),
    Row(f"{OF}_type", "rollout_rs", kind),
    Row(f"{OF}_ratio", "rollout_is_threshold", upper),
    Row(f"{OF}_ratio_min", "rollout_is_threshold", lower),
    Row(f"{LOSS}.sequence_level_importance_ratios", "loss_type",
        lambda c: c.loss_type == "gspo" or UNSET),
    Row(f"{LOSS}.token_level_loss", "loss_type",
        lambda c: False if c.loss_type == "gspo" else UNSET),
    Row(f"{LOSS}.use_cispo", "loss_type", lambda c: c.loss_type == "cispo" or UNSET))

NEMO_RL_LACKS = (
    Lack("metrics_only, rollout_is and rollout_rs", lambda c: c.metrics_only,
         "NeMo-RL measures no weights that it does not apply, so they are not written",
         NOTHING_MEASURED),
    *IDLE,
    Lack("bypass_mode", lambda c: c.bypass_mode,
         "NeMo-RL clips around π_old, so nothing is written", nothing),
    Lack("score_centering", lambda c: c.score_centering,
         "NeMo-RL has no candidate tokens in its loss", without(score_centering=False)),
    Lack("loss_type", lambda c: c.loss_type not in ("ppo_clip", "cispo", "gspo"),
         "NeMo-RL's losses with an equal here are PPO's clip, gspo and cispo",
         without(loss_type="ppo_clip")),
    Lack("rollout_is_batch_normalize", lambda c: c.rollout_is_batch_normalize,
         "NeMo-RL does not normalise weights", without(rollout_is_batch_normalize=False)),
    Lack("rollout_is", lambda c: c.rollout_is is not None
         and c.loss_type not in LEVELS.get(c.rollout_is, ()),
         "NeMo-RL has weights of tokens with PPO's clip and cispo, of sequences with gspo",
         NO_WEIGHTS),
    *(lacks_criterion(name, "NeMo-RL rejects by the geometric mean of ρ, beside token weights "
                      "that nothing caps", lambda c, name=name: name != "seq_mean_k1"
                      or c.rollout_is != "token" or c.rollout_is_threshold != math.inf)
      for name in CRITERIA))

NEMO_RL = System("NeMo-RL", NEMO_RL_ROWS, NEMO_RL_LACKS, own_loop)
