"""A checkpoint costs next to no memory, and a backward pass no second copy of the gradients.

The first is measured from outside the process that writes it. The metrics of a step say how fast
and how large it is.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from three_policies import trainer
from three_policies.policy import load_policy
from three_policies.tests.support.launching import shell
from three_policies.tests.support.small import steady
from three_policies.tests.support.waiting import HANG
from three_policies.tools.bench import peak
from three_policies.tools.bench_size import heap
from three_policies.training import capacity, record, run as run_module
from three_policies.training.capacity import Sizes, memory_metrics
from three_policies.training.faults import process_group
from three_policies.training.shards import NAMES, TensorByTensor

SAVE = """
import os, sys, torch
from pathlib import Path
from types import SimpleNamespace
from three_policies.training.checkpoints import Checkpoints
from three_policies.training.faults import process_group
from three_policies.training.settings import load_config
from three_policies.policy import load_policy
from three_policies.rollout import WeightSync
with process_group() as device:
    policy = load_policy(sys.argv[1], 1.0, "float32", device)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    for parameter in policy.parameters(): parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    loaded = SimpleNamespace(
        policy=policy, optimizer=optimizer, sync=WeightSync(None),
        engine=SimpleNamespace(name="transformers"), task=SimpleNamespace(digest=""))
    checkpoints = Checkpoints(Path("checkpoints"), load_config(["run=x"]))
    print(os.getpid(), sum(p.numel() for p in policy.parameters()), flush=True)
    sys.stdin.readline()
    checkpoints.save(1, loaded, 0.0)
    print("saved", flush=True)
    sys.stdin.readline()
"""


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_model(directory, hidden, vocabulary):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        tie_word_embeddings=True, dtype="float32")).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model of 59 million parameters, whose largest matrix has a fifth of them.

    So it is in the small models that people train.
    """
    return make_model(tmp_path_factory.mktemp("large") / "model", 512, 24_000)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(),
                    reason="only Linux tells what is in memory")
