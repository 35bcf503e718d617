"""Checkpoints, and files that are there whole or not at all.

This file decides: all that a later step reads is in a checkpoint, as safetensors, sharded as the
ranks hold it; it is written beside its place and renamed when whole, so that the last good one
remains, whenever the run is killed. A run continues with the settings it began with.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.futures import Future

from plumbing.settings import CHANGEABLE, Config, UserError, flat
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
                write(path / "state.json", [{"step": step, "before": run.before,
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
        for parameter in run.policy.parameters():          # an update by nothing makes the moments
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
        run.optimizer.zero_grad()
        layout = {name: (x.shape, x.dtype) for name, x in map(run.sync.kept, full_weights(run.policy))}
        waiting = [{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
                   for _ in range(min(self.step, run.config.rollout.staleness))]
        path = str(self.directory / f"step-{self.step:06d}")
        try:
            dcp.load(self.state(run, waiting), storage_reader=dcp.HuggingFaceStorageReader(path))
        except (Exception, dcp.CheckpointException):
            raise unreadable(path) from None
        run.sync.load_state_dict({"waiting": waiting})
        self.prune(run)


class TensorByTensor(dcp.HuggingFaceStorageWriter):
    """A file per rank as its parent writes it, which serialises all of it in memory first."""

    def write_data(self, plan, planner) -> Future:
        names, written = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}, Future()
        header, place = {}, 0
        for item in plan.items:
            dtype, sizes = item.tensor_data.properties.dtype, list(item.tensor_data.chunk.sizes)
            end = place + math.prod(sizes) * dtype.itemsize
            header[item.index.fqn] = {"dtype": names[dtype], "shape": sizes,
                                      "data_offsets": [place, end]}
            place = end
        offsets = {item.index.fqn: {"saved_offsets": item.tensor_data.chunk.offsets}
                   for item in plan.items}
        header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        rank = plan.storage_data["shard_index"]
        with open(Path(self.path) / f"rank-{rank:05d}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for item in plan.items:                        # one at a time: so much memory, no more
                tensor = planner.resolve_data(item).detach().cpu().contiguous()
                file.write(tensor.flatten().view(torch.uint8).numpy())
        written.set_result([])
        return written


def unreadable(path) -> UserError:
    return UserError(f"{path} is damaged, or no checkpoint of this program: delete it, and the "
                     "same command goes on from the one before it")


def require_one_directory(place: Path) -> None:
    """All ranks must see what the first one writes: else every node keeps its part of a checkpoint."""
    names = [f".seen-by-all-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(names)
    token = place / names[0]
    if dist.get_rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
        token.touch()
    dist.barrier()
    unseen = torch.tensor(float(not token.exists()))
    dist.all_reduce(unseen)
    if dist.get_rank() == 0:
        token.unlink()
    if unseen:
        raise UserError(f"{int(unseen)} of {dist.get_world_size()} ranks do not see what the first "
                        f"one writes to {place.resolve()}: start all nodes in one shared directory")


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
