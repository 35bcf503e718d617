"""Read other systems' configuration blocks for the same corrections as ours.

This file decides what verl 0.6.0, 0.6.1, 0.9, SkyRL and prime-rl mean by their keys. A key that is
left out has their default; null is off or refused, as it is there. Where a document and
the released code differ, a table of interop/README.md names both. Tensors do not occur here.

    from three_policies.interop.dialects import from_dialect
    config = from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, cast

from three_policies.checks import choice, flag, interval, is_list, nearest, number
from three_policies.presets import PRESETS, RolloutCorrectionConfig
from three_policies.rejection import CRITERIA

WRAPPERS = ("trainer", "loss", "algorithm", "actor_rollout_ref", "actor", "rollout",
            "rollout_correction", "off_policy_correction")
VERL_TIS = ("use_tis", "tis_imp_ratio_cap", "imp_ratio_cap", "behav_imp_weight_cap")
VERL_060 = ("rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold",
            "rollout_is_threshold_lower", "rollout_is_veto_threshold", "rollout_is_batch_normalize")
VERL = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
        "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold",
        "bypass_mode", "bypass_old_logprob_for_rollout", "loss_type", "use_policy_gradient",
        "use_pure_rollout_correction")
SKYRL = (
    "use_tis", "tis_imp_ratio_cap", "tis_ratio_type", "token_tis_ratio_clip_high",
    "sequence_tis_ratio_clip_high",
    "sequence_mask_metric", "product_mask_low", "product_mask_high", "geo_mask_low",
    "geo_mask_high", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low", "token_mask_is_threshold_high")
PRIME = ("type", "eps", "ipo_threshold", "max_importance_ratio", "dppo_mask_low", "dppo_mask_high",
         "ratio_low", "ratio_high", "score_centering", "adv_tau", "kl_tau")
PRIME_TYPES = ("ipo", "icepop", "default")
OWN = ("preset", *(f.name for f in fields(RolloutCorrectionConfig)))
OF_ANY = ("metrics_only", "rollout_is_count_below")        # ours, beside a block of any system
KEYS = dict.fromkeys((*OWN, *VERL, *VERL_060, *VERL_TIS, *SKYRL, *PRIME))           # of all systems
KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}           # verl's names of the estimators


def from_dialect(mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """Return a block of verl's, SkyRL's or prime-rl's configuration as ours.

    The block may be flat or inside its sections (algorithm.rollout_correction,
    off_policy_correction, …), and keeps the meaning that it has there:
        verl PR 2953   tis_imp_ratio_cap, at first imp_ratio_cap or behav_imp_weight_cap
        verl 0.6.0     rollout_is_level, rollout_is_mode, rollout_is_threshold(_lower), …
        verl 0.6.1     rollout_rs: token | sequence | geometric, rollout_rs_threshold(_lower), …
        verl 0.9       rollout_rs: "token_k1,seq_mean_k3", rollout_rs_threshold: "0.5_2.0,0.01"
        SkyRL          tis_ratio_type, sequence_mask_metric, outlier_token_is_threshold_low, …
        prime-rl       trainer.loss: type ipo (eps), icepop (ratio_low, …) or default (DPPO)
        this project   preset: NAME and/or the fields of RolloutCorrectionConfig

    `metrics_only` may stand beside any of them. verl 0.6.0's mode mask becomes weights plus
    rejection, as in the migration guide of verl PR 3984. verl 0.9's k1 bounds are on 1/ρ: they are
    inverted, with a warning where that makes a difference. Raises ValueError, naming the key, for
    anything else.
    """
    block, sections = {}, set[str]()
    _flatten(mapping, block, sections)
    of_any = {key: block.pop(key) for key in OF_ANY if key in block}
    theirs = "loss" in sections or not set(block) <= set(OWN) or _is_verls(block)
    if block.get("preset", "") is None and theirs:
        del block["preset"]                 # it was switched off, for a block of another system
    keys = set(block) - {"calculate_log_probs", "_target_"}     # _target_: verl's dataclass has it
    if "preset" in keys or isinstance(block.get("rollout_rs"), Mapping) \
            or is_list(block.get("rollout_is_threshold")) \
            or ("score_centering" in keys and keys <= set(OWN) and "loss" not in sections):
        read, allowed = _from_own, OWN
        # verl's configuration also has its own keys in the block; null says that they are not used.
        keys = {key for key in keys if key in OWN or key not in VERL or block[key] is not None}
    elif "loss" in sections or keys & {"type", *PRIME[:8]}:    # the section may be empty
        read, allowed = _from_prime, PRIME
    elif keys & set(SKYRL) - set(VERL_TIS) or "use_tis" in keys:
        read, allowed = _from_skyrl, SKYRL
    elif keys & set(VERL_TIS):
        read, allowed = _from_verl_tis, VERL_TIS
    elif keys & set(VERL_060) - set(VERL) or isinstance(block.get("rollout_is"), bool):
        read, allowed = _from_verl_060, VERL_060
    else:
        read, allowed = _from_verl, VERL
    if read is _from_prime:
        choice("type", block.get("type", "ipo"), PRIME_TYPES)
    for key in keys:
        if key not in allowed:
            mixed = " here: it belongs to another dialect" if key in KEYS else nearest(key, KEYS)
            if key in KEYS and "preset" in keys:
                mixed += " than the key 'preset'; correction.preset=null switches that off"
            raise ValueError(f"correction has no key {key!r}{mixed}")
    if read is _from_own and "loss" in sections:        # also an empty one has a meaning
        raise ValueError("correction has the section 'loss' here: it belongs to another dialect" + (
            " than the key 'preset'; correction.preset=null switches that off" if "preset" in keys
            else ""))
    if read is _from_verl_060 and "algorithm" in sections:
        # verl's configuration has rollout_is: false by default. A block outside any section is
        # read as the arguments of verl's function, which has no such switch.
        block.setdefault("rollout_is", False)
    config = read(block)
    config = replace(config, **of_any) if of_any else config
    _warn_of_bounds(config)
    if block.get("calculate_log_probs") is False and config != RolloutCorrectionConfig():
        raise ValueError("calculate_log_probs is false, but a correction needs the rollout's "
                         "log-probs")
    return config


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


def own_keys(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Return a configuration in this project's keys, those alone that differ from the default.

    `from_dialect` reads them back as the same configuration. {} corrects nothing.
    """
    given = {of.name: getattr(config, of.name) for of in fields(config)}
    given["rollout_rs"] = dict(given["rollout_rs"])
    default = RolloutCorrectionConfig()
    return {key: value for key, value in given.items() if value != getattr(default, key)}


