"""A run that is killed at any moment, and started again, ends as if nothing had happened.

pytest kills one small run at every place where it could hurt and at three random moments. A moment
is a number of calls and returns of functions, not of seconds: a slow machine is killed at the same
places as a fast one. The long form kills the demo's command once per run, by the clock, at random
moments between its first step and its end. Its exit code is 1 if one run ends differently:

    python tests/training/test_kills_and_signals.py 20 [SEED] [overrides]
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from three_policies.checks import UserError
from three_policies.tests.support.launching import shell
from three_policies.training import faults

HERE = Path(__file__).resolve().parents[2]

DEMO = ["rollout.engine=transformers", "train.steps=12", "train.save_every=2"]
SMALL = ["task.size=1", "task.eval_size=8", "rollout.engine=transformers", "rollout.prompts=4",
         "rollout.samples=4", "rollout.max_tokens=5", "train.mini_batches=2", "train.lr=0.01",
         "train.steps=8", "train.save_every=2", "train.keep=2", "train.eval_every=3"]

# Forks for every attempt: argv[1] is a list of [place, call that is the last] or
# ["moment", calls and returns after the attempt's first step was logged], the rest is the
# trainer's. Each attempt must be killed.
DRIVER = """
import json, os, signal, sys
import shutil
from three_policies import trainer, rollout
from three_policies.training import checkpoints, run
from three_policies.training.tasks import Task
faults, argv = json.loads(sys.argv[1]), sys.argv[2:]
Task.reward = lambda self, problem, response: float(len(response) % 2)     # untaught models earn it
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def half(self, named_tensors):
    for (name, tensor), _ in zip(named_tensors, range(5)):
        self.model.state_dict()[name].add_(1)
    die()
def renamed(part, place):
    if place.name.startswith("step-"): die()
def one_file(path, **_):
    if path.name.startswith("step-") and path.exists():
        min(path.iterdir()).unlink()
        die()
def half_a_line(self, step, metrics):
    with self.record.metrics.open("a") as file: file.write('{"step": 5, "rew')
    die()
# Owner, function, what happens at the fatal call: before or instead, or after.
PLACES = {
    "generation": (rollout.TransformersEngine, "_batch", die, None),
    "scoring": (trainer, "score", die, None),
    "update": (trainer, "update", None, die),
    "weight sync": (rollout.TransformersEngine, "update_weights", half, None),
    "metrics": (run.Run, "log", half_a_line, None),
    "checkpoint begun": (checkpoints.dcp, "save", die, None),
    "checkpoint without state": (checkpoints.dcp, "save", None, die),
    "before rename": (os, "replace", renamed, None),
    "after rename": (os, "replace", None, renamed),
    "removal of the oldest": (shutil, "rmtree", one_file, None),
    "curves": (run, "plot", die, None),
}
def moment(left):
    def call(*_):
        nonlocal left
        left -= 1
        if left <= 0: die()
    return run.Run, "log", None, lambda *_, **__: sys.setprofile(call)
def arm(owner, name, before, after, left):
    real = getattr(owner, name)
    def counted(*args, **kwargs):
        nonlocal left
        left -= 1
        if left <= 0 and before: before(*args, **kwargs)
        result = real(*args, **kwargs)
        if left <= 0 and after: after(*args, **kwargs)
        return result
    setattr(owner, name, counted)
for place, count in [*faults, (None, None)]:
    child = os.fork()
    if child == 0:
        if place: arm(*(moment(count) if place == "moment" else PLACES[place]),
                      1 if place == "moment" else count)
        os._exit(trainer.main(argv))
    status = os.waitpid(child, 0)[1]
    assert status == (0 if place is None else signal.SIGKILL), (place, count, status)
"""
FAULTS = [("generation", 2), ("weight sync", 3), ("scoring", 1), ("checkpoint begun", 1),
          ("before rename", 1), ("checkpoint without state", 1), ("after rename", 1),
          ("weight sync", 2), ("update", 3), ("metrics", 1), ("after rename", 1),
          ("removal of the oldest", 1), ("after rename", 1), ("curves", 1)]
CROSSING = [("weight sync", 6), ("weight sync", 3), ("weight sync", 7)]    # all within a response


def outcome(directory: Path):
    """Return final weights, held-out answers, and metrics without those of clock and memory."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items()
              if not k.startswith(("time/", "tokens_per", "memory/"))} for line in lines]
    [file] = directory.glob("model/*.safetensors")
    return (load_file(file),
            (directory / "eval.jsonl").read_text(), lines)


def differences(directory: Path, whole: Path) -> list[str]:
    (weights, answers, lines), (expected, right, metrics) = outcome(directory), outcome(whole)
    found = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    found += (["steps"] if [line["step"] for line in lines] != [line["step"] for line in metrics]
              else [])
    found += [f"metrics of step {b['step']}" for a, b in zip(lines, metrics) if a != b]
    return found + (["eval.jsonl"] if answers != right else []) + (
        [] if (directory / "curves.png").exists() else ["curves.png"])


def drive(faults, arguments, cwd, forks):
    (cwd / "driver.py").write_text(DRIVER)
    result = shell([sys.executable, *forks, "driver.py", json.dumps(faults), *arguments], cwd)
    assert result.returncode == 0, result.stderr


def test_a_call_that_has_ended_is_watched_no_longer():
    with faults.end_after(600, "transformers"):
        [watch] = [x for x in threading.enumerate() if isinstance(x, threading.Timer)]
    watch.join(5)
    assert not watch.is_alive()


