"""Three Policies, trained: one node, one loop, from a question to an updated policy.

A step: prompts → rollouts from π_rollout → rewards → advantages → log-probs under π_old (not in
bypass mode) → `correct` → epochs × mini-batches × micro-batches of π_θ → weights into the engine.

What this file decides
* A loss is a sum over tokens divided by a global count, so that ranks and micro-batches only split
  the work: mini-batch m is the same prompts on one rank or on eight, and gradients are summed.
* All log-probs are those of the sampling temperature; the logits of prompts are never computed.
* Everything random is drawn from (seed, what for, step, index): a run that was killed continues
  with what it would have done, on any number of ranks, and no random state needs to be saved.
What it leaves out: tensor parallelism, value functions, rewards other than right or wrong, and
rollouts of several turns.

    python trainer.py [FILE.yaml] [section.key=value …]          # default: configs/demo.yaml
    torchrun --nproc-per-node 2 trainer.py correction.preset=bypass_pg_is rollout.engine=vllm
"""

import contextlib
import difflib
import errno
import functools
import gc
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import typing
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

from correction import RolloutCorrectionConfig, correct, diagnose, from_dialect, merge, to_host
from estimators import grpo_advantages, kl_estimate, reinforce_advantages, rloo_advantages
from losses import Counts, count, kl_loss, policy_loss
from rollout import EngineError, Sample, WeightSync, make_engine, run_prompts, watched

CHUNK = 2 ** 24                    # logits at a time, in float32: 64 MB
# How torch, vLLM and gloo say it.
OUT_OF_MEMORY = ("MemoryError|out of memory|can't allocate memory|memory for the cache|"
                 "gpu_memory_utilization")
LOST = "connection (closed|reset) by peer|broken pipe|remote process exited"


class UserError(Exception):
    """One sentence, on one line, for whoever started the run."""

    def __init__(self, sentence: str):
        super().__init__(" ".join(sentence.split()))


# ---------------------------------------------------------------------------------- configuration