def _is_verls(block: Mapping) -> bool:
    """Tell whether a value is one that verl's keys of the same name have, and ours have not."""
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
        if key in WRAPPERS:
            sections.add(key)
            _flatten({} if value is None else value, into, sections, key)
        elif not isinstance(key, str) or key in into:
            fault = "given twice" if isinstance(key, str) else "no name"
            raise ValueError(f"correction key {key!r} is {fault}")
        else:
            into[key] = value


def _from_own(block: Mapping) -> RolloutCorrectionConfig:
    config = RolloutCorrectionConfig()
    if block.get("preset") is not None:
        choice("correction.preset", block["preset"], tuple(PRESETS))
        config = PRESETS[block["preset"]]()
    changed = replace(config, **{key: block[key] for key in OWN[1:] if key in block})
    one = {"seq_sum_k1": (None, config.rollout_is_threshold)}          # seq_mis: one for both
    if config.rollout_rs == one == changed.rollout_rs and (
            changed.rollout_is_threshold != config.rollout_is_threshold):
        warnings.warn(f"rollout_is_threshold changes the weights of {block['preset']} alone, which "
                      f"still rejects above {config.rollout_is_threshold:g}: give "
                      "rollout_rs.seq_sum_k1 as well", stacklevel=2)
    return changed


def _from_verl_tis(block: Mapping) -> RolloutCorrectionConfig:
    given = [key for key in VERL_TIS[1:] if key in block]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are one setting: give one of them")
    cap = block[given[0]]
    off = cap is None or (isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap <= 0)
    return RolloutCorrectionConfig() if off else RolloutCorrectionConfig(
        "token", number(given[0], cap))


