"""Three Policies, trained: one node, one loop, from a question to an updated policy.

A step: prompts → rollouts from π_rollout → rewards → advantages → log-probs under π_old (not in
bypass mode) → `correct` → epochs × mini-batches × micro-batches of π_θ → weights into the engine.

What this file decides
* A loss is a sum over tokens divided by a global count, so that ranks and micro-batches only split
  the work: mini-batch m is the same prompts on one rank or on eight, and gradients are summed.
* The three log-probs are of the sampling temperature; those of prompts are never computed.
* Everything random is drawn from (seed, what for, step, index): a run that was killed continues with
  what it would have done, and no random state needs to be saved.
What it leaves out: several nodes, tensor parallelism, value functions, multi-turn rollouts.

    python trainer.py [FILE.yaml] [section.key=value …]          # default: configs/demo.yaml
    torchrun --nproc-per-node 2 trainer.py correction.preset=bypass_pg_is rollout.engine=vllm
"""

import contextlib
import difflib
import errno
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import sys
import time
import typing
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from correction import RolloutCorrectionConfig, correct, diagnose, from_dialect, merge, to_host
from estimators import grpo_advantages, kl_estimate, reinforce_advantages, rloo_advantages
from losses import Counts, count, kl_loss, policy_loss
from rollout import Sample, WeightSync, make_engine

CHUNK = 2 ** 26              # logits at a time, in float32: 256 MB
KINDS = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
AGGREGATIONS = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class UserError(Exception):
    """One sentence for whoever started the run."""


# ------------------------------------------------------------------------------------- configuration

@dataclass
class TaskConfig:
    kind: Literal["arithmetic", "sort", "jsonl", "parquet"] = "arithmetic"
    size: int = 2                             # digits per number (arithmetic), digits to sort (sort)
    path: Optional[str] = None                # jsonl, parquet: rows with `question` and `answer`
    eval_path: Optional[str] = None           # null: eval_size rows of `path` are held out
    eval_size: int = 1024                     # held-out problems, one sample each
    instruction: str = ""                     # appended to every question of a file


@dataclass
class PolicyConfig:
    path: Optional[str] = None                # directory or hub id; null: a tiny demo model is made
    dtype: Literal["float32", "bfloat16"] = "float32"     # of the forward pass; weights stay float32
    gradient_checkpointing: bool = False


@dataclass
class RolloutConfig:
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    prompts: int = 64                         # per step, over all ranks
    samples: int = 8                          # per prompt: the group of the group baselines
    max_tokens: int = 10
    temperature: float = 1.0
    top_p: float = 1.0                        # these two only as they are: see `validate`
    top_k: Optional[int] = None
    quantize_bits: Optional[int] = None       # weights rounded on their way to the engine
    staleness: int = 0                        # the engine lags so many updates behind
    batch_size: int = 512                     # samples generated at a time
    gpu_memory_utilization: float = 0.4


@dataclass
class AdvantageConfig:
    kind: Literal["grpo", "rloo", "reinforce"] = "grpo"
    normalize_std: bool = True                # grpo: divide by the group's standard deviation


@dataclass
class LossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: Optional[float] = None
    aggregation: AGGREGATIONS = "token-mean"
    denominator: Literal["fixed", "kept"] = "fixed"       # kept: what rejection left
    kl_coef: float = 0.0                      # 0: no reference policy is loaded
    kl_kind: KINDS = "k3+"
    kl_in: Literal["loss", "reward"] = "loss"


@dataclass
class TrainConfig:
    steps: int = 250
    epochs: int = 1                           # over one step's rollouts
    mini_batches: int = 2                     # optimizer steps per epoch
    micro_batch_size: int = 256               # rows per forward pass and rank
    lr: float = 3e-4
    warmup_steps: int = 10
    schedule: Literal["constant", "cosine"] = "constant"
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    save_every: int = 50
    keep: int = 3                             # checkpoints
    eval_every: int = 50


@dataclass
class Config:
    seed: int = 0
    run: Optional[str] = None                 # writes runs/<run>/; null: named after file and overrides
    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: dict[str, Any] = field(default_factory=dict)      # preset: NAME, and/or its fields
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# A run may be continued with another value of these.
CHANGEABLE = {"train.steps", "train.save_every", "train.keep", "train.eval_every",
              "rollout.gpu_memory_utilization"}


