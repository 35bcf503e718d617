"""This script compares each part of a step of a 0.5B model on a CPU with the least it could cost.

    python tools/bench.py size                  # 20 GB of memory, 16 GB of disk, about 6 minutes
    LD_PRELOAD=libtcmalloc_minimal.so.4 python tools/bench.py size            # with tcmalloc's heap

The model has Qwen2.5-0.5B's shapes and random weights. A step has 4 prompts × 8 samples × 64
tokens, by vLLM in bfloat16 where it imports. Every floor is measured in the same process, after
the steps:
    update      the matrix products of one forward and backward pass (6 · weights · tokens) at the
                speed of a @ b,
                and one pass of the optimizer over its state
    sync        one copy and cast of all weights
    rollout     the same requests to a bare vllm.LLM: the engine's own, without what
                engines/vllm.py does around it
    checkpoint  writing the same bytes beside a file of that size, which is then deleted
A second table compares the memory of the process, as the kernel counts it, with the sum of what it
must hold.
"""

import ctypes
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

SETTINGS = ["task.size=2", "task.eval_size=1", "rollout.prompts=4", "rollout.samples=8",
            "rollout.max_tokens=64",
            "rollout.dtype=bfloat16", "train.mini_batches=1", "train.micro_batch_size=8",
            "train.steps=3",
            "rollout.quantize=null", "train.keep=1", "correction.preset=decoupled_token_is",
            "run=size"]


def memory(name="VmRSS") -> float:
    """Return the GB of this process: now (VmRSS), or the most since clear_refs (VmHWM)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 2 ** 20


class Took(NamedTuple):
    seconds: float
    peak: float            # most memory meanwhile, GB
    before: float          # memory before, GB


def timed(run) -> Took:
    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory(), time.perf_counter()
    run()
    return Took(time.perf_counter() - began, memory("VmHWM"), before)


def median(run, times=3) -> float:
    return statistics.median(timed(run).seconds for _ in range(times))


def one_step(run, step: int, options) -> tuple[dict[str, Took], Any]:
    """Run one step, and return the time and memory of each part, and the batch."""
    from three_policies import trainer
    from three_policies.correction import correct
    world, kept = torch.distributed.group.WORLD, {}

    def rollout():
        batch, _ = trainer.sample(run, step)
        # Random weights answer nothing right, and an update without a gradient would take no step.
        kept["batch"] = batch._replace(advantages=torch.ones_like(batch.advantages))

    def log_probs():
        found = trainer.score(run.loaded.policy, kept["batch"], run.config)
        kept["batch"] = kept["batch"]._replace(old_log_prob=found)

    def update():
        batch = kept["batch"]
        correction = correct(batch.old_log_prob, batch.rollout_log_prob, batch.response_mask,
                             options, group=world)
        trainer.update(run, batch, options, correction)

    parts = {"rollout": rollout, "π_old": log_probs, "update": update,
             "sync": run.push_weights,
             "checkpoint": lambda: run.checkpoints.save(step, run.loaded, 0.0)}
    return {name: timed(part) for name, part in parts.items()}, kept["batch"]


def rate(rows: int, config) -> float:
    """Return the operations per second of a @ b with this many rows."""
    a, b = torch.randn(rows, config.hidden_size), torch.randn(config.hidden_size,
                                                              config.intermediate_size)
    return 2 * a.numel() * b.shape[1] / median(lambda: a @ b, 9)


def write_beside(directory: Path, weights: list) -> float:
    """Return the seconds to write weights and moments, and then delete the file written before.

    The third time counts.
    """
    def write(name):
        with open(directory / name, "wb") as file:
            for _ in range(3):
                for weight in weights:
                    file.write(weight.flatten().numpy())

    write("0")
    for i in range(3):
        took = timed(lambda: (write(f"{i + 1}"), (directory / f"{i}").unlink()))
    (directory / "3").unlink()
    return took.seconds


def floors(run, batch, weights: list) -> dict[str, float]:
    """Return the least seconds of each part."""
    tokens, config = int(batch.attention.sum()), run.loaded.policy.model.config
    for parameter in run.loaded.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    numbers = 6 * sum(w.numel() for w in weights if w.dim() == 2) * tokens
    found = {"update": numbers / rate(tokens, config) + median(run.loaded.optimizer.step),
             "sync": median(lambda: [w.to(torch.bfloat16) for w in weights]),
             "checkpoint": write_beside(Path("."), weights)}
    if run.loaded.engine.name == "vllm":
        start = batch.tokens.shape[1] - batch.response_mask.shape[1]
        prompts = [{"prompt_token_ids": row[:start][on[:start].bool()].tolist()}
                   for row, on in zip(batch.tokens, batch.attention)]
        params = run.loaded.engine.SamplingParams(seed=0, temperature=1.0, max_tokens=64,
                                                  logprobs=0, ignore_eos=True, detokenize=False)
        with torch.compiler.set_stance("force_eager"):
            found["rollout"] = median(lambda: run.loaded.engine.llm.generate(prompts, params,
                                                                      use_tqdm=False))
    return found


class Heap(ctypes.Structure):
    """A Heap is what mallinfo2(3) returns."""
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def heap() -> str:
    """Return the name of the allocator that was loaded before the C library, or "glibc"."""
    loaded = Path("/proc/self/maps").read_text()
    return next((x for x in ("tcmalloc", "jemalloc", "mimalloc") if x in loaded), "glibc")


def unused() -> float:
    """Return the GB that were freed but stay in the process, in gaps between what is in use."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    return mallinfo2().fordblks / 2 ** 30


