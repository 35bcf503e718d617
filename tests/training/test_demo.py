"""The default command teaches a demo model, which then learns. That takes a processor's minute."""

import sys

from three_policies.tests.support.launching import ROOT, shell
from three_policies.training import files


def test_the_default_command_learns_from_a_demo_model(forks, tmp_path):
    result = shell([sys.executable, *forks, str(ROOT / "trainer.py"), "train.steps=2",
                    "rollout.engine=transformers"], tmp_path)
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "runs/demo,rollout.engine=transformers"
    lines = files.read_metrics(directory / "metrics.jsonl")
    # The accuracy depends on the processor, its threads and torch. The README's seeds
    # have 0.56 to 0.65.
    assert 0.5 < lines[0]["eval/accuracy"] < 0.75
    left = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "curves.png", "eval.jsonl", "checkpoints", "model"} <= left
