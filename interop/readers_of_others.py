"""Read the blocks of SkyRL, TRL, prime-rl, OpenRLHF, slime and NeMo-RL.

A key that is left out has their default. What nothing here does is refused by the key's name.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from three_policies.checks import choice, flag, interval, is_list, nearest, number
from three_policies.interop.readers import TRL_SUMS, with_zero
from three_policies.presets import RolloutCorrectionConfig


def from_skyrl(block: Mapping) -> RolloutCorrectionConfig:
    """Read SkyRL's off_policy_correction, and policy_loss_type beside it."""
    level, cap = _skyrl_weights(block)
    criteria = _skyrl_tokens(block) | _skyrl_sequences(block)
    by_sequence = bool({"seq_sum_k1", "seq_mean_k1"} & set(criteria))
    if "seq_max_k1" in criteria and level is None and not by_sequence:
        warnings.warn("outlier_token_is_threshold_low and _high act by themselves here, as in "
                      "SkyRL 0.3 and 0.4; in SkyRL's pull request 849 they acted only "
                      "beside tis_ratio_type or sequence_mask_metric", stacklevel=2)
    if "token_k1" in criteria and (level == "sequence" or by_sequence):
        warnings.warn("token_mask_is_threshold_low and _high beside the ratio of a sequence: SkyRL "
                      "takes that ratio of what its mask left, and here it is of all tokens",
                      stacklevel=2)

    loss_type = block.get("policy_loss_type", "regular")
    choice("policy_loss_type", loss_type, tuple(SKYRL_LOSSES))
    choice("cispo_anchor", block.get("cispo_anchor", "old"), ("old", "rollout"))
    around_rollout = loss_type == "rollout_is" or (
        loss_type == "cispo" and block.get("cispo_anchor") == "rollout")
    if around_rollout and (level is not None or criteria):
        raise ValueError(f"policy_loss_type {loss_type!r} is around π_rollout, and SkyRL's "
                         "off_policy_correction beside it is of π_old: give one of them")
    if loss_type == "rollout_is":
        level, cap = "token", _skyrl_pair(block)
    return RolloutCorrectionConfig(level, cap, rollout_rs=criteria, bypass_mode=around_rollout,
                                   loss_type=SKYRL_LOSSES[loss_type])


SKYRL_LOSSES = {"regular": "ppo_clip", "dual_clip": "ppo_clip", "gspo": "gspo", "sapo": "sapo",
                "cispo": "cispo", "rollout_is": "reinforce"}


def _skyrl_weights(block: Mapping) -> tuple[Any, Any]:
    """Return the level of the weights, or None, and their C."""
    level = block.get("tis_ratio_type")
    if flag("use_tis", block.get("use_tis", False)):
        if block.get("tis_imp_ratio_cap") is None:
            raise ValueError("use_tis is true, but tis_imp_ratio_cap is missing")
        return "token", number("tis_imp_ratio_cap", block["tis_imp_ratio_cap"])
    if level is None:
        return None, 2.0
    choice("tis_ratio_type", level, ("token", "sequence"))
    key, default = {"token": ("token_tis_ratio_clip_high", 2.0),
                    "sequence": ("sequence_tis_ratio_clip_high", 5.0)}[level]
    return level, number(key, block.get(key, default))


