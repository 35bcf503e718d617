"""Open a run in runs/<run>/, give its engine prompts and weights, and write its results.

A run is what is set up (`config`, `device`, `checkpoints`), what is loaded (training/loading.py)
and what records it (training/record.py). This file decides nothing that is learned.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from three_policies.checks import UserError
from three_policies.doctor.normal import has_experts
from three_policies.policy import full_weights
from three_policies.rollout import Engine, NamedTensor, Sample
from three_policies.training import signals
from three_policies.training.capacity import matrix_rate, update_flops
from three_policies.training.checkpoints import Checkpoints
from three_policies.training.directory import hold_directory
from three_policies.training.faults import (end_after, process_group, require_one_directory,
                                            watch_engine)
from three_policies.training.files import read_metrics, settle, write, write_aside
from three_policies.training.loading import Loaded, load
from three_policies.training.models import empty_model
from three_policies.training.record import Record
from three_policies.training.remarks import remarks
from three_policies.training.report import closing_table, plot, say, summarize
from three_policies.training.settings import Config, in_own_keys
from three_policies.training.tasks import seed_of


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
        with hold_directory(directory := directory_of(config)):
            checkpoints = Checkpoints(directory / "checkpoints", config)
            signals.Received.where = checkpoints.resumption
            if done := finished(config, checkpoints):
                say(f"{directory} is finished after {done} steps; a larger train.steps continues "
                    "it")
                yield None
                return
            loaded = load(config, device)
            # Before the process group ends: vLLM needs it to shut down.
            with closing(loaded.engine, config.rollout.timeout):
                take_threads(size_of(loaded))
                rate = matrix_rate(device, config.policy.dtype)
                introduce(config, loaded, device)
                restore(config, loaded, checkpoints)
                experts = has_experts(loaded.policy.model.config.get_text_config().to_dict())
                with contextlib.closing(Record(config, directory, checkpoints.step, device,
                                               loaded.engine, experts)) as record, unwatched():
                    yield Run(config, device, checkpoints, loaded, record, rate)


def directory_of(config: Config) -> Path:
    """Return runs/<run>/; `load_config` has named the run if nobody else has."""
    assert config.run is not None
    return Path("runs") / config.run


def finished(config: Config, checkpoints: Checkpoints) -> int:
    """Return the last step if all is done, else 0; UserError if there is no checkpoint to go on."""
    directory = directory_of(config)
    record = directory / "finished.json"
    model = any((directory / "model").glob("*config.json"))
    if record.exists():
        try:
            last = json.loads(record.read_text())
            checkpoints.require_same(last["settings"])
            if model and last["step"] >= config.train.steps:
                return last["step"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{record} is damaged: delete it, and the same command goes on "
                            "from the last checkpoint") from None
    if not checkpoints.step and (model or record.exists()):
        raise UserError(f"{directory} has a finished run or a model, and no checkpoint to "
                        "go on from: choose another run=NAME, or delete that directory")
    return 0                       # done but not recorded: `finish` did not come to its end


@contextlib.contextmanager
def closing(engine: Engine, timeout: float) -> Iterator[None]:
    """Close an engine at the end; if the run failed, that failure is raised, and not a second."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            close(engine, timeout)
        raise
    close(engine, timeout)


def close(engine: Engine, timeout: float) -> None:
    with end_after(timeout, engine.name):
        engine.close()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Keep what is loaded from the garbage collector, which would walk through it for 0.2 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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


def size_of(loaded: Loaded) -> int:
    return sum(p.numel() for p in loaded.policy.parameters())


def introduce(config: Config, loaded: Loaded, device: torch.device) -> None:
    """Print what is about to run, and which valid settings are probably mistakes."""
    preset, changed = config.correction.get("preset"), ", changed" * (len(config.correction) > 1)
    say(f"{directory_of(config)}: {size_of(loaded) / 1e6:.1f}M parameters on "
        f"{dist.get_world_size()} × {device.type}, engine {loaded.engine.name} "
        f"({config.rollout.dtype}), correction {preset + changed if preset else 'as configured'}")
    say(f"  correction: {in_own_keys(config)}")
    say("  " + summarize(config))
    for sentence in remarks(config) + loaded.remarks:
        say(f"* {sentence}")


def restore(config: Config, loaded: Loaded, checkpoints: Checkpoints) -> None:
    """Load the last checkpoint, if there is one."""
    if not (done := checkpoints.step):
        return
    loaded.engine.sleep()          # as in an update, which needs as much memory
    checkpoints.load(loaded)
    say(f"continuing after step {done}" + (
        f", beyond train.steps={config.train.steps}" if done > config.train.steps else ""))
    then = checkpoints.saved["settings"].get("train.steps")
    if config.train.schedule == "cosine" and then != config.train.steps:
        say(f"* train.schedule=cosine fell towards train.steps={then} so far, so this "
            "is not the run that one command would have been")


