"""Define every setting, its meaning and its limits, and answer a wrong one with one sentence.

This file decides: a setting is a field of a dataclass, with its meaning and its limits beside it;
FILE.yaml and dotted overrides fill them; the help is made of them. Without a FILE.yaml the demo's
settings are the base, or GSM8K's where questions come from a file. YAML is read by its safe loader,
and neither aliases nor ${…} are replaced.
"""

import difflib
import functools
import hashlib
import json
import math
import os
import re
import reprlib
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import yaml

from three_policies.checks import UserError, check_fields, interval, limits_of, setting
from three_policies.training.rounding import rounding
from three_policies.interop.dialects import KEYS, OWN, WRAPPERS, from_dialect, kl_kind, own_keys
from three_policies.losses import LossConfig
from three_policies.presets import HISTORICAL, PRESETS, RolloutCorrectionConfig
from three_policies.rejection import CRITERIA
from three_policies.surrogates import LOSSES

ROOT = Path(__file__).resolve().parent.parent
PRESET_FILES = ROOT / "configs/presets"
FILE_KINDS = ("jsonl", "parquet")          # of task.kind: the questions come from a file
TEXT_KINDS = (*FILE_KINDS, "reasoning_gym")            # they are for a model that reads text


# -------------------------------------------------------------------------------- what there is

@dataclass
class TaskConfig:
    kind: Literal["arithmetic", "sort", "dyck", "jsonl", "parquet", "reasoning_gym"] = setting(
        "arithmetic", "the task; jsonl and parquet take questions from a file, reasoning_gym "
        "makes them; where no FILE.yaml is given, the other settings are those of "
        "configs/gsm8k.yaml")
    name: str | None = setting(None, "reasoning_gym: the family of questions, such as chain_sum")
    options: dict[str, Any] = field(default_factory=dict, metadata={
        "meaning": "reasoning_gym: the family's own settings, such as {max_terms: 2}"})
    questions: int = setting(2000, "reasoning_gym: number of questions, held-out ones included", 2)
    size: int = setting(2, "digits per number, or digits to sort", 1, 9)
    length: int = setting(64, "dyck: number of brackets in an answer", 2, 512)
    depth: int = setting(3, "dyck: largest number of brackets open at once", 2, 9)
    path: str | None = setting(None, "a file whose rows have `question` and `answer`")
    eval_path: str | None = setting(
        None, "a file of held-out questions; null: eval_size rows of `path`")
    eval_size: int | None = setting(
        None, "number of held-out problems, one sample each; null: 1024, but at most half of "
        "what task.size makes, or a tenth of the rows of a file without eval_path", 1)
    on_bad_row: Literal["raise", "skip"] = setting(
        "raise", "on unusable rows and prompts that are too long: end the run, or leave them out")
    instruction: str = setting("", "text appended to every question")
    prompt: str = setting(
        "{question}", "the prompt: a text with {question}, or a part of a reasoning_gym question, "
        "such as {expression}")
    chat_template: bool | None = setting(
        None, "put prompts into the model's chat template; null: if it has one")
    match: Literal["strict", "last_number"] = setting(
        "strict", "how a response's answer is found: by answers.py, or as its last number")
    reward: str | None = setting(
        None, "FILE.py:FUNCTION, (question, answer, response) → float, in place of task.match")


@dataclass
class PolicyConfig:
    path: str | None = setting(None, "a model's directory or hub id; null: a tiny demo model")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "precision of the computation; weights and moments are float32")
    gradient_checkpointing: bool = setting(
        False, "save memory at the cost of a second forward pass")
    packed: bool = setting(
        False, "lay the rows of a forward pass one after the other, without padding; a prompt "
        "that several rows share then runs for each: for a GPU, and responses of many lengths")
    cpu_offload: bool = setting(
        False, "keep weights, gradients and moments in the host's memory, and update them there")
    lora_rank: int | None = setting(
        None, "train peft's LoRA of this rank and freeze the model; null: train the model",
        1, 512)
    lora_alpha: int = setting(8, "the LoRA's product BA is scaled by lora_alpha / lora_rank", 1)
    lora_targets: str | None = setting(
        None, "names of the modules that get a LoRA, joined by commas, or all-linear; null: "
        "those that peft has for the architecture")
    lora_save_merged: bool = setting(
        False, "write the model with its LoRA added at the end, besides the LoRA")