def _from_verl_060(block: Mapping) -> RolloutCorrectionConfig:
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
        low, _ = _with_zero("rollout_is_threshold_lower", lower, threshold)
        counted = low or 0.0
    elif mode != "truncate":
        low = _reciprocal("rollout_is_threshold", threshold)
    if mode != "truncate":
        criteria = {K1_OF_LEVEL[level]: (low, threshold)} | criteria
    return RolloutCorrectionConfig(level, threshold, normalize, criteria, metrics_only=not applies,
                                   rollout_is_count_below=counted)


def _from_verl(block: Mapping) -> RolloutCorrectionConfig:
    get = block.get
    level: Any = get("rollout_is")
    threshold: Any = get("rollout_is_threshold", 2.0)
    if isinstance(threshold, str) and "_" in threshold:
        threshold = interval("rollout_is_threshold", threshold.split("_"))
    if threshold is None:
        level, threshold = None, 2.0                                # verl: no threshold, no weights
    both = [_switch(block, key) for key in ("bypass_mode", "bypass_old_logprob_for_rollout")]
    bypass = any(both)                                                      # both are checked
    loss_type: Any = "ppo_clip" if get("loss_type") is None else get("loss_type")
    for key in ("use_policy_gradient", "use_pure_rollout_correction"):
        if _switch(block, key):
            if not bypass:
                raise ValueError(f"{key} needs bypass_mode true")
            loss_type = "reinforce"
    rejection = _verl_rejection(block)
    if bypass and get("rollout_rs") in K1_OF_LEVEL and loss_type == "ppo_clip" and (
            get("loss_type") is None):
        warnings.warn("rollout_rs rejects here; verl 0.6.1 computes its mask in decoupled mode "
                      "alone, and so rejects nothing under bypass_mode with PPO", stacklevel=2)
    return RolloutCorrectionConfig(level, cast(Any, threshold),
                                   _switch(block, "rollout_is_batch_normalize"), rejection, bypass,
                                   loss_type)


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
            pair = _with_zero("rollout_rs_threshold_lower", lower, upper)
            criteria[K1_OF_LEVEL[given]] = pair
        elif lower is not None:
            raise ValueError("rollout_rs_threshold_lower goes with rollout_rs: token, sequence or "
                             "geometric alone")
        else:
            criteria = _verl_criteria(given, str(bound))
    if veto is not None:
        criteria["seq_max_k1"] = (number("rollout_token_veto_threshold", veto), None)
    return criteria


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


def _on_rho(text: str) -> tuple[float | None, float]:
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
    return 1 / hi or None, 1 / lo                       # hi may be inf


def _reciprocal(key: str, upper: float) -> float:
    """Return the lower end 1/u that goes with an upper end u alone."""
    if upper < 1:
        raise ValueError(f"{key} {upper:g} is below 1, so [1/u, u] is empty; a pair such as "
                         "'0.5_5' must stand in quotes, since YAML reads it as the number 0.55")
    return 1 / upper


def _from_skyrl(block: Mapping) -> RolloutCorrectionConfig:
    get, criteria, cap = block.get, {}, 2.0
    level, metric = get("tis_ratio_type"), get("sequence_mask_metric")
    if flag("use_tis", get("use_tis", False)):
        if get("tis_imp_ratio_cap") is None:
            raise ValueError("use_tis is true, but tis_imp_ratio_cap is missing")
        level, cap = "token", number("tis_imp_ratio_cap", get("tis_imp_ratio_cap"))
    elif level is not None:
        choice("tis_ratio_type", level, ("token", "sequence"))
        key, default = {"token": ("token_tis_ratio_clip_high", 2.0),
                        "sequence": ("sequence_tis_ratio_clip_high", 5.0)}[level]
        cap = number(key, get(key, default))
    low, high = get("outlier_token_is_threshold_low"), get("outlier_token_is_threshold_high")
    if high is not None or (low is not None and (isinstance(low, bool) or low != 0)):
        criteria["seq_max_k1"] = _with_zero("outlier_token_is_threshold_low", low, high)
        if level is None and metric is None:
            warnings.warn("outlier_token_is_threshold_low and _high act by themselves here, as in "
                          "SkyRL 0.3 and 0.4; in SkyRL's pull request 849 they acted only "
                          "beside tis_ratio_type or sequence_mask_metric", stacklevel=2)
    low, high = get("token_mask_is_threshold_low"), get("token_mask_is_threshold_high")
    if low is not None and high is not None:
        criteria["token_k1"] = _with_zero("token_mask_is_threshold_low", low, high)
    elif low is not None or high is not None:
        raise ValueError("token_mask_is_threshold_low and token_mask_is_threshold_high go "
                         "together: SkyRL ignores one alone")
    if metric is not None:
        choice("sequence_mask_metric", metric, ("product", "geometric"))
        name, prefix, low, high = {"product": ("seq_sum_k1", "product_mask", 0.5, 2.0),
                                   "geometric": ("seq_mean_k1", "geo_mask", 0.99, 1.01)}[metric]
        criteria[name] = _with_zero(f"{prefix}_low", get(f"{prefix}_low", low),
                                    get(f"{prefix}_high", high))
    if "token_k1" in criteria and (level == "sequence" or metric is not None):
        warnings.warn("token_mask_is_threshold_low and _high beside the ratio of a sequence: SkyRL "
                      "takes that ratio of what its mask left, and here it is of all tokens",
                      stacklevel=2)
    return RolloutCorrectionConfig(level, cap, rollout_rs=criteria)