def memory_held(run, batch, engine: float, start: float, peak: float) -> list[list[str]]:
    """List the GB that the process must hold in the update, and those that it did hold."""
    from three_policies import trainer
    weights = 4 * sum(p.numel() for p in run.loaded.policy.parameters()) / 2 ** 30
    storages, own = {}, {p.untyped_storage().data_ptr() for p in run.loaded.policy.parameters()}

    def keep(x):
        place = x.untyped_storage()
        if place.data_ptr() not in own:
            storages[place.data_ptr()] = place.nbytes()
        return x

    between = unused()
    rows = trainer.micro_batches(batch, run.config, together=True)[-1]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.log_probs(run.loaded.policy, batch.rows(rows, rows))[0].sum().backward()
    parts = {"libraries": start, "weights": weights, "gradients": weights, "moments": 2 * weights,
             "engine": engine, "activations of a micro-batch": sum(storages.values()) / 2 ** 30}
    total = sum(parts.values())
    rows = [[name, f"{gb:.1f}"] for name, gb in parts.items()] + [
        ["sum", f"{total:.1f}"], ["most in the update", f"{peak:.1f}"],
        ["ratio", f"{peak / total:.2f}"]]
    if heap() == "glibc":                      # the one that tells
        rows.append(["free afterwards, and kept by the heap: the activations' room, too",
                     f"{between:.1f}"])
    return rows


def bench_size(table) -> None:
    from three_policies.tools.gpu_report import LARGE, make_model
    from three_policies.training import loading, run as runs
    from three_policies.training.settings import correction_of, load_config
    start, engine, make_engine = memory(), [], loading.make_engine

    def weighed(*args, **settings):
        before = memory()
        made = make_engine(*args, **settings)
        engine.append(memory() - before)
        return made

    with (tempfile.TemporaryDirectory() as directory,
          mock.patch("three_policies.training.loading.make_engine", weighed)):
        os.chdir(directory)
        make_model("model", LARGE, "bfloat16")
        config = load_config([*SETTINGS, "policy.path=model"])
        options = correction_of(config)
        with runs.open_run(config) as run:
            assert run is not None             # it is not finished: its directory was empty
            run.push_weights()
            for step in run.steps(0.0):
                took, batch = one_step(run, step, options)
            weights = [p.detach() for p in run.loaded.policy.parameters()]
            n, floor = sum(w.numel() for w in weights), floors(run, batch, weights)
            memories = memory_held(run, batch, engine[0], start, took["update"].peak)
        rows = []
        for name, t in took.items():
            least, ratio = "–", "–"
            if name in floor:
                least, ratio = f"{floor[name]:.2f}", f"{t.seconds / floor[name]:.2f}"
            rows.append([name, f"{t.seconds:.2f}", least, ratio, f"{t.peak:.1f}",
                         f"{t.peak / t.before:.2f}"])
        table(f"{n / 1e6:.0f}M parameters, {int(batch.attention.sum())} tokens, "
              f"engine {run.loaded.engine.name}, heap {heap()}; step {config.train.steps}: the "
              "ones before it warm the memory up",
              "part | s | floor, s | ratio | most memory, GB | of what was held before", rows)
        table("The process in the update", "what | GB", memories)