def load_config(argv: list[str]) -> Config:
    """FILE.yaml and dotted overrides, checked. Whatever is wrong is a UserError of one sentence."""
    paths = [a for a in argv if "=" not in a or a.endswith(".yaml") and Path(a).is_file()]
    overrides = [a for a in argv if a not in paths]
    if len(paths) > 1:
        raise UserError(f"at most one FILE.yaml and key=value overrides are expected, not {' '.join(paths)}")
    path = Path(paths[0]) if paths else Path(__file__).parent / "configs" / "demo.yaml"
    try:
        text = path.read_text(encoding="utf-8") + "\n".join(overrides)
        if "${" in text:
            raise UserError(f"{path}: '${{…}}' is not replaced here; write the value itself")
        in_file, given = OmegaConf.load(path), OmegaConf.from_dotlist(overrides)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:          # YAML's own errors have many types, all of several lines
        raise UserError(f"{path} or an override is not YAML: {' '.join(str(error).split())}") from None
    try:
        user = OmegaConf.merge(in_file, given)
        settings = flat(OmegaConf.to_container(user))
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError):
        raise UserError(f"{path} must be a mapping of settings, such as train: {{steps: 10}}") from None
    known = dict(leaves(Config))
    for key, value in settings.items():
        if key not in known and not key.startswith("correction."):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise UserError(f"{key} is not a setting; did you mean {near}?")
        if is_dataclass(known.get(key)) and value != {}:
            raise UserError(f"{key} must be {describe(known[key])}, not {value!r}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), user))
    except OmegaConfBaseException as error:
        key = error.full_key
        raise UserError(f"{key} must be {describe(known[key])}, not {settings.get(key)!r}") from None
    config.correction = dict(config.correction) or {"preset": "decoupled_token_is"}
    if "run" not in given:
        changes = sorted(o for o in overrides if o.split("=")[0] not in CHANGEABLE)
        name = re.sub(r"[^\w.,=+-]+", "_", ",".join([config.run or path.stem, *changes]))
        config.run = name if len(name) < 100 else f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    validate(config)
    return config


def leaves(cls, prefix="") -> typing.Iterator[tuple[str, Any]]:
    """("train.steps", int) … for every setting, sections included."""
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name, hint
        if is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")


def describe(hint) -> str:
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(choices)}"
    if type(None) in choices:
        return f"{describe(choices[0])} or null"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "a section of settings")