def _with_zero(key: str, low: Any, high: Any) -> tuple[float | None, float | None]:
    """Return a pair that bounds ρ, of which verl and SkyRL write an open lower end as 0.

    `key` is that of the lower end. A wrong upper end is reported under its own.
    """
    if high is not None and key.endswith("_low"):
        number(key.removesuffix("low") + "high", high)
    return interval(key, (None if low == 0 and not isinstance(low, bool) else low, high))


def _from_prime(block: Mapping) -> RolloutCorrectionConfig:
    """Read prime-rl's [trainer.loss]: gradient ρ A ∇log π with ρ = π_θ/μ, and a mask of tokens.

    IPO's defaults are those since September 2026: eps 0.3 (PR 3586), and ρ capped at 1e4. The
    release with ipo_threshold has no cap. Nor has `default`, the DPPO that was the default from
    February to August. The reward's temperature adv_tau and the term kl_tau (log ρ)² are not part
    of the correction.
    """
    get, kind = block.get, block.get("type", "ipo")
    own = {"ipo": ("eps", "ipo_threshold", "max_importance_ratio", "score_centering"),
           "icepop": ("ratio_low", "ratio_high"), "default": ("dppo_mask_low", "dppo_mask_high")}
    for key in set(block) - {"type", "adv_tau", "kl_tau", *own[kind]}:
        raise ValueError(f"{key} is no setting of prime-rl's loss type {kind}"
                         + nearest(key, own[kind]))
    for key, neutral in (("adv_tau", 1), ("kl_tau", 0)):
        if get(key, neutral) != neutral:
            raise ValueError(f"{key} must be {neutral}, not {get(key)!r}: it is no correction, and "
                             "nothing here stands for it")
    policy_gradient = {"bypass_mode": True, "loss_type": "reinforce"}
    if kind == "icepop":
        number("ratio_high", get("ratio_high", 5.0))
        pair = interval("ratio_low", (get("ratio_low", 0.2), get("ratio_high", 5.0)))
        return RolloutCorrectionConfig("token", pair, **policy_gradient)
    if kind == "ipo":
        if {"eps", "ipo_threshold"} <= set(block):
            raise ValueError("eps and ipo_threshold are one setting: give one of them")
        key, cap = ("ipo_threshold", math.inf) if "ipo_threshold" in block else ("eps", 1e4)
        criteria = {"token_tv": number(key, get(key, 0.3))}
        if "max_importance_ratio" in block:
            cap = number("max_importance_ratio", block["max_importance_ratio"])
            if not 1 <= cap < math.inf:
                raise ValueError("max_importance_ratio must be a finite number of at least 1, not "
                                 f"{block['max_importance_ratio']!r}")
    else:
        low, high = get("dppo_mask_low", 0.2), get("dppo_mask_high", 0.2)
        if low != high:
            raise ValueError(f"dppo_mask_low and dppo_mask_high must be equal, not {low!r} and "
                             f"{high!r}: token_tv_outward has one bound")
        criteria, cap = {"token_tv_outward": number("dppo_mask_high", high)}, math.inf
    return RolloutCorrectionConfig("token", cap, rollout_rs=criteria, **policy_gradient,
                                   score_centering=get("score_centering", False))
