"""Remarks on settings that are accepted but have no effect, since another switches them off.

Nothing here refuses anything; training/settings.py does. Each sentence names the setting, what it
does in this configuration, and what to take in its place.
"""

import functools
import math
import warnings
from dataclasses import fields

from three_policies.interop.dialects import from_dialect
from three_policies.presets import RolloutCorrectionConfig
from three_policies.rejection import CRITERIA
from three_policies.surrogates import LOSSES
from three_policies.training.settings import (ROOT, SECTIONS, TEXT_KINDS, Config, correction_of,
                                              default_of, kl_of, read_mapping)


def remarks(config: Config) -> list[str]:
    """Return a sentence on each setting that is accepted but does not do what its name says."""
    return [*kl_remarks(config), *loss_remarks(config), *correction_remarks(config),
            *train_remarks(config),
            *(f"{name} has no effect: {why}" for name, why in idle(config).items()),
            *task_remarks(config), *rollout_remarks(config), *candidate_remarks(config)]


def correction_remarks(config: Config) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = from_dialect(config.correction)
    found = [f"correction: {warning.message}" for warning in caught]
    if options.metrics_only and options.rollout_is is None and not options.rollout_rs:
        found.append("correction.metrics_only=true measures nothing more: it has neither weights "
                     "nor criteria")
    elif options.metrics_only:
        found.append("correction: weights and criteria are measured, and none of them is applied" +
                     "; the loss's own ratio to π_rollout is" * options.ratio_is_the_weight)
    elif (set(config.correction) - {"preset"} and not options.corrects
          and config.correction.get("preset") != "disabled"):
        found.append("correction: these keys correct nothing: they ask for neither weights nor "
                     "rejection nor bypass mode")
    return found


def train_remarks(config: Config) -> list[str]:
    train, late, found = config.train, config.rollout.staleness, []
    if train.lr == 0:
        found.append("train.lr=0 moves nothing")
    if train.warmup_steps >= train.steps:
        found.append(f"train.warmup_steps={train.warmup_steps} is not over after train.steps="
                     f"{train.steps}, so the learning rate never reaches train.lr")
    if late >= train.steps:
        found.append(f"rollout.staleness={late} is as large as train.steps={train.steps}, so the "
                     "engine keeps the first weights")
    return found


def task_remarks(config: Config) -> list[str]:
    instruction, found = config.task.instruction, []
    if instruction and instruction == gsm8k_instruction():
        found.append("task.instruction is that of configs/gsm8k.yaml, and ends every question: "
                     f"{instruction!r}; task.instruction= leaves it out")
    if instruction and config.policy.path is None:
        found.append("task.instruction is for a model that reads text, and the demo model knows "
                     "digits and brackets only")
    return found


def rollout_remarks(config: Config) -> list[str]:
    rollout, kind, found = config.rollout, config.advantage.kind, []
    if rollout.update_every and rollout.update_every >= rollout.max_tokens:
        found.append(f"rollout.update_every={rollout.update_every} changes no response: it has at "
                     f"most rollout.max_tokens={rollout.max_tokens} tokens")
    if rollout.recompute_cache and not rollout.update_every:
        found.append("rollout.recompute_cache=true has no effect: rollout.update_every is null, "
                     "so weights stay for a response")
    if rollout.top_k == 1:
        found.append("rollout.top_k=1 keeps one token, which has the log-prob 0 whatever the "
                     "weights are, so nothing can be learned")
    if rollout.samples == 1 and kind != "reinforce":
        found.append(f"rollout.samples=1 leaves advantage.kind={kind} no baseline, which is made "
                     "of a group's other samples: every advantage is the reward itself; take "
                     "advantage.kind=reinforce, whose baseline is the batch's mean")
    return found


def candidate_remarks(config: Config) -> list[str]:
    """Return a sentence on each criterion that can reject a token which is no candidate."""
    rollout, options = config.rollout, correction_of(config)
    cut = rollout.top_p < 1 or rollout.min_p > 0 or (rollout.top_k or 0) > 0    # candidates are all
    if cut or not options.score_centering:
        return []
    return [f"rollout.candidates={rollout.candidates} is too few for correction.rollout_rs.{name}="
            f"{bound:g}: other tokens have up to 1/{rollout.candidates + 1} of μ each, and score "
            f"centering keeps them all; take at least {math.ceil(1 / bound) - 1} (chapter 14)"
            for name, bound in options.rollout_rs.items()
            if "rollout_log_prob" in CRITERIA[name].needs and (rollout.candidates + 1) * bound < 1]


def loss_remarks(config: Config) -> list[str]:
    """Return a sentence on each number and aggregation that is another loss's."""
    row, found = correction_of(config).loss, []
    if (config.loss.clip_low or 0) > 1 and "clip_low" in row.own:
        found.append(f"loss.clip_low={config.loss.clip_low:g} is above 1, so the clip has no lower "
                     "end: 1 − clip_low is below every ratio")
    for key, own in row.own.items():
        given = getattr(config.loss, key)
        if not given or not own:
            continue
        sizes = {name: other.own[key] for name, other in LOSSES.items() if other.own.get(key)}
        closest = min(sizes, key=lambda name: abs(math.log(given / sizes[name])))
        if abs(math.log(given / sizes[closest])) < 2.3 < abs(math.log(given / own)):     # factor 10
            found.append(
                f"loss.{key}={given:g} suits {closest} ({sizes[closest]:g}) and not "
                f"correction.loss_type={correction_of(config).loss_type}, whose own is {own:g}: "
                f"leave it out, or set loss.{key}=null")
    if row.level == "geometric" and config.loss.aggregation != "seq-mean-token-mean":
        found.append(f"loss.aggregation={config.loss.aggregation} lets long responses count for "
                     f"more, and correction.loss_type={correction_of(config).loss_type} is defined "
                     "as a mean over responses: take loss.aggregation=seq-mean-token-mean")
    return found


