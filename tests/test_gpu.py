"""On an accelerator: the real trainer on a pretend one (tests/pretend_gpu.py), in its configurations.

One process trains them all, since a device is registered once and for good; a test reads its part.
The host waits of a step are printed (`pytest -s`) and bounded.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent
SMALL = ["task.size=1", "task.eval_size=4", "rollout.engine=transformers", "rollout.prompts=4", "rollout.samples=4",
         "rollout.max_tokens=4", "rollout.quantize_bits=4", "train.mini_batches=2", "train.micro_batch_size=4", "train.lr=0.01",
         "train.steps=2", "train.eval_every=2"]
CASES = {                          # name: overrides
    "demo": ["train.steps=3", "train.save_every=2"],
    "checkpointing": ["policy.gradient_checkpointing=true"],
    "kl in loss": ["loss.kl_coef=0.1"],
    "kl in reward": ["loss.kl_coef=0.1", "loss.kl_in=reward"],
    "bypass": ["correction.preset=bypass_ppo_clip_k3_rs", "rollout.staleness=1", "train.save_every=1", "train.steps=3"],
    "kept": ["correction.preset=decoupled_seq_is_rs", "loss.denominator=kept"],
    "kept bypass": ["correction.preset=bypass_pg_geo_rs_token_tis", "loss.denominator=kept",
                    "correction.rollout_is_batch_normalize=true"],
    "bfloat16": ["policy.dtype=bfloat16", "rollout.dtype=bfloat16"],
    "gspo": ["correction={loss_type: gspo, rollout_is: sequence}", "advantage.kind=rloo"],
    "reinforce": ["correction.preset=bypass_pg_is", "advantage.kind=reinforce", "loss.aggregation=seq-mean-token-mean"],
    "opsm": ["correction={rollout_is: token, rollout_is_batch_normalize: true, rollout_rs: {opsm: 0.1}}"],
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
tasks.Task.reward = lambda self, problem, response: float(len(response) % 2)     # untaught models earn it
real = faults.process_group
@contextlib.contextmanager
def process_group():
    with real(): yield pretend_gpu.DEVICE
plumbing.run.process_group = process_group

forwards, phases, updates = [0, {}], {}, []       # calls and waits of forward passes; waits of a step's phases

def since(before, into):
    for key, n in pretend_gpu.WAITS.items():
        if n > before.get(key, 0): into[" ".join(key)] = into.get(" ".join(key), 0) + n - before.get(key, 0)

forward, timed, update = policy.Policy.forward, plumbing.run.Run.timed, trainer.update
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
plumbing.run.Run.timed = phase
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
    undo, name = spoil() if case.startswith("nan") else lambda: None, f"run={case.replace(' ', '-')}"
    try:
        code = trainer.main([*SMALL, *overrides, name])
        if code == 0 and "train.save_every" in str(overrides):                     # and goes on
            code = trainer.main([*SMALL, *overrides, name, "train.steps=5"])
    except Exception:
        error = traceback.format_exc()
        if dist.is_initialized(): dist.destroy_process_group()
    undo()
    results[case] = dict(code=code, error=error, forwards=forwards, phases=phases, updates=len(updates))
    print(json.dumps({case: results[case]}), flush=True)
"""


def drive(directory: Path, model: Path, cases: dict) -> dict:
    result = subprocess.run([sys.executable, "-c", DRIVER, json.dumps([*SMALL, f"policy.path={model}"]), json.dumps(cases)],
                            cwd=directory, capture_output=True, text=True, timeout=280,
                            env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE / 'tests'}"})
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
    assert found["error"] == "" and found["code"] == (2 if case == "nan raise" else 0), found["error"] + pretended["said"][-2000:]
    assert (pretended["runs"] / case.replace(" ", "-") / "model").is_dir() == (case != "nan raise")


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("nan")])
def test_host_waits_are_few(case, pretended):
    """Of scoring and updating: at most one in a forward pass, and two a mini-batch beside those."""
    (passes, inside), phases, updates = (pretended[case][name] for name in ("forwards", "phases", "updates"))
    all_of_them = Counter(phases["log_probs"]) + Counter(phases["update"])
    beside = all_of_them - Counter(inside)
    print(f"{case}: host waits {sum(inside.values()) / passes:.2f} a forward pass and {beside.total() / updates:.2f} more a "
          f"mini-batch", dict(all_of_them))
    assert sum(inside.values()) <= passes and beside.total() <= 2 * updates, (inside, beside)
