"""The real trainer runs, in its configurations, on a pretended accelerator (tools/pretend_gpu.py).

One process trains all configurations, since a device is registered once for the whole process. A
test reads its part; two ranks train one configuration more. The host waits of a step are printed
(`pytest -s`), and each has a place where it may be.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from launching import PATH, shell
from safetensors.torch import load_file
from waiting import HANG

import rollout
import trainer
from kernels.shapes import Shape, pad_rows, to_device
from adapters.vllm import import_vllm
from plumbing.engines import make_engine
from plumbing.faults import process_group
from plumbing.models import add_adapter
from plumbing.settings import PolicyConfig
from policy import load_policy

SMALL = ["task.size=1", "task.eval_size=2", "rollout.engine=transformers", "rollout.prompts=2",
         "rollout.samples=4", "rollout.max_tokens=3", "rollout.quantize_bits=4",
         "train.mini_batches=2", "train.micro_batch_size=4", "train.lr=0.01", "train.steps=1"]
GOES_ON = ["train.steps=2", "train.save_every=1"]      # and is continued by a third step
CASES = {                          # name: overrides
    "demo": ["rollout.prompts=4", "train.steps=2", "train.micro_batch_size=2"],
    "kl in loss": ["policy.gradient_checkpointing=true", "loss.kl_coef=0.1",
                   "loss.kl_correction=prefix"],
    "kl in reward": ["policy.dtype=bfloat16", "rollout.dtype=bfloat16", "loss.kl_coef=0.1",
                     "loss.kl_in=reward", "loss.kl_correction=prefix"],
    "bypass": ["correction.preset=bypass_ppo_clip_k3_rs", "rollout.staleness=1", *GOES_ON],
    "kept": ["correction.preset=decoupled_seq_is_rs", "loss.denominator=kept"],
    "kept bypass": ["correction.preset=bypass_pg_geo_rs_token_tis", "loss.denominator=kept",
                    "correction.rollout_is_batch_normalize=true"],
    "gspo": ["correction={loss_type: gspo, rollout_is: sequence}", "advantage.kind=rloo"],
    "reinforce": ["correction.preset=bypass_pg_is", "advantage.kind=reinforce",
                  "loss.aggregation=seq-mean-token-mean"],
    "replay": ["rollout.top_p=0.9", "rollout.top_k=8", "loss.kl_coef=0.1"],
    "centered": ["correction={score_centering: true, rollout_is: token, bypass_mode: true, "
                 "loss_type: reinforce}", "rollout.candidates=6"],
    "centered replay": ["correction={score_centering: true, rollout_is: token, bypass_mode: true, "
                        "loss_type: reinforce}", "rollout.top_k=6"],
    "second moment": ["correction={rollout_is: prefix, rollout_rs: {second_moment: 0.001}}",
                      "loss.denominator=kept"],
    "opsm": ["correction={rollout_is: token, rollout_is_batch_normalize: true, "
             "rollout_rs: {opsm: 0.1}}"],
    "veto": ["correction.preset=geo_mis", "train.epochs=2"],
    "lora": ["policy.lora_rank=2", "loss.kl_coef=0.1", *GOES_ON],
    "lora apart": ["policy.lora_rank=2", "rollout.adapter=apart", "rollout.quantize_bits=null"],
    "crossing": ["rollout.staleness=1", "rollout.update_every=2", "train.steps=2"],
    "nan raise": ["train.on_nonfinite=raise"],
    "nan skip": ["train.on_nonfinite=skip"],
    "nan update": ["correction.preset=bypass_pg_is", "train.on_nonfinite=skip"],
}
TWO_RANKS = {"two ranks": ["rollout.prompts=4", "train.steps=2", "loss.kl_coef=0.1",
                           "rollout.staleness=1", *CASES["second moment"]]}
# Weights that FSDP keeps on the host, beside buffers that it leaves on the device.
OFFLOADED = {"two ranks offloaded": ["rollout.prompts=4", "policy.cpu_offload=true"]}
PAGEABLE = "demo"                  # a case in which nothing is pinned; in the others as on CUDA
SENDS = "copy of pageable memory shapes.py to_device"
SAMPLES = {SENDS, *(f"{what} rollout.py {function}" for what, function in [
    ("copy from the host", "_batch"), ("copy to the host", "_batch"), ("item", "_batch"),
    ("tolist", "_batch"), ("aten::nonzero", "__call__"), ("copy to the host", "__call__"),
    ("tolist", "__call__")])}
# Where the parts of a step wait for the device: what for, file, function. The engine is that of
# transformers; vLLM's is not tried here.
TIMED = "synchronize run.py time_part"                 # once at the end of each part
MAY_WAIT = {
    "rollout": {*SAMPLES, "copy from the host rollout.py update_weights"},           # in flight
    "log_probs": {SENDS, "item trainer.py without_nonfinite"},
    "doctor": {SENDS, "copy to the host dumps.py rows_of"},
    "update": {SENDS, "tolist trainer.py update"},
    "sync": {*SAMPLES, "copy to the host rollout.py copy_to_host",      # of stale weights
             "copy from the host rollout.py update_weights"},
}
DRIVER = """
import contextlib, json, os, sys, traceback, torch, torch.distributed as dist
import pretend_gpu           # from here on it is torch's accelerator, and the trainer finds it
import policy, trainer, plumbing.run
from kernels import shapes
from plumbing import cards, tasks
# A reward that untaught models earn. The curves are not drawn, and the products of matrices that a
# run times when it opens are small: those for a card take this processor seven seconds.
tasks.Task.reward = lambda self, problem, response: float(len(response) % 2)
plumbing.run.plot = lambda *_: None
cards.SIDES[pretend_gpu.DEVICE.type] = 64
# Some models have a buffer in their checkpoint; this one gets one.
def with_buffer(make):
    def made(path):
        (model := make(path)).register_buffer("of_a_checkpoint", torch.zeros(3))
        return model
    return made
