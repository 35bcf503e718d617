"""A demo model is taught once, by the first rank, under a name of its own; then it learns.

The default command does both, which takes a processor's minute.
"""

import sys

import pytest
import torch

from three_policies.checks import UserError
from three_policies.tests.support.launching import ROOT, shell
from three_policies.training import demo, files, tasks
from three_policies.training.faults import process_group
from three_policies.training.loading import load
from three_policies.training.settings import load_config


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


# ------------------------------------------------------------------ what is said before it is spent

class Taught(Exception):
    pass


@pytest.mark.parametrize("given, said", [
    ([], "task.kind=arithmetic, task.size=2, task.eval_size=1024 and seed=0"),
    (["task.kind=sort", "task.size=5", "task.eval_size=9", "seed=3"],
     "task.kind=sort, task.size=5, task.eval_size=9 and seed=3"),
    (["task.kind=dyck", "rollout.max_tokens=65"],
     "task.kind=dyck, task.length=64, task.depth=3, task.eval_size=1024 and seed=0")])
def test_a_demo_model_that_must_be_taught_is_announced_by_the_first_rank(
        given, said, tmp_path, monkeypatch, capsys):
    def teach(*_):
        raise Taught
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "character_tokenizer", teach)
    config = load_config(given)
    task = tasks.make_task(config.task, config.seed)
    for rank in 0, 1:
        with pytest.raises(Taught), process_group(), monkeypatch.context() as patch:
            patch.setattr(demo.dist, "get_rank", lambda: rank)
            demo.make_demo_model(config, task)
        assert capsys.readouterr().err == (
            f"a demo model for {said} is taught first, which happens once and takes about "
            "a minute\n" if rank == 0 else "")
    with process_group():
        monkeypatch.setattr(tasks.Path, "exists", lambda _: True)
        assert (demo.make_demo_model(config, task).startswith("runs/.demo/")
                and capsys.readouterr().err == "")


def test_a_demo_model_has_a_name_of_its_own_for_each_task_and_seed(tmp_path, monkeypatch):
    """Otherwise one that was taught the held-out problems of another would be taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "teach", lambda path, *_: path.mkdir(parents=True))
    names = []
    for given in ([], ["task.size=1"], ["task.eval_size=9"], ["seed=1"]):
        config = load_config(given)
        with process_group():
            names.append(demo.make_demo_model(config, tasks.make_task(config.task, config.seed)))
    assert len(set(names)) == 4
    with process_group():
        other = load_config(["seed=2"])               # the same task, taught from another seed
        names += [demo.make_demo_model(other, tasks.make_task(config.task, 1))]
    assert len(set(names)) == 5


def test_a_damaged_demo_model_says_how_it_is_taught_again(tmp_path, monkeypatch):
    (tmp_path / "damaged").mkdir()
    monkeypatch.setattr("three_policies.training.loading.make_demo_model",
                        lambda *_: str(tmp_path / "damaged"))
    with pytest.raises(UserError, match="damaged .delete it, and it is taught again. cannot be lo"):
        load(load_config(["task.size=1"]), torch.device("cpu"))