def test_saving_takes_a_tenth_of_the_memory_at_most(model, forks, tmp_path):
    (tmp_path / "save.py").write_text(SAVE)
    process = subprocess.Popen([sys.executable, *forks, "save.py", model], cwd=tmp_path,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, parameters = map(int, process.stdout.readline().split())      # those of the fork
    assert parameters > 50e6
    before, most, began = resident(pid), 0, time.perf_counter()
    process.stdin.write("\n")
    process.stdin.flush()
    os.set_blocking(process.stdout.fileno(), False)
    while process.poll() is None and process.stdout.readline() != "saved\n":
        most = max(most, resident(pid))
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    process.communicate("\n", timeout=HANG)
    assert process.returncode == 0
    print(f"{parameters / 1e6:.0f}M parameters: {before / 2 ** 20:.0f} MB before a save, "
          f"at most {most / 2 ** 20:.0f} MB while it is written, {most / before:.3f} times; "
          f"{seconds:.1f} s")
    assert most <= 1.1 * before
    [file] = (tmp_path / "checkpoints/step-000001").glob("*.safetensors")
    saved, first = load_file(file), load_file(f"{model}/model.safetensors")
    assert (set(saved) > {f"policy.model.{name}" for name in first}
            and "exp_avg_sq.model.model.norm.weight" in saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_of_any_type_and_shape_is_read_as_it_was_written(tmp_path):
    """Stale weights wait in the engine's dtype. The header ends at a multiple of 8 bytes."""
    g = torch.Generator().manual_seed(0)
    given = {f"{dtype}, {shape}": torch.randn(shape, generator=g).to(dtype)
             for dtype in NAMES for shape in ((3,), (2, 5), (), (0, 4))}
    given["transposed"] = torch.randn(4, 3, generator=g).T
    dcp.save(dict(given), storage_writer=TensorByTensor(str(tmp_path), save_distributed=True),
             no_dist=True)
    [file] = tmp_path.glob("*.safetensors")
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    found = load_file(file)
    assert set(found) == set(given)
    for name, x in given.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name


HELD = """
import ctypes, sys
from three_policies.tools.bench_size import Heap
if sys.argv[1] == "kept":
    from three_policies.training.run import keep_memory
    keep_memory()
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Heap, ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(2 ** 24))       # from now on glibc takes such a block from the heap
begun = libc.mallinfo2()
held = [libc.malloc(2 ** 24) for _ in range(16)]
grown = libc.mallinfo2()
for block in reversed(held): libc.free(block)
left = libc.mallinfo2()
libc.malloc(2 ** 30)       # more than the heap has free
print(grown.arena - begun.arena, grown.arena - left.arena, libc.mallinfo2().hblkhd - left.hblkhd)
"""


@pytest.mark.skipif(not hasattr(os, "confstr")
                    or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or "")
                    or heap() != "glibc",              # an allocator that was loaded before it
                    reason="glibc's mallopt is asked for")
def test_what_was_freed_stays_in_the_heap_but_for_the_largest_blocks(tmp_path):
    """16 blocks of 16 MB stay when they are freed; one of 1 GB is no part of the heap.

    glibc alone gives the heap's free top back to the kernel. The blocks are malloc's own: a tensor
    also takes small ones, which may stand above it.
    """
    (tmp_path / "held.py").write_text(HELD)

    def held(how):
        return map(int, shell([sys.executable, "held.py", how], tmp_path).stdout.split())
    (_, back, _), (grown, kept, mapped) = held("given back"), held("kept")
    assert back >= 2 ** 27 and grown >= 2 ** 27 and kept == 0 and mapped >= 2 ** 30


TOKENS = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 5, 8, 9]])      # two responses to one prompt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_and_responses_hold_no_second_copy_of_the_gradients(dtype, tmp_path):
    """12 layers take at most 12 bytes a weight of one layer, beyond weights and gradients.

    In one graph the responses' gradients would wait for the prompts': 52 bytes in float32, and 31
    in bfloat16, where FSDP has gathered the weights.
    """
    with process_group() as device:
        policy = load_policy(make_model(tmp_path / "model", 128, 64), 1.0, dtype, device)

        def add_gradient():
            policy(TOKENS, torch.ones_like(TOKENS), 2).sum().backward()
        add_gradient()                                         # makes .grad
        layer = sum(x.numel() for name, x in policy.named_parameters() if ".layers.0." in name)
        assert 2 * layer < peak(add_gradient) < 12 * layer


def test_a_gradient_that_would_lack_the_prompts_part_is_refused(tiny_model):
    with process_group() as device:
        policy = load_policy(str(tiny_model), 1.0, "float32", device)
        *_, last = (x for name, x in policy.named_parameters() if "k_proj.weight" in name)
        for asked in (list(policy.parameters()), [last]):
            loss = policy(TOKENS, torch.ones_like(TOKENS), 2).sum()
            with pytest.raises(RuntimeError, match="call loss.backward.. instead of torch.auto"):
                torch.autograd.grad(loss, asked, retain_graph=True)
            with pytest.raises(RuntimeError, match="call loss.backward.. instead of torch.auto"):
                loss.backward(inputs=asked)


# ------------------------------------------------------------------------------ metrics and offload