def bounded(default, low, high=2 ** 31):
    """A setting with the smallest and largest value that make sense."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass
class TaskConfig:
    kind: Literal["arithmetic", "sort", "jsonl", "parquet"] = "arithmetic"
    size: int = bounded(2, 1, 9)                    # digits per number, or digits to sort
    path: Optional[str] = None                      # of a file: rows with `question` and `answer`
    eval_path: Optional[str] = None                 # null: eval_size rows of `path` are held out
    eval_size: int = bounded(1024, 1)               # held-out problems, one sample each
    instruction: str = ""                           # appended to every question of a file


@dataclass
class PolicyConfig:
    path: Optional[str] = None                      # directory or hub id; null: a tiny demo model
    dtype: Literal["float32", "bfloat16"] = "float32"     # of the computation; weights are float32
    gradient_checkpointing: bool = False


@dataclass
class RolloutConfig:
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    prompts: int = bounded(128, 1)                  # per step, over all ranks
    samples: int = bounded(8, 1)                    # per prompt: a group
    max_tokens: int = bounded(10, 1)
    temperature: float = bounded(1.0, 0.01, 100)
    top_p: float = 1.0                              # these two must stay as they are: `validate`
    top_k: Optional[int] = None
    quantize_bits: Optional[int] = bounded(None, 2, 16)   # of weights on their way to the engine
    staleness: int = bounded(0, 0)                  # the engine lags so many updates behind
    batch_size: int = bounded(512, 1)               # samples generated at a time
    mask_truncated: bool = False                    # responses cut at max_tokens: no gradient
    timeout: float = bounded(1800.0, 1)             # seconds for one call of the engine
    gpu_memory_utilization: float = bounded(0.4, 0.01, 0.99)


@dataclass
class AdvantageConfig:
    kind: Literal["grpo", "rloo", "reinforce"] = "grpo"
    normalize_std: bool = True                      # grpo: divide by the group's std


@dataclass
class LossConfig:
    clip_low: float = bounded(0.2, 0, 1)
    clip_high: float = bounded(0.2, 0)
    dual_clip: Optional[float] = bounded(None, 1)
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean",
                         "seq-mean-token-sum-norm"] = "token-mean"
    denominator: Literal["fixed", "kept"] = "fixed"       # kept: counts what rejection left
    kl_coef: float = bounded(0.0, 0)                # 0: no reference policy is loaded
    kl_kind: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k3+"
    kl_in: Literal["loss", "reward"] = "loss"


@dataclass
class TrainConfig:
    steps: int = bounded(150, 1)
    epochs: int = bounded(1, 1)                     # over one step's rollouts
    mini_batches: int = bounded(4, 1)               # optimizer steps per epoch
    micro_batch_size: int = bounded(256, 1)         # rows per forward pass and rank
    lr: float = bounded(2e-4, 0, 10)
    warmup_steps: int = bounded(10, 0)
    schedule: Literal["constant", "cosine"] = "constant"
    max_grad_norm: float = bounded(1.0, 1e-6)
    weight_decay: float = bounded(0.0, 0, 10)
    save_every: int = bounded(50, 1)
    keep: int = bounded(3, 1)                       # checkpoints
    eval_every: int = bounded(50, 1)
    on_nonfinite: Literal["raise", "skip"] = "raise"


@dataclass
class Config:
    seed: int = bounded(0, 0)
    run: Optional[str] = None      # writes runs/<run>/; null: named after the file and overrides
    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: dict[str, Any] = field(default_factory=dict)         # see `correction_of`
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# What may differ when a run is continued.
CHANGEABLE = {"train.steps", "train.save_every", "train.keep", "train.eval_every",
              "train.on_nonfinite", "rollout.gpu_memory_utilization", "rollout.timeout"}


def load_config(argv: list[str]) -> Config:
    """FILE.yaml and dotted overrides, checked. Whatever is wrong is a UserError of one sentence."""
    paths = [a for a in argv if "=" not in a or a.endswith(".yaml") and Path(a).is_file()]
    overrides = [a for a in argv if a not in paths]
    if len(paths) > 1:
        raise UserError(f"expected at most one FILE.yaml, and key=value, not {paths}")
    path = Path(paths[0]) if paths else Path(__file__).parent / "configs" / "demo.yaml"
    try:
        texts = [read_text(path), *(o.partition("=")[2] for o in overrides)]
        if len("".join(texts)) > 2 ** 14:
            raise UserError(f"{path} and the overrides have more than {2 ** 14} characters")
        if "${" in "".join(texts):
            raise UserError(f"{path}: '${{…}}' is not replaced here; write the value itself")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) or len(getattr(event, "value", "") or "") > 3000
               for text in texts for event in yaml.parse(text, loader)):
            raise UserError(f"{path}: '*name' is not replaced here, and a value has at most 3000 "
                            "characters; write the value itself")
        user = OmegaConf.merge(OmegaConf.load(path), given := OmegaConf.from_dotlist(overrides))
        settings = flat(OmegaConf.to_container(user))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:     # YAML's and OmegaConf's own have many types and several lines
        raise UserError(f"{path} and the overrides must be a mapping of settings in YAML, such as "
                        f"train: {{steps: 10}} ({str(error)[:300]})") from None
    known = dict(leaves(Config))
    for key, value in settings.items():
        if key not in known and not key.startswith("correction."):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise UserError(f"{key} is not a setting; did you mean {near}?")
        if is_dataclass(known.get(key)) and value != {}:
            raise UserError(f"{key} must be {describe(known[key])}, not {value!r}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), user))
    except Exception as error:     # OmegaConf's own, and an OverflowError that it lets through
        key = getattr(error, "full_key", "a setting")
        raise UserError(f"{key} must be {describe(known.get(key))}, "
                        f"not {settings.get(key)!r}") from None
    config.correction = dict(config.correction) or {"preset": "decoupled_token_is"}
    if "run" not in given:
        name = ",".join([config.run or path.stem, *sorted(
            o for o in overrides if o.split("=")[0] not in CHANGEABLE)])
        digest = hashlib.sha256(repr(name).encode()).hexdigest()
        name = re.sub(r"[^\w.,=+-]+", "_", name, flags=re.ASCII)
        config.run = name if len(name) < 100 else f"{name[:80]}-{digest[:8]}"
    validate(config)
    return config


def leaves(cls, prefix="") -> typing.Iterator[tuple[str, Any]]:
    """("train", TrainConfig), ("train.steps", int) … for every section and setting."""
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name, hint
        if is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")


def flat(settings: dict, prefix="") -> dict[str, Any]:
    """{"train": {"lr": 1}} → {"train.lr": 1}"""
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def describe(hint) -> str:
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(choices)}"
    if type(None) in choices:
        return f"{describe(choices[0])} or null"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "a section of settings")


def read_text(path: Path) -> str:
    if path.exists() and not path.is_file():       # a device or a pipe may never end
        raise UserError(f"{path} is not a file")
    return path.read_text(encoding="utf-8-sig")


def validate(config: Config) -> None:
    """Values that have the right type and still make no sense."""
    for section, part in [("", config), *((f"{f.name}.", getattr(config, f.name))
                                          for f in fields(Config)[2:])]:
        for f in fields(part) if is_dataclass(part) else ():
            low, high, value = (*map(f.metadata.get, ("low", "high")), getattr(part, f.name))
            if low is not None and value is not None and not low <= value <= high:
                allowed = f"{low} to {high}" if high < 2 ** 31 else f"at least {low}"
                raise UserError(f"{section}{f.name} must be {allowed}, not {value!r}")
    if not re.fullmatch(r"\w[\w.,=+-]{0,99}", config.run or "", re.ASCII):
        raise UserError(f"run must be a plain name of letters, digits and .,=+-_ since it is a "
                        f"directory inside runs/, not {config.run!r}")
    if (config.task.path is None) == (config.task.kind in ("jsonl", "parquet")):
        raise UserError(f"task.path must be a file for task.kind=jsonl or parquet, and null for "
                        f"the others, not {config.task.path!r} with task.kind={config.task.kind}")
    for key, neutral in [("top_p", (1,)), ("top_k", (None, 0, -1))]:
        if getattr(config.rollout, key) not in neutral:
            raise UserError(f"rollout.{key} must be left at its neutral value, not "
                            f"{getattr(config.rollout, key)!r}: log-probs would miss the mass cut")
    share = config.train.mini_batches * int(os.environ.get("WORLD_SIZE", 1))
    if config.rollout.prompts % share:
        raise UserError(f"rollout.prompts={config.rollout.prompts} must be a multiple of {share}, "
                        "train.mini_batches × ranks, so that all ranks have the same share")
    correction_of(config)


def correction_of(config: Config) -> RolloutCorrectionConfig:
    """`correction: {preset: NAME, field: value …}`, or any dialect that correction.py reads."""
    try:
        return from_dialect(config.correction)
    except (ValueError, TypeError) as error:
        raise UserError(f"{'' if 'correction' in str(error) else 'correction: '}{error}") from None


# ------------------------------------------------------------------------------------------- task

class Problem(NamedTuple):
    question: str
    answer: str
    where: str                     # file and line, for messages


@dataclass
class Task:
    train: list[Problem]
    held_out: list[Problem]        # disjoint from train
    exact: bool                    # the response must be the answer; else it ends with it

    def reward(self, problem: Problem, response: str) -> float:
        if self.exact:
            return float(response == problem.answer)
        return float(final_answer(response) == final_answer(problem.answer))

    def order(self, seed: int, first: int, n: int) -> list[int]:
        """Indices first … first + n of an endless sequence of shuffled passes over `train`."""
        size, chosen = len(self.train), []
        for epoch in range(first // size, (first + n - 1) // size + 1):
            begin = first - epoch * size
            chosen += shuffled(size, seed, epoch)[max(0, begin):begin + n]
        return chosen


@functools.lru_cache(maxsize=2)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    return random.Random(seed_of(seed, "order", epoch)).sample(range(size), size)


def make_task(config: TaskConfig, seed: int) -> Task:
    rng, exact = random.Random(seed_of(seed, "task")), config.kind in ("arithmetic", "sort")
    problems = (make_problems if exact else read_problems)(config, rng, config.path)
    if config.eval_path is not None:
        held_out = read_problems(config, rng, config.eval_path)
        return Task(problems, held_out[:config.eval_size], exact)
    held_out = min(config.eval_size, len(problems) // 2) if exact else config.eval_size
    if len(problems) <= held_out:
        raise UserError(f"{config.path} has {len(problems)} rows, too few to hold out "
                        f"task.eval_size={held_out} of them: set task.eval_path or a smaller "
                        "task.eval_size")
    rng.shuffle(problems)
    return Task(problems[held_out:], problems[:held_out], exact)


def make_problems(config: TaskConfig, rng: random.Random, _) -> list[Problem]:
    """Up to 10 000 different questions: 17+25=, or 3102> for digits to be sorted."""
    largest, sort, answers = 10 ** config.size, config.kind == "sort", {}
    wanted = min(10_000, largest if sort else largest ** 2)
    while len(answers) < wanted:
        if sort:
            digits = f"{rng.randrange(largest):0{config.size}d}"
            answers[f"{digits}>"] = "".join(sorted(digits))
        else:
            a, b = rng.randrange(largest), rng.randrange(largest)
            answers[f"{a}+{b}="] = str(a + b)
    return [Problem(question, answer, repr(question)) for question, answer in answers.items()]


def read_problems(config: TaskConfig, _, path: str) -> list[Problem]:
    """Rows with `question` and `answer` in GSM8K's shape: the last line may be '#### 42'."""
    try:
        if config.kind == "parquet":
            from pyarrow import parquet
            with open(path, "rb") as file:         # a name could be an address or a directory
                rows = enumerate(parquet.read_table(file).to_pylist(), 1)
        else:
            lines = read_text(Path(path)).split("\n")
            rows = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    except ImportError:
        raise UserError("task.kind=parquet needs pyarrow: pip install pyarrow") from None
    except UserError:
        raise
    except Exception as error:     # pyarrow's are of many types
        reason = getattr(error, "strerror", None) or str(error)[:300]
        raise UserError(f"{path} cannot be read as {config.kind}: {reason}") from None
    problems, unit = [], "row" if config.kind == "parquet" else "line"
    for i, row in rows:
        where = f"{path}, {unit} {i}"
        try:
            row = json.loads(row) if isinstance(row, str) else row
        except (ValueError, RecursionError):
            raise UserError(f"{where} is not JSON: {row[:60]!r}") from None
        values = [row.get(k) if isinstance(row, dict) else None for k in ("question", "answer")]
        for key, value in zip(("question", "answer"), values):
            if type(value) not in (str, int, float) or not str(value).strip():
                raise UserError(f"{where} has no `{key}`")
            if re.search("[\ud800-\udfff]", str(value)):       # no tokenizer takes it
                raise UserError(f"{where} has half a character in its `{key}`: {value[:60]!r}")
        if not final_answer(str(values[1])):
            raise UserError(f"{where} has an `answer` that ends in nothing: {values[1][-60:]!r}")
        problems.append(Problem(str(values[0]), str(values[1]), where))
    if not problems:
        raise UserError(f"{path} has no rows")
    return problems


