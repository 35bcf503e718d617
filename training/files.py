"""Write files and directories so that each is there whole or not at all.

What is written stands beside its place, is brought to the disk, and is renamed. A process that is
killed, or a machine that loses power, leaves the old one or the new one.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from three_policies.checks import UserError

# Older ones must not stay beside new ones: they would be read instead.
WEIGHTS = (".safetensors", ".safetensors.index.json", "adapter_config.json")


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