def test_the_metrics_of_a_step_say_how_fast_and_large_it_is_and_change_nothing(run, monkeypatch):
    _, lines = run(name="measured")
    for line in lines:
        assert line["memory/peak_mb"] >= line["memory/rss_mb"] and 0 < line["time/mfu"] < 1
        assert line["tokens_per_second"] * line["time/step"] == pytest.approx(
            line["response/tokens"])
    peak = lines[1]["memory/peak_mb"]
    assert peak >= lines[0]["memory/peak_mb"]
    assert memory_metrics(torch.device("cpu"), 2 * peak)["memory/peak_mb"] == 2 * peak
    monkeypatch.setattr(run_module, "matrix_rate", lambda *_: 1.0)
    _, others = run(name="other")
    assert steady(lines) == steady(others)
    model = Sizes.of(AutoModelForCausalLM.from_pretrained("runs/other/model"))
    flops = others[0]["time/mfu"] * others[0]["time/update"]          # at a rate of 1
    prompt = (flops / 6 - model.head * others[0]["response/tokens"]) / model.matrices - (
        others[0]["response/tokens"])
    assert prompt == pytest.approx(round(prompt), rel=1e-9) and prompt >= 4    # tokens of 4 prompts


def test_the_share_of_the_speed_is_of_all_ranks_gpus(monkeypatch):
    kept, nothing = [], SimpleNamespace()
    run: Any = run_module.Run(
        nothing, torch.device("cpu"), nothing,
        SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 1.0}])),
        SimpleNamespace(log=lambda metrics, flops, lr: kept.append(flops)), rate=1.0)
    monkeypatch.setattr(run_module.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(run_module.Run, "flops", lambda *_: 8.0)
    run.log(1, {"response/tokens": 1})
    assert kept == [2]


def test_the_rate_is_that_of_the_fastest_product(monkeypatch):
    """A product of n × n matrices takes 2n³ FLOPs. The clock is planted."""
    times = iter([x for took in (9, 4, 5, 2, 8, 3, 7, 6) for x in (0.0, float(took))])
    monkeypatch.setattr(capacity.time, "perf_counter", lambda: next(times))
    assert capacity.matrix_rate(torch.device("cpu"), "float32") == (
        2 * capacity.SIDES["cpu"] ** 3 / 2)


@pytest.mark.parametrize("system, unit", [("linux", 2 ** 10), ("darwin", 1)])
def test_the_systems_peak_is_in_its_own_unit(system, unit, monkeypatch):
    """Linux counts it in KiB, and macOS in bytes. It is planted: 2 TiB."""
    monkeypatch.setattr(capacity.sys, "platform", system)
    monkeypatch.setattr(capacity.resource, "getrusage",
                        lambda who: SimpleNamespace(ru_maxrss=2 ** 41 // unit))
    assert memory_metrics(torch.device("cpu"))["memory/peak_mb"] == 2 ** 21


def test_a_peak_leaves_out_what_a_sleeping_engine_has_given_back(monkeypatch):
    """vLLM holds 30 MB of 36 while it samples. In an update torch counts them still, and 9 more."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    engine, MB = SimpleNamespace(given_back=0), 2 ** 20
    run = SimpleNamespace(device=torch.device("cuda"), engine=engine, most=0.0, times={})
    found = []
    for part, counted, before, after in [("log_probs", 39, 30, 30), ("rollout", 36, 0, 30),
                                         ("sync", 37, 30, 0)]:
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: counted * MB)
        engine.given_back = before * MB
        with record.Record.time_part(run, part):
            engine.given_back = after * MB
        found.append(run.most)
    assert found == [9, 36, 37] and memory_metrics(run.device, 37.0)["memory/peak_mb"] == 37


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_no_backward_pass_begins_where_a_gradient_lies(offload, run, monkeypatch):
    """FSDP2 would wait for each weight, to add the new gradient to it."""
    found, real_update, real_backward = [], trainer.update, torch.Tensor.backward

    def update(run, *given):
        def backward(loss):
            found.append(any(x.grad is not None for x in run.loaded.policy.parameters()))
            real_backward(loss)
        monkeypatch.setattr(torch.Tensor, "backward", backward)
        return real_update(run, *given)
    monkeypatch.setattr(trainer, "update", update)
    code, _ = run("policy.dtype=bfloat16", "train.steps=1", "policy.gradient_checkpointing=true",
                  f"policy.cpu_offload={offload}".lower())
    assert code == 0 and found == [False, not offload] * 2     # two updates of two micro-batches