def final_answer(text: str) -> str:
    r"""What follows the last ####, else the last \boxed{…}, else the whole; 1234 for $1,234.0."""
    if "####" in text:
        text = text.rsplit("####", 1)[1].strip().split("\n")[0]
    elif "\\boxed{" in text:
        text, depth = text.rsplit("\\boxed{", 1)[1], 1
        for end, character in enumerate(text):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                text = text[:end]
                break
    text = text.strip().removesuffix(".").replace("\\$", "").replace("$", "").strip()
    number = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    if re.fullmatch(r"[-+]?(\d{1,300}(\.\d{0,300})?|\.\d{1,300})", number, re.ASCII):
        return f"{Decimal(number).normalize() + 0:f}"     # + 0: −0 is 0
    return text


def seed_of(*what) -> int:
    """31 bits from (seed, purpose, step, index …): the same in every process, on any machine."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") >> 1


# ----------------------------------------------------------------------------------------- policy

class Policy(nn.Module):
    """A Hugging Face causal LM that returns log-probs of responses at the sampling temperature."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, tokens: Tensor, attention: Tensor, width: int) -> Tensor:
        """tokens, attention [B, P + T]: prompts padded left, responses, T = width, padded right.

        Returns log π(y_t | x, y_<t), float32, [B, T], 0 beyond the longest response of these rows.
        """
        t = attention[:, -width:].sum(-1).max().clamp(min=1).item()
        p = attention[:, :-width].sum(-1).max().item()
        kept = slice(tokens.shape[1] - width - p, tokens.shape[1] - width + t)
        tokens, attention = tokens[:, kept], attention[:, kept]                         # [B, p + t]
        hidden = self.hidden_states(tokens, attention, p)[:, :t].flatten(0, 1)          # [B·t, H]
        targets = tokens[:, p:].flatten()                                               # [B·t]
        return F.pad(self.log_probs(hidden, targets).view(-1, t), (0, width - t))       # [B, T]

    def hidden_states(self, tokens: Tensor, attention: Tensor, p: int) -> Tensor:
        """From the prompt's last one to that before the last token's: [B, p + t] → [B, ≥ t, H]."""
        decoder, places = self.model.get_decoder(), (attention.cumsum(-1) - 1).clamp(min=0)
        if self.model.is_gradient_checkpointing:                       # it has no use for a cache
            return decoder(input_ids=tokens, attention_mask=attention, position_ids=places,
                           use_cache=False).last_hidden_state[:, p - 1:]
        # A group's samples have one prompt: it is run once, and its keys and values serve them all.
        before, row = run_prompts(decoder, tokens[:, :p], attention[:, :p])
        end = max(p + 1, tokens.shape[1] - 1)      # all ranks run both, whatever their lengths
        after = decoder(input_ids=tokens[:, p:end], attention_mask=attention[:, :end],
                        position_ids=places[:, p:end], use_cache=True,
                        past_key_values=before.past_key_values)
        return torch.cat([before.last_hidden_state[row, -1:], after.last_hidden_state], 1)

    def log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log π of each target: [N, H], [N] → [N], in float32 at least."""
        head = self.model.get_output_embeddings()
        return TokenLogProbs.apply(hidden, head.weight, getattr(head, "bias", None), targets,
                                   self.temperature, self.softcap)


class TokenLogProbs(torch.autograd.Function):
    """log π(y) = z_y − log Σ_v e^{z_v} with z = W h/τ, so that ∂ log π(y)/∂z_v = 1[v = y] − π(v).

    z exists for one slice of the vocabulary at a time, and the backward pass computes it again, so
    that memory does not grow with N·V. From the forward pass it takes log Σ_v e^{z_v} alone: [N].
    In float32 at least.  (eq:sampling)
    """

    @staticmethod
    def slices(hidden, weight, bias, targets, temperature, softcap):
        """Of the vocabulary: W's rows, z [N, slice], and where in it the targets are, if they are.

        Every z is in the memory of the one before.
        """
        size = max(1, CHUNK // max(1, len(hidden)))
        space = hidden.new_empty(len(hidden) * min(size, len(weight)))
        wide = space.to(torch.promote_types(space.dtype, torch.float32))       # or itself
        for first in range(0, len(weight), size):
            rows = slice(first, first + size)
            z, product = (x[:len(hidden) * len(weight[rows])].view(len(hidden), -1)
                          for x in (wide, space))
            torch.mm(hidden, weight[rows].T, out=product)
            if wide is not space:
                z.copy_(product)
            if bias is not None:
                z.add_(bias[rows])
            if softcap:
                z.div_(softcap).tanh_().mul_(softcap)
            if temperature != 1:
                z.div_(temperature)
            place = (targets - first)[:, None]
            inside = (0 <= place) & (place < z.shape[1])
            yield rows, z, place.where(inside, 0), inside

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, softcap):
        chosen, log_sum = hidden.new_full((2, len(hidden)), -math.inf)          # z is wider
        given = weight, bias, targets, temperature, softcap
        for _, z, place, inside in TokenLogProbs.slices(hidden, *given):
            log_sum = torch.logaddexp(log_sum, z.logsumexp(-1))
            chosen = torch.where(inside, z.gather(-1, place), chosen[:, None])[:, 0]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum)
        ctx.settings = temperature, softcap
        return chosen - log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        (temperature, softcap), g = ctx.settings, gradient[:, None]
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        of_weight, of_bias = (None if x is None else torch.empty_like(x) for x in (weight, bias))
        given = weight, bias, targets, temperature, softcap
        for rows, z, place, inside in TokenLogProbs.slices(hidden, *given):
            slope = 1 - (z * (temperature / softcap)).square() if softcap else None     # of tanh
            z.sub_(log_sum[:, None]).exp_().mul_(-g).scatter_add_(-1, place, g * inside)
            z = z if temperature == 1 else z.div_(temperature)
            of_z = (z.mul_(slope) if softcap else z).to(weight.dtype)                   # [N, slice]
            of_hidden += of_z @ weight[rows]
            torch.mm(of_z.T, hidden, out=of_weight[rows])
            if bias is not None:
                torch.sum(of_z, 0, out=of_bias[rows])
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def load_policy(path: str, config: Config, device, frozen: bool = False) -> Policy:
    """The model in float32, checked, sharded over the ranks (FSDP2), computing in policy.dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False)   # no pickles
    policy = Policy(model, config.rollout.temperature).train(not frozen).requires_grad_(not frozen)
    with torch.no_grad():
        tokens = torch.arange(4).expand(2, -1) % model.config.get_text_config().vocab_size
        whole = (model(input_ids=tokens).logits.float() / policy.temperature).log_softmax(-1)
        whole = whole[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        if not torch.allclose(policy(tokens, torch.ones_like(tokens), 3), whole, atol=1e-3):
            raise UserError(f"{path}: {type(model).__name__} does more to its logits than Policy "
                            "in trainer.py knows of, so its log-probs would be wrong")
    if config.policy.gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(getattr(torch, config.policy.dtype), torch.float32)
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):     # the decoder's layers
            fully_shard(module, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision)


