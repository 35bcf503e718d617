"""What OpenRLHF 0.11 can express of a correction, by its flags.

It has one gate: min(ρ, C) of tokens, or ρ uncapped where one statistic is within bounds.
"""

import math
from typing import Any

from three_policies.interop.lacks import (
    IDLE, NO_CRITERIA, NO_WEIGHTS, NOTHING_MEASURED, UNSET, Lack, Row, System, ends, is_pair,
    lacks_criterion, nothing, own_loop, without)
from three_policies.interop.readers_of_others import OPENRLHF_GATES
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA

ADVANTAGE = "algo.advantage.is_correction"
GATES = {name: gate for gate, name in OPENRLHF_GATES.items() if name != "token_binary_kl"}


def gate(config: Config) -> tuple[str, str]:
    """Return level and gating of the one criterion; without one the ratio of tokens is judged."""
    return next((GATES[name] for name in config.rollout_rs), ("token", "ratio"))


def is_on(config: Config) -> bool:
    return config.rollout_is is not None or config.bypass_mode


def of_correction(value: Any) -> Any:
    return lambda config: value(config) if config.rollout_is is not None else UNSET


def mode(config: Config) -> str:
    return "mask" if config.rollout_rs or is_pair(config) else "clip"


def threshold(config: Config) -> list[float]:
    bound: Any = next(iter(config.rollout_rs.values()), ends(config))
    low, high = bound if isinstance(bound, tuple) else (None, bound)
    return [0.0 if low is None else low, math.inf if high is None else high]


OPENRLHF_ROWS = (
    Row(f"{ADVANTAGE}_level", "rollout_is",
        lambda c: (gate(c)[0] if c.rollout_is else "token") if is_on(c) else "off"),
    Row(f"{ADVANTAGE}_mode", "rollout_is_threshold", of_correction(mode)),
    Row(f"{ADVANTAGE}_gating", "rollout_rs", of_correction(lambda c: gate(c)[1])),
    Row(f"{ADVANTAGE}_threshold", "rollout_is_threshold", of_correction(threshold)),
    Row("actor.policy_loss_type", "loss_type",
        lambda c: c.loss_type if c.loss_type == "gspo" else UNSET))


def room_for(name: str, config: Config) -> bool:
    """True if this criterion can be the gate, of weights that nothing caps."""
    first = next((known for known in config.rollout_rs if known in GATES), None)
    return (config.rollout_is == "token" and config.rollout_is_threshold == math.inf
            and name == first)


OPENRLHF_LACKS = (
    Lack("metrics_only, rollout_is and rollout_rs", lambda c: c.metrics_only,
         "OpenRLHF measures no weights that it does not apply, so they are not written",
         NOTHING_MEASURED),
    *IDLE,
    Lack("score_centering", lambda c: c.score_centering,
         "OpenRLHF 0.11 has no candidate tokens in its loss", without(score_centering=False)),
    Lack("bypass_mode", lambda c: c.bypass_mode and c.loss_type != "gspo",
         "OpenRLHF clips around π_old, and around π_rollout for gspo alone, so nothing is written",
         nothing),
    Lack("loss_type", lambda c: c.loss_type not in ("ppo_clip", "gspo"),
         "OpenRLHF's losses with an equal here are ppo and gspo", without(loss_type="ppo_clip")),
    Lack("rollout_is", lambda c: c.ratio_is_the_weight and c.rollout_is is not None,
         "it is only measured where the loss's own ratio is the weight, and is not written",
         NO_WEIGHTS, changes=False),
    Lack("rollout_is and rollout_rs",
         lambda c: c.loss_type == "gspo" and bool(c.rollout_is or c.rollout_rs),
         "OpenRLHF's gspo has no weights and rejects nothing",
         lambda c: NO_CRITERIA(NO_WEIGHTS(c))),
    Lack("rollout_is_batch_normalize", lambda c: c.rollout_is_batch_normalize,
         "OpenRLHF does not normalise weights", without(rollout_is_batch_normalize=False)),
    Lack("rollout_is", lambda c: c.rollout_is not in (None, "token"),
         "OpenRLHF has weights of tokens", NO_WEIGHTS),
    *(lacks_criterion(name, "OpenRLHF has one gate, on a geometric mean of ρ, |π − μ| or a mean "
                      "KL(μ‖π), beside token weights that nothing caps",
                      lambda c, name=name: not room_for(name, c)) for name in CRITERIA))

OPENRLHF = System("OpenRLHF 0.11", OPENRLHF_ROWS, OPENRLHF_LACKS, own_loop)