def _skyrl_tokens(block: Mapping) -> dict[str, Any]:
    """Read the thresholds of outliers, which may stand alone, and of tokens, which may not."""
    criteria: dict[str, Any] = {}
    low, high = (block.get(f"outlier_token_is_threshold_{end}") for end in ("low", "high"))
    if high is not None or (low is not None and (isinstance(low, bool) or low != 0)):
        criteria["seq_max_k1"] = with_zero("outlier_token_is_threshold_low", low, high)
    low, high = (block.get(f"token_mask_is_threshold_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        criteria["token_k1"] = with_zero("token_mask_is_threshold_low", low, high)
    elif low is not None or high is not None:
        raise ValueError("token_mask_is_threshold_low and token_mask_is_threshold_high go "
                         "together: SkyRL ignores one alone")
    return criteria


def _skyrl_sequences(block: Mapping) -> dict[str, Any]:
    metric = block.get("sequence_mask_metric")
    if metric is None:
        return {}
    choice("sequence_mask_metric", metric, ("product", "geometric"))
    name, prefix, low, high = {"product": ("seq_sum_k1", "product_mask", 0.5, 2.0),
                               "geometric": ("seq_mean_k1", "geo_mask", 0.99, 1.01)}[metric]
    return {name: with_zero(f"{prefix}_low", block.get(f"{prefix}_low", low),
                             block.get(f"{prefix}_high", high))}


def _skyrl_pair(block: Mapping) -> tuple[float | None, float | None]:
    """Return [1 − eps_clip_low, 1 + eps_clip_high], outside which rollout_is drops a token."""
    low, high = (number(key, block.get(key, 0.2)) for key in ("eps_clip_low", "eps_clip_high"))
    return with_zero("eps_clip_low", 1 - low, 1 + high)


def from_trl(block: Mapping) -> RolloutCorrectionConfig:
    """Read TRL 1.16's GRPOConfig, whose correction is on by default; use_vllm is taken as true.

    A loss_type that only says what divides the sum, such as dapo, is PPO's clip here. The older
    name …_cap of …_clip_max goes before it, as in TRL.
    """
    get, loss = block.get, block.get("loss_type", "dapo")
    if get("off_policy_mask_threshold") is not None:
        raise ValueError("off_policy_mask_threshold must be null: it compares π_θ, not π_old, with "
                         "π_rollout, which rollout_rs: {opsm: δ} does in bypass mode alone")
    choice("loss_type", loss, (*TRL_SUMS, *TRL_LOSSES))
    loss = loss if loss in TRL_LOSSES else "ppo_clip"
    mode = get("vllm_importance_sampling_mode", "sequence_mask")
    choice("vllm_importance_sampling_mode", mode, TRL_MODES)
    if not (flag("use_vllm", get("use_vllm", True)) and flag(
            f"{IS}_correction", get(f"{IS}_correction", True))):
        return RolloutCorrectionConfig(loss_type=loss)

    level, kind = mode.split("_")
    high, low = get(f"{IS}_clip_max", 3.0), get(f"{IS}_clip_min")
    high = math.inf if high is None else number(f"{IS}_clip_max", high)
    if get(f"{IS}_cap") is not None:
        high = number(f"{IS}_cap", get(f"{IS}_cap"))
    if low is None and kind == "truncate":
        return RolloutCorrectionConfig(level, high, loss_type=loss)
    if kind == "truncate":
        raise ValueError("vllm_importance_sampling_clip_min must be null with "
                         f"vllm_importance_sampling_mode {mode}: it raises small ratios, which "
                         "nothing here does")
    pair = with_zero("vllm_importance_sampling_clip_min", low, high)
    return RolloutCorrectionConfig(level, high if pair == (None, math.inf) else pair,
                                   loss_type=loss)


IS = "vllm_importance_sampling"
TRL_LOSSES = ("cispo", "sapo")
TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
PRIME_TYPES = ("ipo", "icepop", "default")


def from_prime(block: Mapping) -> RolloutCorrectionConfig:
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


def from_openrlhf(block: Mapping) -> RolloutCorrectionConfig:
    """Read OpenRLHF 0.11's is_correction_* and policy_loss_type, or the …_enable and _type before.

    Its mask keeps ρ, uncapped, where the statistic is within its bounds: ρ itself, or for level seq
    the geometric mean; tv and binary_kl have an upper bound alone. GSPO with a correction clips
    around π_rollout and looks at no bound.
    """
    get, loss = block.get, block.get("policy_loss_type", "ppo")
    choice("policy_loss_type", loss, ("ppo", "gspo"))
    loss = "ppo_clip" if loss == "ppo" else str(loss)
    old = get("is_correction_type", "tis")
    choice("is_correction_type", old, ("tis", "icepop", "seq-mask-tis"))
    on = flag("is_correction_enable", get("is_correction_enable", "is_correction_type" in block))
    level = get("is_correction_level", ("token", "seq")[old == "seq-mask-tis"] if on else "off")
    level = "off" if level is False else level              # YAML 1.1 reads off as false
    mode = get("is_correction_mode", "clip" if on and old == "tis" else "mask")
    gate = get("is_correction_gating", "ratio")
    choice("is_correction_level", level, ("off", "token", "seq"))
    choice("is_correction_mode", mode, ("mask", "clip"))
    choice("is_correction_gating", gate, ("ratio", "binary_kl", "tv"))
    if level == "off":
        return RolloutCorrectionConfig(loss_type=loss)
    if mode == "clip" and (level, gate) != ("token", "ratio"):
        raise ValueError("is_correction_mode clip requires is_correction_level token and "
                         "is_correction_gating ratio")
    if loss == "gspo":
        return RolloutCorrectionConfig(bypass_mode=True, loss_type=loss)

    key, bounds = "is_correction_threshold", get("is_correction_threshold", (0.5, 5.0))
    bounds = [*bounds] if is_list(bounds) else [bounds]
    pair = with_zero(key, *([None, *bounds] if len(bounds) == 1 else bounds[:2]))
    if len(bounds) > 2:
        raise ValueError(f"{key} must be one number or two, not {bounds!r}")
    if mode == "clip":
        return RolloutCorrectionConfig("token", _capped(key, pair), loss_type=loss)
    if gate == "ratio" and level == "token":
        return RolloutCorrectionConfig(
            "token", math.inf if pair == (None, math.inf) else pair, loss_type=loss)
    if gate != "ratio" and pair[0] is not None:
        raise ValueError(f"{key} must be one upper bound with is_correction_gating {gate}, not "
                         f"{bounds!r}")
    bound = pair if gate == "ratio" else number(key, pair[1])
    criteria = {} if pair == (None, math.inf) else {OPENRLHF_GATES[level, gate]: bound}
    if "token_binary_kl" in criteria:
        warnings.warn("is_correction_gating binary_kl of tokens is KL(μ‖π) in OpenRLHF; here "
                      "token_binary_kl is the larger of both directions", stacklevel=2)
    return RolloutCorrectionConfig("token", math.inf, rollout_rs=criteria, loss_type=loss)


OPENRLHF_GATES = {("seq", "ratio"): "seq_mean_k1", ("token", "tv"): "token_tv",
                  ("seq", "tv"): "seq_mean_tv", ("token", "binary_kl"): "token_binary_kl",
                  ("seq", "binary_kl"): "seq_mean_binary_kl"}
SLIME_LOSSES = ("gspo", "cispo")
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


def _capped(key: str, pair: tuple[float | None, float | None]) -> float:
    """Return the C of clamp(ρ, 0, C); a lower end above 0 would raise small ratios."""
    if pair[0] is not None:
        raise ValueError(f"{key} must begin at 0, not at {pair[0]:g}: its clip raises small "
                         "ratios, which nothing here does")
    return math.inf if pair[1] is None else pair[1]


def from_slime(block: Mapping) -> RolloutCorrectionConfig:
    """Read slime's --use-tis, --use-opsm and --use-rollout-logprobs, and what goes with them."""
    get, loss = block.get, block.get("advantage_estimator", "grpo")
    loss = loss if loss in SLIME_LOSSES else "ppo_clip"
    weights, bypass, opsm = (flag(key, get(key, False)) for key in (
        "use_tis", "use_rollout_logprobs", "use_opsm"))
    if bypass and weights:
        raise ValueError("use_tis and use_rollout_logprobs cannot both be true: slime refuses it")
    if opsm and not bypass:
        raise ValueError("use_opsm needs use_rollout_logprobs here: without it slime compares π_θ "
                         "with π_old, and opsm judges how far π_rollout is")
    criteria = {"opsm": number("opsm_delta", get("opsm_delta", 1e-4))} if opsm else {}
    if not weights:
        return RolloutCorrectionConfig(rollout_rs=criteria, bypass_mode=bypass, loss_type=loss)

    pair = with_zero("tis_clip_low", get("tis_clip_low", 0), number("tis_clip", get("tis_clip", 2)))
    function = get("custom_tis_function_path")
    if function is not None and not str(function).endswith("icepop_function"):
        raise ValueError(f"custom_tis_function_path {function!r} is a function of your own: only "
                         "icepop_function can be read")
    if function is None:
        return RolloutCorrectionConfig("token", _capped("tis_clip_low", pair), loss_type=loss)
    return RolloutCorrectionConfig("token", math.inf if pair == (None, math.inf) else pair,
                                   loss_type=loss)


def from_nemo_rl(block: Mapping) -> RolloutCorrectionConfig:
    """Read NeMo-RL's loss_fn: weights of π_old/π_generation, of tokens or, with GSPO, sequences."""
    get, of = block.get, "truncated_importance_sampling"
    weights, whole, cispo, bare = (flag(key, get(key, False)) for key in (
        "use_importance_sampling_correction", "sequence_level_importance_ratios", "use_cispo",
        "disable_ppo_ratio"))
    flag("force_on_policy_ratio", get("force_on_policy_ratio", False))
    if bare:
        raise ValueError("disable_ppo_ratio must be false: it is REINFORCE weighted by π_old, and "
                         "reinforce here is weighted by π_θ")
    loss = "gspo" if whole else "cispo" if cispo else "ppo_clip"
    high, kind = get(f"{of}_ratio"), get(f"{of}_type")
    if not weights:
        if high is not None:
            raise ValueError(f"{of}_ratio needs use_importance_sampling_correction true")
        return RolloutCorrectionConfig(loss_type=loss)
    level = "sequence" if whole else "token"
    if high is None:
        return RolloutCorrectionConfig(level, math.inf, loss_type=loss)

    choice(f"{of}_type", kind, ("tis", "icepop", "seq-mask-tis"))
    if kind == "tis":
        return RolloutCorrectionConfig(level, number(f"{of}_ratio", high), loss_type=loss)
    if get(f"{of}_ratio_min") is None:
        raise ValueError(f"{of}_ratio_min is missing: {kind} needs it")
    pair = with_zero(f"{of}_ratio_min", get(f"{of}_ratio_min"), number(f"{of}_ratio", high))
    if kind == "icepop" or pair == (None, math.inf):
        bound = math.inf if pair == (None, math.inf) else pair
        return RolloutCorrectionConfig(level, bound, loss_type=loss)
    if whole:
        raise ValueError(f"{of}_type seq-mask-tis goes without sequence_level_importance_ratios")
    return RolloutCorrectionConfig(level, math.inf, rollout_rs={"seq_mean_k1": pair},
                                   loss_type=loss)
