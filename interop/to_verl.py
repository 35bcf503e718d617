"""What verl 0.9 can express of a correction, by keys of its Hydra configuration.

In decoupled mode its driver corrects, by the block algorithm.rollout_correction; in bypass mode its
workers do, which need a loss_mode and a copy of the block.
"""

from typing import Any

from three_policies.interop.lacks import (
    IDLE, NO_WEIGHTS, NOTHING_MEASURED, UNSET, Lack, Recipe, Row, System, ends, is_pair,
    lacks_criterion, of_micro_batches, own_loop, without)
from three_policies.interop.readers import VERL_CRITERIA, VERL_LOSSES
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA

CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
NO_END = "1e-300"                                   # verl has no open end; log ρ is far above this


def verl_ends(low: float | None, high: float | None) -> str:
    return f"{NO_END if low is None else low}_{'inf' if high is None else high}"


def verl_bound(bound: Any) -> str:
    """Return a bound as verl's text; those of k1, which bound ρ here, are on 1/ρ there."""
    if not isinstance(bound, tuple):
        return str(bound)
    low, high = (None if end is None else 1 / end for end in bound)
    return verl_ends(high, low)


def verl_threshold(config: Config) -> Any:
    if config.rollout_is is None:
        return UNSET
    bound = config.rollout_is_threshold
    return verl_ends(*bound) if isinstance(bound, tuple) else bound


def verl_mode(config: Config) -> Any:
    """Return policy_loss.loss_mode, without which verl's trainer takes PPO's clip."""
    if config.loss_type in VERL_LOSSES:
        return config.loss_type
    return "bypass_mode" if config.bypass_mode else UNSET


def verl_copy(config: Config) -> Any:
    """Return verl's reference to the block, which its workers need in bypass mode."""
    return f"${{{CORRECTION}}}" if verl_mode(config) == "bypass_mode" else UNSET


VERL_ROWS = (
    Row(f"{CORRECTION}.rollout_is", "rollout_is", lambda c: c.rollout_is),
    Row(f"{CORRECTION}.rollout_is_threshold", "rollout_is_threshold", verl_threshold),
    Row(f"{CORRECTION}.rollout_is_batch_normalize", "rollout_is_batch_normalize",
        lambda c: c.rollout_is_batch_normalize or UNSET),
    Row(f"{CORRECTION}.rollout_rs", "rollout_rs", lambda c: ",".join(c.rollout_rs) or UNSET),
    Row(f"{CORRECTION}.rollout_rs_threshold", "rollout_rs", lambda c: ",".join(
        verl_bound(bound) for bound in c.rollout_rs.values()) or UNSET),
    Row(f"{CORRECTION}.bypass_mode", "bypass_mode", lambda c: c.bypass_mode or UNSET),
    Row(f"{CORRECTION}.loss_type", "loss_type",
        lambda c: c.loss_type if c.loss_type == "reinforce" else UNSET),
    Row(f"{POLICY_LOSS}.loss_mode", "loss_type", verl_mode),
    Row(f"{POLICY_LOSS}.rollout_correction", "bypass_mode", verl_copy))


def verl_inverts(config: Config) -> bool:
    return any(isinstance(bound, tuple) and verl_bound(bound) != verl_ends(*bound)
               for bound in config.rollout_rs.values())


def verl_has_no_end(config: Config) -> bool:
    """True if a lower end is open, which for a criterion of k1 is ρ's upper end."""
    return (config.rollout_is is not None and is_pair(config) and ends(config)[0] is None) or any(
        isinstance(bound, tuple) and bound[1] is None for bound in config.rollout_rs.values())


VERL_HAS = {                                        # for criteria that verl has not
    "seq_max_k1": "verl 0.9 has seq_max_k2 and seq_max_k3, which bound ρ on both sides alike",
    "token_tv_outward": "verl's nearest is policy_loss.loss_mode=dppo_tv, a loss with that mask"}
VERL_LACKS = (
    Lack("metrics_only, rollout_is and rollout_rs", lambda c: c.metrics_only,
         "verl measures no weights or criteria that it does not apply, so they are not written; "
         "it logs the mismatch itself (rollout_corr/k3_kl, …) by default", NOTHING_MEASURED),
    *IDLE,
    Lack("score_centering", lambda c: c.score_centering,
         "verl brings no candidate tokens to its workers", without(score_centering=False)),
    Lack("loss_type", lambda c: c.loss_type not in ("ppo_clip", "reinforce", *VERL_LOSSES),
         "verl's losses with an equal here are vanilla, gspo, sapo, cispo and, in bypass mode, "
         "reinforce", without(loss_type="ppo_clip")),
    Lack("rollout_is", lambda c: c.rollout_is in ("prefix", "geometric"),
         "verl 0.9 has weights of tokens and of sequences", NO_WEIGHTS),
    Lack("rollout_is_batch_normalize", lambda c: c.bypass_mode and c.rollout_is_batch_normalize,
         "in bypass mode verl divides by the mean of a micro-batch, not of the batch",
         without(rollout_is_batch_normalize=False)),
    *(lacks_criterion(name, VERL_HAS.get(name, f"verl 0.9 has {', '.join(VERL_CRITERIA)}"))
      for name in CRITERIA if name not in VERL_CRITERIA),
    Lack("rollout_rs",
         lambda c: c.bypass_mode and c.loss_type in VERL_LOSSES and bool(c.rollout_rs),
         "in bypass mode verl rejects beside loss_type ppo_clip and reinforce alone",
         without(rollout_rs={})),
    Lack("rollout_rs", verl_inverts, "verl 0.9 bounds 1/ρ by its k1 criteria, so the bounds on ρ "
         "are written inverted", without(), changes=False),
    Lack("rollout_rs and rollout_is_threshold", verl_has_no_end,
         f"verl has no open lower end, so {NO_END} stands for it", without(), changes=False))


def verl_recipe(config: Config) -> Recipe:
    """Return our loss in bypass mode alone; in decoupled mode verl's driver corrects before it."""
    if config.bypass_mode and of_micro_batches(config):
        return Recipe("our loss in verl does it (loss_mode=three_policies)",
                      "interop/README.md#verl-09")
    return own_loop(config)


VERL = System("verl 0.9", VERL_ROWS, VERL_LACKS, verl_recipe)
