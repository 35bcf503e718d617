"""Find out whose configuration block a mapping is, and read it as ours.

meanings.py has the keys of each system, readers.py and readers_of_others.py read their blocks, and
export.py writes a configuration in their keys. Tensors do not occur here.

    from three_policies.interop.dialects import from_dialect
    config = from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import fields, replace
from typing import Any, NamedTuple

from three_policies.checks import choice, interval, is_list, nearest
from three_policies.interop import readers, readers_of_others as others
from three_policies.interop.meanings import OWN as OWN                       # re-exported
from three_policies.interop.meanings import (
    NEMO_RL, NEMO_RL_BESIDE, OPENRLHF, PRIME, READ, SKYRL, SLIME, TRL, UNREAD, VERL, VERL_060,
    VERL_TIS, of_unread, sentences)
from three_policies.presets import RolloutCorrectionConfig
from three_policies.rejection import CRITERIA

WRAPPERS = ("trainer", "loss", "algorithm", "actor_rollout_ref", "actor", "rollout",
            "rollout_correction", "off_policy_correction", "policy_loss", "cispo", "generator",
            "sampling_params", "algo", "advantage", "loss_fn", "slime")
ESTIMATOR = "advantage_estimator"                          # of slime also the loss
OF_ANY = ("metrics_only", "rollout_is_count_below")        # ours, beside a block of any system
BESIDE = {"calculate_log_probs", "logprobs", "_target_"}   # theirs; verl's dataclass has _target_
KEYS = dict.fromkeys(key for table in READ.values() for key in table)          # of all systems
KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}           # verl's names of the estimators


class Dialect(NamedTuple):
    """The keys of one system's block, and its reader."""

    keys: Mapping[str, str]                         # with what they mean here
    read: Callable[[Mapping[str, Any]], RolloutCorrectionConfig]


OF_OURS, OF_PRIME = Dialect(OWN, readers.from_own), Dialect(PRIME, others.from_prime)
OF_SKYRL, OF_TRL = Dialect(SKYRL, others.from_skyrl), Dialect(TRL, others.from_trl)
OF_OPENRLHF, OF_SLIME = Dialect(OPENRLHF, others.from_openrlhf), Dialect(SLIME, others.from_slime)
OF_NEMO_RL = Dialect(NEMO_RL, others.from_nemo_rl)
OF_VERL, OF_VERL_060 = Dialect(VERL, readers.from_verl), Dialect(VERL_060, readers.from_verl_060)
OF_VERL_TIS = Dialect(VERL_TIS, readers.from_verl_tis)


