"""Write checkpoints, and other files, so that each is there whole or not at all.

A checkpoint holds all that a later step reads, as safetensors, sharded as the ranks hold it. It is
written beside its place, brought to the disk, and renamed, so the last good one remains whenever
the run is killed or its machine loses power. A run continues with the settings it began with.
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from three_policies.checks import UserError
from three_policies.training.faults import cause_of, explain
from three_policies.training.models import digest_of
from three_policies.training.settings import CHANGEABLE, Config, flat, without_slash
from three_policies.training.shards import TensorByTensor

# Older ones must not stay beside new ones: they would be read instead.
WEIGHTS = (".safetensors", ".safetensors.index.json", "adapter_config.json")


class Checkpoints:
    """Keep checkpoints/step-000050/: the ranks' safetensors (no pickles), and state.json.

    Other names in the directory are not the run's, and are left alone. A checkpoint that is read is
    checked for its form, and for NaN.
    """

    def __init__(self, directory: Path, config: Config):
        self.directory, self.keep, self.step, self.saved = directory, config.train.keep, 0, {}
        self.settings, self.path = json.loads(json.dumps(flat(asdict(config)))), config.policy.path
        if found := self.whole():
            try:
                self.step = step_of(found[-1])
                self.saved = json.loads((found[-1] / "state.json").read_text())
                if self.saved["step"] != self.step or not (
                        isinstance(self.saved["before"], float) and self.saved["engine"]):
                    raise ValueError("it was renamed or changed")
                self.require_same(self.saved["settings"])
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError,
                    RecursionError):
                raise self.unreadable(found[-1]) from None

    @functools.cached_property
    def model(self) -> str | None:
        """Return the digest of policy.path at the first call; None for the demo model."""
        return self.path and digest_of(self.path)

    def whole(self) -> list[Path]:
        """Return the checkpoints that are there, oldest first."""
        names = (path for path in self.directory.glob("step-*") if path.is_dir())
        return sorted((path for path in names
                       if re.fullmatch(r"step-\d{6,}", path.name, re.ASCII)), key=step_of)

    def resumption(self) -> str:
        """Say where the same command would continue, given what is there now."""
        if not (found := self.whole()):
            return "there is no checkpoint yet, so the same command begins anew"
        step = step_of(found[-1])
        return f"the same command goes on after step {step}, from {found[-1]}"

    def unreadable(self, path: Path) -> UserError:
        """Return what to do about a damaged checkpoint, with and without another before it."""
        before = [found.name for found in self.whole() if step_of(found) < step_of(path)]
        return UserError(f"{path} is damaged, or no checkpoint of this program" + (
            f": move it away, and the same command goes on from {before[-1]}" if before else
            ", and there is none before it: choose another run=NAME, or delete "
            f"{self.directory.parent}"))

    def require_same(self, then: dict) -> None:
        """Raise UserError if a run with the settings `then` now has others, except for CHANGEABLE.

        A setting that did not exist then had its present default.
        """
        defaults = flat(asdict(Config()))
        then = {key: defaults.get(key) for key in self.settings if key in defaults} | then
        then["policy.path"] = without_slash(then["policy.path"])        # once it was kept
        differing = [f"{key}={then.get(key)} (now {self.settings.get(key)})"
                     for key in {**then, **self.settings} if key not in CHANGEABLE
                     and then.get(key) != self.settings.get(key)]
        if differing:
            raise UserError(f"{self.directory.parent} is a run with {', '.join(differing)}: choose "
                            "another run=NAME, or delete that directory")

    def state(self, run: Any, waiting: list[dict]) -> dict[str, Tensor]:
        """Return all that a later step reads, by name: this rank's part of it."""
        state = {f"waiting.{i}.{name}": x for i, snapshot in enumerate(waiting)
                 for name, x in snapshot.items()}          # the engine's weights that are due later
        for name, parameter in run.policy.named_parameters():
            if not parameter.requires_grad:
                continue                                   # under a LoRA: as it was loaded
            moments = run.optimizer.state[parameter]
            state |= {f"{key}.{name}": x for key, x in {"policy": parameter, **moments}.items()}
        return {name: x.detach() for name, x in state.items()}

    def save(self, run: Any, step: int) -> None:
        with write_aside(self.directory / f"step-{step:06d}") as path:
            dcp.save(self.state(run, run.sync.state_dict()["waiting"]),
                     storage_writer=TensorByTensor(str(path), save_distributed=True))
            if run.main:
                moved = any(run.optimizer.state.values())         # else no update took a step
                write(path / "state.json", [{
                    "step": step, "before": run.before, "moments": moved, "engine": run.engine.name,
                    "data": run.task.digest, "model": self.model, "settings": self.settings}])
        self.prune(run)

    def prune(self, run: Any) -> None:
        """Delete all but the newest train.keep checkpoints, and what is half written."""
        old = self.whole()[:-self.keep]
        for path in [*old, *self.directory.glob(".step-*.part")] * run.main:
            shutil.rmtree(path, ignore_errors=True)         # not a link; NFS keeps open files

    def load(self, run: Any) -> None:
        if (engine := self.saved.get("engine")) != run.engine.name:
            raise UserError(f"this run was sampled by rollout.engine={engine}, and auto is now "
                            f"{run.engine.name}: name the engine")
        if self.saved.get("data", run.task.digest) != run.task.digest:
            raise UserError(f"{self.directory.parent} was trained on other questions or answers "
                            "than task.path has now: bring them back, or choose another run=NAME")
        if self.saved.get("model", self.model) != self.model:
            raise UserError(f"{self.directory.parent} began from another model than policy.path="
                            f"{self.path} is now: bring that back, or choose another run=NAME")
        if self.saved.get("moments", True):                # a zero update creates the moments
            for parameter in run.policy.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            run.optimizer.step()
            run.optimizer.zero_grad()
        late = range(min(self.step, run.config.rollout.staleness))
        waiting = [dict(map(run.sync.copy_to_host, run.weights())) for _ in late]
        path = self.directory / f"step-{self.step:06d}"
        logging.disable(logging.WARNING)       # torch would show a traceback before our sentence
        state = self.state(run, waiting)
        try:
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        except (Exception, dcp.CheckpointException) as error:
            cause = cause_of(error)
            if explain(cause) and not isinstance(cause, FileNotFoundError):
                raise                      # the machine's fault, or another rank's
            raise self.unreadable(path) from None
        finally:
            logging.disable(logging.NOTSET)
        own = [x.to_local() if isinstance(x, DTensor) else x for x in state.values()]
        damaged = torch.tensor(float(any(x.isnan().any() for x in own)))
        dist.all_reduce(damaged)
        if damaged:
            raise self.unreadable(path)
        run.sync.load_state_dict({"waiting": waiting})
        self.prune(run)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's name; a million comes after 999999."""
    return int(path.name.removeprefix("step-"))