def full_weights(policy: Policy):
    """(name, whole tensor) of every parameter, one at a time; every rank has to walk through it."""
    policy.reshard()               # a forward pass without a backward leaves the root gathered
    for name, parameter in policy.model.named_parameters():
        yield name, parameter.detach().full_tensor()


# --------------------------------------------------------------------------------------- the loop

class Batch(NamedTuple):
    """One step's rollouts on this rank: N = prompts × samples / ranks rows."""

    tokens: Tensor                                  # [N, P + T]
    attention: Tensor                               # [N, P + T]
    response_mask: Tensor                           # [N, T]
    advantages: Tensor                              # [N, T]
    rollout_log_prob: Tensor                        # [N, T]  π_rollout
    old_log_prob: Tensor | None = None              # [N, T]  π_old
    ref_log_prob: Tensor | None = None              # [N, T]  π_ref

    def rows(self, index) -> "Batch":
        return Batch(*(None if x is None else x[index] for x in self))


def train(run: "Run") -> None:
    config, policy, options = run.config, run.policy, correction_of(run.config)
    for step in run.steps():
        with run.timed("rollout"):
            batch, metrics = sample(run, step)
        with run.timed("log_probs"):
            if not options.bypass_mode:
                batch = batch._replace(old_log_prob=score(policy, batch, config))
            if run.reference is not None:
                batch = batch._replace(ref_log_prob=score(run.reference, batch, config))
            batch = without_nonfinite(run, batch)
            batch = with_kl_in_reward(batch, config)
        with run.timed("update"):
            correction = None      # bypass mode: ρ = π_θ/π_rollout changes with every update
            if not options.bypass_mode:
                correction = correct(batch.old_log_prob, batch.rollout_log_prob,
                                     batch.response_mask, options, batch.advantages,
                                     dist.group.WORLD)
            run.set_learning_rate(step)
            updates = []
            for _ in range(config.train.epochs):
                for rows in torch.arange(len(batch.tokens)).chunk(config.train.mini_batches):
                    part = correction and correction.rows(rows)
                    updates.append(update(run, batch.rows(rows), options, part))
            metrics |= average([u.metrics for u in updates if u.metrics])
            first_epoch = [c for u in updates[:config.train.mini_batches] for c in u.corrections]
            if correction or first_epoch:          # or every update was skipped
                metrics |= merge([correction] if correction else first_epoch, dist.group.WORLD)
        with run.timed("sync"):
            run.engine.wake()
            metrics |= run.evaluation_if_due(step)
            run.update_engine(run.sync.push)
        run.log(step, metrics)
        run.save_if_due(step)


def sample(run: "Run", step: int) -> tuple[Batch, dict]:
    """This rank's prompts (every world-th of the step), their samples, rewards and advantages."""
    config, task, n = run.config, run.task, run.config.rollout.samples
    rank, world, size = dist.get_rank(), dist.get_world_size(), config.rollout.prompts
    chosen = task.order(config.seed, (step - 1) * size, size)
    rows = [(p, j) for p in range(rank, size, world) for j in range(n)]
    prompts = [run.prompts[chosen[p]] for p, _ in rows]
    samples, texts = run.generate(prompts, [seed_of(config.seed, "sample", step, *r) for r in rows])
    run.engine.sleep()
    rewards = [task.reward(task.train[chosen[p]], text) for (p, _), text in zip(rows, texts)]

    # Baselines are of whole groups and batches: gather all ranks' rows, in the order of one rank.
    own = torch.tensor([[reward, len(s.tokens), s.finished, not text]
                        for reward, s, text in zip(rewards, samples, texts)])           # [N, 4]
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    rewards, lengths, finished, empty = torch.stack(
        [x.view(-1, n, 4) for x in everyone], 1).view(-1, 4).T                # 4 × [prompts · n]
    kept, known = own[:, 0].isfinite(), rewards.isfinite()                  # [N], [prompts · n]
    if not known.all():
        run.nonfinite("samples", [
            f"the reward of {text!r} for {task.train[chosen[rows[i][0]]].where} is {own[i, 0]:g}"
            for i, text in enumerate(texts) if not kept[i]])
        rewards = torch.where(known, rewards, 0.0)
    if config.rollout.mask_truncated:
        kept &= own[:, 2].bool()
    groups = torch.arange(size).repeat_interleave(n)
    advantages = {
        "grpo": lambda: grpo_advantages(rewards, groups, config.advantage.normalize_std, known),
        "rloo": lambda: rloo_advantages(rewards, groups, known),
        "reinforce": lambda: reinforce_advantages(rewards, known),
    }[config.advantage.kind]().view(-1, n)[rank::world].flatten()                       # [N]
    best = torch.where(known, rewards, -math.inf).view(-1, n).amax(1)                   # [prompts]
    worst = torch.where(known, rewards, math.inf).view(-1, n).amin(1)
    batch = pad(prompts, samples, advantages, run.device)
    mask = batch.response_mask & kept.to(run.device)[:, None]                           # [N, T]
    return batch._replace(response_mask=mask), {
        "reward/mean": rewards.sum() / known.sum().clamp(min=1),
        "reward/std": rewards[known].std(correction=0) if known.any() else torch.tensor(0.0),
        "reward/groups_without_signal": (best <= worst).float().mean(),
        "response/tokens": lengths.sum(), "response/length_mean": lengths.mean(),
        "response/length_max": lengths.max(), "response/truncated_fraction": 1 - finished.mean(),
        "response/empty_fraction": empty.mean()}


