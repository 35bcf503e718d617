"""The real trainer runs, in its configurations, on the accelerator of tests/support/pretend_gpu.py.

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

import pytest
import torch
from safetensors.torch import load_file

from three_policies.tests.support.launching import shell
from three_policies.tests.support.waiting import HANG

SMALL = ["task.size=1", "task.eval_size=2", "rollout.engine=transformers", "rollout.prompts=2",
         "rollout.samples=4", "rollout.max_tokens=3", "rollout.quantize=4",
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
    "packed": ["policy.packed=true", "loss.kl_coef=0.1", "rollout.top_k=8"],
    "packed checkpoints": ["policy.packed=true", "policy.gradient_checkpointing=true",
                           "policy.dtype=bfloat16", "train.micro_batch_tokens=20"],
    "lora": ["policy.lora_rank=2", "loss.kl_coef=0.1", *GOES_ON],
    "lora apart": ["policy.lora_rank=2", "rollout.lora=apart", "rollout.quantize=null"],
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
TIMED = "synchronize record.py time_part"                 # once at the end of each part
MAY_WAIT = {
    "rollout": {*SAMPLES, "copy from the host rollout.py update_weights"},           # in flight
    "log_probs": {SENDS, "item trainer.py without_nonfinite"},
    "doctor": {SENDS, "copy to the host dumps.py _lists"},
    "update": {SENDS, "tolist trainer.py step_or_skip"},
    "sync": {*SAMPLES, "copy to the host rollout.py copy_to_host",      # of stale weights
             "copy from the host rollout.py update_weights"},
}
DRIVER = """
import contextlib, json, os, sys, traceback, torch, torch.distributed as dist
# From here on it is torch's accelerator, and the trainer finds it.
from three_policies.tests.support import pretend_gpu
from three_policies.training import record, run
from three_policies import policy, trainer
from three_policies.training import shapes
from three_policies.training import capacity, tasks
# A reward that untaught models earn. The curves are not drawn, and the products of matrices that a
# run times when it opens are small: those for a GPU take this processor seven seconds.
tasks.Task.reward = lambda self, problem, response: float(len(response) % 2)
run.plot = lambda *_: None
capacity.SIDES[pretend_gpu.DEVICE.type] = 64
# Some models have a buffer in their checkpoint; this one gets one.
def with_buffer(make):
    def made(path):
        (model := make(path)).register_buffer("of_a_checkpoint", torch.zeros(3))
        return model
    return made
policy.read_model, policy.empty_model = map(with_buffer, (policy.read_model, policy.empty_model))
# Calls of the policy and of `update`; waits of a step's parts.
passes, updates, parts = [], [], {}
forward, timed, update = policy.Policy.forward, record.Record.time_part, trainer.update
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
record.Record.time_part = part

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
        environment = {**os.environ, "OMP_NUM_THREADS": "1",
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


def test_the_appendix_counts_the_configurations():
    assert len(CASES) + len(TWO_RANKS) + len(OFFLOADED) == 24 and len(TWO_RANKS) == 1
    said = (Path(__file__).resolve().parents[2] / "math/appendix-settings.md").read_text().split()
    assert "runs in twenty-four configurations, two of them on two ranks" in " ".join(said)


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
        assert parts["update"]["tolist trainer.py step_or_skip"] == updates
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
import pytest, torch
from three_policies.tests.support import pretend_gpu
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


def test_offloaded_a_run_ends_alike_on_an_accelerator(tiny_model, forks, tmp_path):
    """Weights, gradients and moments are on the host, the computation is not."""
    found = drive(forks, tmp_path, tiny_model, {"here": [], "there": ["policy.cpu_offload=true"]})
    (here,), (there,) = found["here"], found["there"]
    assert here["code"] == there["code"] == 0, found["said"][-2000:]
    own, other = (load_file(tmp_path / f"runs/{case}/model/model.safetensors")
                  for case in ("here", "there"))
    assert all(torch.equal(x, other[name]) for name, x in own.items())
    copied = "copy to the host _fsdp_collectives.py"                   # gradients, by FSDP2
    assert [any(copied in wait for wait in one["parts"]["update"])
            for one in (here, there)] == [False, True]
