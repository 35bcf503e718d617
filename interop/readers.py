"""Read our own block, and those of verl's releases.

This file decides what verl 0.6.0, 0.6.1 and 0.9 mean by their keys; readers_of_others.py has the
other systems, meanings.py the keys of all. A key that is left out has their default; null is off or
refused, as it is there. Where a document and the released code differ, a table of interop/README.md
names both. dialects.py finds out whose a block is.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from three_policies.checks import choice, flag, interval, number
from three_policies.interop.meanings import OWN, VERL_TIS
from three_policies.presets import PRESETS, RolloutCorrectionConfig
from three_policies.rejection import CRITERIA


def from_own(block: Mapping) -> RolloutCorrectionConfig:
    config = RolloutCorrectionConfig()
    if block.get("preset") is not None:
        choice("correction.preset", block["preset"], tuple(PRESETS))
        config = PRESETS[block["preset"]]()
    own = OWN.keys() - {"preset"}
    changed = replace(config, **{key: block[key] for key in block if key in own})
    one = {"seq_sum_k1": (None, config.rollout_is_threshold)}          # seq_mis: one for both
    if config.rollout_rs == one == changed.rollout_rs and (
            changed.rollout_is_threshold != config.rollout_is_threshold):
        warnings.warn(f"rollout_is_threshold changes the weights of {block['preset']} alone, which "
                      f"still rejects above {config.rollout_is_threshold:g}: give "
                      "rollout_rs.seq_sum_k1 as well", stacklevel=2)
    return changed


def from_verl_tis(block: Mapping) -> RolloutCorrectionConfig:
    given = [key for key in VERL_TIS if key != "use_tis" and key in block]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are one setting: give one of them")
    cap = block[given[0]]
    off = cap is None or (isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap <= 0)
    return RolloutCorrectionConfig() if off else RolloutCorrectionConfig(
        "token", number(given[0], cap))


def from_verl_060(block: Mapping) -> RolloutCorrectionConfig:
    """Read verl 0.6.0's block: one level, one mode, and a veto unless it is null.

    rollout_is: false measures the weights and applies none. In mode truncate the lower bound
    only counts. In mode mask (at first called clip) its code zeroes weights outside it. The second
    example of PR 3984's migration guide has weights plus rejection for it. The product of weight
    and mask is the same, but rejected tokens leave the denominator `kept` and appear in the
    metrics.
    """
    upper, lower = block.get("rollout_is_threshold"), block.get("rollout_is_threshold_lower")
    applies = flag("rollout_is", block.get("rollout_is", True))
    level, mode = block.get("rollout_is_level", "token"), block.get("rollout_is_mode", "truncate")
    veto = block.get("rollout_is_veto_threshold", 1e-4)
    choice("rollout_is_level", level, tuple(K1_OF_LEVEL))
    choice("rollout_is_mode", mode, ("truncate", "clip", "mask"))
    normalize = flag("rollout_is_batch_normalize", block.get("rollout_is_batch_normalize", False))
    criteria: dict[str, Any] = {}
    if veto is not None:
        criteria["seq_max_k1"] = (number("rollout_is_veto_threshold", veto), None)
    if upper is None:
        return RolloutCorrectionConfig()                            # off, and nothing is measured

    threshold, counted = number("rollout_is_threshold", upper), None
    if lower is not None:
        low, _ = with_zero("rollout_is_threshold_lower", lower, threshold)
        counted = low or 0.0
    elif mode != "truncate":
        low = _reciprocal("rollout_is_threshold", threshold)
    if mode != "truncate":
        criteria = {K1_OF_LEVEL[level]: (low, threshold)} | criteria
    return RolloutCorrectionConfig(level, threshold, normalize, criteria, metrics_only=not applies,
                                   rollout_is_count_below=counted)


def from_verl(block: Mapping) -> RolloutCorrectionConfig:
    level: Any = block.get("rollout_is")
    threshold: Any = block.get("rollout_is_threshold", 2.0)
    if isinstance(threshold, str) and "_" in threshold:
        threshold = _opened(*interval("rollout_is_threshold", threshold.split("_")))
    if threshold is None:
        level, threshold = None, 2.0                                # verl: no threshold, no weights
    both = [_switch(block, key) for key in ("bypass_mode", "bypass_old_logprob_for_rollout")]
    bypass = any(both)                                                      # both are checked
    loss_type, rejection = _verl_loss(block, bypass), _verl_rejection(block)
    if bypass and block.get("rollout_rs") in K1_OF_LEVEL and loss_type == "ppo_clip" and (
            block.get("loss_type") is None):
        warnings.warn("rollout_rs rejects here; verl 0.6.1 computes its mask in decoupled mode "
                      "alone, and so rejects nothing under bypass_mode with PPO", stacklevel=2)
    return RolloutCorrectionConfig(level, cast(Any, threshold),
                                   _switch(block, "rollout_is_batch_normalize"), rejection, bypass,
                                   loss_type)


def _verl_loss(block: Mapping, bypass: bool) -> Any:
    """Return the loss that loss_type, its older switches, or policy_loss.loss_mode name."""
    loss_type, mode = block.get("loss_type"), block.get("loss_mode", "vanilla")
    loss_type = "ppo_clip" if loss_type is None else loss_type
    for key in ("use_policy_gradient", "use_pure_rollout_correction"):
        if _switch(block, key):
            if not bypass:
                raise ValueError(f"{key} needs bypass_mode true")
            loss_type = "reinforce"
    if loss_type in TRL_SUMS:
        raise ValueError(f"loss_type {loss_type!r} is TRL's: put use_vllm: true beside it, so that "
                         "the block is read as TRL's")
    choice("loss_mode", mode, (*VERL_MODES, *VERL_LOSSES))
    if mode in VERL_MODES or mode == loss_type:
        return loss_type
    if loss_type != "ppo_clip":
        raise ValueError(f"loss_mode {mode!r} and loss_type {loss_type!r} are two losses: verl "
                         "takes loss_mode")
    return mode


def _switch(block: Mapping, key: str) -> bool:
    """Return a switch of verl's, for which null is false, as a missing one is."""
    return block.get(key) is not None and flag(key, block[key])