def validate(config: Config) -> None:
    """Values that have the right type and still make no sense."""
    def positive(x):
        return 0 < x < math.inf

    task, rollout, loss, train = config.task, config.rollout, config.loss, config.train
    from_file = task.kind in ("jsonl", "parquet")
    largest = 12 if task.kind == "sort" else 6
    rules = [
        ("seed", config.seed, config.seed >= 0, "a whole number of at least 0"),
        ("run", config.run, re.fullmatch(r"\w[\w.,=+-]{0,99}", config.run),
         "a plain name of letters, digits and .,=+-_ : it is a directory inside runs/"),
        ("task.size", task.size, from_file or 1 <= task.size <= largest, f"a number from 1 to {largest}"),
        ("task.eval_size", task.eval_size, task.eval_size >= 1, "a whole number of at least 1"),
        ("task.path", task.path, (task.path is not None) == from_file,
         "the question file for task.kind=jsonl or parquet, and null for the others"),
        ("rollout.temperature", rollout.temperature, positive(rollout.temperature), "a number above 0"),
        ("rollout.top_p", rollout.top_p, rollout.top_p == 1, "1.0: the recorded log-probs would miss the mass cut off"),
        ("rollout.top_k", rollout.top_k, rollout.top_k in (None, 0, -1), "null: the recorded log-probs would miss the mass cut off"),
        ("rollout.quantize_bits", rollout.quantize_bits, rollout.quantize_bits is None or 2 <= rollout.quantize_bits <= 16,
         "null or a number of bits from 2 to 16"),
        ("rollout.staleness", rollout.staleness, rollout.staleness >= 0, "a whole number of at least 0"),
        ("rollout.gpu_memory_utilization", rollout.gpu_memory_utilization, 0 < rollout.gpu_memory_utilization < 1,
         "a share of the GPU between 0 and 1"),
        ("loss.clip_low", loss.clip_low, 0 <= loss.clip_low <= 1, "a number from 0 to 1"),
        ("loss.clip_high", loss.clip_high, 0 <= loss.clip_high < math.inf, "a number of at least 0"),
        ("loss.dual_clip", loss.dual_clip, loss.dual_clip is None or 1 < loss.dual_clip < math.inf, "null or a number above 1"),
        ("loss.kl_coef", loss.kl_coef, 0 <= loss.kl_coef < math.inf, "a number of at least 0"),
        ("train.lr", train.lr, positive(train.lr), "a number above 0"),
        ("train.max_grad_norm", train.max_grad_norm, train.max_grad_norm > 0, "a number above 0"),
        ("train.weight_decay", train.weight_decay, 0 <= train.weight_decay < math.inf, "a number of at least 0"),
        ("train.warmup_steps", train.warmup_steps, train.warmup_steps >= 0, "a whole number of at least 0"),
        *((f"{section}.{key}", value, value >= 1, "a whole number of at least 1") for section, key, value in [
            *(("rollout", k, getattr(rollout, k)) for k in ("prompts", "samples", "max_tokens", "batch_size")),
            *(("train", k, getattr(train, k)) for k in ("steps", "epochs", "mini_batches", "micro_batch_size",
                                                        "save_every", "keep", "eval_every"))]),
    ]
    for key, value, good, allowed in rules:
        if not good:
            raise UserError(f"{key} must be {allowed}, not {value!r}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if rollout.prompts % (train.mini_batches * world):
        raise UserError(f"rollout.prompts={rollout.prompts} must be a multiple of train.mini_batches × ranks = "
                        f"{train.mini_batches} × {world}, so that every rank has the same share")
    correction_of(config)


def correction_of(config: Config) -> RolloutCorrectionConfig:
    """`correction: {preset: NAME, field: value …}`, or a block in any dialect correction.py reads."""
    try:
        return from_dialect(config.correction)
    except (ValueError, TypeError) as error:
        sentence = " ".join(str(error).split())
        raise UserError(sentence if "correction" in sentence else f"correction: {sentence}") from None


# -------------------------------------------------------------------------------------------- task

class Problem(NamedTuple):
    question: str
    answer: str
    where: str                                # file and line, for messages


@dataclass
class Task:
    train: list[Problem]
    held_out: list[Problem]                   # disjoint from train
    exact: bool                               # the response is the answer, or contains it

    def reward(self, problem: Problem, response: str) -> float:
        if self.exact:
            return float(response == problem.answer)
        return float(final_answer(response) == final_answer(problem.answer))

    def order(self, seed: int, first: int, n: int) -> list[int]:
        """Indices `first` to first + n of an endless sequence of shuffled passes over the problems."""
        size, chosen = len(self.train), []
        for epoch in range(first // size, (first + n - 1) // size + 1):
            shuffled = random.Random(seed_of(seed, "order", epoch)).sample(range(size), size)
            chosen += shuffled[max(0, first - epoch * size):first + n - epoch * size]
        return chosen


def make_task(config: TaskConfig, seed: int) -> Task:
    if config.kind in ("jsonl", "parquet"):
        problems = read_problems(config.path, config.kind)
        if config.eval_path is not None:
            held_out = read_problems(config.eval_path, config.kind)
            return Task(problems, held_out[:config.eval_size], exact=False)
        if len(problems) <= config.eval_size:
            raise UserError(f"{config.path} has {len(problems)} rows: too few to hold out task.eval_size="
                            f"{config.eval_size}; set task.eval_path or a smaller task.eval_size")
        random.Random(seed_of(seed, "task")).shuffle(problems)
        return Task(problems[config.eval_size:], problems[:config.eval_size], exact=False)
    rng, digits, questions = random.Random(seed_of(seed, "task")), config.size, {}
    possible = 10 ** (digits if config.kind == "sort" else 2 * digits)
    wanted = min(possible, 10_000)
    while len(questions) < wanted:            # a dict: every question once
        if config.kind == "sort":
            text = "".join(rng.choices("0123456789", k=digits))
            questions[f"{text}>"] = "".join(sorted(text))
        else:
            a, b = rng.randrange(10 ** digits), rng.randrange(10 ** digits)
            questions[f"{a}+{b}="] = str(a + b)
    problems = [Problem(q, a, f"the question {q!r}") for q, a in questions.items()]
    held_out = min(config.eval_size, wanted // 2)
    return Task(problems[held_out:], problems[:held_out], exact=True)


def read_problems(path: str, kind: str) -> list[Problem]:
    """Rows with `question` and `answer`, in GSM8K's shape: the answer's last line may be '#### 42'."""
    try:
        if kind == "parquet":
            from pyarrow import parquet
            rows = [(f"{path}, row {i}", row) for i, row in enumerate(parquet.read_table(path).to_pylist(), 1)]
        else:
            text = Path(path).read_text(encoding="utf-8")
            rows = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    except ImportError:
        raise UserError("task.kind=parquet needs pyarrow: pip install pyarrow") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:               # not UTF-8; not parquet (pyarrow's errors are ValueErrors)
        raise UserError(f"{path} is not a {kind} file: {' '.join(str(error).split())}") from None
    problems = []
    for where, row in rows:
        try:
            row = json.loads(row) if isinstance(row, str) else row
        except (ValueError, RecursionError):
            raise UserError(f"{where} is not JSON: {row[:60]!r}") from None
        for key in ("question", "answer"):
            value = row.get(key) if isinstance(row, dict) else None
            if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
                raise UserError(f"{where} has no `{key}`")
        if not final_answer(str(row["answer"])):
            raise UserError(f"{where} has an `answer` that ends in nothing: {str(row['answer'])[-60:]!r}")
        problems.append(Problem(str(row["question"]), str(row["answer"]), where))
    if not problems:
        raise UserError(f"{path} has no rows")
    return problems


def final_answer(text: str) -> str:
    r"""What follows the last '####', else the last \boxed{…}, else the whole text; 1,234.0 is $1234."""
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
        return f"{Decimal(number).normalize() + 0:f}"         # + 0: −0 is 0
    return text


def seed_of(*what) -> int:
    """31 bits from (seed, purpose, step, index …): the same in every process and on any number of ranks."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") >> 1


# ------------------------------------------------------------------------------------------ policy

class Policy(nn.Module):
    """A Hugging Face causal LM that returns log-probs of responses at the sampling temperature."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, tokens: Tensor, attention: Tensor, width: int) -> Tensor:
        """tokens, attention [B, P + T]: prompts padded on the left, responses on the right; width = T.

        Returns log π(y_t | x, y_<t), float32, [B, T], 0 beyond the longest response of these rows.
        """
        response = attention[:, -width:].sum(-1).max().clamp(min=1).item()
        prompt = attention[:, :-width].sum(-1).max().item()
        rows = slice(tokens.shape[1] - width - prompt, tokens.shape[1] - width + response)
        tokens, attention = tokens[:, rows], attention[:, rows]
        positions = (attention.cumsum(-1) - 1).clamp(min=0)                           # [B, p + t]
        hidden = self.model.get_decoder()(
            input_ids=tokens, attention_mask=attention, position_ids=positions, use_cache=False,
        ).last_hidden_state[:, prompt - 1:-1].flatten(0, 1)                           # [B·t, H]
        targets = tokens[:, prompt:].flatten()                                        # [B·t]
        head = self.model.get_output_embeddings()
        chunk = max(1, CHUNK // head.weight.shape[0])                               # recomputed in backward
        parts = [checkpoint(self.token_log_probs, h, y, use_reentrant=False)
                 for h, y in zip(hidden.split(chunk), targets.split(chunk))]
        return F.pad(torch.cat(parts).view(-1, response), (0, width - response))      # [B, T]

    def token_log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()                   # [chunk, V]
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        logits = logits / self.temperature
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)


def load_policy(path: str, config: Config, device, frozen: bool = False) -> Policy:
    """The model in float32, checked, sharded over the ranks (FSDP2), computing in policy.dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(not frozen)
    policy = Policy(model, config.rollout.temperature).requires_grad_(not frozen)
    with torch.no_grad():
        tokens = torch.arange(4)[None] % model.config.get_text_config().vocab_size
        expected = (model(input_ids=tokens).logits.float() / policy.temperature).log_softmax(-1)
        expected = expected[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        if not torch.allclose(policy(tokens, torch.ones_like(tokens), 3), expected, atol=1e-3):
            raise UserError(f"{path}: {type(model).__name__} does more to its logits than trainer.py's "
                            "Policy knows of, so its log-probs would be wrong")
    if config.policy.gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(getattr(torch, config.policy.dtype), torch.float32)}
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):      # the decoder's layers
            fully_shard(module, **options)
    return fully_shard(policy, **options)


def full_weights(policy: Policy):
    """(name, whole tensor) of every parameter, one at a time; a collective, so every rank walks through it."""
    policy.reshard()                          # a forward pass without a backward leaves the root gathered
    for name, parameter in policy.model.named_parameters():
        yield name, parameter.detach().full_tensor()


# ---------------------------------------------------------------------------------------- the loop

class Batch(NamedTuple):
    """One step's rollouts on this rank; N = prompts × samples / ranks rows."""

    tokens: Tensor                            # [N, P + T]
    attention: Tensor                         # [N, P + T]
    response_mask: Tensor                     # [N, T]
    advantages: Tensor                        # [N, T]
    rollout_log_prob: Tensor                  # [N, T]  π_rollout
    old_log_prob: Tensor | None = None        # [N, T]  π_old
    ref_log_prob: Tensor | None = None        # [N, T]  π_ref

    def rows(self, index) -> "Batch":
        return Batch(*(None if x is None else x[index] for x in self))


def train(run: "Run") -> None:
    config, policy, engine, sync = run.config, run.policy, run.engine, run.sync
    correction_config = correction_of(config)
    for step in run.steps():
        with run.timed("rollout"):
            batch, metrics = sample(run, step)
        with run.timed("log_probs"):
            if not correction_config.bypass_mode:
                batch = batch._replace(old_log_prob=score(policy, batch, config))
            if run.reference is not None:
                batch = batch._replace(ref_log_prob=score(run.reference, batch, config))
            batch = with_kl_in_reward(batch, config)
        with run.timed("update"):
            correction = None                 # bypass mode: ρ = π_θ/π_rollout changes with every update
            if not correction_config.bypass_mode:
                correction = correct(batch.old_log_prob, batch.rollout_log_prob, batch.response_mask,
                                     correction_config, batch.advantages, dist.group.WORLD)
            run.set_learning_rate(step)
            updates = []
            for epoch in range(config.train.epochs):
                for rows in torch.arange(len(batch.tokens)).chunk(config.train.mini_batches):
                    part = None if correction is None else correction.rows(rows)
                    updates.append(update(policy, run.optimizer, batch.rows(rows), correction_config, config, part))
            metrics |= average([u.metrics for u in updates])
            corrections = [correction] if correction else [
                c for u in updates[:config.train.mini_batches] for c in u.corrections]
            metrics |= merge(corrections, dist.group.WORLD)
        with run.timed("sync"):
            engine.wake()
            metrics |= run.evaluation_if_due(step)
            sync.push(full_weights(policy))
        run.log(step, metrics)
        run.save_if_due(step)


def sample(run: "Run", step: int) -> tuple[Batch, dict]:
    """This rank's prompts (every world-th of the step), their samples, rewards and advantages."""
    config, task, n = run.config.rollout, run.task, run.config.rollout.samples
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen = task.order(run.config.seed, (step - 1) * config.prompts, config.prompts)
    rows = [(p, j) for p in range(rank, config.prompts, world) for j in range(n)]
    prompts = [run.prompts[chosen[p]] for p, _ in rows]
    samples = run.engine.generate(
        prompts, [seed_of(run.config.seed, "sample", step, p, j) for p, j in rows],
        temperature=config.temperature, max_tokens=config.max_tokens, eos_ids=run.eos_ids)
    run.engine.sleep()
    texts = run.tokenizer.batch_decode([s.tokens for s in samples], skip_special_tokens=True)
    rewards = [task.reward(task.train[chosen[p]], text) for (p, _), text in zip(rows, texts)]

    # Advantages need the groups and the batch of all ranks: gathered into the order of one rank.
    own = torch.tensor([[r, len(s.tokens), s.finished] for r, s in zip(rewards, samples)])  # [N, 3]
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    rewards, lengths, finished = torch.stack([x.view(-1, n, 3) for x in everyone], 1).view(-1, 3).T
    groups = torch.arange(config.prompts).repeat_interleave(n)
    advantages = {"grpo": lambda: grpo_advantages(rewards, groups, run.config.advantage.normalize_std),
                  "rloo": lambda: rloo_advantages(rewards, groups),
                  "reinforce": lambda: reinforce_advantages(rewards)}[run.config.advantage.kind]()
    advantages = advantages.view(-1, n)[rank::world].flatten()                        # [N]
    of_group = rewards.view(-1, n)
    run.tokens_sampled = lengths.sum().item()
    return pad(prompts, samples, advantages, run.device), {
        "reward/mean": rewards.mean(), "reward/std": rewards.std(correction=0),
        "reward/groups_without_signal": (of_group == of_group[:, :1]).all(1).float().mean(),
        "response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
        "response/truncated_fraction": 1 - finished.mean()}


def pad(prompts: list[list[int]], samples: list, advantages: Tensor, device) -> Batch:
    longest_prompt = max(map(len, prompts))
    width = max(1, *(len(s.tokens) for s in samples))

    def right(rows):
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])      # [N, T]

    left = torch.tensor([[0] * (longest_prompt - len(p)) + p for p in prompts])       # [N, P]
    is_prompt = torch.tensor([[0] * (longest_prompt - len(p)) + [1] * len(p) for p in prompts])
    mask = right([[1] * len(s.tokens) for s in samples])
    batch = Batch(torch.cat([left, right([s.tokens for s in samples])], 1), torch.cat([is_prompt, mask], 1),
                  mask.bool(), advantages[:, None].expand_as(mask), right([s.log_probs for s in samples]).float())
    return Batch(*(x if x is None else x.to(device) for x in batch))


def micro_batches(batch: Batch, size: int) -> tuple[Tensor, ...]:
    """Row numbers, `size` at a time, rows of similar length together."""
    return batch.attention.sum(-1).argsort(stable=True).split(size)


@torch.no_grad()
def score(policy: Policy, batch: Batch, config: Config) -> Tensor:
    """Log-probs of all rows under a policy, without a graph: [N, T]"""
    log_prob = torch.zeros_like(batch.rollout_log_prob)
    for rows in micro_batches(batch, config.train.micro_batch_size):
        part = batch.rows(rows)
        log_prob[rows] = policy(part.tokens, part.attention, log_prob.shape[1])
    return log_prob


def with_kl_in_reward(batch: Batch, config: Config) -> Batch:
    """A_t −= kl_coef · Σ_{s≥t} k_s: the penalty's return from token t on (earlier terms drop out)."""
    if config.loss.kl_coef == 0 or config.loss.kl_in != "reward":
        return batch
    sampled_by = batch.rollout_log_prob if batch.old_log_prob is None else batch.old_log_prob
    kl = torch.where(batch.response_mask, kl_estimate(sampled_by, batch.ref_log_prob, config.loss.kl_kind), 0.0)
    to_go = kl.flip(-1).cumsum(-1).flip(-1)                                           # [N, T]
    return batch._replace(advantages=batch.advantages - config.loss.kl_coef * to_go)


class Update(NamedTuple):
    metrics: dict[str, Tensor]
    corrections: list


def update(policy, optimizer, batch: Batch, correction_config, config: Config, correction=None) -> Update:
    """One optimizer step on one mini-batch: this rank's rows of it, in micro-batches."""
    loss_config, options = config.loss, correction_config
    if correction is None and (options.rollout_is_batch_normalize or loss_config.denominator == "kept"):
        # What is kept, or the mean weight, is known only after a forward pass over the mini-batch.
        correction = correct(score(policy, batch, config), batch.rollout_log_prob, batch.response_mask,
                             options, batch.advantages, dist.group.WORLD)
    whole = global_counts(batch.response_mask)
    counts = whole if loss_config.denominator == "fixed" else global_counts(correction.mask)
    sums, corrections = defaultdict(float), []
    for rows in micro_batches(batch, config.train.micro_batch_size):
        part = batch.rows(rows)
        log_prob = policy(part.tokens, part.attention, part.response_mask.shape[1])   # [b, T]
        corrections.append(correction.rows(rows) if correction else correct(
            log_prob, part.rollout_log_prob, part.response_mask, options, part.advantages))
        old = part.rollout_log_prob if options.bypass_mode else part.old_log_prob
        loss, metrics = policy_loss(
            log_prob, old, part.rollout_log_prob, part.advantages, part.response_mask, options,
            correction=corrections[-1], clip_low=loss_config.clip_low, clip_high=loss_config.clip_high,
            dual_clip=loss_config.dual_clip, mode=loss_config.aggregation, denominator=loss_config.denominator,
            counts=counts, horizon=config.rollout.max_tokens)
        metrics = {k: v for k, v in metrics.items() if k.startswith("loss/")}
        if part.ref_log_prob is not None:
            kl = kl_loss(log_prob, part.ref_log_prob, part.response_mask, loss_config.kl_kind,
                         loss_config.aggregation, counts=whole, horizon=config.rollout.max_tokens)
            loss = loss + loss_config.kl_coef * kl * (loss_config.kl_in == "loss")
            metrics["loss/kl"] = kl.detach()
        (loss * dist.get_world_size()).backward()         # FSDP averages over ranks; these are summands
        for name, value in metrics.items():
            sums[name] = sums[name] + value
    names, values = list(sums), torch.stack(list(sums.values()))
    dist.all_reduce(values)
    norm = nn.utils.clip_grad_norm_(policy.parameters(), config.train.max_grad_norm).full_tensor()
    if not norm.isfinite():
        raise UserError("the gradient is not finite; the last checkpoint is from before this step")
    optimizer.step()
    optimizer.zero_grad()
    return Update(dict(zip(names, values)) | {"grad_norm": norm}, [correction] if correction else corrections)


def global_counts(mask: Tensor) -> Counts:
    counts = torch.stack(count(mask))
    dist.all_reduce(counts)
    return Counts(*counts)


def average(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([m[name] for m in metrics]).mean() for name in metrics[0]}


# ----------------------------------- plumbing: from here on nothing is about reinforcement learning

class Run:
    """Everything a run has open: the directory runs/<run>/, the models, the engine, the clock."""

    def __init__(self, config: Config, device):
        self.config, self.device, self.main = config, device, dist.get_rank() == 0
        self.directory = Path("runs") / config.run
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config)
        self.done, self.before = self.checkpoints.step, self.checkpoints.saved.get("before")
        self.engine = self.reference = self.board = None

    def open(self) -> None:
        config, device = self.config, self.device
        self.task = make_task(config.task, config.seed)
        path = config.policy.path or make_demo_model(config, self.task)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            hf_config = transformers.AutoConfig.from_pretrained(path)
            generation = transformers.GenerationConfig.from_model_config(hf_config)
            with contextlib.suppress(OSError):
                generation = transformers.GenerationConfig.from_pretrained(path)
            self.prompts, self.held_out_prompts = (self.encode(problems, hf_config)
                                                   for problems in (self.task.train, self.task.held_out))
            self.policy = load_policy(path, config, device)
        except (OSError, ValueError) as error:
            raise UserError(f"policy.path={path} cannot be loaded: {str(error).splitlines()[0]}") from None
        ends = generation.eos_token_id if generation.eos_token_id is not None else []
        ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}
        self.eos_ids = sorted(ends)
        if config.loss.kl_coef != 0:
            self.reference = load_policy(path, config, device, frozen=True)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.train.lr,
                                           weight_decay=config.train.weight_decay)
        longest = max(map(len, self.prompts + self.held_out_prompts)) + config.rollout.max_tokens
        try:
            self.engine = make_engine(
                config.rollout.engine, str(path), dtype=config.rollout.dtype, max_model_len=longest,
                gpu_memory_utilization=config.rollout.gpu_memory_utilization, device=device,
                batch_size=config.rollout.batch_size)
        except (ImportError, RuntimeError, ValueError) as error:
            raise UserError(f"rollout.engine={config.rollout.engine} does not start: {error}") from None
        self.sync = WeightSync(self.engine, config.rollout.staleness, config.rollout.quantize_bits)

    @property
    def finished(self) -> bool:
        return self.done >= self.config.train.steps and (self.directory / "model").is_dir()

    def encode(self, problems: list[Problem], hf_config) -> list[list[int]]:
        """Token ids of every prompt, through the chat template of a model that has one."""
        context = getattr(hf_config.get_text_config(), "max_position_embeddings", None) or math.inf
        encoded = []
        for problem in problems:
            text = f"{problem.question} {self.config.task.instruction}".rstrip()
            if self.tokenizer.chat_template:
                ids = self.tokenizer.apply_chat_template([{"role": "user", "content": text}],
                                                         add_generation_prompt=True, return_dict=False)
            else:
                ids = self.tokenizer(text).input_ids
            if not ids or len(ids) + self.config.rollout.max_tokens > context:
                raise UserError(f"{problem.where} is a prompt of {len(ids)} tokens, which with rollout.max_tokens="
                                f"{self.config.rollout.max_tokens} must fit the model's context of {context}")
            encoded.append(ids)
        return encoded

    def restore(self) -> None:
        """To the last checkpoint, if there is one, with the metrics cut back to it."""
        config, metrics = self.config, self.directory / "metrics.jsonl"
        count = sum(p.numel() for p in self.policy.parameters())
        if count < 10_000_000:
            torch.set_num_threads(1)          # a second thread costs a tiny model more than it saves
        self.say(f"{self.directory}: {count / 1e6:.1f}M parameters on {dist.get_world_size()} × {self.device.type}, "
                 f"engine {self.engine.name} ({config.rollout.dtype}), "
                 f"correction {config.correction.get('preset', 'as configured')}")
        if self.done:
            self.checkpoints.load(self)
            self.say(f"continuing after step {self.done}")
        else:
            self.before = self.evaluate()
        if self.main:
            self.directory.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.structured(config), self.directory / "config.yaml")
            lines = read_metrics(metrics) if metrics.exists() else []
            write(metrics, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= self.done))
            if importlib.util.find_spec("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
                self.board = SummaryWriter(str(self.directory), purge_step=self.done + 1)
        self.sync.push(full_weights(self.policy))

    def steps(self):
        """The numbers of the steps still to do, under a progress bar."""
        self.bar = tqdm(total=self.config.train.steps, initial=self.done, disable=not self.main, desc=self.config.run, mininterval=1)
        with self.bar:
            for step in range(self.done + 1, self.config.train.steps + 1):
                torch.manual_seed(seed_of(self.config.seed, "torch", step, dist.get_rank()))   # dropout
                self.times, self.began = {}, time.perf_counter()
                yield step
                self.done = step

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
            progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
            scale *= 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        for group in self.optimizer.param_groups:
            group["lr"] = train.lr * scale

    def evaluate(self) -> float:
        """Exact-match accuracy of one sample per held-out problem, always with the same seeds.

        The engine is given the policy's weights as they are: not rounded, not late. (In its dtype.)
        """
        config, held_out = self.config, self.task.held_out
        self.engine.update_weights(full_weights(self.policy))
        own = range(dist.get_rank(), len(held_out), dist.get_world_size())
        samples = self.engine.generate(
            [self.held_out_prompts[i] for i in own], [seed_of(config.seed, "eval", i) for i in own],
            temperature=config.rollout.temperature, max_tokens=config.rollout.max_tokens, eos_ids=self.eos_ids)
        texts = self.tokenizer.batch_decode([s.tokens for s in samples], skip_special_tokens=True)
        self.answers = [dict(question=held_out[i].question, answer=held_out[i].answer, response=text,
                             reward=self.task.reward(held_out[i], text)) for i, text in zip(own, texts)]
        right = torch.tensor(float(sum(a["reward"] for a in self.answers)))
        dist.all_reduce(right)
        return right.item() / len(held_out)

    def evaluation_if_due(self, step: int) -> dict:
        """Line 1 of the metrics carries the accuracy from before the first update."""
        last = step == self.config.train.steps
        if last or step % self.config.train.eval_every == 0:
            return {"eval/accuracy": self.evaluate()}
        return {"eval/accuracy": self.before} if step == 1 else {}

    def log(self, step: int, metrics: dict) -> None:
        seconds = time.perf_counter() - self.began
        metrics = {"step": step, **to_host(metrics), "learning_rate": self.optimizer.param_groups[0]["lr"],
                   **self.times, "time/step": seconds, "tokens_per_second": self.tokens_sampled / seconds}
        self.accuracy = metrics.get("eval/accuracy", getattr(self, "accuracy", self.before))
        if not self.main:
            return
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f} accuracy {self.accuracy:.3f} "
                                 f"ESS {effective_share(metrics):.3f} KL {metrics['rollout_corr/k3_kl']:.1e}", refresh=False)
        self.bar.update()

    def save_if_due(self, step: int) -> None:
        if step == self.config.train.steps or step % self.config.train.save_every == 0:
            self.checkpoints.save(self, step)

    def finish(self) -> None:
        """The model as a Hugging Face directory, its held-out answers, the curves, the closing table."""
        weights = {name: tensor.cpu() for name, tensor in full_weights(self.policy)}
        everyone = [None] * dist.get_world_size()
        if not hasattr(self, "answers"):      # resumed after the last step, before this was written
            self.evaluate()
        dist.all_gather_object(everyone, self.answers)
        with aside(self.directory / "model") as path:
            if self.main:
                self.policy.model.save_pretrained(path, state_dict=weights)
                self.tokenizer.save_pretrained(path)
        if not self.main:
            return
        write(self.directory / "eval.jsonl", "".join(json.dumps(a) + "\n" for part in everyone for a in part))
        lines = read_metrics(self.directory / "metrics.jsonl")
        plot(lines, self.directory / "curves.png")
        first, last = lines[0], lines[-1]
        rows = [(f"held-out accuracy ({len(self.task.held_out)} sampled)", self.before, last["eval/accuracy"]),
                ("training reward", first["reward/mean"], last["reward/mean"]),
                ("response length", first["response/length_mean"], last["response/length_mean"]),
                ("effective sample size", effective_share(first), effective_share(last)),
                ("KL(rollout ‖ train), k3, nats", first["rollout_corr/k3_kl"], last["rollout_corr/k3_kl"])]
        self.say(f"\n{'':36}{'before':>10}{'after':>10}")
        for name, before, after in rows:
            self.say(f"{name:36}{before:10.4g}{after:10.4g}")
        for sentence in diagnose(last):
            self.say(f"* {sentence}")
        self.say(f"model, metrics and curves are in {self.directory}")

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self.board:
            self.board.close()
        if self.engine is not None:
            self.engine.close()