@dataclass
class RolloutConfig:
    engine: Literal["auto", "vllm", "transformers"] = setting(
        "auto", "the sampler; auto: vLLM where it imports, else transformers")
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "precision of the engine")
    prompts: int = setting(128, "prompts per step, over all ranks", 1)
    samples: int = setting(8, "responses per prompt: the size of a group", 1)
    max_tokens: int = setting(10, "largest number of tokens in a response", 1)
    stop: str | None = setting(
        None, "a text of one token that ends a response too, such as the end of a line")
    temperature: float = setting(
        1.0, "temperature of sampling and of all log-probs", 0.01, 100)
    top_p: float = setting(
        1.0, "sample from the fewest tokens of this mass; log-probs are renormalised to them", 0.01,
        1)
    top_k: int | None = setting(
        None, "sample from the K likeliest tokens, likewise; null, 0 or -1: from all", -1)
    min_p: float = setting(
        0.0, "sample from tokens with at least this share of the largest probability, likewise", 0,
        1)
    candidates: int = setting(
        64, "for correction.score_centering: likeliest tokens of μ, or all that a cut keeps", 1)
    quantize: str | int | None = setting(
        None, "how weights are rounded on their way to the engine: int8, int4, int4-group-32, "
        "int4-group-128, float8-e4m3, float8-e4m3-tensor, or 2 to 16 bits per channel")
    staleness: int = setting(0, "how many weight syncs the engine lags behind", 0)
    update_every: int | None = setting(
        None, "update the engine's weights every N tokens within a response, the oldest first; "
        "null: only between responses", 1)
    recompute_cache: bool = setting(
        False, "with update_every: run earlier tokens again through the new weights")
    lora: Literal["merged", "merged-bfloat16", "apart"] = setting(
        "merged", "how the engine gets a LoRA (policy.lora_rank): added to the weights in "
        "float32, added on bfloat16's grid, or apart from them")
    batch_size: int = setting(512, "responses generated at a time", 1)
    mask_truncated: bool = setting(False, "give truncated responses no gradient")
    timeout: float = setting(1800.0, "seconds that one call of the engine may take", 1)
    enforce_eager: bool | None = setting(None, "run vLLM without graphs; null: true on a CPU")
    gpu_memory_utilization: float = setting(0.4, "vLLM's share of a GPU while awake", 0.01, 0.99)


@dataclass
class AdvantageConfig:
    kind: Literal["grpo", "rloo", "reinforce"] = setting("grpo", "the estimator of advantages")
    normalize_std: bool = setting(True, "grpo: divide advantages by the group's standard deviation")


@dataclass(frozen=True)
class LossSettings(LossConfig):
    kl_coef: float = setting(
        0.0, "coefficient of KL(π_θ‖π_ref); 0: no reference policy is loaded", 0)
    kl_kind: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "kl", "mse",
                     "low_var_kl", "kl+", "mse+", "low_var_kl+"] | None = setting(
        None, "the KL's estimator; null: k3+ in the loss, k1 in the reward; + takes k2's gradient; "
        "the last six are verl's names of k1, k2, k3")
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "whether the KL stands in the loss or the reward")
    kl_correction: Literal["none", "token", "prefix"] | None = setting(
        None, "ratio of π to π_rollout that multiplies the KL: the token's, or the product up to "
        "it; null: token in the loss, none in the reward")


