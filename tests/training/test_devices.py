"""A GPU and vLLM's engine on it are asked for the right things; stand-ins take the questions."""

import os
import re
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig

from three_policies import rollout, trainer
from three_policies.checks import UserError
from three_policies.engines import choice
from three_policies.engines.choice import make_engine
from three_policies.engines.vllm import VllmEngine, import_vllm
from three_policies.policy import load_policy
from three_policies.rollout import Cut
from three_policies.tests.support.waiting import HANG
from three_policies.training import faults, loading
from three_policies.training.faults import process_group
from three_policies.training.models import add_lora
from three_policies.training.settings import PolicyConfig
from three_policies.training.shapes import Shape, pad_rows, to_device


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
        for place in ("three_policies.engines.vllm", "three_policies.engines.choice"):
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


def test_the_weights_under_a_lora_are_kept_in_sleep(gpu_engine, monkeypatch):
    """They come once, when the engine starts; an update brings the LoRA alone."""
    monkeypatch.setitem(sys.modules, "vllm.config.lora", SimpleNamespace(MaxLoRARanks=Literal[8]))
    engine = gpu_engine(lora=lambda model: add_lora(model, PolicyConfig(lora_rank=2), 0))
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
    monkeypatch.setattr("three_policies.engines.choice.find_spec", lambda name: True)
    monkeypatch.setattr("three_policies.engines.choice.TransformersEngine",
                        lambda path, **settings: "its place")
    asked = dict(dtype="float32", max_model_len=64, device=device)
    with pytest.raises(RuntimeError, match=f"^vLLM is built for {words}; inst"):
        make_engine("vllm", tiny_model, **asked)
    with pytest.warns(UserWarning, match=f"auto takes transformers: vLLM is built for {words}"):
        assert make_engine("auto", tiny_model, **asked) == "its place"


PYDANTIC = ("1 validation error for ModelConfig\n  Value error, The model type 'gemma2' does not "
            "support float16. [type=value_error, input_value=ArgsKwargs((), {'model': ...})]\n"
            "    For further information visit https://errors.pydantic.dev/2.11/v/value_error")


@pytest.mark.parametrize("error, said", [
    (ValueError(PYDANTIC), "The model type 'gemma2' does not support float16."),
    (RuntimeError("vLLM does not import (no); install it."),
     "vLLM does not import (no); install it.")])
def test_an_engine_that_does_not_start_says_why_once(error, said, run, monkeypatch, capsys):
    def fail(*_, **__):
        raise error
    monkeypatch.setattr("three_policies.training.loading.make_engine", fail)
    assert run()[0] == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"trainer.py: rollout.engine=transformers does not start: {said}"


def test_vllm_on_a_cpu_has_no_lora_beside_experts(monkeypatch, tmp_path):
    monkeypatch.setattr("three_policies.engines.vllm.import_vllm", lambda device: (None, None))
    MixtralConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                  num_attention_heads=2, num_local_experts=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="beside experts: set rollout.lora=merged$"):
        VllmEngine(tmp_path, dtype="float32", max_model_len=8, gpu_memory_utilization=0.4,
                   enforce_eager=None, device="cpu", batch_size=1, cut=Cut.of(1, None, 0, 9),
                   candidates=0, lora=lambda model: model)


def test_a_vllm_that_fails_with_any_error_does_not_import(monkeypatch):
    """One that is built for other hardware raises an OSError, among others."""
    class Broken:
        def __getattr__(self, name):
            raise OSError("libcuda.so is missing")
    monkeypatch.setitem(sys.modules, "vllm", Broken())
    with pytest.raises(ImportError, match=r"vLLM does not import \(libcuda.so is missing\); inst"):
        import_vllm("cpu")


# ------------------------------------------------------------------------------- a GPU without use

OLD = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.fixture
def old_driver(monkeypatch):
    """Pretend a torch for CUDA and an old driver; GPUs(names) says what /dev has."""
    def available():
        warnings.warn(f"CUDA initialization: {OLD}", stacklevel=2)
        return False

    def init():
        raise RuntimeError(OLD)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *names: monkeypatch.setattr(
        faults.Path, "glob", lambda path, pattern: (path / n for n in names if path.name == "dev"))


def test_an_old_driver_ends_the_run_with_torchs_own_words(old_driver, run, monkeypatch, capsys):
    old_driver("nvidia0")
    assert run()[0] == 2
    said = capsys.readouterr().err
    assert f"CUDA 13.0, cannot use the GPU that is here: CUDA initialization: {OLD}" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)    # it warns once a process
    with pytest.raises(UserError, match=f"that is here: {re.escape(OLD)}; with CUDA_VISIBLE"):
        faults.require_driver()


@pytest.mark.parametrize("build, names, unseen", [
    ("13.0", [], None), (None, ["nvidia0"], None), ("13.0", ["nvidia0"], "")])
def test_without_a_gpu_or_cuda_or_by_request_the_cpu_is_taken(
        build, names, unseen, old_driver, monkeypatch):
    old_driver(*names)
    monkeypatch.setattr(torch.version, "cuda", build)
    if unseen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", unseen)
    faults.require_driver()


# --------------------------------------------------------------------------------- how a run starts

def test_a_single_process_has_a_store_as_torchruns():
    with faults.process_group():
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        assert isinstance(store.underlying_store, torch.distributed.TCPStore)


def test_vllm_is_announced_before_it_starts(monkeypatch, tiny_model):
    told = []

    def start(*args, **settings):
        assert told == ["vLLM starts: seconds on a CPU, up to three minutes on a GPU; with "
                        "VLLM_LOGGING_LEVEL=WARNING it shows what it prints"]
        raise InterruptedError
    monkeypatch.setattr(choice, "import_vllm", lambda device: None)
    monkeypatch.setattr(choice, "VllmEngine", start)
    with pytest.raises(InterruptedError):
        choice.make_engine("vllm", tiny_model, dtype="float32", max_model_len=64, say=told.append)


def test_an_engine_that_does_not_start_ends_the_run_in_time(run, monkeypatch, capfd):
    """The process cannot really end here: what hangs is let go instead.

    While vLLM starts, stderr leads nowhere, and the sentence is seen all the same.
    """
    ended, codes = threading.Event(), []

    def end(code):
        codes.append(code)
        ended.set()

    def hang(*args, **settings):
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        assert ended.wait(HANG)
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
        raise RuntimeError("let go")
    monkeypatch.setattr(faults.os, "_exit", end)
    monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False))    # as outside pytest
    monkeypatch.setattr(loading, "make_engine", hang)
    run("rollout.timeout=1")
    sentence = "rollout.engine=transformers has not answered for rollout.timeout=1 seconds"
    said = capfd.readouterr().err
    assert codes == [1] and sentence in said and "there is no checkpoint yet" in said