class Checkpoints:
    """checkpoints/step-000050/: sharded safetensors (no pickles), and state.json with the settings.

    A checkpoint is written beside its place and renamed when whole: the last good one always remains.
    """

    def __init__(self, directory: Path, config: Config):
        self.directory, self.keep, self.settings = directory, config.train.keep, flat(asdict(config))
        self.step, self.saved = 0, {}
        if found := sorted(directory.glob("step-*")):
            self.step = int(found[-1].name.removeprefix("step-"))
            self.saved = json.loads((found[-1] / "state.json").read_text())
            then = self.saved["settings"]
            differing = [f"{k}={then.get(k)} (now {self.settings.get(k)})" for k in {**then, **self.settings}
                         if k not in CHANGEABLE and then.get(k) != self.settings.get(k)]
            if differing:
                raise UserError(f"{directory.parent} is a run with {', '.join(differing)}: choose another run=NAME, "
                                "or delete that directory")

    def tensors(self, run: Run, snapshots: list[dict]) -> dict[str, Tensor]:
        """All that a later step reads, by name; each rank's part of it."""
        state = {f"policy.{name}": p for name, p in run.policy.named_parameters()}
        for name, parameter in run.policy.named_parameters():
            state |= {f"{key}.{name}": x for key, x in run.optimizer.state[parameter].items()}
        state |= {f"waiting.{i}.{name}": x for i, waiting in enumerate(snapshots) for name, x in waiting.items()}
        return {name: x.detach() for name, x in state.items()}

    def save(self, run: Run, step: int) -> None:
        with aside(self.directory / f"step-{step:06d}") as path:
            state = self.tensors(run, run.sync.state_dict()["waiting"])
            torch.distributed.checkpoint.save(
                state, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))
            if run.main:
                write(path / "state.json", json.dumps({"step": step, "before": run.before, "settings": self.settings,
                                                       "engine": run.engine.name}, indent=1))
        if run.main:
            for old in sorted(self.directory.glob("step-*"))[:-self.keep]:
                shutil.rmtree(old)

    def load(self, run: Run) -> None:
        if self.saved["engine"] != run.engine.name:
            raise UserError(f"this run was sampled by {self.saved['engine']}, and rollout.engine=auto now finds "
                            f"{run.engine.name}: set rollout.engine={self.saved['engine']}")
        for parameter in run.policy.parameters():         # an update by nothing makes the optimizer's state
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
        run.optimizer.zero_grad()
        waiting = [{name: torch.empty_like(x, device="cpu") for name, x in full_weights(run.policy)}
                   for _ in range(min(self.step, run.config.rollout.staleness))]
        torch.distributed.checkpoint.load(
            self.tensors(run, waiting),
            storage_reader=HuggingFaceStorageReader(str(self.directory / f"step-{self.step:06d}")))
        run.sync.load_state_dict({"waiting": waiting})