@contextlib.contextmanager
def write_aside(place: Path) -> Iterator[Path]:
    """Yield a directory for all ranks to write into; rename it into its place when they are done.

    If that place is a link, the files are moved one by one to its target, and the link stays. What
    a user put there stays, too, but for weights. If that is interrupted, the next call ends it.
    """
    if os.path.realpath(place) == os.path.abspath(place) and place.is_symlink():
        raise UserError(f"{place} is a link to itself: remove it")
    linked, place = place.is_symlink(), place.resolve()
    part, old = (place.with_name(f".{place.name}.{end}") for end in ("part", "old"))
    main = dist.get_rank() == 0
    try:
        if main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        yield part
        dist.barrier()
        if main:
            for path in [*part.rglob("*"), part]:
                settle(path)
        if main and linked:
            place.mkdir(exist_ok=True)
            new = {path.name for path in part.iterdir()}
            for name in new:
                os.replace(part / name, place / name)
            for path in place.iterdir():
                if path.name.endswith(WEIGHTS) and path.name not in new:
                    path.unlink()
            settle(place)
        elif main:
            if old.exists():
                bring_back(old, place)
            if place.exists():
                os.replace(place, old)
            os.replace(part, place)
            bring_back(old, place)
            settle(place.parent)
        dist.barrier()
    finally:
        if main:
            shutil.rmtree(part, ignore_errors=True)


def bring_back(old: Path, place: Path) -> None:
    """Move what `place` lacks from the directory that it replaced, but for weights."""
    place.mkdir(exist_ok=True)
    for path in old.glob("*"):
        if not path.name.endswith(WEIGHTS) and not (place / path.name).exists():
            os.replace(path, place / path.name)
    shutil.rmtree(old, ignore_errors=True)


def settle(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():                 # not every file system can do it for a directory
            raise
    finally:
        os.close(handle)


def write(path: Path, lines: list[dict]) -> None:
    """Write a file of JSON lines that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settle(part)
    os.replace(part, path)


def read_metrics(path: Path) -> list[dict]:
    """Return the whole lines; a killed run may have left the last one incomplete."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    try:
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        if any(isinstance(line["step"], bool)
               or not isinstance(line.get("reward/mean", 0), (int, float)) for line in found):
            raise ValueError
        return [line for line in found if line["step"] > 0]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} has a line that is not the metrics of a step") from None