@dataclass
class TrainConfig:
    steps: int = setting(150, "steps of sampling and updating", 1)
    epochs: int = setting(1, "passes over one step's rollouts", 1)
    mini_batches: int = setting(4, "optimizer steps per epoch", 1)
    micro_batch_size: int = setting(256, "rows per forward pass and rank", 1)
    micro_batch_tokens: int | None = setting(
        None, "instead of micro_batch_size: tokens, padding included, per forward pass and rank; a "
        "longer row runs alone", 1)
    lr: float = setting(2e-4, "learning rate of AdamW", 0, 10)
    warmup_steps: int = setting(10, "steps in which the learning rate rises", 0)
    schedule: Literal["constant", "cosine"] = setting(
        "constant", "the learning rate after warm-up; cosine: it falls, to 0 after the last step")
    max_grad_norm: float = setting(
        1.0, "scale the gradient down to this norm if it is longer; .inf: never", 1e-6,
        math.inf)
    weight_decay: float = setting(0.0, "weight decay of AdamW", 0, 10)
    save_every: int = setting(50, "steps between checkpoints", 1)
    keep: int = setting(3, "number of checkpoints that are kept", 1)
    eval_every: int = setting(50, "steps between evaluations", 1)
    dump: int = setting(
        0, "steps after each start whose tokens and log-probs go to runs/<run>/dumps/, for "
        "the doctor; also named run.dump", 0)
    grace: float = setting(25.0, "seconds after SIGTERM in which a step may end and be saved", 0)
    on_nonfinite: Literal["raise", "skip"] = setting(
        "raise", "on a number that is not finite: end the run, or leave the sample out")


@dataclass
class Config:
    seed: int = setting(0, "seed of all random draws", 0)
    run: str | None = setting(
        None, "name of the directory runs/<run>/; null: made of file and overrides")
    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: dict[str, Any] = field(default_factory=dict, metadata={
        "meaning": "preset: NAME and fields of RolloutCorrectionConfig, or a verl or SkyRL block; "
                   "left out: decoupled_token_is"})
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainConfig = field(default_factory=TrainConfig)


# These split the work, and change no more than how sums are rounded. Where a gradient is nothing
# but rounding, as that of a KL at θ = ref may be, AdamW still makes a whole step of it.
SPLITS = {"train.micro_batch_size", "train.micro_batch_tokens", "rollout.batch_size",
          "policy.gradient_checkpointing", "policy.packed"}
# What may differ when a run is continued.
CHANGEABLE = {"train.steps", "train.save_every", "train.keep", "train.eval_every", "train.grace",
              "train.dump", "train.on_nonfinite", "rollout.gpu_memory_utilization",
              "rollout.timeout", "policy.cpu_offload", *SPLITS}
# Each has a name that says more, and is read as that.
OTHER_NAMES = {"run.dump": "train.dump", "rollout.quantize_bits": "rollout.quantize",
               "rollout.adapter": "rollout.lora"}


def help_text() -> str:
    """Return every setting with its default, what it may be, and what it means."""
    lines = ["settings (key=value, or nested in FILE.yaml), each with its default:"]
    for key, default, meaning, may_be in documented():
        lines += [f"  {key}={default}", f"      {meaning} ({may_be})"]
    return "\n".join([*lines, "", *correction_help()])


def documented() -> Iterator[tuple[str, str, str, str]]:
    """Yield key, default, meaning and what it may be, for every setting."""
    for key, kind, of in leaves(Config):
        if not is_dataclass(kind):
            default = yaml.safe_dump(default_of(of), default_flow_style=True).split("\n")[0]
            yield key, default, of.metadata["meaning"], what_it_may_be(kind, of.metadata)


def default_of(of: Field) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def what_it_may_be(kind: Any, metadata: Mapping[str, Any]) -> str:
    if choices := metadata.get("choices"):
        return f"one of {', '.join(choices)}"
    limits = limits_of(metadata) if {metadata.get("low"), metadata.get("above")} != {None} else ""
    return describe(kind) + f", {limits}" * bool(limits)


def correction_help() -> Iterator[str]:
    """Yield a line for each preset, criterion and loss."""
    yield "correction.preset=NAME, explained in math/6-correction.md:"
    for name, preset in PRESETS.items():
        if name not in HISTORICAL:
            yield f"  {name}: {preset.__doc__}"
    yield "correction.rollout_rs={CRITERION: BOUND, …}: keep what is within the bounds of all:"
    for name, row in CRITERIA.items():
        bound = "in [lo, hi]" if row.read is interval else "at most BOUND"
        yield f"  {name}: {row.statistic} of each {row.of}, {bound}"
    yield "correction.loss_type=NAME, each with its own numbers, which the settings loss.* replace:"
    for name, loss in LOSSES.items():
        numbers = ", ".join(f"{key}={'null' if own is None else f'{own:g}'}"
                            for key, own in loss.own.items())
        yield f"  {name}: {loss.meaning}" + (f" ({numbers})" if numbers else "")


