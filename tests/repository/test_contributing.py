"""The recipes of CONTRIBUTING.md are executed: each block is put where a sentence says, and run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from three_policies.tests.support.waiting import HANG
from three_policies.tools.mutate import LEFT

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"^(?:In|At the end of) `([\w/.]+)`(?:, (above|below) `([^`]+)`)?:\n\n"
                   r"```python\n(.*?)```", re.DOTALL | re.MULTILINE)
NEW = ["correction={rollout_rs: {token_abs: 0.5}, loss_type: root}", "rollout.quantize=4"]

USED = """
import sys, torch
from three_policies import trainer
from three_policies.presets import RolloutCorrectionConfig
from three_policies.correction import correct
from three_policies.losses import policy_loss
config = RolloutCorrectionConfig(rollout_rs={"token_abs": 0.5}, loss_type="root")
old, mu, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
decided = correct(old, mu, mask, config)
assert decided.mask.tolist() == [[1, 0]]
assert decided.metrics["rollout_corr/rollout_rs_token_abs_mean"] == 0.5
new = old.clone().requires_grad_()
loss, metrics = policy_loss(new, old, mu, torch.ones(1, 2), mask, config)
assert torch.autograd.grad(loss, new)[0].tolist() == [[-0.5, 0.0]]
assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
from three_policies.book import tables
assert "`token_abs`" in tables.criteria() and "`root`" in tables.losses()
assert f"all {len(tables.every_metric())} metrics" in tables.metrics()
assert "rollout_rs_token_abs_seq_max_deviation" in tables.every_metric()
assert trainer.main(["--help"]) == 0
sys.exit(trainer.main(sys.argv[1:]))
"""


def blocks() -> list[Any]:
    """Return file, above or below, which line, and the code, of each block that has a place."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert text.count("```python") == len(PLACE.findall(text)), "a block without a place"
    return [found.groups() for found in PLACE.finditer(text)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the repository with the criterion and the loss of the recipes."""
    place = tmp_path_factory.mktemp("contributed") / "three_policies"
    shutil.copytree(ROOT, place, ignore=LEFT)
    for name, side, line, code in blocks():
        text = (place / name).read_text()
        if line is None:
            new = text + code
        else:
            assert text.count(f"{line}\n") == 1, f"{name} has not one line {line!r}"
            new = text.replace(f"{line}\n", f"{code}{line}\n" if side == "above"
                               else f"{line}\n{code}")
        (place / name).write_text(new)
    return place


def run(copy: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=copy.parent, text=True, timeout=HANG,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_new_rows_pass_their_own_tests_and_those_of_any_row(copy):
    out = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider",
              *(f"three_policies/tests/method/test_{name}.py" for name in (
                  "any_criterion_and_loss", "rejection", "metrics", "surrogates")),
              "three_policies/tests/repository/test_conventions.py::test_every_equation_that_reads_is_one_that_runs")
    assert "passed" in out and "failed" not in out and "skipped" not in out


@pytest.mark.long
def test_the_new_rows_are_judged_measured_listed_and_trained(copy, tiny_model):
    """eq:correction, eq:rejection: `correct`, `policy_loss`, metrics, tables know the new rows.

    So do the help and the trainer.
    """
    said = run(copy, "-c", USED, "task.size=1", "task.eval_size=8", "rollout.prompts=4",
               "rollout.samples=4", "rollout.max_tokens=5", "rollout.engine=transformers",
               "train.mini_batches=1", "train.steps=10", f"policy.path={tiny_model}", "run=new",
               *NEW)
    assert "token_abs: |log ρ| of each token" in said and "root: 2√r in the place of r" in said
    lines = (copy.parent / "runs/new/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 10 and "rollout_corr/rollout_rs_token_abs_mean" in lines[-1]


def test_the_recipe_of_an_unknown_place_is_noticed():
    assert {name for name, *_ in blocks()} == {
        "rejection.py", "surrogates.py", "tests/method/test_rejection.py",
        "tests/method/test_surrogates.py"}