policy.read_model, policy.empty_model = map(with_buffer, (policy.read_model, policy.empty_model))
# Calls of the policy and of `update`; waits of a step's parts.
passes, updates, parts = [], [], {}
forward, timed, update = policy.Policy.forward, plumbing.run.Run.time_part, trainer.update
policy.Policy.forward = lambda *args: passes.append(1) or forward(*args)
trainer.update = lambda *args: updates.append(1) or update(*args)
@contextlib.contextmanager
def part(self, name):
    before, into = dict(pretend_gpu.WAITS), parts.setdefault(name, {})
    with timed(self, name): yield
    for (what, line), n in pretend_gpu.WAITS.items():
        place, function = line.split(" < ")[-1].split()
        key, more = f"{what} {place.split(':')[0]} {function}", n - before.get((what, line), 0)
        if more: into[key] = into.get(key, 0) + more
plumbing.run.Run.time_part = part

def spoil():
    # The first forward pass of training (π_old, or in bypass mode π_θ) has numbers that are none.
    forward, calls = policy.Policy.forward, []
    def spoiled(self, *args):
        log_prob = forward(self, *args)
        calls.append(len(args[0]) > 2)              # `load_policy` checks itself with two
        return log_prob * (float("nan") if calls[-1] and sum(calls) == 1 else 1.0)
    policy.Policy.forward = spoiled
    return lambda: setattr(policy.Policy, "forward", forward)

SMALL, CASES, PAGEABLE = map(json.loads, sys.argv[1:])
for case, overrides in CASES.items():
    passes.clear(), updates.clear(), parts.clear()
    shapes.PINS = set() if case == PAGEABLE else {"pretend"}
    code, error, name = None, "", f"run={case.replace(' ', '-')}"
    undo = spoil() if case.startswith("nan") else lambda: None
    try:
        code = trainer.main([*SMALL, *overrides, name])
        if code == 0 and "train.save_every" in str(overrides):                     # and goes on
            code = trainer.main([*SMALL, *overrides, name, "train.steps=3"])
    except Exception:
        error = traceback.format_exc()
        if dist.is_initialized(): dist.destroy_process_group()
    undo()
    found = dict(code=code, error=error, passes=len(passes), updates=len(updates), parts=parts)
    print(json.dumps({case: found}), flush=True)
