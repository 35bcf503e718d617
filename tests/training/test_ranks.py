"""A run goes on with another number of ranks; two agents are one node; a failure is one message.

Nobody waits for a rank that has failed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
import torch
from safetensors.torch import load_file

from three_policies.checks import UserError
from three_policies.tests.support import launching
from three_policies.tests.support.launching import serving, shell, torchrun
from three_policies.tests.support.small import steady
from three_policies.tests.support.waiting import HANG
from three_policies.training import faults

SMALL = ["task.size=1", "task.eval_size=8", "rollout.engine=transformers", "rollout.prompts=8",
         "rollout.samples=4", "rollout.max_tokens=5", "rollout.staleness=1",
         "train.mini_batches=2", "train.micro_batch_size=4", "train.lr=0.01", "train.eval_every=2"]
DRIVER = """
import os, signal, sys, torch
from three_policies import rollout, trainer
from three_policies.training import capacity, run
from three_policies.training.tasks import Task
from three_policies.tests.support.tolerances import in_float64
Task.reward = lambda self, problem, response: float(len(response) % 2)     # untaught models earn it
fault, rank, calls = sys.argv[1], int(os.environ.get("RANK", 0)), []
def broken(owner, name):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        calls.append(name)
        if rank == 1 and len(calls) == 5:          # not before the first checkpoint
            if fault == "bug": raise ValueError("a bug of rank 1")
            if fault == "memory": raise torch.OutOfMemoryError("CUDA out of memory.")
            if fault == "hang": signal.pause()
            if fault == "nan": return real(*args, **kwargs) * torch.nan
        return real(*args, **kwargs)
    setattr(owner, name, call)
run.plot = lambda *_: None             # curves and speed are no ranks' business
capacity.SIDES["cpu"] = 64
watch_engine = run.watch_engine        # half a second for the call that hangs; another may be slow
run.watch_engine = lambda engine, seconds: watch_engine(
    engine, 0.5 if rank == 1 and len(calls) == 4 else seconds)