def idle(config: Config) -> dict[str, str]:
    """Return changed settings that another one switches off, and why they have no effect."""
    options, changed = correction_of(config), set[str]()
    for section in SECTIONS:
        part = getattr(config, section)
        changed |= {f"{section}.{of.name}" for of in fields(part)
                    if getattr(part, of.name) != default_of(of)}
    changed |= {f"correction.{name}" for name in (
                    "rollout_is_threshold", "rollout_is_batch_normalize")
                if getattr(options, name) != getattr(RolloutCorrectionConfig, name)}

    numbers = {key for row in LOSSES.values() for key in row.own} - set(options.loss.own)
    kind = config.task.kind
    off = {
        f"task.kind={kind} has no such setting":
            ["task.length", "task.depth"] * (kind != "dyck")
            + ["task.size"] * (kind in (*TEXT_KINDS, "dyck"))
            + ["task.questions", "task.options"] * (kind != "reasoning_gym")
            + ["task.match"] * (kind not in TEXT_KINDS),
        "task.reward says what is right":
            ["task.match"] * (config.task.reward is not None),
        f"correction.loss_type={options.loss_type} has no such number":
            [f"loss.{key}" for key in sorted(numbers)],
        "correction.rollout_is is null, so there are no weights":
            ["correction.rollout_is_threshold", "correction.rollout_is_batch_normalize"] * (
                options.rollout_is is None),
        "correction.metrics_only is true, so no weights are applied":
            ["correction.rollout_is_batch_normalize"] * (
                options.metrics_only and options.rollout_is is not None),
        f"loss.aggregation={config.loss.aggregation} has no horizon":
            ["loss.horizon"] * (config.loss.aggregation != "seq-mean-token-sum-norm"),
        "nothing is rejected":
            ["loss.denominator"] * (options.metrics_only or not options.rollout_rs),
        "train.micro_batch_tokens is set":
            ["train.micro_batch_size"] * (config.train.micro_batch_tokens is not None),
        "correction.score_centering is false":
            ["rollout.candidates"] * (not options.score_centering),
        "loss.kl_coef is 0":
            ["loss.kl_kind", "loss.kl_in", "loss.kl_correction"] * (config.loss.kl_coef == 0),
        f"advantage.kind={config.advantage.kind} divides by no deviation":
            ["advantage.normalize_std"] * (config.advantage.kind != "grpo"),
        "policy.lora_rank is null, so the whole model is trained": [
            "policy.lora_alpha", "policy.lora_targets", "policy.lora_save_merged",
            "rollout.lora"] * (config.policy.lora_rank is None)}
    return {name: why for why, names in off.items() for name in names if name in changed}


def kl_remarks(config: Config) -> list[str]:
    how, (kind, level) = config.loss, kl_of(config.loss)
    found, k1 = [], kind == "k1"
    if how.kl_coef == 0:
        return found
    if how.kl_in == "reward" and kind.removesuffix("+") != "k1":
        found.append(f"loss.kl_kind={kind} in the reward has another gradient than the KL: take k1 "
                     "(chapter 13)")
    if how.kl_in == "loss" and k1 and level is None:
        found.append("loss.kl_kind=k1 in the loss has a gradient of 0 on average: take k3+, or "
                     "loss.kl_correction=token (chapter 13)")
    if how.kl_in == "loss" and kind == "k3" and level is None:
        found.append("loss.kl_kind=k3 (verl's low_var_kl) in the loss without a ratio has the "
                     "gradient of KL(π_ref‖π_θ): in chapter 13's table it is 0.14 ‖∇KL‖ away on-"
                     "policy, and 0.31 off-policy; take k3+, or loss.kl_correction=token")
    if how.kl_in == "loss" and kind == "abs":
        found.append("loss.kl_kind=abs in the loss has not the gradient of the KL: in chapter 13's "
                     "table it is 5.90 ‖∇KL‖ away; take k3+ (or abs+, which keeps the value)")

    options = correction_of(config)
    zeroes = options.applies_weights and isinstance(options.rollout_is_threshold, tuple)
    rejects = options.rollout_rs and not options.metrics_only
    if how.kl_in == "reward" and level is not None and (rejects or zeroes):
        found.append(f"loss.kl_correction={level} in the reward leaves out the tokens that are "
                     "rejected or have weight 0, so its gradient is not that of the KL: take "
                     "loss.kl_in=loss")
    if how.kl_in == "reward" and options.score_centering:
        found.append("loss.kl_in=reward is only roughly right with correction.score_centering, "
                     "which subtracts the mean of the penalty as well: take loss.kl_in=loss")
    if how.kl_in == "reward" and options.bypass_mode:
        found.append("loss.kl_in=reward needs π_old, so bypass mode does not save its forward pass")
        if level is not None and options.loss.level:
            found.append(f"loss.kl_correction={level} in the reward is only roughly right with "
                         f"{options.loss_type} in bypass mode, whose clip or gate acts on the "
                         "penalty as well: take loss.kl_in=loss")
    return found


@functools.cache
def gsm8k_instruction() -> str:
    return read_mapping(ROOT / "configs" / "gsm8k.yaml")["task"]["instruction"]