def pad(prompts: list[list[int]], samples: list[Sample], advantages: Tensor, device) -> Batch:
    before, after = max(map(len, prompts)), max(1, *(len(s.tokens) for s in samples))

    def left(rows):
        return torch.tensor([[*[0] * (before - len(row)), *row] for row in rows])       # [N, P]

    def right(rows):
        return torch.tensor([[*row, *[0] * (after - len(row))] for row in rows])        # [N, T]

    tokens = torch.cat([left(prompts), right([s.tokens for s in samples])], 1)
    mask = right([[1] * len(s.tokens) for s in samples])
    attention = torch.cat([left([[1] * len(p) for p in prompts]), mask], 1)
    batch = (tokens, attention, mask.bool(), advantages[:, None].expand_as(mask),
             right([s.log_probs for s in samples]).float())
    return Batch(*(x.to(device) for x in batch))


def micro_batches(batch: Batch, config: Config) -> tuple[Tensor, ...]:
    """Row numbers, micro_batch_size at a time, rows of similar length together."""
    return batch.attention.sum(-1).argsort(stable=True).split(config.train.micro_batch_size)


@torch.no_grad()
def score(policy: Policy, batch: Batch, config: Config) -> Tensor:
    """Log-probs of all rows under a policy, without a graph: [N, T]"""
    log_prob = torch.zeros_like(batch.rollout_log_prob)
    for rows in micro_batches(batch, config):
        log_prob[rows] = policy(batch.tokens[rows], batch.attention[rows], log_prob.shape[1])
    return log_prob


def without_nonfinite(run: "Run", batch: Batch) -> Batch:
    """Rows in which a policy's log-prob is not finite: named (raise), or left out (skip)."""
    names = ("π_rollout", "π_old", "π_ref")
    policies = {name: x for name, x in zip(names, batch[-3:], strict=True) if x is not None}
    fault = ~torch.stack(list(policies.values())).isfinite() & batch.response_mask   # [P, N, T]
    faults = fault.any(-1).sum()
    dist.all_reduce(faults)        # all ranks decide the same
    if faults:
        run.nonfinite("samples", nonfinite_rows(run, batch, policies))
    return batch._replace(response_mask=batch.response_mask & ~fault.any(0).any(-1, keepdim=True))


def nonfinite_rows(run: "Run", batch: Batch, policies: dict[str, Tensor]) -> list[str]:
    """Policy, token and prompt of the first log-prob that is not finite in each row with one."""
    found, width = {}, batch.response_mask.shape[1]
    for policy, log_prob in policies.items():
        for row, t in (~log_prob.isfinite() & batch.response_mask).nonzero().tolist():
            prompt = batch.tokens[row, :-width][batch.attention[row, :-width].bool()]
            prompt, token = map(run.tokenizer.decode, (prompt, batch.tokens[row, t - width]))
            found.setdefault(row, f"{policy} has the log-prob {log_prob[row, t].item()} for token "
                             f"{t + 1}, {token!r}, after the prompt {prompt[-200:]!r}")
    return list(found.values())


def with_kl_in_reward(batch: Batch, config: Config) -> Batch:
    """A_t −= kl_coef · Σ_{s≥t} k_s: the penalty still to come at token t (the past drops out)."""
    if config.loss.kl_in != "reward" or batch.ref_log_prob is None:
        return batch
    sampler = batch.rollout_log_prob if batch.old_log_prob is None else batch.old_log_prob
    kl = kl_estimate(sampler, batch.ref_log_prob, config.loss.kl_kind)                  # [N, T]
    kl = torch.where(batch.response_mask, kl, 0.0)
    to_go = kl.flip(-1).cumsum(-1).flip(-1)                                             # [N, T]
    return batch._replace(advantages=batch.advantages - config.loss.kl_coef * to_go)


class Update(NamedTuple):
    metrics: dict[str, Tensor]
    corrections: list


def update(run: "Run", batch: Batch, options: RolloutCorrectionConfig, correction=None) -> Update:
    """One optimizer step on one mini-batch, of which these are this rank's rows."""
    config, policy, how = run.config, run.policy, run.config.loss
    if correction is None and (options.rollout_is_batch_normalize or how.denominator == "kept"):
        # What is kept, or the mean weight, is known only after a pass over the mini-batch.
        correction = correct(score(policy, batch, config), batch.rollout_log_prob,
                             batch.response_mask, options, batch.advantages, dist.group.WORLD)
    whole = global_counts(batch.response_mask)
    counts = whole if how.denominator == "fixed" else global_counts(correction.mask)
    sums, corrections = defaultdict(float), []
    for rows in micro_batches(batch, config):
        part = batch.rows(rows)
        log_prob = policy(part.tokens, part.attention, part.response_mask.shape[1])     # [b, T]
        corrections.append(correction.rows(rows) if correction else correct(
            log_prob, part.rollout_log_prob, part.response_mask, options, part.advantages))
        loss, metrics = policy_loss(
            log_prob, part.rollout_log_prob if options.bypass_mode else part.old_log_prob,
            part.rollout_log_prob, part.advantages, part.response_mask, options,
            correction=corrections[-1], clip_low=how.clip_low, clip_high=how.clip_high,
            dual_clip=how.dual_clip, mode=how.aggregation, denominator=how.denominator,
            counts=counts, horizon=config.rollout.max_tokens)
        metrics = {k: v for k, v in metrics.items() if k.startswith("loss/")}
        if part.ref_log_prob is not None:
            kl = kl_loss(log_prob, part.ref_log_prob, part.response_mask, how.kl_kind,
                         how.aggregation, counts=whole, horizon=config.rollout.max_tokens)
            loss = loss + how.kl_coef * kl if how.kl_in == "loss" else loss
            metrics["loss/kl"] = kl.detach()
        (loss * dist.get_world_size()).backward()   # FSDP averages over ranks; these are summands
        for name, value in metrics.items():
            sums[name] = sums[name] + value
    totals = torch.stack(list(sums.values()))
    dist.all_reduce(totals)
    norm = nn.utils.clip_grad_norm_(policy.parameters(), config.train.max_grad_norm).full_tensor()
    if not (norm.isfinite() & totals.isfinite().all()):
        run.optimizer.zero_grad()
        run.nonfinite("updates", nonfinite_rows(run, batch, {"π_θ": score(policy, batch, config)}))
        return Update({}, [])
    run.optimizer.step()
    run.optimizer.zero_grad()
    return Update({**dict(zip(sums, totals)), "grad_norm": norm},
                  [correction] if correction else corrections)