def _verl_rejection(block: Mapping) -> dict[str, Any]:
    """Read rollout_rs of verl 0.6.1 (levels, bounds on ρ) or 0.9 (criteria, k1 bounds on 1/ρ)."""
    given, bound = block.get("rollout_rs"), block.get("rollout_rs_threshold")
    lower, veto = block.get("rollout_rs_threshold_lower"), block.get("rollout_token_veto_threshold")
    criteria = {}
    if given is not None:
        if not isinstance(given, str) or not given.replace(",", "").strip():
            raise ValueError(f"rollout_rs must name its criteria, such as 'token_k1,seq_mean_k3', "
                             f"not {given!r}")
        if given in K1_OF_LEVEL and "rollout_rs_threshold" not in block:
            bound = 2.0                     # since PR 3984, not rollout_is_threshold
        if bound is None:
            fault = "null" if "rollout_rs_threshold" in block else "missing"
            raise ValueError(f"rollout_rs is {given!r}, but rollout_rs_threshold is {fault}: it "
                             "must be a bound, such as 2.0")
        if given in K1_OF_LEVEL:
            upper = number("rollout_rs_threshold", bound)
            lower = _reciprocal("rollout_rs_threshold", upper) if lower is None else lower
            pair = with_zero("rollout_rs_threshold_lower", lower, upper)
            criteria[K1_OF_LEVEL[given]] = pair
        elif lower is not None:
            raise ValueError("rollout_rs_threshold_lower goes with rollout_rs: token, sequence or "
                             "geometric alone")
        else:
            criteria = _verl_criteria(given, str(bound))

    if veto is not None:
        criteria["seq_max_k1"] = (number("rollout_token_veto_threshold", veto), None)
    return criteria


TRL_SUMS = ("dapo", "grpo", "bnpo", "dr_grpo")          # PPO's clip, divided by different counts
VERL_LOSSES = ("gspo", "sapo", "cispo")
VERL_MODES = ("vanilla", "bypass_mode", "three_policies")           # under these loss_type chooses
K1_OF_LEVEL = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
VERL_CRITERIA = ("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
                 "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3")


def _verl_criteria(given: str, bounds: str) -> dict[str, Any]:
    """Read "token_k1,seq_mean_k3" with "0.5_2.0,0.01", or with one bound for all of them."""
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    parts = [part.strip() for part in bounds.split(",") if part.strip()]
    if len(parts) == 1:
        parts = parts * len(names)
    if len(parts) != len(names):
        raise ValueError(f"rollout_rs_threshold needs one bound or {len(names)}, one for each of "
                         f"rollout_rs, not {bounds!r}")
    for name in names:
        choice("rollout_rs", name, VERL_CRITERIA)
    return {name: _on_rho(part) if CRITERIA[name].read is interval
            else number("rollout_rs_threshold", part) for name, part in zip(names, parts)}


def _on_rho(text: str) -> tuple[float | None, float | None]:
    """Return verl 0.9's bound (log lo, log hi) on −log ρ as one on ρ, [1/hi, 1/lo]."""
    key = "rollout_rs_threshold"
    if "_" not in text and number(key, text) == math.inf:
        raise ValueError(f"{key} {text!r} bounds nothing: leave that criterion out")
    lo, hi = text.split("_", 1) if "_" in text else (_reciprocal(key, number(key, text)), text)
    lo, hi = cast(tuple[float, float], interval(key, (lo, hi)))        # neither end is open
    if not math.isclose(lo * hi, 1, rel_tol=1e-9):
        warnings.warn(f"{key} {text!r}: verl 0.9 bounds 1/ρ with it, which on ρ is [{1 / hi:.6g}, "
                      f"{1 / lo:.6g}]; write rollout_rs as a mapping to bound ρ itself",
                      stacklevel=2)
    return _opened(1 / hi, 1 / lo)


def _opened(low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """Return a pair with None for an end that is 0 or ∞ in float32: others write an open one so."""
    return (low if low is not None and low > 1e-38 else None,
            high if high is not None and high < 3e38 else None)


def _reciprocal(key: str, upper: float) -> float:
    """Return the lower end 1/u that goes with an upper end u alone."""
    if upper < 1:
        raise ValueError(f"{key} {upper:g} is below 1, so [1/u, u] is empty; a pair such as "
                         "'0.5_5' must stand in quotes, since YAML reads it as the number 0.55")
    return 1 / upper


def with_zero(key: str, low: Any, high: Any) -> tuple[float | None, float | None]:
    """Return a pair that bounds ρ, of which verl and SkyRL write an open lower end as 0.

    `key` is that of the lower end. A wrong upper end is reported under its own.
    """
    if high is not None and key.endswith("_low"):
        number(key.removesuffix("low") + "high", high)
    low, high = interval(key, (None if low == 0 and not isinstance(low, bool) else low, high))
    return low, None if high == math.inf and low is not None else high
