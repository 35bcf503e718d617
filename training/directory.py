"""Give a run's directory to one run, and to one process at a time.

The process that trains in runs/<run>/ holds a lock of the operating system on .lock there, which
ends with the process in any case. A second process is told which one holds it. Finished runs stay
as they are. Files that are not the run's own are neither read nor touched.
"""

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch.distributed as dist
from tqdm import tqdm

from three_policies.checks import UserError


FILES = ("config.yaml", "metrics.jsonl", "finished.json", "curves.png", "eval.jsonl")


@contextlib.contextmanager
def hold_directory(place: Path) -> Iterator[None]:
    """Lock the directory, made if need be, for this process alone; remove it if it stays empty.

    With several ranks the first one holds it. Raises UserError if another process does, or if
    nothing can be written.
    """
    words, file = [""], None
    made = [path for path in (place, place.parent) if not path.exists()]
    if dist.get_rank() == 0:
        try:
            require_writable(place)
            file = lock_file(place / ".lock")
        except BlockingIOError as error:
            words = [f"{place} is in use by {error}: wait for its end, or choose another run=NAME"]
        except UserError as error:
            words = [str(error)]
    dist.broadcast_object_list(words)
    if words[0]:
        raise UserError(words[0])
    try:
        yield
    finally:
        if file is not None:
            remove_empty(place, made)
            file.close()


def remove_empty(place: Path, made: list[Path]) -> None:
    """Remove the lock, and the directories that were `made` for it, if nothing else is there."""
    with contextlib.suppress(OSError):                         # gone, or runs/ is not empty
        if [path.name for path in place.iterdir()] == [".lock"]:
            (place / ".lock").unlink()
            for path in made:
                path.rmdir()


@contextlib.contextmanager
def take_turns(path: Path) -> Iterator[None]:
    """Let one process at a time create what several runs may want at once."""
    file = None
    if dist.get_rank() == 0:
        try:
            file = lock_file(path)
        except BlockingIOError as error:
            tqdm.write(f"waiting for {error}, which makes {path.stem[1:]}", file=sys.stderr)
            file = lock_file(path, wait=True)
    dist.barrier()
    try:
        yield
    finally:
        if file is not None:
            file.close()


def lock_file(path: Path, wait: bool = False) -> IO[str]:
    """Return the open file `path`, locked, with its holder's name in it; closing it unlocks.

    The lock is POSIX's: NFS has it too, no child of this process inherits it, and it ends with the
    process. Without `wait` a lock that another process holds is a BlockingIOError that names it.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # No link is followed: what it leads to would be overwritten.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            file = os.fdopen(os.open(path, flags, 0o666), "a+")
        except OSError as error:
            why = f"{path.name} is a link there" if path.is_symlink() else error.strerror
            raise not_writable(path.parent, why) from None

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise BlockingIOError(file.read() or "another process") from None
            raise UserError(f"{path.parent} is on a file system without locks ({error.strerror}), "
                            "so two runs could write to it at once: start elsewhere") from None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        file.close()                               # its owner has removed it meanwhile

    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since "
               f"{time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return file


def require_writable(place: Path) -> None:
    """Raise UserError if a part of the directory cannot be written, or is of another kind.

    Opening a pipe waits for its other end.
    """
    for path in (place, *(place / name for name in ("checkpoints", "model", "dumps"))):
        try:
            path.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is a link to itself: remove it") from None
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is not a directory: move it away")
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise not_writable(path, os.strerror(errno.EACCES))
    for path in (*map(place.joinpath, FILES), *place.glob("checkpoints/step-*/state.json")):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file: move it away")


def not_writable(path: Path, reason: str | None) -> UserError:
    return UserError(f"{path} cannot be written: {reason}; start in a directory that can, since a "
                     "run keeps its checkpoints there")