def global_counts(mask: Tensor) -> Counts:
    counts = torch.stack(count(mask))
    dist.all_reduce(counts)
    return Counts(*counts)


def average(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = metrics[0] if metrics else ()
    return {name: torch.stack([m[name] for m in metrics]).mean() for name in names}


# --------------------------- plumbing: from here on nothing is particular to reinforcement learning

class Run:
    """What a run has open: the directory runs/<run>/, the models, the engine, the clock."""

    def __init__(self, config: Config, device):
        self.config, self.device, self.main = config, device, dist.get_rank() == 0
        self.directory = Path("runs") / config.run
        self.metrics = self.directory / "metrics.jsonl"
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config)
        self.done, self.before = self.checkpoints.step, self.checkpoints.saved.get("before")
        self.engine = self.reference = self.answers = None
        self.warned = set()                        # metrics that `diagnose` has already spoken of

    @property
    def finished(self) -> bool:
        return self.done >= self.config.train.steps and (self.directory / "model").is_dir()

    def open(self) -> None:
        config = self.config
        self.task = make_task(config.task, config.seed)
        if config.policy.path is None and not self.task.exact:
            raise UserError("policy.path must name a model for task.kind=jsonl or parquet: the "
                            "demo model knows digits only")
        path = config.policy.path or make_demo_model(config, self.task)
        try:
            model = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path,
                                                                        trust_remote_code=False)
            self.prompts = self.encode(self.task.train, model)
            self.held_out_prompts = self.encode(self.task.held_out, model)
            self.policy = load_policy(path, config, self.device)
        except UserError:
            raise
        except Exception as error:         # of as many types as there are kinds of damage
            reason = explain(error) or str(error).strip().split("\n")[0]
            raise UserError(f"policy.path={path} cannot be loaded: {reason}") from None
        ends = self.policy.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.eos_ids = sorted({*ends, self.tokenizer.eos_token_id} - {None})
        if config.loss.kl_coef != 0:
            self.reference = load_policy(path, config, self.device, frozen=True)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.train.lr, fused=True,
                                           weight_decay=config.train.weight_decay)
        longest = max(map(len, self.prompts + self.held_out_prompts)) + config.rollout.max_tokens
        try:
            self.engine = make_engine(
                config.rollout.engine, str(path), dtype=config.rollout.dtype, device=self.device,
                max_model_len=longest, batch_size=config.rollout.batch_size,
                gpu_memory_utilization=config.rollout.gpu_memory_utilization)
        except Exception as error:         # vLLM's are of many types
            raise UserError(f"rollout.engine={config.rollout.engine} does not start: "
                            f"{explain(error) or error}") from None
        self.sync = WeightSync(self.engine, config.rollout.staleness, config.rollout.quantize_bits)

    def encode(self, problems: list[Problem], model) -> list[list[int]]:
        """Token ids of every prompt, through the chat template of a model that has one."""
        context = getattr(model.get_text_config(), "max_position_embeddings", None) or math.inf
        encoded, room = [], context - self.config.rollout.max_tokens
        for problem in problems:
            text = f"{problem.question} {self.config.task.instruction}".rstrip()
            if self.tokenizer.chat_template:
                ids = self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True,
                    return_dict=False)
            else:
                ids = self.tokenizer(text).input_ids
            if not 0 < len(ids) <= room:
                raise UserError(f"{problem.where} is a prompt of {len(ids)} tokens: between 1 and "
                                f"{room} are left of the model's context of {context} by "
                                f"rollout.max_tokens={self.config.rollout.max_tokens}")
            encoded.append(ids)
        return encoded

    def restore(self) -> None:
        """To the last checkpoint, if there is one, with the metrics cut back to it."""
        config, count = self.config, sum(p.numel() for p in self.policy.parameters())
        if count < 10_000_000:
            torch.set_num_threads(1)         # a second thread costs a tiny model more than it saves
        self.say(f"{self.directory}: {count / 1e6:.1f}M parameters on {dist.get_world_size()} × "
                 f"{self.device.type}, engine {self.engine.name} ({config.rollout.dtype}), "
                 f"correction {config.correction.get('preset', 'as configured')}")
        if self.done:
            self.checkpoints.load(self)
            self.say(f"continuing after step {self.done}")
        else:
            self.before = self.evaluate()
        if self.main:
            self.directory.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.structured(config), self.directory / "config.yaml")
            lines = read_metrics(self.metrics) if self.metrics.exists() else []
            write(self.metrics, [line for line in lines if line["step"] <= self.done])
        self.update_engine(self.sync.push)

    def steps(self):
        """The numbers of the steps still to do, under a progress bar."""
        config, self.accuracy = self.config, self.before
        with tqdm(total=config.train.steps, initial=self.done, disable=not self.main,
                  desc=config.run, mininterval=1) as self.bar:
            for step in range(self.done + 1, config.train.steps + 1):
                torch.manual_seed(seed_of(config.seed, "dropout", step, dist.get_rank()))
                self.times, self.began, self.step = {}, time.perf_counter(), step
                self.skipped = {"train/skipped_samples": 0, "train/skipped_updates": 0}
                yield step

    def nonfinite(self, what: str, own: list[str]) -> None:
        """All ranks together: end the run with the first sentence found, or say and count it."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found = sum(everyone, []) or ["the gradient of π_θ is not finite, though its log-probs are"]
        sentence = f"step {self.step}: {found[0]}"
        if self.config.train.on_nonfinite == "raise":
            raise UserError(f"{sentence}; train.on_nonfinite=skip goes on without such {what}")
        self.skipped[f"train/skipped_{what}"] += len(found) if what == "samples" else 1
        self.say(f"* {sentence}")

    @contextlib.contextmanager
    def timed(self, name: str):
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times[f"time/{name}"] = time.perf_counter() - began

    def set_learning_rate(self, step: int) -> None:
        train = self.config.train
        scale = min(1.0, step / (train.warmup_steps + 1))
        if train.schedule == "cosine":
            left = (train.steps - step) / max(1, train.steps - train.warmup_steps)
            scale *= 0.5 - 0.5 * math.cos(math.pi * min(1.0, left))
        for group in self.optimizer.param_groups:
            group["lr"] = train.lr * scale

    def generate(self, prompts: list[list[int]],
                 seeds: list[int]) -> tuple[list[Sample], list[str]]:
        with watched(self.engine, self.config.rollout.timeout, report):
            samples = self.engine.generate(
                prompts, seeds, temperature=self.config.rollout.temperature,
                max_tokens=self.config.rollout.max_tokens, eos_ids=self.eos_ids)
        return samples, self.tokenizer.batch_decode([s.tokens for s in samples],
                                                    skip_special_tokens=True)

    def update_engine(self, push) -> None:
        with watched(self.engine, self.config.rollout.timeout, report):
            push(full_weights(self.policy))

    def evaluate(self) -> float:
        """Exact-match accuracy of one sample per held-out problem, always with the same seeds.

        The engine gets the policy's weights as they are, neither rounded nor late (in its dtype).
        """
        self.update_engine(self.engine.update_weights)
        own = range(dist.get_rank(), len(self.task.held_out), dist.get_world_size())
        _, texts = self.generate([self.held_out_prompts[i] for i in own],
                                 [seed_of(self.config.seed, "eval", i) for i in own])
        self.answers = [{"question": p.question, "answer": p.answer, "response": text,
                         "reward": self.task.reward(p, text)}
                        for p, text in zip((self.task.held_out[i] for i in own), texts)]
        right = torch.tensor(float(sum(a["reward"] for a in self.answers)))
        dist.all_reduce(right)
        return right.item() / len(self.task.held_out)

    def evaluation_if_due(self, step: int) -> dict:
        """Line 1 of the metrics carries the accuracy from before the first update."""
        if step == self.config.train.steps or step % self.config.train.eval_every == 0:
            return {"eval/accuracy": self.evaluate()}
        return {"eval/accuracy": self.before} if step == 1 else {}

    def log(self, step: int, metrics: dict) -> None:
        seconds, metrics = time.perf_counter() - self.began, to_host(metrics)
        with contextlib.suppress(OSError):         # where the system tells what is in memory
            pages = Path("/proc/self/statm").read_text().split()[1]
            metrics["memory/rss_mb"] = int(pages) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20
        metrics = {"step": step, **metrics, **self.skipped, **self.times,
                   "learning_rate": self.optimizer.param_groups[0]["lr"], "time/step": seconds,
                   "tokens_per_second": metrics["response/tokens"] / seconds}
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        if not self.main:
            return
        with self.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        kl = metrics.get("rollout_corr/k3_kl", math.nan)
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f} accuracy {self.accuracy:.3f}"
                                 f" ESS {ess(metrics):.3f} KL {kl:.1e}", refresh=False)
        self.bar.update()
        for sentence in diagnose(metrics):         # each metric once, when it first looks wrong
            if (name := sentence.split()[0]) not in self.warned:
                self.warned.add(name)
                self.say(f"* step {step}: {sentence}")

    def save_if_due(self, step: int) -> None:
        if step == self.config.train.steps or step % self.config.train.save_every == 0:
            self.checkpoints.save(self, step)

    def finish(self) -> None:
        """The model as a Hugging Face directory, held-out answers, curves and a closing table."""
        weights = {name: tensor.cpu() for name, tensor in full_weights(self.policy)}
        if self.answers is None:   # killed after the last step and before this was written
            self.evaluate()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.answers)
        if self.main:
            write(self.directory / "eval.jsonl", sum(everyone, []))
            plot(lines := read_metrics(self.metrics), self.directory / "curves.png")
        with aside(self.directory / "model") as path:      # the last: a run with it is finished
            if self.main:
                self.policy.model.save_pretrained(path, state_dict=weights)
                self.tokenizer.save_pretrained(path)
        if not self.main:
            return
        first, last = lines[0], lines[-1]
        table = [(f"accuracy, {len(self.task.held_out)} held-out problems, sampled", self.before,
                  last["eval/accuracy"])]
        for name in ("reward/mean", "response/length_mean", "rollout_corr/k3_kl"):
            table.append((name, first.get(name, math.nan), last.get(name, math.nan)))
        table.append(("effective sample size / N", ess(first), ess(last)))
        self.say(f"\n{'':48}{'before':>10}{'after':>10}")
        for name, before, after in table:
            self.say(f"{name:48}{before:10.4g}{after:10.4g}")
        for sentence in diagnose(last):
            self.say(f"* {sentence}")
        self.say(f"model, metrics and curves: {self.directory}")

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class Checkpoints:
    """checkpoints/step-000050/: the ranks' safetensors (no pickles), and state.json.

    A checkpoint is written beside its place and renamed when whole: the last good one remains.
    """

    def __init__(self, directory: Path, config: Config):
        self.directory, self.keep, self.step, self.saved = directory, config.train.keep, 0, {}
        self.settings = json.loads(json.dumps(flat(asdict(config))))
        if found := sorted(directory.glob("step-*")):
            try:
                self.step = int(found[-1].name.removeprefix("step-"))
                self.saved = json.loads((found[-1] / "state.json").read_text())
                then, now = {**self.saved["settings"]}, self.settings
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                raise unreadable(found[-1]) from None
            differing = [f"{key}={then.get(key)} (now {now.get(key)})" for key in {**then, **now}
                         if key not in CHANGEABLE and then.get(key) != now.get(key)]
            if differing:
                raise UserError(f"{directory.parent} is a run with {', '.join(differing)}: choose "
                                "another run=NAME, or delete that directory")

    def state(self, run: Run, waiting: list[dict]) -> dict[str, Tensor]:
        """All that a later step reads, by name: this rank's part of it."""
        state = {f"waiting.{i}.{name}": x for i, snapshot in enumerate(waiting)
                 for name, x in snapshot.items()}          # the engine's weights that are due later
        for name, parameter in run.policy.named_parameters():
            moments = run.optimizer.state[parameter]
            state |= {f"{key}.{name}": x for key, x in {"policy": parameter, **moments}.items()}
        return {name: x.detach() for name, x in state.items()}

    def save(self, run: Run, step: int) -> None:
        with aside(self.directory / f"step-{step:06d}") as path:
            dcp.save(self.state(run, run.sync.state_dict()["waiting"]),
                     storage_writer=dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))
            if run.main:
                write(path / "state.json", [{"step": step, "before": run.before,
                                             "engine": run.engine.name, "settings": self.settings}])
        self.prune(run)

    def prune(self, run: Run) -> None:
        """Down to train.keep, and nothing half written: a run may have been killed meanwhile."""
        whole, parts = sorted(self.directory.glob("step-*")), self.directory.glob(".*")
        for path in [*whole[:-self.keep], *parts] if run.main else ():
            shutil.rmtree(path)

    def load(self, run: Run) -> None:
        if (engine := self.saved.get("engine")) != run.engine.name:
            raise UserError(f"this run was sampled by rollout.engine={engine}, and auto is now "
                            f"{run.engine.name}: name the engine")
        for parameter in run.policy.parameters():          # an update by nothing makes the moments
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
        run.optimizer.zero_grad()
        waiting = [{name: torch.empty_like(x, device="cpu") for name, x in full_weights(run.policy)}
                   for _ in range(min(self.step, run.config.rollout.staleness))]
        path = str(self.directory / f"step-{self.step:06d}")
        try:
            dcp.load(self.state(run, waiting), storage_reader=dcp.HuggingFaceStorageReader(path))
        except (Exception, dcp.CheckpointException):
            raise unreadable(path) from None
        run.sync.load_state_dict({"waiting": waiting})
        self.prune(run)


