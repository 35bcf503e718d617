"""The real trainer runs, in its configurations, on a pretended accelerator (tools/pretend_gpu.py).

One process trains all configurations, since a device is registered once for the whole process. A
test reads its part. The host waits of a step are printed (`pytest -s`) and bounded.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import ROOT, shell
from safetensors.torch import load_file

import rollout
import trainer
from kernels.shapes import Shape
from plumbing.engines import make_engine
from plumbing.faults import process_group
from policy import load_policy

SMALL = ["task.size=1", "task.eval_size=4", "rollout.engine=transformers", "rollout.prompts=4",
         "rollout.samples=4", "rollout.max_tokens=4", "rollout.quantize_bits=4",
         "train.mini_batches=2", "train.micro_batch_size=4", "train.lr=0.01", "train.steps=2",
         "train.eval_every=2"]
CASES = {                          # name: overrides
    "demo": ["train.steps=3", "train.save_every=2"],
    "checkpointing": ["policy.gradient_checkpointing=true"],
    "kl in loss": ["loss.kl_coef=0.1"],
    "kl in reward": ["loss.kl_coef=0.1", "loss.kl_in=reward"],
    "bypass": ["correction.preset=bypass_ppo_clip_k3_rs", "rollout.staleness=1",
               "train.save_every=1", "train.steps=3"],
    "kept": ["correction.preset=decoupled_seq_is_rs", "loss.denominator=kept"],
    "kept bypass": ["correction.preset=bypass_pg_geo_rs_token_tis", "loss.denominator=kept",
                    "correction.rollout_is_batch_normalize=true"],
    "bfloat16": ["policy.dtype=bfloat16", "rollout.dtype=bfloat16"],
    "gspo": ["correction={loss_type: gspo, rollout_is: sequence}", "advantage.kind=rloo"],
    "reinforce": ["correction.preset=bypass_pg_is", "advantage.kind=reinforce",
                  "loss.aggregation=seq-mean-token-mean"],
    "cut": ["rollout.top_p=0.9", "rollout.top_k=8", "loss.kl_coef=0.1", "rollout.staleness=1"],
    "centered": ["correction={score_centering: true, rollout_is: token, bypass_mode: true, "
                 "loss_type: reinforce}", "rollout.candidates=6"],
    "second moment": ["correction={rollout_is: prefix, rollout_rs: {second_moment: 0.001}}"],
    "opsm": ["correction={rollout_is: token, rollout_is_batch_normalize: true, "
             "rollout_rs: {opsm: 0.1}}"],
    "veto": ["correction.preset=geo_mis", "train.epochs=2"],
    "nan raise": ["train.on_nonfinite=raise"],
    "nan skip": ["train.on_nonfinite=skip"],
    "nan update": ["correction.preset=bypass_pg_is", "train.on_nonfinite=skip"],
}
DRIVER = """
import contextlib, json, sys, traceback, torch, torch.distributed as dist
import pretend_gpu
import policy, trainer, plumbing.run
from plumbing import faults, tasks
# A reward that untaught models earn; and the curves are not drawn.
tasks.Task.reward = lambda self, problem, response: float(len(response) % 2)
plumbing.run.plot = lambda *_: None
real = faults.process_group
@contextlib.contextmanager
def process_group():
    with real(): yield pretend_gpu.DEVICE
plumbing.run.process_group = process_group

# Calls and waits of forward passes; waits of a step's phases.
forwards, phases, updates = [0, {}], {}, []

def since(before, into):
    for key, n in pretend_gpu.WAITS.items():
        name, more = " ".join(key), n - before.get(key, 0)
        if more > 0: into[name] = into.get(name, 0) + more

forward, timed, update = policy.Policy.forward, plumbing.run.Run.time_part, trainer.update
def counted(*args):
    before, forwards[0] = dict(pretend_gpu.WAITS), forwards[0] + 1
    result = forward(*args)
    since(before, forwards[1])
    return result
policy.Policy.forward = counted
@contextlib.contextmanager
def phase(self, name):
    before = dict(pretend_gpu.WAITS)
    with timed(self, name): yield
    since(before, phases.setdefault(name, {}))