def leaves(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield ("train", TrainConfig, field), ("train.steps", int, field) … for every setting."""
    kinds = typing.get_type_hints(cls)
    for of in fields(cls):
        yield prefix + of.name, kinds[of.name], of
        if is_dataclass(kinds[of.name]):
            yield from leaves(kinds[of.name], f"{prefix}{of.name}.")


SECTIONS = [of.name for of in fields(Config) if is_dataclass(of.default_factory)]
KINDS = {key: kind for key, kind, _ in leaves(Config)}
TEXTS = {key for key, kind in KINDS.items() if kind in (str, str | None)}


# --------------------------------------------------------------------------------- how it is read

def load_config(argv: list[str]) -> Config:
    """Read and check FILE.yaml and dotted overrides. An error is a UserError of one sentence."""
    if deleted := next((a[1:] for a in argv if a.startswith("~")), None):
        raise UserError(f"Hydra's ~{deleted} is not read here: write {deleted.split('=')[0]}=null")
    paths = [a for a in argv if "=" not in a or (a.endswith(".yaml") and Path(a).is_file())]
    overrides = [a.lstrip("+") for a in argv if a not in paths]            # "+" is Hydra's
    if len(paths) > 1:
        raise UserError(f"expected at most one FILE.yaml, and key=value, not {paths}")
    user, given = read_settings(Path(paths[0]) if paths else None, overrides)
    check_keys(user)

    try:
        config = msgspec.convert(user, Config, strict=False)
    except msgspec.ValidationError as error:
        if error.__cause__:                                          # LossConfig's own sentence
            raise UserError(f"loss.{error.__cause__}") from None
        key = str(error).rpartition("$.")[2].rstrip("`")             # … - at `$.train.steps`
        quotes = "; a text that looks like a number stands in quotes" if key in TEXTS else ""
        raise UserError(f"{key} must be {describe(KINDS[key])}, "
                        f"not {flat(user).get(key, user.get(key))!r}{quotes}") from None
    config.policy.path = without_slash(config.policy.path)
    if (bits := str(config.rollout.quantize)).isascii() and bits.isdecimal():
        config.rollout.quantize = int(bits)            # '6' in quotes is the number, too
    if "correction" not in user:
        config.correction = {"preset": "decoupled_token_is"}
    if given.get("run") is None:
        if config.run:
            check_run(config.run)          # as it was given, before anything is added to it
        config.run = name_of(config.run or (Path(paths[0]).stem if paths else "demo"), overrides)
    validate(config)
    return config


def name_of(base: str, overrides: list[str]) -> str:
    """Return a run's name: that of its file, and what makes it another run than the file's."""
    name = ",".join([base, *sorted(o for o in overrides
                                   if renamed(o.split("=")[0]) not in ("run", *CHANGEABLE))])
    digest = hashlib.sha256(repr(name).encode()).hexdigest()
    name = re.sub(r"[^\w.,=+-]+", "_", name, flags=re.ASCII)
    return name if len(name) < 100 else f"{name[:80]}-{digest[:8]}"


def without_slash(path: str | None) -> str | None:
    """Return a path without the slash at its end, which a shell's completion adds."""
    return path and (path.rstrip("/") or "/")


# libyaml's loader where it is: in Python 16 kB of brackets take seconds.
SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(SafeLoader):
    """PyYAML's safe loader, for which 1e-3 is a number, a date is text, and no key stands twice."""

    yaml_implicit_resolvers: ClassVar = {
        first: [row for row in rows if not row[0].endswith((":timestamp", ":float"))]
        for first, rows in SafeLoader.yaml_implicit_resolvers.items()}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key stands twice", problem_mark=node.start_mark)
        return found


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$"
               r"|[-+]?\.?(inf|Inf|INF)$|\.?(nan|NaN|NAN)$"), [*"-+.0123456789iInN"])