@pytest.mark.parametrize("case, settings", [
    ("places", ["rollout.staleness=2", "rollout.quantize=4"]),
    ("crossing", ["rollout.staleness=2", "rollout.update_every=2", "train.steps=4",
                  "train.save_every=1", "policy.lora_rank=4", "loss.kl_coef=0.1"]),
    ("moments", ["correction.preset=bypass_pg_is"])])
def test_a_killed_run_ends_as_an_uninterrupted_one(case, settings, tiny_model, forks, tmp_path):
    arguments = [*SMALL, *settings, *(["train.steps=24"] if case == "moments" else []),
                 f"policy.path={tiny_model}"]
    drive([], [*arguments, "run=whole"], tmp_path, forks)
    # A step is some 200 000 calls and returns.
    rng = random.Random(0)
    faults = {"places": FAULTS, "crossing": CROSSING,
              "moments": [("moment", rng.randrange(700_000)) for _ in range(3)]}[case]
    drive(faults, [*arguments, "run=parts"], tmp_path, forks)
    assert differences(tmp_path / "runs/parts", tmp_path / "runs/whole") == []
    # There are train.keep checkpoints, and no leftovers.
    assert len(list((tmp_path / "runs/parts/checkpoints").iterdir())) == 2


def main(faults: int, seed: int, overrides: list[str]) -> int:
    """Plant one fault a run, each run from its beginning; the demo's model is made once."""
    rng, failed, missed = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory() as directory:
        def start(name):
            return subprocess.Popen(
                [sys.executable, str(HERE / "trainer.py"), *DEMO, *overrides, f"run={name}"],
                cwd=directory, stderr=subprocess.DEVNULL)

        def wait_for_step(name, done, process):
            path = runs / name / "metrics.jsonl"
            while process.poll() is None and not (
                    path.exists() and path.read_text().count("\n") >= done):
                time.sleep(0.02)
            return time.monotonic()
        runs = Path(directory) / "runs"
        process = start("whole")
        began = wait_for_step("whole", 0, process)
        assert process.wait() == 0
        step_time = (time.monotonic() - began) / 12
        for i in range(faults):
            process, done, moment = (start(name := f"killed-{i}"), rng.randrange(13),
                                     rng.uniform(0, step_time))
            wait_for_step(name, done, process)
            time.sleep(moment)
            process.kill()
            killed = process.wait() == -9
            missed += not killed
            code = start(name).wait()
            found = differences(runs / name, runs / "whole") if code == 0 else [f"exit code {code}"]
            print(f"fault {i + 1}: {'killed' if killed else 'had ended'} {moment:.2f} s after step "
                  f"{done}: {', '.join(found) or 'identical'}", flush=True)
            failed += [name] if found else []
            shutil.rmtree(runs / name)
    print(f"{faults - missed} faults injected, {faults - missed - len(failed)} survived "
          f"({missed} came too late)")
    return 1 if failed else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    sys.exit(main(*[*numbers, *(20, 0)[len(numbers):]],
                  [word for word in sys.argv[1:] if "=" in word]))


WAITS = """
import torch.distributed as dist
from three_policies.training.faults import end_after, process_group
with process_group(), end_after(0.2, "vllm"):
    dist.distributed_c10d._get_default_store().get("never")
"""


def test_a_call_that_waits_for_another_rank_is_ended_too(forks, tmp_path):
    """It holds the lock of its connection to the store, and the watchdog asks over another."""
    (tmp_path / "waits.py").write_text(WAITS)
    result = shell([sys.executable, *forks, "waits.py"], tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("trainer.py: rollout.engine=vllm has not answered"), result


def test_a_failure_does_not_wait_for_the_collectives_of_others(monkeypatch):
    """NCCL's `destroy_process_group` does; a rank that fails must end its group without it."""
    def waits(*_):
        raise AssertionError("this would wait for ever")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(faults.dist, "destroy_process_group", waits)
        with faults.process_group():
            raise ZeroDivisionError
    assert not faults.dist.is_initialized()
    with faults.process_group():                                    # and another can follow
        assert faults.dist.get_world_size() == 1


@pytest.mark.parametrize("rank, silent", [(1, False), (2, True)])
def test_a_rank_without_a_gpu_says_so_once(rank, silent, monkeypatch):
    """Rank 0 has one and waits, so the first rank without speaks."""
    def refuse(index):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal\nand more of it")
    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(UserError) as found:
        faults.take_gpu(torch.device("cuda", rank))
    assert str(found.value) == (f"rank {rank} needs cuda:{rank}, and there are 1: start at most 1 "
                                "ranks (torchrun --nproc-per-node 1)")
    assert vars(found.value)["silent"] == silent


def test_another_fault_of_a_gpu_is_not_about_their_number(monkeypatch):
    def refuse(index):
        raise torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy")
    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    with pytest.raises(torch.AcceleratorError, match="are busy"):
        faults.take_gpu(torch.device("cuda", 0))


@pytest.mark.parametrize("patience, seconds", [(10, 1800), (4000, 4000)])
def test_ranks_wait_for_each_other_as_long_as_an_engine_may_take(patience, seconds, monkeypatch):
    given = []

    def init(*_, timeout, **__):
        given.append(timeout.total_seconds())
        raise InterruptedError
    monkeypatch.setattr(faults.dist, "init_process_group", init)
    with pytest.raises(InterruptedError), faults.process_group(patience):
        pass
    assert given == [seconds]


@pytest.mark.parametrize("cores, ranks, threads", [(8, 2, 4), (3, 2, 1), (1, 2, 1)])
def test_ranks_of_one_machine_share_its_cores(cores, ranks, threads, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    before = torch.get_num_threads()
    with faults.process_group():
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
