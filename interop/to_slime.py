"""What slime can express of a correction, by its flags.

It has weights of tokens, truncated or 0 outside a pair; around π_rollout opsm, and no weights.
"""

import math
from typing import Any

from three_policies.interop.lacks import (
    IDLE, NO_WEIGHTS, NOTHING_MEASURED, UNSET, Lack, Row, System, ends, is_pair, lacks_criterion,
    nothing, own_loop, without)
from three_policies.interop.readers_of_others import ICEPOP, SLIME_LOSSES
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA


def of_weights(end: int, open_end: float) -> Any:
    def value(config: Config) -> Any:
        bound = ends(config)[end]
        return UNSET if config.rollout_is is None else open_end if bound is None else bound
    return value


SLIME_ROWS = (
    Row("use_tis", "rollout_is", lambda c: c.rollout_is is not None),
    Row("tis_clip", "rollout_is_threshold", of_weights(1, math.inf)),
    Row("tis_clip_low", "rollout_is_threshold", of_weights(0, 0.0)),
    Row("custom_tis_function_path", "rollout_is_threshold",
        lambda c: ICEPOP if c.rollout_is is not None and is_pair(c) else UNSET),
    Row("use_rollout_logprobs", "bypass_mode", lambda c: c.bypass_mode or UNSET),
    Row("use_opsm", "rollout_rs", lambda c: "opsm" in c.rollout_rs or UNSET),
    Row("opsm_delta", "rollout_rs", lambda c: c.rollout_rs.get("opsm", UNSET)),
    Row("advantage_estimator", "loss_type",
        lambda c: c.loss_type if c.loss_type in SLIME_LOSSES else UNSET))

SLIME_LACKS = (
    Lack("metrics_only, rollout_is and rollout_rs", lambda c: c.metrics_only,
         "slime measures no weights that it does not apply, so they are not written",
         NOTHING_MEASURED),
    *IDLE,
    Lack("score_centering", lambda c: c.score_centering,
         "slime has no candidate tokens in its loss", without(score_centering=False)),
    Lack("bypass_mode", lambda c: c.bypass_mode and c.loss_type not in ("ppo_clip", *SLIME_LOSSES),
         "around π_rollout slime has PPO's clip, gspo and cispo, so nothing is written", nothing),
    Lack("loss_type", lambda c: c.loss_type not in ("ppo_clip", *SLIME_LOSSES),
         "slime's losses with an equal here are PPO's clip, gspo and cispo",
         without(loss_type="ppo_clip")),
    Lack("rollout_is", lambda c: c.ratio_is_the_weight and c.rollout_is is not None,
         "it is only measured where the loss's own ratio is the weight, and is not written",
         NO_WEIGHTS, changes=False),
    Lack("rollout_is_batch_normalize", lambda c: c.rollout_is_batch_normalize,
         "slime does not normalise weights", without(rollout_is_batch_normalize=False)),
    Lack("rollout_is", lambda c: c.rollout_is not in (None, "token"),
         "slime has weights of tokens; its example train_infer_mismatch_helper has others",
         NO_WEIGHTS),
    Lack("loss_type", lambda c: c.loss_type == "gspo" and c.rollout_is is not None,
         "slime's gspo differentiates through the mean ratio itself, which under weights of tokens "
         "is another gradient", without(loss_type="ppo_clip")),
    *(lacks_criterion(name, "slime rejects nothing of itself; its example "
                      "train_infer_mismatch_helper does" if name != "opsm" else
                      "slime's --use-opsm compares π_θ with π_old, unless --use-rollout-logprobs",
                      lambda c, name=name: name != "opsm" or not c.bypass_mode)
      for name in CRITERIA))

SLIME = System("slime", SLIME_ROWS, SLIME_LACKS, own_loop)