class Dumper(yaml.SafeDumper):
    """Write texts such that `Loader` reads texts."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def as_yaml(config: Config) -> str:
    return yaml.dump(asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def load_yaml(text: str, source: object = "the overrides") -> Any:
    """Read YAML of at most 16 kB in which nothing is replaced and no number has two readings."""
    if len(text) > 2 ** 14:
        raise UserError(f"{source} has more than {2 ** 14} characters")
    try:
        for event in yaml.parse(text, Loader):
            if fault := unclear(event):
                raise UserError(f"{source}: {fault}")
        return yaml.load(text, Loader)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{source} cannot be read as YAML: {line}{error.problem}") from None
    except Exception as error:            # of 9999 digits, 9999 brackets, a date that is none
        raise UserError(f"{source} cannot be read as YAML: {str(error)[:300]}") from None


def unclear(event: yaml.Event) -> str | None:
    """Return what is wrong with a piece of YAML that is not, or not always, what it looks like."""
    value = getattr(event, "value", None) or ""
    if isinstance(event, yaml.AliasEvent) or len(value) > 3000:
        return ("'*name' is not replaced here, and a value has at most 3000 characters; write the "
                "value itself")
    if "${" in value:                                                  # also written as "\x24{"
        return "'${…}' is not replaced here; write the value itself"
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and re.fullmatch(
            r"[-+]?(0[\d_]+|\d[\d_]*(:\d+)+(\.\d*)?)", value):
        return (f"YAML may read {value} to the base 8 or 60; write a number without leading zeros "
                "and colons, or a text in quotes")
    return None


def read_settings(path: Path | None, overrides: list[str]) -> tuple[dict, dict]:
    """Return all that the user gives, and the overrides alone; without a path, on a default."""
    given = functools.reduce(merged, map(one_override, overrides), {})
    user = merged(read_mapping(path) if path else default_settings(given), given)
    last = given if "correction" in given else user
    if "correction" in user and last["correction"] in (None, {}):
        user["correction"] = {}                  # off, and no default in its place
    return user, given


def read_mapping(path: Path) -> dict:
    """Return what a file of settings says, or nothing of an empty one."""
    found = load_yaml(read_text(path), path)
    if not isinstance(found, dict | None):
        raise UserError(f"{path} must be a mapping of settings, such as train: {{steps: 10}}, "
                        f"not {reprlib.repr(found)}")
    return with_present_names(found or {}, path)


def renamed(key: str) -> str:
    """Return the name of a setting that has another one, too."""
    return OTHER_NAMES.get(key, key)


def with_present_names(given: dict, source: object) -> dict:
    """Return nested settings in which no key of a section has its other name."""
    for key, name in OTHER_NAMES.items():
        (section, old), (ours, new) = key.split("."), name.split(".")
        part = given.get(section)
        if section != ours or not isinstance(part, dict) or old not in part:
            continue
        if new in part:
            raise UserError(f"{source}: {key} is another name of {name}: write one of them")
        part[new] = part.pop(old)
    return given


def one_override(override: str) -> dict:
    """Return {"train": {"lr": 0.1}} for train.lr=0.1. A text stands as it is: run=007."""
    key, _, text = override.partition("=")
    key = renamed(key)
    nothing = ("null", "~") if key == "task.instruction" else ("null", "~", "")
    if key in TEXTS and text not in nothing and text[:1] not in ("'", '"'):
        text = json.dumps(text, ensure_ascii=False)
    value = load_yaml(text, f"the value of {key:.80}")
    for part in reversed(key.split(".", 9)):
        value = {part: value}
    return with_present_names(value, f"the value of {key:.80}")


def merged(base: dict, other: dict) -> dict:
    """Return the settings of both; where both have one, that of the other."""
    both = {key: merged(base[key], value) for key, value in other.items()
            if isinstance(base.get(key), dict) and isinstance(value, dict)}
    return {**base, **other, **both}


def new_place(path: Path | None) -> str:
    """Return where the file of a preset stands since it has left configs/."""
    if path is None or os.path.exists(path) or not os.path.isfile(PRESET_FILES / path.name):
        return ""                              # pathlib raises on a name that is too long
    return f"; it is configs/presets/{path.name} now"


def default_settings(given: dict) -> dict:
    """Return the demo's settings; for other questions GSM8K's without its files and model."""
    task = given.get("task")
    kind = task.get("kind") if isinstance(task, dict) else None
    name = "gsm8k" if kind in TEXT_KINDS else "demo"
    base = load_yaml((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    if kind in TEXT_KINDS:
        for key in "path", "eval_path", "eval_size":
            del base["task"][key]
        if kind == "reasoning_gym":
            del base["task"]["instruction"]    # its scorers take the whole response
        # Not every model can be packed, and padded rows of a larger one may not fit.
        del base["policy"]["path"], base["policy"]["packed"]
        base["train"]["micro_batch_size"] = 16
        base["run"] = kind                     # what the run is named after, as a file is
    return base


def check_keys(user: dict[str, Any]) -> None:
    """Refuse a key that is not a setting."""
    if isinstance(user.get("run"), dict):
        raise UserError(f"run.{next(iter(user['run']), '')} is not a setting; did you mean "
                        "run.dump=N (in a file train.dump)?")
    if dotted := next((str(key) for key in user if "." in str(key)), ""):
        section, _, name = dotted.partition(".")
        raise UserError(f"{dotted} is written in two parts in a file: {section}: {{{name}: …}}")
    settings = flat(user)
    for key in settings:
        if key not in KINDS and not key.startswith(("correction.", "task.options.")):
            raise UserError(unknown(key, settings))


def unknown(key: str, settings: dict[str, Any]) -> str:
    """Return a sentence: this key is no setting, and which one is near, or whose it is."""
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    block = [k for k in settings if k.partition(".")[0] == first]
    foreign = first in WRAPPERS and first not in KINDS and any(
        k.rpartition(".")[2] in KEYS or "correction." in k for k in block)
    if foreign or key in WRAPPERS or (last in KEYS and first in (last, *WRAPPERS)):
        ours = last in OWN and (first == last or first in KINDS)
        whose = "a correction" if ours else "another system"
        return f"{key} is a setting of {whose}: put its block under correction:"

    section = key.rpartition(".")[0]
    near = [name for name, kind in KINDS.items() if not is_dataclass(kind)] + [*OTHER_NAMES]
    if is_dataclass(KINDS.get(section)):
        near = [name for name in near if name.startswith(f"{section}.")]
    near = renamed(difflib.get_close_matches(key, near, n=1, cutoff=0)[0])
    shown = key if key and key == key.strip() else repr(key)
    return f"{shown} is not a setting; did you mean {near}?"


def flat(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Return {"train.lr": 1} for {"train": {"lr": 1}}."""
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def describe(hint: Any) -> str:
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(choices)}"
    if type(None) in choices:
        return " or ".join([*(describe(kind) for kind in choices[:-1]), "null"])
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "a section of settings")