plumbing.run.Run.time_part = phase
trainer.update = lambda *args: updates.append(1) or update(*args)

def spoil():
    # The first forward pass of training (π_old, or in bypass mode π_θ) has numbers that are none.
    forward, calls = policy.Policy.forward, []
    def spoiled(self, *args):
        log_prob = forward(self, *args)
        calls.append(len(args[0]) > 2)              # `load_policy` checks itself with two
        return log_prob * (float("nan") if calls[-1] and sum(calls) == 1 else 1.0)
    policy.Policy.forward = spoiled
    return lambda: setattr(policy.Policy, "forward", forward)

SMALL, CASES, results = *map(json.loads, sys.argv[1:]), {}
for case, overrides in CASES.items():
    forwards[:], code, error = [0, {}], None, ""
    phases.clear(), updates.clear()
    name = f"run={case.replace(' ', '-')}"
    undo = spoil() if case.startswith("nan") else lambda: None
    try:
        code = trainer.main([*SMALL, *overrides, name])
        if code == 0 and "train.save_every" in str(overrides):                     # and goes on
            code = trainer.main([*SMALL, *overrides, name, "train.steps=5"])
    except Exception:
        error = traceback.format_exc()
        if dist.is_initialized(): dist.destroy_process_group()
    undo()
    results[case] = dict(code=code, error=error, forwards=forwards, phases=phases,
                         updates=len(updates))
    print(json.dumps({case: results[case]}), flush=True)
"""


def drive(directory: Path, model: Path, cases: dict) -> dict:
    settings = json.dumps([*SMALL, f"policy.path={model}"])
    result = shell([sys.executable, "-c", DRIVER, settings, json.dumps(cases)], directory)
    found = {}
    for line in result.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    assert set(found) == set(cases), result.stderr[-3000:]
    return found | {"said": result.stderr}


@pytest.fixture(scope="module")
def pretended(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pretended")
    return drive(directory, tiny_model, CASES) | {"runs": directory / "runs"}


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_runs_on_an_accelerator(case, pretended):
    found = pretended[case]
    code = 2 if case == "nan raise" else 0
    said = found["error"] + pretended["said"][-2000:]
    assert found["error"] == "" and found["code"] == code, said
    assert (pretended["runs"] / case.replace(" ", "-") / "model").is_dir() == (case != "nan raise")


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("nan")])
def test_host_waits_are_few(case, pretended):
    """Scoring and updating wait at most once a forward pass, and twice a mini-batch besides."""
    (passes, inside), phases, updates = (
        pretended[case][name] for name in ("forwards", "phases", "updates"))
    all_of_them = Counter(phases["log_probs"]) + Counter(phases["update"])
    beside = all_of_them - Counter(inside)
    print(f"{case}: host waits {sum(inside.values()) / passes:.2f} a forward pass and "
          f"{beside.total() / updates:.2f} more a mini-batch", dict(all_of_them))
    assert sum(inside.values()) <= passes and beside.total() <= 2 * updates, (inside, beside)


DEVICE = """
import pretend_gpu, pytest, torch
there, here = torch.ones(3).to(pretend_gpu.DEVICE, non_blocking=True), torch.ones(3)
assert pretend_gpu.WAITS.total() == 0
assert (there + 1 + torch.tensor(1.0)).device == pretend_gpu.DEVICE
for mixed in (lambda: there + here, lambda: here * there, lambda: torch.cat([here, there]),
              lambda: torch.where(there > 0, there, here),
              lambda: torch.stack([there.sum(), here.sum()]), lambda: there.add_(here),
              lambda: torch.mm(there[None], here[:, None])):
    with pytest.raises(RuntimeError, match="on the same device"): mixed()
waiting = [lambda: there[0].item(), lambda: bool(there[0] > 0), lambda: there.tolist(),
           lambda: there.cpu(), lambda: here.to(there.device), lambda: there[there > 0],
           lambda: there.nonzero(), lambda: there[torch.tensor([0])], lambda: here.copy_(there),
           lambda: there.unique(), lambda: there.to("cpu", non_blocking=True)]
for n, call in enumerate(waiting, 1):
    call()
    assert pretend_gpu.WAITS.total() == n, (n, pretend_gpu.WAITS)