def unreadable(path) -> UserError:
    return UserError(f"{path} is damaged, or no checkpoint of this program: delete it, and the "
                     "same command goes on from the one before it")


@contextlib.contextmanager
def aside(place: Path):
    """A directory for all ranks to write into, renamed into its place when they are through."""
    part, main = place.with_name(f".{place.name}.part"), dist.get_rank() == 0
    try:
        if main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        yield part
        dist.barrier()
        if main:
            shutil.rmtree(place, ignore_errors=True)
            os.replace(part, place)
        dist.barrier()
    finally:
        if main:
            shutil.rmtree(part, ignore_errors=True)


def write(path: Path, lines: list[dict]) -> None:
    """A file of JSON lines that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(part, path)


def read_metrics(path: Path) -> list[dict]:
    """The lines that are whole: the last one of a run that was killed may not be."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    try:
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in found if line["step"] > 0]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} has a line that is not the metrics of a step") from None


def ess(metrics: dict) -> float:
    """ESS/N of the raw weights where there are any, else the tokens' 1/(1 + χ²)."""
    raw = metrics.get("rollout_corr/rollout_is_raw_eff_sample_size")
    chi2 = max(metrics.get("rollout_corr/chi2_token", math.nan), 0.0)       # nan: nothing was left
    return 1 / (1 + chi2) if raw is None else raw