def read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():       # a device or a pipe may never end
            raise UserError(f"{path} is not a file")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text in UTF-8; a compressed file must be unpacked "
                        "first") from None
    except (OSError, ValueError) as error:             # ValueError: a path with a zero byte
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {why}{new_place(path)}") from None


def validate(config: Config) -> None:
    """Refuse values that have the right type and make no sense."""
    try:
        for name in SECTIONS:
            check_fields(getattr(config, name), f"{name}.")
        check_fields(config)
        if config.rollout.quantize is not None:
            rounding(config.rollout.quantize)
    except ValueError as error:
        raise UserError(str(error)) from None
    check_run(config.run or "")
    check_task(config)
    check_rollout(config)
    correction_of(config)


def check_task(config: Config) -> None:
    task, kind = config.task, config.task.kind
    if task.path is None and kind in FILE_KINDS:
        raise UserError(f"task.kind={kind} needs task.path=FILE, the questions")
    if task.path is not None and kind not in FILE_KINDS:
        raise UserError(f"task.path must be null for task.kind={kind}, which makes its questions, "
                        f"not {task.path!r}: for a file take task.kind=jsonl or parquet")
    if task.eval_path is not None and kind not in FILE_KINDS:
        raise UserError(f"task.eval_path must be null for task.kind={kind}, whose held-out "
                        f"problems are made as the others are, not {task.eval_path!r}")
    if (task.name is None) == (kind == "reasoning_gym"):
        raise UserError("task.name must be a family of reasoning_gym's questions, such as "
                        "chain_sum, for task.kind=reasoning_gym, and null for the others, not "
                        f"{task.name!r} with task.kind={kind}")
    if kind == "dyck" and task.length % 2:
        raise UserError("task.length must be even, as brackets come in pairs, not "
                        f"{task.length}")
    if kind == "dyck" and config.rollout.max_tokens <= task.length:
        raise UserError(f"rollout.max_tokens must be at least {task.length + 1}, for the brackets "
                        f"of task.length and the end token, not {config.rollout.max_tokens}")


