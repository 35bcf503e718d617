"""Write and read checkpoints: all that a later step reads, as safetensors, sharded like the ranks.

The last good one remains whenever the run is killed (training/files.py). A run continues with the
settings it began with.
"""

import functools
import json
import logging
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from three_policies.checks import UserError
from three_policies.training.faults import cause_of, explain
from three_policies.training.files import write, write_aside
from three_policies.training.loading import Loaded
from three_policies.training.models import digest_of
from three_policies.training.settings import (CHANGEABLE, Config, flat, renamed,
                                              without_slash)
from three_policies.training.shards import TensorByTensor


class Checkpoints:
    """Keep checkpoints/step-000050/: the ranks' safetensors (no pickles), and state.json.

    Other names in the directory are not the run's, and are left alone. A checkpoint that is read is
    checked for its form, and for NaN.
    """

    def __init__(self, directory: Path, config: Config):
        self.directory, self.step, self.saved = directory, 0, {}
        self.keep, self.staleness = config.train.keep, config.rollout.staleness
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
        """Return where the same command would continue, given what is there now."""
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
        then = {key: defaults.get(key) for key in self.settings if key in defaults} | {
            renamed(key): value for key, value in then.items()}
        then["policy.path"] = without_slash(then["policy.path"])        # once it was kept
        differing = [f"{key}={then.get(key)} (now {self.settings.get(key)})"
                     for key in {**then, **self.settings} if key not in CHANGEABLE
                     and then.get(key) != self.settings.get(key)]
        if differing:
            raise UserError(f"{self.directory.parent} is a run with {', '.join(differing)}: choose "
                            "another run=NAME, or delete that directory")

    def state(self, loaded: Loaded, waiting: list[dict]) -> dict[str, Tensor]:
        """Return all that a later step reads, by name: this rank's part of it."""
        state = {f"waiting.{i}.{name}": x for i, snapshot in enumerate(waiting)
                 for name, x in snapshot.items()}          # the engine's weights that are due later
        for name, parameter in loaded.policy.named_parameters():
            if not parameter.requires_grad:
                continue                                   # under a LoRA: as it was loaded
            moments = loaded.optimizer.state[parameter]
            state |= {f"{key}.{name}": x for key, x in {"policy": parameter, **moments}.items()}
        return {name: x.detach() for name, x in state.items()}

    def save(self, step: int, loaded: Loaded, before: float) -> None:
        """Save what a later step reads, and the accuracy before the first step."""
        with write_aside(self.directory / f"step-{step:06d}") as path:
            dcp.save(self.state(loaded, loaded.sync.state_dict()["waiting"]),
                     storage_writer=TensorByTensor(str(path), save_distributed=True))
            if dist.get_rank() == 0:
                moved = any(loaded.optimizer.state.values())      # else no update took a step
                write(path / "state.json", [{
                    "step": step, "before": before, "moments": moved,
                    "engine": loaded.engine.name, "data": loaded.task.digest, "model": self.model,
                    "settings": self.settings}])
        self.prune()

    def prune(self) -> None:
        """Delete all but the newest train.keep checkpoints, and what is half written."""
        if dist.get_rank() == 0:
            for path in [*self.whole()[:-self.keep], *self.directory.glob(".step-*.part")]:
                shutil.rmtree(path, ignore_errors=True)     # not a link; NFS keeps open files

    def require_same_parts(self, loaded: Loaded) -> None:
        """Raise UserError if engine, questions or first model are not those of the checkpoint."""
        if (engine := self.saved.get("engine")) != loaded.engine.name:
            raise UserError(f"this run was sampled by rollout.engine={engine}, and auto is now "
                            f"{loaded.engine.name}: name the engine")
        if self.saved.get("data", loaded.task.digest) != loaded.task.digest:
            raise UserError(f"{self.directory.parent} was trained on other questions or answers "
                            "than task.path has now: bring them back, or choose another run=NAME")
        if self.saved.get("model", self.model) != self.model:
            raise UserError(f"{self.directory.parent} began from another model than policy.path="
                            f"{self.path} is now: bring that back, or choose another run=NAME")

    def load(self, loaded: Loaded) -> None:
        """Read the last checkpoint into what is loaded."""
        self.require_same_parts(loaded)
        if self.saved.get("moments", True):
            make_moments(loaded)
        late = range(min(self.step, self.staleness))
        waiting = [dict(map(loaded.sync.copy_to_host, loaded.weights())) for _ in late]
        path, state = self.directory / f"step-{self.step:06d}", self.state(loaded, waiting)
        logging.disable(logging.WARNING)       # torch would show a traceback before our sentence
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
        loaded.sync.load_state_dict({"waiting": waiting})
        self.prune()


def make_moments(loaded: Loaded) -> None:
    """Make the optimizer's moments, by an update whose gradient is 0."""
    for parameter in loaded.policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    loaded.optimizer.step()
    loaded.optimizer.zero_grad()


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's name; a million comes after 999999."""
    return int(path.name.removeprefix("step-"))