@contextlib.contextmanager
def aside(place: Path):
    """A directory for all ranks to write into, which takes its place, in one renaming, when all are through."""
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


def write(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def read_metrics(path: Path) -> list[dict]:
    """The lines that are whole: the last one of a run that was killed may not be."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def effective_share(metrics: dict) -> float:
    """ESS/N of the raw weights where there are any, else 1/(1 + χ²) of the tokens."""
    raw = metrics.get("rollout_corr/rollout_is_raw_eff_sample_size")
    return 1 / (1 + max(0.0, metrics["rollout_corr/chi2_token"])) if raw is None else raw


def plot(lines: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = ["reward/mean", "eval/accuracy", "rollout_corr/k3_kl", "loss/clip_fraction", "grad_norm",
             "response/length_mean"]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for name, axis in zip(names, axes.flat):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot(*zip(*points), marker="o" if len(points) < 20 else None)
        axis.set(title=name, xlabel="step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def make_demo_model(config: Config, task: Task) -> str:
    """A tiny Qwen2 with one token per character, half taught; made once, by rank 0, under runs/.demo/.

    Taught with half of the answers wrong in one digit, it knows the right answer but is not sure
    of it: greedy accuracy is near 1, sampled accuracy near one half. RL can sharpen that.
    """
    characters, wrong, steps, batch, rate, seed = "0123456789+=>", 0.5, 700, 256, 5e-3, seed_of(config.seed, "demo")
    key = repr((seed, task, characters, wrong, steps, batch, rate, "qwen2 64×3"))
    path = Path("runs/.demo") / f"{config.task.kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    exists = path.exists()
    dist.barrier()                            # all ranks have looked before one of them makes it
    if exists:
        return str(path)
    tokenizer = character_tokenizer(characters)
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        rng = random.Random(seed)
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            tie_word_embeddings=True, initializer_range=0.1, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
        for step in tqdm(range(steps), desc="warm start", mininterval=1):
            optimizer.param_groups[0]["lr"] = rate * min(step / 100, 1.03 - step / steps)
            problems = rng.choices(task.train, k=batch)
            answers = [corrupted(p.answer, rng) if rng.random() < wrong else p.answer for p in problems]
            answers = [Sample([*ids, tokenizer.eos_token_id], [], True) for ids in tokenizer(answers).input_ids]
            rows = pad(tokenizer([p.question for p in problems]).input_ids, answers, torch.zeros(batch), "cpu")
            positions, width = (rows.attention.cumsum(-1) - 1).clamp(min=0), rows.response_mask.shape[1]
            logits = model(input_ids=rows.tokens, attention_mask=rows.attention, position_ids=positions).logits
            F.cross_entropy(logits[:, -width - 1:-1][rows.response_mask],
                            rows.tokens[:, -width:][rows.response_mask]).backward()
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
    ids = {c: i for i, c in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                                                unk_token="<unk>")


def corrupted(answer: str, rng: random.Random) -> str:
    at = rng.randrange(len(answer))
    return answer[:at] + rng.choice("0123456789".replace(answer[at], "")) + answer[at + 1:]


def flat(settings: dict, prefix="") -> dict[str, Any]:
    """{"train": {"lr": 1}} → {"train.lr": 1}, as JSON would give it back."""
    items = [(prefix + str(key), value) for key, value in settings.items()]
    return {k: v for key, value in items for k, v in
            (flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}).items()}


@contextlib.contextmanager
def process_group():
    """The device of this rank, inside a process group: torchrun's, or one of a single process."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, **alone)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def start(config: Config) -> None:
    with process_group() as device:
        run = Run(config, device)
        try:
            if run.finished:
                return run.say(f"{run.directory} is finished: {run.done} steps; a larger train.steps continues it")
            run.open()
            run.restore()
            train(run)
            run.finish()
        finally:
            run.close()


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch.distributed")
    rank, code, sentence = int(os.environ.get("RANK", 0)), 0, ""
    try:
        start(load_config(argv))
    except KeyboardInterrupt:
        code, sentence = 130, "interrupted: the same command continues from the last checkpoint"
    except (UserError, CheckpointException) as error:      # the same on every rank
        code, sentence = 2, str(error) if isinstance(error, UserError) else explain(error)
        sentence = sentence if rank == 0 else ""
    except Exception as error:
        code, sentence = 1, explain(error)
        if not sentence:
            raise
        sentence = f"rank {rank}: {sentence}" if rank else sentence
    if sentence:
        print(f"trainer.py: {sentence}", file=sys.stderr)
    return code


def explain(error: BaseException) -> str:
    """A sentence for what a machine does to a run; nothing for what must be a bug."""
    text = f"{error} {error.__cause__ or ''}"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
        return "the disk is full: free some space, and the same command continues from the last checkpoint"
    if isinstance(error, torch.OutOfMemoryError):
        return ("out of GPU memory: lower train.micro_batch_size or rollout.gpu_memory_utilization, "
                "or set policy.gradient_checkpointing=true")
    return str(error).splitlines()[0] if isinstance(error, (OSError, CheckpointException)) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
