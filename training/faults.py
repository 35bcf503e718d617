"""Handle ranks, calls that hang, and failures; each failure prints one sentence at most.

This file decides that only the first failing rank prints, and that the others exit silently. What
is not a bug of this program prints one sentence and sets an exit code: 2 if the user can mend it,
130, 143 or 129 for a signal, 1 for the machine. A bug is a traceback. A collective that hangs under
NCCL ends the process in NCCL's own words.
"""

import atexit
import contextlib
import errno
import os
import re
import secrets
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from three_policies.checks import UserError
from three_policies.training.signals import Ended, Received

# How torch, vLLM and gloo word these two failures.
OUT_OF_MEMORY = ("MemoryError|out of memory|can't allocate memory|memory for the cache|"
                 "gpu_memory_utilization")
LOST = "connection (closed|reset) by peer|broken pipe|remote process exited"


@contextlib.contextmanager
def process_group(patience: float = 1800) -> Iterator[torch.device]:
    """Yield this rank's device in a process group: torchrun's, or one of a single process.

    patience: seconds that a rank waits for the others, at least torch's own 1800.
    """
    require_driver()
    device = choose_device()
    own = dist.get_default_backend_for_device(device)          # NCCL for CUDA
    if device.type != "cpu":
        take_gpu(device)

    # A store as torchrun's, since NCCL was never tried with the others; port 0 is any free one.
    alone: dict[str, Any] = {} if "RANK" in os.environ else {
        "store": dist.TCPStore("127.0.0.1", 0, 1, True), "rank": 0, "world_size": 1}
    # No device_id: with it all ranks must take part in making a group, also those outside it, and
    # vLLM makes groups that not all ranks are in.
    dist.init_process_group(own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}",
                            timeout=timedelta(seconds=max(patience, 1800)), **alone)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks, threads = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads()
    if ranks > 1:                              # torchrun gives each of them one thread
        torch.set_num_threads(max(1, (cores or 1) // ranks))

    atexit.unregister(wait_for_gloo)           # once, whatever the number of groups before
    atexit.register(wait_for_gloo)
    end = dist.destroy_process_group
    try:
        yield device
        dist.barrier()
    except BaseException as error:
        # NCCL's `destroy` waits for collectives which the other ranks may never join.
        end = dist.distributed_c10d._abort_process_group
        error.silent = not first_to_fail()     # pyright: ignore[reportAttributeAccessIssue]
        raise
    finally:
        end()
        torch.set_num_threads(threads)         # a caller's own, which may run more than this


def take_gpu(device: torch.device) -> None:
    """Make a GPU this rank's, or raise UserError if there are fewer GPUs than ranks."""
    try:
        torch.accelerator.set_device_index(device.index)
    except RuntimeError as error:
        gpus = torch.accelerator.device_count()
        if device.index < gpus:               # the GPU has another fault
            raise
        fault = UserError(f"rank {device.index} needs {device}, and there are {gpus}: start at "
                          f"most {gpus} ranks (torchrun --nproc-per-node {gpus})")
        fault.silent = device.index > gpus    # pyright: ignore[reportAttributeAccessIssue]
        raise fault from error


def wait_for_gloo() -> None:
    """Give gloo's threads the GIL, and time, before the interpreter shuts down.

    They free a collective's tensors after its result is known. If one does so during the shutdown,
    the process aborts. Destroying the group does not wait for them, since a cache of DTensor's
    keeps it.
    """
    time.sleep(0.1)


def choose_device() -> torch.device:
    """Return this rank's accelerator, of any maker, or the CPU. Apple's was never tried."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))


def require_driver() -> None:
    """Raise UserError if torch is built for the GPU that is there and cannot use it.

    With an old driver, say, a run would train on the CPU without a word. /dev/nvidia0 and so on are
    the GPUs that a process, also one in a container, was given; /proc/driver/nvidia has those of
    the whole machine. An empty CUDA_VISIBLE_DEVICES asks for the CPU.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if (torch.cuda.is_available() or torch.version.cuda is None
                or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
                or not any(Path("/dev").glob("nvidia[0-9]*"))):
            return
        words = [str(warning.message) for warning in caught]
    try:
        torch.cuda.init()          # raises what `is_available` warns of, but only once a process
    except Exception as error:
        raise UserError(f"torch {torch.__version__}, for CUDA {torch.version.cuda}, cannot use the "
                        f"GPU that is here: {(words or [error])[0]}; with CUDA_VISIBLE_DEVICES= it "
                        "trains on the CPU") from None


def require_one_directory(place: Path) -> None:
    """Raise UserError if ranks do not see the first one's files: checkpoints would be split."""
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


def first_to_fail(apart: bool = False) -> bool:
    """True if no other rank has failed before; later failures are consequences.

    apart: ask over another connection, since the main thread may be waiting on its own.
    """
    with contextlib.suppress(Exception):           # the store may be gone with the launcher
        store: Any = dist.distributed_c10d._get_default_store()
        return (store.clone() if apart else store).add("failed", 1) == 1
    return True


class EngineError(RuntimeError):
    """Report in one sentence why an engine failed."""


@contextlib.contextmanager
def watch_engine(engine: Any, seconds: float) -> Iterator[None]:
    """Guard one call of an engine; whatever the engine raises becomes an EngineError."""
    try:
        with end_after(seconds, engine.name):
            yield
    except Exception as error:
        words = (str(error).strip() or "no word").splitlines()[0]
        raise EngineError(f"rollout.engine={engine.name} failed with {type(error).__name__}: "
                          f"{words}") from error


@contextlib.contextmanager
def end_after(seconds: float, name: str) -> Iterator[None]:
    """Print a sentence and end the process if the engine `name` does not answer in time.

    Nothing can be raised into a call that hangs.
    """
    caller, stderr = threading.get_ident(), os.dup(2)          # vLLM's start goes without stderr

    def end() -> None:
        at = traceback.extract_stack(sys._current_frames()[caller])[-1]
        if first_to_fail(apart=True):
            os.write(stderr, f"trainer.py: rollout.engine={name} has not answered for "
                     f"rollout.timeout={seconds:g} seconds, in {at.name} "
                     f"({at.filename}:{at.lineno}): {Received.where()}\n".encode())
        os._exit(1)

    watch = threading.Timer(seconds, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        os.close(stderr)


@contextlib.contextmanager
def report_errors() -> Iterator[Any]:
    """Yield an object with the exit .code; expected failures print a line, bugs propagate."""
    outcome = SimpleNamespace(code=0)
    try:
        yield outcome
    except (Exception, KeyboardInterrupt, Ended, dcp.CheckpointException) as error:
        error = Received.ended or error            # a signal may have caused the error
        codes = {KeyboardInterrupt: 130, UserError: 2}
        outcome.code = getattr(error, "code", codes.get(type(error), 1))
        # Before the ranks have met they all find the same error; the first one prints it.
        if getattr(error, "silent", int(os.environ.get("RANK", "0")) > 0):
            return
        if not (sentence := explain(error)):
            raise
        print(f"trainer.py: {sentence}", file=sys.stderr)


def cause_of(error: BaseException) -> BaseException:
    """Return what the first rank raised, if it is torch's error about a checkpoint's ranks."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def explain(error: BaseException) -> str:
    """Return a sentence for an expected failure, or nothing for what must be a bug."""
    error = cause_of(error)
    words = str(error)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, (UserError, Ended)):
        return words
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: the same command continues from the last checkpoint"
    if full or re.search("No space|os error (27|28|122)", words):
        return ("the disk or its quota is full, or a limit on the size of files is met: free some, "
                "and the same command goes on from the last checkpoint")
    if re.search(OUT_OF_MEMORY, repr(error), re.IGNORECASE):
        return ("out of memory: lower train.micro_batch_size or _tokens, rollout.batch_size or "
                "rollout.max_tokens, set policy.gradient_checkpointing=true, or divide the GPU "
                "otherwise by rollout.gpu_memory_utilization")
    if isinstance(error, RuntimeError) and re.search(LOST, words, re.IGNORECASE):
        return ("another rank has ended without a word (killed, or its machine is gone): the same "
                "command continues from the last checkpoint")
    if isinstance(error, RuntimeError) and "Timed out waiting" in words:
        return ("another rank has not answered in time, since it hangs or is far slower: the same "
                "command continues from the last checkpoint")
    return words.strip().split("\n")[0] if isinstance(error, (OSError, EngineError)) else ""