def check_rollout(config: Config) -> None:
    rollout, share = config.rollout, config.train.mini_batches * ranks()
    if rollout.prompts % share:
        raise UserError(f"rollout.prompts={rollout.prompts} must be a multiple of {share}, "
                        "train.mini_batches × ranks, so that all ranks have the same share")
    if rollout.engine == "vllm" and rollout.temperature > 2:
        raise UserError("rollout.temperature must be at most 2 for vLLM, not "
                        f"{rollout.temperature}")
    every = f"rollout.update_every={rollout.update_every} needs "
    if rollout.update_every and rollout.engine != "transformers":
        raise UserError(f"{every}rollout.engine=transformers, not {rollout.engine}, whose weights "
                        "stay for a whole response here")
    if rollout.update_every and rollout.staleness == 0:
        raise UserError(f"{every}rollout.staleness of at least 1 (a response crosses at most that "
                        "many updates), not 0")
    if rollout.lora == "apart" and config.policy.lora_rank and rollout.quantize:
        raise UserError(f"rollout.quantize={rollout.quantize} rounds the weights that are sent, "
                        "so rollout.lora must be merged or merged-bfloat16, not apart")


def ranks() -> int:
    """Return the number of ranks, which torchrun says in the environment."""
    count = os.environ.get("WORLD_SIZE", "1")
    lacking = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
               if "RANK" in os.environ and name not in os.environ]
    rank = os.environ.get("RANK", "0")
    if lacking or not (count.isdecimal() and rank.isdecimal() and int(rank) < int(count)):
        error = UserError((f"RANK is set and {lacking[0]} is not" if lacking else
                           f"RANK={rank} is no rank of WORLD_SIZE={count}")
                          + ": torchrun sets all of them; unset them for a run of one process")
        error.silent = False               # else only rank 0 speaks
        raise error
    return int(count)


def check_run(name: str) -> None:
    if not re.fullmatch(r"\w[\w.,=+-]{0,99}", name, re.ASCII):
        raise UserError("run must be a plain name of at most 100 letters, digits and .,=+-_ since "
                        f"it is a directory inside runs/, not {name!r}")


def correction_of(config: Config) -> RolloutCorrectionConfig:
    """Return the config of `correction: {preset: NAME, field: value …}`, or of a dialect.

    What it warns of is among `remarks`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return from_dialect(config.correction)
    except (ValueError, TypeError) as error:
        raise UserError(f"{'' if 'correction' in str(error) else 'correction: '}{error}") from None


def in_own_keys(config: Config) -> str:
    """Return what a block was taken for, in our keys: a line that can stand below correction:."""
    options = correction_of(config)
    always = {"rollout_is": options.rollout_is} | (
        {"rollout_is_threshold": options.rollout_is_threshold} if options.rollout_is else {}) | {
        "bypass_mode": options.bypass_mode, "loss_type": options.loss_type}
    plain = json.loads(json.dumps(always | own_keys(options)))               # lists, not tuples
    return yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf).strip()


def kl_of(how: LossSettings) -> tuple[str, str | None]:
    """Return the KL's estimator, and the level of the ratio that multiplies it, if any."""
    kind, level = {"loss": ("k3+", "token"), "reward": ("k1", "none")}[how.kl_in]
    kind, level = kl_kind(how.kl_kind or kind), how.kl_correction or level
    return kind, None if level == "none" else level