@dataclass
class Run:
    """A run: what is set up, what is loaded, and what records it."""

    config: Config
    device: torch.device
    checkpoints: Checkpoints
    loaded: Loaded
    record: Record
    rate: float                                    # FLOPs a second of a product of matrices

    def steps(self, accuracy: float) -> Iterator[int]:
        """Yield the numbers of the remaining steps; accuracy: what the bar shows at first."""
        config, self.record.accuracy = self.config, accuracy
        for step in range(self.checkpoints.step + 1, config.train.steps + 1):
            torch.manual_seed(seed_of(config.seed, "dropout", step, dist.get_rank()))
            self.record.begin(step)
            with signals.save_first(config.train.grace):
                yield step
        self.record.close()                        # the table comes after the bar

    def generate(self, prompts: list[list[int]], seeds: list[int],
                 step: int | None = None) -> tuple[list[Sample], list[str]]:
        """Sample; within a response of a training step the engine may take newer weights."""
        rollout, loaded, crossing = self.config.rollout, self.loaded, {}
        if rollout.update_every and step is not None:
            crossing["in_flight"] = loaded.sync.in_flight(
                rollout.update_every, rollout.recompute_cache, newest=step - 1)
        with watch_engine(loaded.engine, rollout.timeout):
            samples = loaded.engine.generate(
                prompts, seeds, temperature=rollout.temperature, max_tokens=rollout.max_tokens,
                eos_ids=loaded.eos_ids, **crossing)
        return samples, loaded.tokenizer.batch_decode([s.tokens for s in samples],
                                                      skip_special_tokens=True)

    def push_weights(self, evaluated: bool = False) -> None:
        """Give the engine its weights for training: rounded and stale, as configured.

        If they are neither and were just `evaluated`, the engine has them already.
        """
        if evaluated and self.loaded.sync.as_is:
            return
        with watch_engine(self.loaded.engine, self.config.rollout.timeout):
            self.loaded.sync.push(self.loaded.weights())

    def load_weights(self) -> None:
        """Give the engine the policy's current weights, unrounded, for an evaluation."""
        with watch_engine(self.loaded.engine, self.config.rollout.timeout):
            self.loaded.engine.update_weights(self.loaded.weights())

    def log(self, step: int, metrics: dict) -> None:
        """Record a step's metrics, and what its updates needed of all ranks' FLOPs a second."""
        flops = self.flops(step, int(metrics["response/tokens"]))
        self.record.log(metrics, flops / (self.rate * dist.get_world_size()),
                        self.loaded.optimizer.param_groups[0]["lr"])

    def flops(self, step: int, tokens: int) -> float:
        """Return the FLOPs of a step's updates; the samples of a group share its prompt."""
        size, loaded = self.config.rollout.prompts, self.loaded
        chosen = loaded.task.order(self.config.seed, (step - 1) * size, size)
        prompts = sum(len(loaded.prompts[i]) for i in chosen)
        return self.config.train.epochs * update_flops(loaded.sizes, prompts, tokens)

    def save_if_due(self, step: int, before: float) -> None:
        """Save every train.save_every steps, at the end, and when any rank has received SIGTERM.

        before: the accuracy before the first step, which a checkpoint keeps.
        """
        ending = torch.tensor(float(signals.Received.ending))
        dist.all_reduce(ending)
        if ending or step == self.config.train.steps or step % self.config.train.save_every == 0:
            if dist.get_rank() == 0:
                settle(self.record.metrics)        # a checkpoint must not outlive its metrics
            self.checkpoints.save(step, self.loaded, before)
        if ending:
            signals.end(signals.SIGTERM)

    def finish(self, before: float, after: float, answers: list[dict]) -> None:
        """Write the model or its LoRA, held-out answers, curves and a table."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, answers)
        directory, main = self.record.directory, dist.get_rank() == 0
        if main:
            in_turn = itertools.zip_longest(*everyone)      # rank r had every world-th question
            write(directory / "eval.jsonl", [a for row in in_turn for a in row if a])
            plot(lines := read_metrics(self.record.metrics), directory / "curves.png")
        self.write_models()
        if not main:
            return
        write(directory / "finished.json",
              [{"step": max(self.checkpoints.step, self.config.train.steps),
                "settings": self.checkpoints.settings}])
        held_out = len(self.loaded.task.held_out)
        say("\n".join(closing_table(lines, before, after, held_out)) if lines else
            f"* {self.record.metrics} has no step, so there is no table of the run")
        say(f"model, metrics and curves: {directory}")

    def write_models(self) -> None:
        """Write model/: the trained weights, or a LoRA's; and merged/, if both are asked for."""
        loaded, policy, merged = self.loaded, self.config.policy, full_weights(self.loaded.policy)
        if policy.lora_rank and policy.lora_save_merged:
            self.write_model("merged", empty_model(loaded.path), loaded.dtype, merged)
        if policy.lora_rank:
            self.write_model("model", loaded.policy.model, torch.float32,
                             full_weights(loaded.policy, "apart"))
        else:
            self.write_model("model", loaded.policy.model, loaded.dtype, merged)

    def write_model(self, name: str, model: Any, dtype: torch.dtype,
                    weights: Iterator[NamedTensor]) -> None:
        """Write a Hugging Face directory of a model, or of its LoRA if it has one."""
        main = dist.get_rank() == 0
        kept = {key: x.to("cpu", dtype) for key, x in weights if main}
        with write_aside(self.record.directory / name) as path:
            if main:
                # As it came: save_pretrained would refuse a temperature without do_sample.
                own = model.generation_config
                model.generation_config = transformers.GenerationConfig()
                model.save_pretrained(path, state_dict=kept)
                own.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config"])
                if not (path / "adapter_config.json").exists():
                    model.config.dtype = dtype
                    model.config.save_pretrained(path)
                self.loaded.tokenizer.save_pretrained(path)
