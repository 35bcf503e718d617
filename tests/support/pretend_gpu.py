"""A pretended accelerator has tensors that say `pretend:0`, and computes on the CPU.

On a machine without a GPU it imitates what causes trouble on one:
* An operation on tensors of two devices raises, as CUDA's kernels do: a 0-dim tensor of the CPU may
  be an operand, but no element of a list (`stack`, `cat`) and no index.
* Whatever makes the host wait for the device is counted, with the line that asked for it: `item`,
  `tolist`, `if tensor`, shapes that depend on data, copies in either direction. A non_blocking copy
  to the device counts too, under a name of its own, unless `pin_memory` made its source: CUDA first
  copies pageable memory aside, and beyond 64 KB waits for what the stream has to do before.
* `pin_memory` raises where CUDA's does: if elements share their memory.
FSDP2, DTensor, the optimizer and the collectives (gloo, on one rank or several) are the real ones.
The streams and events that they ask a device for exist here, and do nothing. Importing this file
registers the device, for the rest of the process.
"""

import contextlib
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

HERE = Path(__file__).resolve().parents[2]
WAITS = Counter()                  # (what waits, the line of this project that asked) → how often
SHAPES_BY_DATA = {"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
                  "aten::bincount",
                  "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave"}
LISTS = {"aten::stack", "aten::cat"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::_to_copy", "aten::copy_"}
NESTED = (list, tuple, dict)       # what arguments and results come in


class Stream:
    """A Stream stands for the only stream there is: everything on it is done at once."""
    def __init__(self, *_, **__): self.device = torch.device("pretend:0")
    def wait_stream(self, other): pass
    def wait_event(self, event): pass
    def record_event(self, event=None): return event or Event()
    def synchronize(self): wait("synchronize")


class Event:
    def __init__(self, *_, **__): pass
    def record(self, stream=None): return self
    def wait(self, stream=None): pass
    def query(self): return True
    def synchronize(self): wait("synchronize")


class Module:
    """A Module stands for torch.pretend, as torch.cuda is CUDA's module."""
    Stream, Event, stream = Stream, Event, contextlib.nullcontext
    def is_initialized(self): return True
    def is_available(self): return True
    def device_count(self): return 1
    def current_device(self): return 0
    def set_device(self, device): pass
    def current_stream(self, device=None): return Stream()
    def synchronize(self, device=None): wait("synchronize")
    def _is_in_bad_fork(self): return False
    def manual_seed_all(self, seed): pass
    def get_amp_supported_dtype(self): return [torch.bfloat16]         # gradient checkpointing asks


_setup_privateuseone_for_python_backend("pretend", Module())
DEVICE = torch.device("pretend:0")


def line() -> str:
    """Return the innermost line of the project, preceded by the library's line that it led to.

    A line is "file.py:number function", and a comprehension is part of the function around it.
    """
    frames = [(f.f_code, at) for f, at in traceback.walk_stack(sys._getframe())
              if f.f_code.co_filename != __file__]                        # the innermost first
    own = [(code, at) for code, at in frames if code.co_filename.startswith(f"{HERE}{os.sep}")
           and "site-packages" not in code.co_filename     # an environment may lie in the clone
           and not code.co_name.startswith("<")]
    names = [f"{Path(code.co_filename).name}:{at} {code.co_name}"
             for code, at in (frames[0], (own or frames)[0])]
    return " < ".join(dict.fromkeys(names))


def pin_memory(x: torch.Tensor) -> torch.Tensor:
    made: Any = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    made.pinned = True
    return made


def wait(what: str) -> None:
    WAITS[what, line()] += 1


class Pretend(torch.Tensor):
    """A Pretend is a tensor of the device: its numbers are in `.inner`, a tensor of the CPU."""

    inner: torch.Tensor
    __torch_function__ = (  # pyright: ignore[reportAssignmentType]
        torch._C._disabled_torch_function_impl)

    @staticmethod
    def __new__(cls, inner):
        assert type(inner) is torch.Tensor, type(inner)
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        parts = func.decompose(*args, **kwargs or {})         # inference mode leaves that to us
        return run(func, args, kwargs or {}) if parts is NotImplemented else parts

    def untyped_storage(self):                     # FSDP2 frees and fills it
        return self.inner.untyped_storage()

    def tolist(self):
        wait("tolist")
        return self.inner.tolist()

    def __repr__(self, **_):
        return f"Pretend({self.inner})"


def leaves(given) -> list[torch.Tensor]:
    """Return the tensors among arguments, which may be in lists, tuples or dictionaries."""
    if isinstance(given, torch.Tensor):
        return [given]
    parts = given.values() if isinstance(given, dict) else given
    return [x for part in parts for x in leaves(part)] if isinstance(given, NESTED) else []


def replace(given: Any, kind: Any, by: Any) -> Any:
    """Return the same arguments with by(x) for each x that is a `kind`.

    torch's tree_map is many times slower: an operation here would spend half of its time in it.
    """
    if isinstance(given, kind):
        return by(given)
    if isinstance(given, dict):
        return {name: replace(x, kind, by) for name, x in given.items()}
    return type(given)(replace(x, kind, by) for x in given) if isinstance(given, NESTED) else given


def refuse_mixed(name, args, kwargs) -> None:
    for argument in (*args, *kwargs.values()):
        listed = isinstance(argument, (list, tuple))
        for x in leaves(argument):
            strict = x.dim() > 0 or (listed and (name in LISTS or name in INDEXING))
            if not isinstance(x, Pretend) and strict:
                raise RuntimeError("Expected all tensors to be on the same device, but found cpu "
                                   f"and {DEVICE} in {name} at {line()}")


def count_waits(name, args, kwargs, to) -> None:
    if name == "aten::_local_scalar_dense":
        wait("item")
    elif name in SHAPES_BY_DATA:
        wait(name)
    elif name in COPIES:
        source = args[1] if name == "aten::copy_" else args[0]
        blocking = not kwargs.get("non_blocking", False)
        if name == "aten::copy_" and len(args) > 2:
            blocking = not args[2]
        target = args[0].device if name == "aten::copy_" else to or source.device
        if source.numel() == 0:
            return
        back = source.device.type != "cpu" and target.type == "cpu"
        if back:
            wait("copy to the host")
        elif source.device.type != target.type and (blocking or not hasattr(source, "pinned")):
            wait("copy from the host" if blocking else "copy of pageable memory")
    elif name in INDEXING:
        if any(x.dtype in (torch.bool, torch.uint8) for x in leaves(args[1])):
            wait(f"{name} by a mask")
        if any(not isinstance(x, Pretend) for x in leaves(args[1])):
            wait(f"{name} by an index of the host")


def run(func, args, kwargs):
    """Run one operation whose arguments, or whose target, are on the device."""
    name, to = func._schema.name, kwargs.get("device")
    to = None if to is None else torch.device(to)
    if name == "aten::_fused_sdp_choice":
        return 0  # plain operations rather than a kernel of one device
    count_waits(name, args, kwargs, to)
    if name not in COPIES and name not in INDEXING:
        refuse_mixed(name, args, kwargs)
    given = {id(x.inner): x for x in leaves((args, kwargs)) if isinstance(x, Pretend)}
    inner_args, inner_kwargs = replace((args, kwargs), Pretend, lambda x: x.inner)
    if to is not None:
        inner_kwargs = {**inner_kwargs, "device": torch.device("cpu")}
    inner_kwargs.pop("pin_memory", None)
    result = func(*inner_args, **inner_kwargs)
    if name == "aten::copy_":
        return args[0]
    if to is not None and to.type == "cpu":
        return result.clone() if any(result is x for x in leaves(inner_args)) else result

    def on_device(x):
        if isinstance(x, AsyncCollectiveTensor):       # its wait is a stream's, not the host's
            x = x.trigger_wait()
        return given[id(x)] if id(x) in given else Pretend(x)
    return replace(result, torch.Tensor, on_device)


def factory(name: str) -> None:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    LIBRARY.impl(name, lambda *args, **kwargs: run(operation, args, {**kwargs, "device": DEVICE}),
                 "PrivateUse1")


LIBRARY = torch.library.Library("aten", "IMPL")
for factory_name in ("empty.memory_format", "empty_strided", "arange", "arange.start",
                     "arange.start_step"):
    factory(factory_name)
# `torch.tensor(…, device=…)` ends in this operation.
LIBRARY.impl("_copy_from", lambda x, to,
             later=False: run(torch.ops.aten.copy_.default, (to, x, later), {}),
             "PrivateUse1")


def move(parameters, buffers, device) -> None:
    """Move parameters and buffers for FSDP2, whose own function sets `tensor.data`.

    That cannot change a tensor's class.
    """
    for x in [*parameters, *buffers]:
        if x.device not in (device, torch.device("meta")):
            moved = x.detach().to(device)
            is_parameter = isinstance(x, torch.nn.Parameter)
            torch.utils.swap_tensors(x, torch.nn.Parameter(moved, x.requires_grad) if is_parameter
                                     else moved)


dist.Backend.backend_capability["gloo"].append("pretend")    # gloo serves the device, as NCCL would
dist.Backend.default_device_backend_map["pretend"] = "gloo"
# What torch asks an allocator and streams of C++ for.
ROOM = 2 ** 36                     # bytes of memory, all free
torch.accelerator.synchronize = lambda device=None: wait("synchronize")
torch.accelerator.get_memory_info = lambda device=None: (ROOM, ROOM)
torch.accelerator.max_memory_allocated = lambda device=None: 0
torch.accelerator.reset_peak_memory_stats = lambda device=None: None
_fsdp_init._move_states_to_device = move
torch.__future__.set_swap_module_params_on_conversion(True)  # and `model.to(device)` the same way


class Generator(torch.Generator):
    """A Generator draws its random numbers on the CPU, too."""
    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


torch.Generator = Generator
torch.Tensor.pin_memory = pin_memory  # pyright: ignore[reportAttributeAccessIssue]
