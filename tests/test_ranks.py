"""Ranks: a run goes on with another number of them, two agents are one node, and one failure is one message."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent.parent
SMALL = ["task.size=1", "task.eval_size=8", "rollout.engine=transformers", "rollout.prompts=8", "rollout.samples=4",
         "rollout.max_tokens=5", "rollout.staleness=1", "train.mini_batches=2", "train.micro_batch_size=4",
         "train.lr=0.01", "train.eval_every=2"]
DRIVER = """
import os, sys, time, torch, rollout, trainer
from plumbing.tasks import Task
Task.reward = lambda self, problem, response: float(len(response) % 2)     # untaught models earn it
fault, rank, calls = sys.argv[1], int(os.environ.get("RANK", 0)), []
def broken(owner, name):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        calls.append(name)
        if rank == 1 and len(calls) == 5:          # not before the first checkpoint
            if fault == "bug": raise ValueError("a bug of rank 1")
            if fault == "memory": raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if fault == "hang": time.sleep(60)
        return real(*args, **kwargs)
    setattr(owner, name, call)
if fault: broken(*(rollout.TransformersEngine, "generate") if fault == "hang" else (trainer, "score"))
sys.exit(trainer.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def train(tiny_model, tmp_path_factory):
    """train(ranks, "key=value" …) in one directory, from a driver that can break rank 1; agents: torchrun's."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "driver.py").write_text(DRIVER)

    def call(ranks, *overrides, fault="", agents=1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks // agents),
                    "--nnodes", str(agents), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        commands = [[*torchrun, "--node-rank", str(i)] for i in range(agents)] if ranks > 1 else [[sys.executable]]
        started = [subprocess.Popen([*command, "driver.py", fault, *SMALL, f"policy.path={tiny_model}", *overrides],
                                    cwd=directory, env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
                                    text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
        said = "".join(process.communicate(timeout=120)[0] for process in started)
        assert fault or not any(process.returncode for process in started), said
        return said
    call.runs = directory / "runs"
    return call


def curve(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "tokens_per", "memory/"))} for line in lines]


def assert_same(directory, other, tolerance):
    lines, expected = curve(directory), curve(other)
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, right in zip(lines, expected):
        assert line == pytest.approx(right, rel=tolerance, abs=tolerance)
    weights, right = (load_file(d / "model/model.safetensors") for d in (directory, other))
    assert all(torch.allclose(weights[name], right[name], rtol=0, atol=tolerance) for name in right)


def test_a_run_goes_on_with_fewer_ranks_and_with_more(train):
    train(1, "run=whole", "train.steps=6")
    for ranks, steps in [(2, 2), (1, 4), (2, 6)]:
        said = train(ranks, "run=parts", f"train.steps={steps}")
        assert steps == 2 or f"continuing after step {steps - 2}" in said
    assert_same(train.runs / "parts", train.runs / "whole", 1e-4)


def test_two_agents_on_one_machine_train_as_one_node_with_four_ranks(train):
    train(4, "run=node", "train.steps=2")
    train(4, "run=agents", "train.steps=2", agents=2)
    assert_same(train.runs / "agents", train.runs / "node", 1e-6)


@pytest.mark.parametrize("fault, said, settings", [
    ("bug", "ValueError: a bug of rank 1", []),
    ("memory", "trainer.py: out of memory: lower train.micro_batch_size, rollout.batch_size", []),
    ("hang", "trainer.py: rollout.engine=transformers has not answered for rollout.timeout=2 seconds, in call ",
     ["rollout.timeout=2"]),
])
def test_one_rank_that_fails_ends_all_of_them_with_one_message(fault, said, settings, train):
    began = time.monotonic()
    output = train(2, f"run={fault}", "train.steps=40", "train.save_every=1", *settings, fault=fault)
    assert time.monotonic() - began < 60
    assert output.count(said) == 1 and output.count("trainer.py: ") == (fault != "bug"), output
    assert (train.runs / fault / "checkpoints/step-000002/state.json").exists()
