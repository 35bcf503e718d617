"""Checkpoints, and files that are there whole or not at all.

This file decides: all that a later step reads is in a checkpoint, as safetensors, sharded as the
ranks hold it; it is written beside its place and renamed when whole, so that the last good one
remains, whenever the run is killed. A run continues with the settings it began with.
"""

import contextlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp

from plumbing.settings import CHANGEABLE, Config, UserError, flat
from plumbing.shards import TensorByTensor
from policy import full_weights


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

    def state(self, run, waiting: list[dict]) -> dict[str, Tensor]:
        """All that a later step reads, by name: this rank's part of it."""
        state = {f"waiting.{i}.{name}": x for i, snapshot in enumerate(waiting)
                 for name, x in snapshot.items()}          # the engine's weights that are due later
        for name, parameter in run.policy.named_parameters():
            moments = run.optimizer.state[parameter]
            state |= {f"{key}.{name}": x for key, x in {"policy": parameter, **moments}.items()}
        return {name: x.detach() for name, x in state.items()}

    def save(self, run, step: int) -> None:
        with aside(self.directory / f"step-{step:06d}") as path:
            dcp.save(self.state(run, run.sync.state_dict()["waiting"]),
                     storage_writer=TensorByTensor(str(path), save_distributed=True))
            if run.main:
                moved = any(run.optimizer.state.values())         # or every update was empty so far
                write(path / "state.json", [{"step": step, "before": run.before, "moments": moved,
                                             "engine": run.engine.name, "settings": self.settings}])
        self.prune(run)

    def prune(self, run) -> None:
        """Down to train.keep, and nothing half written: a run may have been killed meanwhile."""
        whole, parts = sorted(self.directory.glob("step-*")), self.directory.glob(".*")
        for path in [*whole[:-self.keep], *parts] if run.main else ():
            shutil.rmtree(path)

    def load(self, run) -> None:
        if (engine := self.saved.get("engine")) != run.engine.name:
            raise UserError(f"this run was sampled by rollout.engine={engine}, and auto is now "
                            f"{run.engine.name}: name the engine")
        if self.saved.get("moments", True):                # an update by nothing makes the moments
            for parameter in run.policy.parameters():
                parameter.grad = torch.zeros_like(parameter)
            run.optimizer.step()
            run.optimizer.zero_grad()
        late = range(min(self.step, run.config.rollout.staleness))
        waiting = [dict(map(run.sync.kept, full_weights(run.policy))) for _ in late]
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