os._exit(0)                            # gloo's threads may want Python's lock while it shuts down
"""


def drive(forks: list[str], directory: Path, model: Path, cases: dict, ranks: int = 1) -> dict:
    """Train every case, and return what each rank found of it.

    A process of two ranks trains once: a second group at the same port does not always meet.
    """
    (directory / "driver.py").write_text(DRIVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=free.getsockname()[1])
    command = [sys.executable, *forks, "driver.py", json.dumps([*SMALL, f"policy.path={model}"]),
               json.dumps(cases), json.dumps(PAGEABLE)]
    started = []
    for rank in range(ranks):
        own = {**group, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1",
                       **{name: str(value) for name, value in own.items()}}
        started.append(subprocess.Popen(command, cwd=directory, env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    found, said = {case: [] for case in cases}, ""
    for process in started:
        out, error = process.communicate(timeout=HANG)
        said += error
        for line in filter(lambda line: line.startswith("{"), out.splitlines()):
            [(case, one)] = json.loads(line).items()
            found[case].append(one)
    assert all(len(of_ranks) == ranks for of_ranks in found.values()), said[-3000:]
    return found | {"said": said}


@pytest.fixture(scope="module")
def pretended(tiny_model, forks, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pretended")
    driven = [drive(forks, directory, tiny_model, *given)
              for given in ((CASES,), (TWO_RANKS, 2), (OFFLOADED, 2))]
    said = "".join(found.pop("said") for found in driven)
    return {case: found for part in driven for case, found in part.items()} | {
        "said": said, "runs": directory / "runs"}


@pytest.mark.parametrize("case", [*CASES, *TWO_RANKS, *OFFLOADED])
def test_the_trainer_runs_on_an_accelerator(case, pretended):
    code = 2 if case == "nan raise" else 0
    for found in pretended[case]:
        said = found["error"] + pretended["said"][-2000:]
        assert found["error"] == "" and found["code"] == code, said
    assert (pretended["runs"] / case.replace(" ", "-") / "model").is_dir() == (case != "nan raise")


@pytest.mark.parametrize("case", [c for c in [*CASES, *TWO_RANKS] if not c.startswith("nan")])
def test_a_step_waits_where_it_may_and_nowhere_else(case, pretended):
    """Scoring waits once a step and an update once.

    Forward passes send what decides shapes: nothing waits for that if it is pinned.
    """
    for found in pretended[case]:
        passes, updates, parts = found["passes"], found["updates"], found["parts"]
        print(case, passes, "forward passes,", updates, "updates:", parts)
        for name, waits in parts.items():
            assert set(waits) <= {*MAY_WAIT[name], TIMED}, name
            assert waits[TIMED] >= 1, name
        assert parts["update"]["tolist trainer.py update"] == updates
        sent = {part: waits.get(SENDS, 0) for part, waits in parts.items()}
        if case == PAGEABLE:
            assert 0 < sent["update"] + sent["log_probs"] <= 5 * passes
        else:
            assert not any(sent.values())


def test_weights_are_loaded_in_the_middle_of_responses(pretended):
    """The case "crossing" has three tokens and new weights after two, from its second step on."""
    [found] = pretended["crossing"]
    assert found["parts"]["rollout"].get("copy from the host rollout.py update_weights", 0) > 0


DEVICE = """
import pretend_gpu, pytest, torch
there, here = torch.ones(3, device=pretend_gpu.DEVICE), torch.ones(3)
pretend_gpu.WAITS.clear()
assert (there + 1 + torch.tensor(1.0)).device == pretend_gpu.DEVICE
for mixed in (lambda: there + here, lambda: here * there, lambda: torch.cat([here, there]),
              lambda: torch.where(there > 0, there, here),
              lambda: torch.stack([there.sum(), here.sum()]), lambda: there.add_(here),
              lambda: torch.mm(there[None], here[:, None])):
    with pytest.raises(RuntimeError, match="on the same device"): mixed()
waiting = [lambda: there[0].item(), lambda: bool(there[0] > 0), lambda: there.tolist(),
           lambda: there.cpu(), lambda: here.to(there.device), lambda: there[there > 0],
           lambda: there.nonzero(), lambda: there[torch.tensor([0])], lambda: here.copy_(there),
           lambda: there.unique(), lambda: there.to("cpu", non_blocking=True),
           lambda: here.to(there.device, non_blocking=True),                # here is pageable
           lambda: here.pin_memory().to(there.device),
           lambda: there.copy_(here, non_blocking=True)]
for n, call in enumerate(waiting, 1):
    call()
    assert pretend_gpu.WAITS.total() == n, (n, pretend_gpu.WAITS)