def from_dialect(mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """Return a block of another system's configuration as ours.

    The block may be flat or inside its sections (algorithm.rollout_correction,
    off_policy_correction, …), and keeps the meaning that it has there:
        verl PR 2953   tis_imp_ratio_cap, at first imp_ratio_cap or behav_imp_weight_cap
        verl 0.6.0     rollout_is_level, rollout_is_mode, rollout_is_threshold(_lower), …
        verl 0.6.1     rollout_rs: token | sequence | geometric, rollout_rs_threshold(_lower), …
        verl 0.9       rollout_rs: "token_k1,seq_mean_k3", rollout_rs_threshold: "0.5_2.0,0.01"
        SkyRL          tis_ratio_type, sequence_mask_metric, outlier_token_is_threshold_low, …
        TRL            vllm_importance_sampling_mode, …_clip_min, …_clip_max
        prime-rl       trainer.loss: type ipo (eps), icepop (ratio_low, …) or default (DPPO)
        OpenRLHF       is_correction_level, …_mode, …_gating, …_threshold
        slime          use_tis, tis_clip, tis_clip_low, use_rollout_logprobs, use_opsm
        NeMo-RL        loss_fn: truncated_importance_sampling_type, …_ratio, …_ratio_min
        this project   preset: NAME and/or the fields of RolloutCorrectionConfig

    `metrics_only` may stand beside any of them. verl 0.6.0's mode mask becomes weights plus
    rejection, as in the migration guide of verl PR 3984. verl 0.9's k1 bounds are on 1/ρ: they are
    inverted, with a warning where that makes a difference. Raises ValueError, naming the key, for
    anything else; of a system in meanings.UNREAD it says what its keys are here.
    """
    block, sections = {}, set[str]()
    _flatten(mapping, block, sections)
    of_any = {key: block.pop(key) for key in OF_ANY if key in block}
    theirs = "loss" in sections or not set(block) <= set(OWN) or _is_verls(block)
    if block.get("preset", "") is None and theirs:
        del block["preset"]                 # it was switched off, for a block of another system

    _refuse_unread(block)
    dialect = dialect_of(block, sections)
    _check_keys(block, sections, dialect)
    if dialect is OF_VERL_060 and "algorithm" in sections:
        # verl's configuration has rollout_is: false by default. A block outside any section is
        # read as the arguments of verl's function, which has no such switch.
        block.setdefault("rollout_is", False)

    config = dialect.read(block)
    config = replace(config, **of_any) if of_any else config
    _warn_of_bounds(config)
    if block.get("calculate_log_probs") is False and config != RolloutCorrectionConfig():
        raise ValueError("calculate_log_probs is false, but a correction needs the rollout's "
                         "log-probs")
    return config


def _refuse_unread(block: Mapping[str, Any]) -> None:
    """Raise ValueError if the block is that of a system which is only named here."""
    keys = set(block) - set(KEYS)
    if isinstance(block.get("rollout_is"), Mapping):        # as xtuner's file has it
        keys |= {*UNREAD["xtuner"]}
    if whose := of_unread(keys):
        raise ValueError(whose)


def dialect_of(block: Mapping[str, Any], sections: Iterable[str] = ()) -> Dialect:
    """Return whose flat block it is, by the keys or the values that no other system has."""
    keys = set(block) - BESIDE
    if "preset" in keys or isinstance(block.get("rollout_rs"), Mapping) \
            or is_list(block.get("rollout_is_threshold")) \
            or ("score_centering" in keys and keys <= set(OWN) and "loss" not in sections):
        return OF_OURS
    if "loss" in sections or keys & set(PRIME) - {"score_centering", "adv_tau", "kl_tau"}:
        return OF_PRIME                                         # the section may be empty
    if keys & set(TRL) - {"loss_type"}:
        return OF_TRL
    if "loss_fn" in sections or keys & set(NEMO_RL):
        return OF_NEMO_RL
    if "slime" in sections or keys & set(SLIME) - {"use_tis", ESTIMATOR} or (
            ESTIMATOR in keys and keys <= set(SLIME)):
        return OF_SLIME
    if keys & set(OPENRLHF) - {"policy_loss_type"} or "advantage" in sections:
        return OF_OPENRLHF
    if keys & set(SKYRL) - set(VERL_TIS) or "use_tis" in keys:
        return OF_SKYRL
    if keys & set(VERL_TIS):
        return OF_VERL_TIS
    if keys & set(VERL_060) - set(VERL) or isinstance(block.get("rollout_is"), bool):
        return OF_VERL_060
    return OF_VERL


def _check_keys(block: Mapping[str, Any], sections: Set[str], dialect: Dialect) -> None:
    """Raise ValueError if a key, or the section `loss`, belongs to another dialect or to none."""
    keys = set(block) - BESIDE
    if dialect is OF_OURS:
        # verl's configuration also has its own keys in the block; null says that they are not used.
        keys = {key for key in keys if key in OWN or key not in VERL or block[key] is not None}
    if dialect is OF_PRIME:
        choice("type", block.get("type", "ipo"), others.PRIME_TYPES)
    if dialect is OF_NEMO_RL:
        keys -= NEMO_RL_BESIDE
    if dialect is not OF_SLIME:
        keys -= {ESTIMATOR}

    preset = " than the key 'preset'; correction.preset=null switches that off" * ("preset" in keys)
    for key in keys - set(dialect.keys):
        mixed = (f" here: it belongs to another dialect{preset}" if key in KEYS
                 else nearest(key, KEYS))
        raise ValueError(f"correction has no key {key!r}{mixed}")
    if dialect is OF_OURS and "loss" in sections:       # also an empty one has a meaning
        raise ValueError("correction has the section 'loss' here: it belongs to another dialect"
                         f"{preset}")


def _warn_of_bounds(config: RolloutCorrectionConfig):
    """Warn of bounds that exclude ρ = 1, where both policies agree."""
    bounds: dict[str, Any] = {
        f"rollout_rs.{name}": bound for name, bound in config.rollout_rs.items()
        if CRITERIA[name].read is interval}
    if config.rollout_is is not None:
        bounds["rollout_is_threshold"] = config.rollout_is_threshold
    for key, bound in bounds.items():
        low, high = bound if isinstance(bound, tuple) else (None, bound)
        if (low is not None and low > 1) or (high is not None and high < 1):
            pair = isinstance(bound, tuple)
            shown = f"[{low}, {high}]" if pair else f"{high:g}"
            quotes = ("; a pair such as verl's 0.5_5 must stand in quotes, because YAML reads it "
                      "as the number 0.55") * (not pair)
            warnings.warn(f"{key}={shown} leaves out ρ = 1, so it acts where both policies agree"
                          f"{quotes}", stacklevel=3)


def meanings_of(mapping: Mapping[str, Any]) -> list[str]:
    """Return "key: what it means here" for each key of a block that is another system's."""
    block, sections = {}, set[str]()
    _flatten(mapping, block, sections)
    return sentences(block, dialect_of(block, sections).keys)


def own_keys(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Return a configuration in this project's keys, those alone that differ from the default.

    `from_dialect` reads them back as the same configuration. {} corrects nothing.
    """
    given = {of.name: getattr(config, of.name) for of in fields(config)}
    given["rollout_rs"] = dict(given["rollout_rs"])
    default = RolloutCorrectionConfig()
    return {key: value for key, value in given.items() if value != getattr(default, key)}


def _is_verls(block: Mapping) -> bool:
    """True if only verl's key of this name takes such a value, and ours does not."""
    threshold = block.get("rollout_is_threshold", 2.0)
    return (isinstance(block.get("rollout_rs"), str) or isinstance(block.get("rollout_is"), bool)
            or threshold is None or (isinstance(threshold, str) and "_" in threshold))


def kl_kind(name: str) -> str:
    """Return our name of verl's KL estimator, with its "+" if it has one; ours stay as they are."""
    base = name.removesuffix("+")
    return KL_NAMES.get(base, base) + name[len(base):]


def _flatten(mapping: Any, into: dict[str, Any], sections: set[str],
             name: str = "correction") -> None:
    """Put the settings of a block into one mapping, and the names of its sections into a set."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{name} must be a mapping of settings, not {mapping!r}")
    for key, value in mapping.items():
        if key == "rollout_correction" and name == "policy_loss" and isinstance(value, str):
            continue                        # verl's copy of the block: "${algorithm.…}"
        if key in WRAPPERS:
            sections.add(key)
            _flatten({} if value is None else value, into, sections, key)
        elif not isinstance(key, str) or key in into:
            fault = "given twice" if isinstance(key, str) else "no name"
            raise ValueError(f"correction key {key!r} is {fault}")
        else:
            into[key] = value