if not fault: in_float64()
if fault == "hang": broken(rollout.TransformersEngine, "generate")
elif fault: broken(trainer, "score")
sys.exit(trainer.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def train(tiny_model, forks, tmp_path_factory):
    """train(ranks, "key=value" …) starts a driver that can break rank 1, and returns all output.

    agents: how many of torchrun's; apart: each in a directory of its own. begin: what is put before
    the driver.
    """
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "driver.py").write_text(DRIVER)

    def call(ranks, *overrides, fault="", agents=1, apart=False, begin=forks):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        node = ["--nnodes", str(agents), "--master-addr", "127.0.0.1", "--master-port", str(port),
                "--node-rank"]
        places = [directory / f"node-{i}" if apart else directory for i in range(agents)]
        for place in places:
            place.mkdir(exist_ok=True)
        given = [str(directory / "driver.py"), fault, *SMALL, f"policy.path={tiny_model}",
                 *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [subprocess.Popen(
            torchrun(ranks // agents, begin, *given, node=[*node, str(i)] if ranks > 1 else None),
            cwd=place, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for i, place in enumerate(places)]
        said = "".join(process.communicate(timeout=HANG)[0] for process in started)
        assert fault or not any(process.returncode for process in started), said
        return said
    call.runs = directory / "runs"
    return call


def curve(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return steady([json.loads(line) for line in lines])


def assert_same(directory, other, tolerance=1e-9):
    """Compare two runs in float64: only rounding may differ.

    AdamW multiplies it where a gradient is nearly 0.
    """
    lines, expected = curve(directory), curve(other)
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, right in zip(lines, expected):
        assert line == pytest.approx(right, rel=tolerance, abs=tolerance)
    answers, right = ((d / "eval.jsonl").read_text() for d in (directory, other))
    assert answers == right
    weights, right = (load_file(*d.glob("model/*.safetensors")) for d in (directory, other))
    assert all(torch.allclose(weights[name], right[name], rtol=0, atol=tolerance)
               for name in right)


@pytest.mark.long
@pytest.mark.parametrize("settings", [[], ["policy.lora_rank=4", "loss.kl_coef=0.1"]])
def test_a_run_goes_on_with_fewer_ranks_and_with_more(settings, train, forks):
    """The first two ranks of a whole model are processes that torchrun has started, no forks."""
    name = "lora" if settings else "full"
    train(1, f"run={name}-whole", "train.steps=6", *settings)
    for ranks, steps, begin in [(2, 2, forks if settings else []), (1, 4, forks), (2, 6, forks)]:
        said = train(ranks, f"run={name}-parts", f"train.steps={steps}", *settings, begin=begin)
        assert steps == 2 or f"continuing after step {steps - 2}" in said
    assert_same(train.runs / f"{name}-parts", train.runs / f"{name}-whole")


def test_a_packed_run_on_two_ranks_ends_as_a_padded_one(train):
    train(1, "run=padded", "train.steps=2", "loss.kl_coef=0.1", "rollout.top_k=8")
    train(2, "run=packed", "train.steps=2", "loss.kl_coef=0.1", "rollout.top_k=8",
          "policy.packed=true", "policy.gradient_checkpointing=true", "train.micro_batch_tokens=20")
    assert_same(train.runs / "packed", train.runs / "padded")


@pytest.mark.long
def test_two_agents_on_one_machine_train_as_one_node_with_four_ranks(train):
    train(4, "run=node", "train.steps=2")
    train(4, "run=agents", "train.steps=2", agents=2)
    assert_same(train.runs / "agents", train.runs / "node")


def test_two_agents_without_a_shared_directory_are_told_before_anything_is_trained(train):
    said = train(2, "run=apart", fault="none", agents=2, apart=True)
    unseen = "trainer.py: 1 of 2 ranks do not see what the first one writes to "
    assert said.count(unseen) == said.count("trainer.py: ") == 1, said
    assert "start all nodes in one shared directory" in said
    left = list(train.runs.parent.glob("node-*/runs/*"))
    assert not left                                                    # nothing is left behind


LOAD = """
import os, sys, torch, torch.distributed as dist, transformers
from three_policies.training.faults import process_group
from three_policies.policy import full_weights, load_policy
from three_policies.tests.support.tolerances import in_float64
in_float64()                                                                # whatever the threads
def forbidden(*_, **__): raise AssertionError("a rank that is not the first reads the model")
with process_group() as device:
    if dist.get_rank() > 0:
        transformers.AutoModelForCausalLM.from_pretrained = forbidden
    for frozen in True, False:
        policy = load_policy(sys.argv[1], 0.7, "float32", device, frozen=frozen)
        weights = {name: x.clone() for name, x in full_weights(policy)}
        tokens = torch.arange(12).view(2, 6) + 3
        log_prob = policy(tokens, torch.ones_like(tokens), 3)
        assert log_prob.requires_grad != frozen
        everyone = [torch.empty_like(log_prob) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, log_prob.detach())
        assert all(torch.equal(x, everyone[0]) for x in everyone)
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "log_prob": log_prob.detach()}, "loaded.pt")
"""


def test_one_rank_reads_the_model_and_all_have_it(tiny_model, forks, tmp_path):
    found = []
    (tmp_path / "load.py").write_text(LOAD)
    for ranks in 1, 3:
        result = shell(torchrun(ranks, forks, "load.py", str(tiny_model)), tmp_path)
        assert result.returncode == 0, result.stderr
        found.append(torch.load(tmp_path / "loaded.pt", weights_only=True))
    alone, together = found
    first = load_file(tiny_model / "model.safetensors")
    assert set(first) == set(together["weights"]) == set(alone["weights"])
    assert all(torch.equal(x, first[name].double()) for name, x in together["weights"].items())
    assert torch.allclose(alone["log_prob"], together["log_prob"], rtol=0, atol=1e-12)


NO_ANSWER = "rollout.engine=transformers has not answered for rollout.timeout=0.5 seconds, in call "


@pytest.mark.parametrize("fault, said", [
    ("bug", "ValueError: a bug of rank 1"),
    ("memory", "trainer.py: out of memory: lower train.micro_batch_size or _tokens"),
    ("hang", "trainer.py: " + NO_ANSWER)])
def test_one_rank_that_fails_ends_all_of_them_with_one_message(fault, said, train):
    output = train(2, f"run={fault}", "train.steps=40", "train.save_every=1", fault=fault)
    assert output.count(said) == 1, output
    assert output.count("trainer.py: ") == (fault != "bug"), output
    assert (train.runs / fault / "checkpoints/step-000002/state.json").exists()


def test_what_one_rank_cannot_use_all_leave_out(train):
    """Otherwise one of them would wait for the others in the gathering of what is said."""
    said = train(2, "run=nan", "train.steps=5", "train.on_nonfinite=skip", fault="nan")
    assert said.count("π_old has the log-prob nan") == 1, said
    assert sum(line.get("train/skipped_samples", 0) for line in curve(train.runs / "nan")) == 16


PROGRAM = """
import atexit, os, signal, sys, threading
atexit.register(print, "the last")             # left to be written when all else has ended
threading.Timer(0.1, print, ["the thread's end"]).start()
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], __name__, flush=True)
if sys.argv[1] == "exits": sys.exit(7)
if sys.argv[1] == "says why": sys.exit("ValueError: a bug")
if sys.argv[1] == "fails": raise ValueError("a bug")
if sys.argv[1] == "is killed": os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end, code", [
    ("returns", 0), ("exits", 7), ("says why", 1), ("fails", 1), ("is killed", -9)])
def test_a_program_in_a_fork_is_as_in_a_process_of_its_own(end, code, forks, tmp_path):
    """A fork of launching.py has the same arguments, place, environment, streams and end."""
    (tmp_path / "program.py").write_text(PROGRAM)
    own, forked = (shell(torchrun(1, begin, "program.py", end, "π"), tmp_path,
                         env={**os.environ, "GIVEN": "x"}) for begin in ([], forks))
    assert own.returncode == forked.returncode == code and own.stdout == forked.stdout != ""
    assert ("ValueError: a bug" in own.stderr) == ("ValueError: a bug" in forked.stderr)


@pytest.mark.parametrize("numbers", [0, 1])
def test_a_server_that_ends_is_no_success(numbers):
    """It ends before it says the fork's number, or before it says how the fork ended."""
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/socket")
        listener.listen()
        client = subprocess.Popen([sys.executable, launching.__file__, f"{place}/socket", "x.py"],
                                  stderr=subprocess.PIPE, text=True)
        connection, _ = listener.accept()
        size, streams, *_ = socket.recv_fds(connection, 8, 3)
        connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        connection.sendall(numbers * client.pid.to_bytes(8, "big"))
        for stream in connection.detach(), *streams:
            os.close(stream)
        _, said = client.communicate(timeout=HANG)
    assert client.returncode == 1 and "the server of forks has ended" in said


def test_a_server_that_cannot_import_is_no_success(tmp_path):
    with serving("import no_such_module") as begin:
        asked = shell([sys.executable, *begin, "x.py"], tmp_path)
    assert asked.returncode == 1 and "the server of forks has ended" in asked.stderr


def test_what_is_left_over_ends_with_its_server(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, signal; print(os.getpid(), flush=True); signal.pause()")
    with serving("import os") as begin:
        process = subprocess.Popen([sys.executable, *begin, "program.py"], cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE)
        left = int(process.stdout.readline())
    assert process.wait(HANG) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


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