assert here.pin_memory().to(there.device, non_blocking=True).device == pretend_gpu.DEVICE
with pytest.raises(RuntimeError, match="more than one element"): here.expand(2, 3).pin_memory()
there[torch.arange(1, device=there.device)] = 2.0
there.cumsum(0).sort().values.topk(2).values.log_softmax(-1).clone().copy_(there[:2])
assert pretend_gpu.WAITS.total() == len(waiting)
"""


def test_the_pretended_device_refuses_what_is_mixed_and_counts_what_waits(tmp_path, forks):
    (tmp_path / "device.py").write_text(DEVICE)
    result = shell([sys.executable, *forks, "device.py"], tmp_path)
    assert result.returncode == 0, result.stderr


# ----------------------------------------------------------------------- what a GPU is asked for

@pytest.mark.parametrize("maker, backends", [("cuda", "cpu:gloo,cuda:nccl"),
                                             ("xpu", "cpu:gloo,xpu:xccl"), ("mps", "gloo")])
def test_the_process_group_is_that_of_the_accelerator_and_splits_no_communicator(
        maker, backends, monkeypatch):
    asked = []

    def asking(*args, **kwargs):
        asked.append((args, kwargs))
        raise InterruptedError
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False:
                        torch.device(maker))
    monkeypatch.setattr(torch.accelerator, "set_device_index", asked.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", asking)
    with pytest.raises(InterruptedError), process_group():
        pass
    *index, (named, settings) = asked
    assert named == (backends,) and index == ([] if maker == "mps" else [0])
    assert "device_id" not in settings


@pytest.mark.parametrize("maker, asked", [("cuda", ["pin", "copy"]), ("pretend", ["copy"])])
def test_what_goes_to_cuda_is_pinned_first(maker, asked, monkeypatch):
    """Elsewhere memory may not be pinned: another maker's backend may have none."""
    found = []

    def pin(x):                            # as CUDA does: an expanded tensor shares its memory
        assert 0 not in x.stride(), "more than one element refers to a single memory location"
        return found.append("pin") or x
    monkeypatch.setattr(torch, "device", lambda name: SimpleNamespace(type=name.split(":")[0]))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking: found.append(
        "copy" if non_blocking else "wait") or x)
    [there] = to_device(f"{maker}:0", torch.ones(3, 1).expand(3, 2))
    assert found == asked and there.tolist() == [[1, 1]] * 3


def test_attention_is_not_cudnns(tiny_model):
    torch.backends.cuda.enable_cudnn_sdp(True)
    with process_group() as device:
        load_policy(str(tiny_model), 1.0, "float32", device)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


class PretendVllm:
    """A PretendVllm stands for vLLM's `LLM` on a GPU, and keeps what it is asked for, in order."""

    def __init__(self, path, **settings):
        self.settings, self.asked, self.llm_engine = settings, [], SimpleNamespace(engine_core=self)

    def get_current_usage(self):
        return 30

    def sleep(self, level):
        self.asked.append(f"sleep {level}")

    def wake_up(self, tags):
        self.asked += [f"wake {tag}" for tag in tags]
        if self.settings.get("broken"):
            raise RuntimeError("it cannot be woken")

    def collective_rpc(self, name, kwargs):
        self.asked += [f"{name} {len(list(kwargs['weights_iterator']))}"]

    def generate(self, requests, params, use_tqdm, lora_request):
        self.asked.append(f"generate {torch._dynamo.eval_frame._stance.stance}")
        self.params = params
        sets = SimpleNamespace(token_ids=[[7, 5], [9]])
        kept = sets if self.settings["return_sampling_mask"] else None
        logprobs = SimpleNamespace(token_ids=[5, 9], logprobs=[-0.5, 0.0])
        made = SimpleNamespace(token_ids=[5, 9], finish_reason="stop", sampling_mask=kept,
                               logprobs=logprobs)
        return [SimpleNamespace(outputs=[made]) for _ in requests]

    def shutdown(self):
        self.asked.append("shutdown")


@pytest.fixture
def gpu_engine(tiny_model, monkeypatch):
    def make(device="cuda", **settings):
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        for place in ("adapters.vllm", "plumbing.engines"):
            monkeypatch.setattr(f"{place}.import_vllm", lambda device: (PretendVllm, dict))
        return make_engine("vllm", tiny_model, dtype="bfloat16", max_model_len=64, device=device,
                           **settings)
    return make


@pytest.mark.parametrize("device, asked, eager", [
    ("cpu", None, True), ("cuda", None, False), ("cuda", True, True), ("cpu", False, False)])
def test_graphs_are_off_on_a_cpu_and_on_on_a_gpu_unless_asked_otherwise(
        device, asked, eager, gpu_engine):
    engine = gpu_engine(device, enforce_eager=asked)
    assert engine.llm.settings["enforce_eager"] == eager
    engine.generate([], [], temperature=1.0, max_tokens=2, eos_ids=[])
    assert engine.llm.asked == [f"generate {'force_eager' if eager else 'default'}"]