def plot(lines: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = ["reward/mean", "eval/accuracy", "response/length_mean", "rollout_corr/k3_kl",
             "loss/clip_fraction", "grad_norm"]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for name, axis in zip(names, axes.flat):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot(*zip(*points), marker="o" if len(points) < 20 else None)
        axis.set(title=name, xlabel="step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def make_demo_model(config: Config, task: Task) -> str:
    """A tiny Llama with one token per character, badly taught; made once, under runs/.demo/.

    Taught with two answers in five wrong in one digit, it knows the right answer but is not sure
    of it: greedy accuracy is near 1, sampled accuracy below 0.65. RL can sharpen that.
    """
    characters, wrong, steps, size, rate = "0123456789+=>", 0.4, 700, 256, 5e-3
    seed = seed_of(config.seed, "demo")
    key = repr((seed, task, characters, wrong, steps, size, rate, "llama 64×3"))
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    path = Path("runs/.demo") / f"{config.task.kind}-{name}"
    exists = path.exists()
    dist.barrier()                 # all ranks have looked before one of them makes it
    if exists:
        return str(path)
    tokenizer, rng = character_tokenizer(characters), random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.1, dtype="float32", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    bar = tqdm(range(steps if dist.get_rank() == 0 else 0), desc="warm start", mininterval=1,
               disable=dist.get_rank() != 0)
    for step in bar:
        optimizer.param_groups[0]["lr"] = rate * min(step / 100, 1.03 - step / steps)
        problems = rng.choices(task.train, k=size)
        answers = [corrupted(p.answer, rng) if rng.random() < wrong else p.answer for p in problems]
        answers = [Sample([*ids, tokenizer.eos_token_id], [], True)
                   for ids in tokenizer(answers).input_ids]
        questions = tokenizer([p.question for p in problems]).input_ids
        batch = pad(questions, answers, torch.zeros(size), "cpu")
        positions, mask = (batch.attention.cumsum(-1) - 1).clamp(min=0), batch.response_mask
        logits = model(input_ids=batch.tokens, attention_mask=batch.attention,
                       position_ids=positions).logits[:, -mask.shape[1] - 1:-1]        # [B, T, V]
        F.cross_entropy(logits[mask], batch.tokens[:, -mask.shape[1]:][mask]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with aside(path) as part:
        if dist.get_rank() == 0:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
    return str(path)


def character_tokenizer(characters: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    special = ["<pad>", "<eos>", "<unk>"]
    ids = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(("pad_token", "eos_token", "unk_token"), special)))


def corrupted(answer: str, rng: random.Random) -> str:
    at = rng.randrange(len(answer))
    return answer[:at] + rng.choice("0123456789".replace(answer[at], "")) + answer[at + 1:]


@contextlib.contextmanager
def process_group():
    """The device of this rank, inside a process group: torchrun's, or one of a single process."""
    local, on_gpu = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                            device_id=device if on_gpu else None,
                            **({} if "RANK" in os.environ else alone))
    try:
        yield device
        # Gloo's threads free a collective's tensors after its result is known. One that did so
        # while the interpreter shuts down would abort the process; meanwhile they get the GIL.
        dist.barrier()
    except BaseException as error:
        error.silent = not first_to_fail()
        raise
    finally:
        dist.destroy_process_group()


def first_to_fail() -> bool:
    """Whether no other rank has failed before: the failures that follow are its consequences."""
    with contextlib.suppress(Exception):           # the store may have gone with the launcher
        return dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    return True


def report(sentence: str) -> None:
    """What is to be said of an engine that hangs."""
    if first_to_fail():
        print(f"trainer.py: {sentence}", file=sys.stderr, flush=True)


def start(config: Config) -> None:
    with process_group() as device:
        run = Run(config, device)
        if run.finished:
            return run.say(f"{run.directory} is finished after {run.done} steps; a larger "
                           "train.steps continues it")
        try:
            run.open()
            run.restore()
            gc.freeze()            # else a collection walks through all loaded libraries: 0.2 s
            train(run)
            run.finish()
        finally:
            gc.unfreeze()
            run.close()            # before the process group: vLLM needs it to shut down


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch.distributed")
    try:
        start(load_config(argv))
        return 0
    except (Exception, KeyboardInterrupt, dcp.CheckpointException) as error:
        code = {KeyboardInterrupt: 130, UserError: 2}.get(type(error), 1)
        # Before the ranks have met they all find the same: the first one says it.
        if getattr(error, "silent", int(os.environ.get("RANK", 0)) > 0):
            return code
        if not (sentence := explain(error)):
            raise
    print(f"trainer.py: {sentence}", file=sys.stderr)
    return code


def explain(error: BaseException) -> str:
    """A sentence for what a machine does to a run; nothing for what must be a bug."""
    words, full = str(error), getattr(error, "errno", None) == errno.ENOSPC
    if isinstance(error, UserError):
        return words
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: the same command continues from the last checkpoint"
    if full or re.search("No space|os error 28", words):
        return "the disk is full: free some, and the same command goes on from the last checkpoint"
    if re.search(OUT_OF_MEMORY, repr(error), re.I):
        return ("out of memory: lower train.micro_batch_size, rollout.batch_size or "
                "rollout.max_tokens, set policy.gradient_checkpointing=true, or divide the GPU "
                "otherwise by rollout.gpu_memory_utilization")
    if isinstance(error, RuntimeError) and re.search(LOST, words, re.I):
        return ("another rank has ended without a word (killed, or its machine is gone): the same "
                "command continues from the last checkpoint")
    return words.strip().split("\n")[0] if isinstance(error, (OSError, EngineError)) else ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a background job ignores it
    sys.exit(main(sys.argv[1:]))