there[torch.tensor([0]).to(there.device, non_blocking=True)] = 2.0
there.cumsum(0).sort().values.topk(2).values.log_softmax(-1).clone().copy_(there[:2])
assert pretend_gpu.WAITS.total() == len(waiting)
"""


def test_the_pretended_device_refuses_what_is_mixed_and_counts_what_waits(tmp_path):
    result = shell([sys.executable, "-c", DEVICE], tmp_path)
    assert result.returncode == 0, result.stderr


# ----------------------------------------------------------------------- what a GPU is asked for

def test_the_process_group_splits_no_communicator_and_attention_is_not_cudnns(
        tiny_model, monkeypatch):
    asked = []

    def asking(*args, **kwargs):
        asked.append((args, kwargs))
        raise InterruptedError
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "set_device", asked.append)
        patched.setattr(torch.distributed, "init_process_group", asking)
        with pytest.raises(InterruptedError), process_group():
            pass
    device, (backends, settings) = asked
    assert device == torch.device("cuda", 0) and backends == ("cpu:gloo,cuda:nccl",)
    assert "device_id" not in settings
    torch.backends.cuda.enable_cudnn_sdp(True)
    with process_group() as device:
        load_policy(str(tiny_model), 1.0, "float32", device)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


class PretendVllm:
    """A PretendVllm stands for vLLM's `LLM` on a GPU, and keeps what it is asked for, in order."""

    def __init__(self, path, **settings):
        self.settings, self.asked, self.llm_engine = settings, [], SimpleNamespace(engine_core=self)

    def sleep(self, level):
        self.asked.append(f"sleep {level}")

    def wake_up(self, tags):
        self.asked += [f"wake {tag}" for tag in tags]
        if self.settings.get("broken"):
            raise RuntimeError("it cannot be woken")

    def collective_rpc(self, name, kwargs):
        self.asked += [f"{name} {len(list(kwargs['weights_iterator']))}"]

    def generate(self, requests, params, use_tqdm):
        self.asked.append(f"generate {torch._dynamo.eval_frame._stance.stance}")
        self.params = params
        sets = SimpleNamespace(token_ids=[[7, 5], [9]])
        kept = sets if self.settings["return_sampling_mask"] else None
        logprobs = [{5: SimpleNamespace(logprob=-0.5)}, {9: SimpleNamespace(logprob=0.0)}]
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
            monkeypatch.setattr(f"{place}.import_vllm", lambda: (PretendVllm, dict))
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
        found = [asked[name] for name in ("logprobs", "top_p", "top_k", "min_p")]
        assert found == [0, cut.get("top_p", 1), k, 0]
        assert s == rollout.Sample([5, 9], [-0.5, 0.0], True, [[7, 5], [9]] if cut else None)


def test_a_sleeping_engine_gets_its_weights_before_its_cache_is_there(gpu_engine, tiny_model):
    engine, weights = gpu_engine(), load_file(tiny_model / "model.safetensors")
    engine.sleep()
    engine.sleep()
    engine.update_weights(weights.items())
    engine.generate([], [], temperature=1.0, max_tokens=2, eos_ids=[])
    engine.update_weights(weights.items())
    assert engine.llm.asked == ["sleep 1", "wake weights", "reload_weights 26", "wake kv_cache",
                                "generate default", "reload_weights 26"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_sleeping_engine_is_woken_before_it_is_closed(broken, gpu_engine):
    engine = gpu_engine()
    engine.llm.settings["broken"], llm = broken, engine.llm
    engine.sleep()
    engine.close()
    assert llm.asked[:2] == ["sleep 1", "wake weights"] and llm.asked[-1] == "shutdown"
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


@pytest.mark.skipif(torch.cuda.is_available(),
                    reason="takes up to half an hour on a GPU: run it by hand")
def test_the_report_runs_tiny_without_a_gpu_and_says_so(tmp_path):
    result = shell([sys.executable, str(ROOT / "tools/gpu_report.py")], tmp_path, env=None)
    assert result.returncode == 0, result.stderr
    assert "NO GPU: tiny shapes" in result.stdout
    assert "one that did not | the same bits |" in result.stdout
    assert result.stdout.count("left out: ") >= 2