def test_on_a_gpu_vllm_is_asked_for_the_sets_and_for_one_log_prob(gpu_engine):
    """vLLM needs a top-k above 0 to return sets, and returns one for every token."""
    for cut, k in (dict(top_p=0.9), 26), (dict(top_k=4), 4), ({}, 0):
        engine = gpu_engine(**cut)
        [s] = engine.generate([[3]], [0], temperature=1.0, max_tokens=2, eos_ids=[])
        asked, settings = engine.llm.params[0], engine.llm.settings
        assert settings["return_sampling_mask"] == bool(cut) and settings["max_logprobs"] == 0
        assert settings["hf_overrides"] == {"head_dtype": "float32"}, "as the policy's logits are"
        found = [asked[name] for name in ("logprobs", "top_p", "top_k", "min_p")]
        assert found == [0, cut.get("top_p", 1), k, 0]
        assert s == rollout.Sample([5, 9], [-0.5, 0.0], True, [[7, 5], [9]] if cut else None)


def test_a_sleeping_engine_gets_its_weights_before_its_cache_is_there(
        gpu_engine, tiny_model, monkeypatch):
    engine, weights = gpu_engine(), load_file(tiny_model / "model.safetensors")
    memory = SimpleNamespace(get_mem_allocator_instance=lambda: engine.llm)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", memory)
    assert engine.given_back == 0
    engine.sleep()
    engine.sleep()
    assert engine.given_back == 30
    engine.update_weights(weights.items())
    engine.generate([], [], temperature=1.0, max_tokens=2, eos_ids=[])
    engine.update_weights(weights.items())
    assert engine.llm.asked == ["sleep 2", "wake weights", "reload_weights 26", "wake kv_cache",
                                "generate default", "reload_weights 26"]


def test_an_engine_that_has_slept_samples_only_from_new_weights(gpu_engine, tiny_model):
    engine, weights = gpu_engine(), load_file(tiny_model / "model.safetensors")
    engine.sleep()
    engine.wake()
    with pytest.raises(ValueError, match="25 weights of the engine's model are missing"):
        engine.update_weights([*weights.items()][:1])
    with pytest.raises(RuntimeError, match="update_weights comes before generate"):
        engine.generate([], [], temperature=1.0, max_tokens=2, eos_ids=[])
    engine.update_weights(weights.items())
    engine.generate([], [], temperature=1.0, max_tokens=2, eos_ids=[])


def test_the_weights_under_an_adapter_are_kept_in_sleep(gpu_engine, monkeypatch):
    """They come once, when the engine starts; an update brings the adapter alone."""
    monkeypatch.setitem(sys.modules, "vllm.config.lora", SimpleNamespace(MaxLoRARanks=Literal[8]))
    engine = gpu_engine(adapter=lambda model: add_adapter(model, PolicyConfig(lora_rank=2), 0))
    engine.sleep()
    engine.generate([], [], temperature=1.0, max_tokens=2, eos_ids=[])
    assert engine.llm.asked[:3] == ["sleep 1", "wake weights", "wake kv_cache"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_sleeping_engine_is_woken_before_it_is_closed(broken, gpu_engine):
    engine = gpu_engine()
    engine.llm.settings["broken"], llm = broken, engine.llm
    engine.sleep()
    engine.close()
    assert llm.asked[:2] == ["sleep 2", "wake weights"] and llm.asked[-1] == "shutdown"
    engine.close()
    assert llm.asked.count("shutdown") == 1


@pytest.mark.parametrize("bits", [None, 4])
def test_weights_that_wait_are_in_the_engines_dtype_and_it_gets_the_same(bits, tiny_model):
    held = []
    engine = SimpleNamespace(
        update_weights=lambda named: held.append({n: x.bfloat16() for n, x in named}))
    weights = load_file(tiny_model / "model.safetensors")
    now, late = rollout.WeightSync(engine, 0, bits), rollout.WeightSync(engine, 1, bits, "bfloat16")
    now.push(weights.items())
    late.push(weights.items())
    assert all(torch.equal(x, held[1][name]) for name, x in held[0].items())
    assert {x.dtype for x in late.waiting[0].values() if x.dim() > 1} == {torch.bfloat16}
    assert {x.dtype for x in late.waiting[0].values() if x.dim() == 1} == {torch.float32}


@pytest.mark.parametrize("rows, least, side, expected, mask", [
    ([[1, 2], [4], []], 0, "left", [[1, 2], [0, 4], [0, 0]], [[1, 1], [0, 1], [0, 0]]),
    ([[1, 2], [4], []], 0, "right", [[1, 2], [4, 0], [0, 0]], [[1, 1], [1, 0], [0, 0]]),
    ([[0.5], [0.0, 2.0]], 3, "left", [[0, 0, 0.5], [0, 0, 2]], [[0, 0, 1], [0, 1, 1]]),
    ([[0.5], [0.0, 2.0]], 3, "right", [[0.5, 0, 0], [0, 2, 0]], [[1, 0, 0], [1, 1, 0]]),
    ([[], []], 1, "right", [[0], [0]], [[0], [0]])])
def test_rows_are_padded_on_the_side_that_is_asked_for(rows, least, side, expected, mask):
    for found, right in zip(pad_rows(rows, side, least), (expected, mask)):
        assert found.dtype == torch.tensor(right).dtype and found.tolist() == right


def test_two_prompts_that_differ_in_padding_alone_are_two():
    """Rows are padded with 0, which may be a token, too; the longest response decides the width."""
    (prompts, left), (responses, right) = pad_rows([[0, 5], [5], [5]], "left"), pad_rows(
        [[7], [8, 9], [3]], "right", 4)
    shape = Shape.of(torch.cat([prompts, responses], 1), torch.cat([left, right], 1), 4, "cpu")
    assert (shape.p, shape.t, shape.padded, len(shape.first)) == (2, 2, True, 2)
    assert shape.which[1] == shape.which[2] != shape.which[0]
    assert shape.first[shape.which].tolist() in ([0, 1, 1], [0, 2, 2])


def test_a_prompts_samples_stay_in_one_micro_batch_where_it_holds_whole_groups():
    config = trainer.Config()
    config.rollout.samples, config.train.micro_batch_size = 4, 8
    lengths = [1, 9, 2, 8, 5, 5, 5, 5, 7, 1, 1, 1, 3, 3, 3, 4]     # of four prompts' samples
    samples = [rollout.Sample([3] * n, [-1.0] * n, True) for n in lengths]
    batch = trainer.pad([[3, 4 + i // 4] for i in range(16)], samples, torch.zeros(16), "cpu")
    parts = trainer.micro_batches(batch, config, together=True)
    assert [sorted({i // 4 for i in part.tolist()}) for part in parts] == [[1, 3], [0, 2]]
    for part in parts:                                                        # and in it by length
        assert [lengths[i] for i in part] == sorted(lengths[i] for i in part)
    shape = Shape.of(batch.tokens[parts[1]], batch.attention[parts[1]], 9, "cpu")
    assert (shape.p, shape.t, shape.padded, len(shape.first)) == (2, 9, False, 2)
    scattered = trainer.micro_batches(batch, config)
    assert [len({i // 4 for i in part.tolist()}) for part in scattered] == [3, 4]


@pytest.mark.parametrize("vllm, device, words", [
    ("", "cpu", "a device that is not here, and the trainer runs on cpu"),
    ("cpu", "cuda", "cpu, and the trainer runs on cuda")])
def test_a_vllm_for_another_device_is_not_taken(vllm, device, words, tiny_model, monkeypatch):
    """vLLM for CUDA has no device where none is there, or none is to be seen."""
    platform = SimpleNamespace(current_platform=SimpleNamespace(device_type=vllm))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=PretendVllm, SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    monkeypatch.setattr("plumbing.engines.find_spec", lambda name: True)
    monkeypatch.setattr("plumbing.engines.TransformersEngine", lambda path, **settings: "its place")
    asked = dict(dtype="float32", max_model_len=64, device=device)
    with pytest.raises(RuntimeError, match=f"rollout.engine=vllm: vLLM is built for {words}; inst"):
        make_engine("vllm", tiny_model, **asked)
    with pytest.warns(UserWarning, match=f"auto takes transformers: vLLM is built for {words}"):
        assert make_engine("auto", tiny_model, **asked) == "its place"


def test_a_vllm_that_fails_with_any_error_does_not_import(monkeypatch):
    """One that is built for other hardware raises an OSError, among others."""
    class Broken:
        def __getattr__(self, name):
            raise OSError("libcuda.so is missing")
    monkeypatch.setitem(sys.modules, "vllm", Broken())
    with pytest.raises(ImportError, match=r"vLLM does not import \(libcuda.so is missing\); inst"):
        import_vllm("cpu")
