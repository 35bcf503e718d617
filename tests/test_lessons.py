"""A run that cannot learn says so, with the reason; its end says what was gained."""

import math
import re

import pytest

from doctor import diagnose
from plumbing.report import judge_accuracy
from plumbing.tasks import Task
from rollout import TransformersEngine

LEARNS = {"response/learned_fraction": 1.0, "response/truncated_fraction": 0.1,
          "response/count": 64,
          "reward/advantage_max": 1.5, "reward/mean": 0.5, "reward/best": 0.6, "grad_norm": 0.3,
          "rollout_corr/all_rejected": 0.0, "train/empty_updates": 0.0}


@pytest.mark.parametrize("metrics, said", [
    ({}, None),
    ({"response/learned_fraction": 0.0, "response/truncated_fraction": 1.0},
     "rollout.mask_truncated leaves out those; raise"),
    ({"response/learned_fraction": 0.0}, "no response has a token to learn from"),
    ({"response/truncated_fraction": 1.0}, "every response was cut at rollout.max_tokens"),
    ({"reward/advantage_max": 0.0, "reward/mean": 0.0, "reward/best": 0.0},
     "no response was right"),
    ({"reward/advantage_max": 0.0, "reward/mean": 1.0}, "every response was right"),
    ({"reward/advantage_max": 0.0}, "in each group all rewards are equal"),
    ({"grad_norm": 0.0}, "rewards differ and tokens were kept, and yet nothing moves"),
    ({"grad_norm": 0.0, "rollout_corr/all_rejected": 1.0}, "every token was rejected"),
    ({"grad_norm": 0.0, "train/empty_updates": 1.0}, "of some mini-batches nothing was kept"),
    ({"reward/mean": 0.0}, "reward/mean is 0, and was 0.6: the policy has collapsed"),
    ({"reward/mean": 0.05}, "reward/mean is 0.05, and was 0.6: the policy has collapsed"),
    ({"reward/mean": 0.07}, None),                                     # above a tenth
    ({"reward/mean": 0.0, "response/count": 41}, None),              # 24.6 right ones expected
    ({"reward/mean": 0.0, "response/count": 42}, "has collapsed")])
def test_each_reason_has_its_sentence(metrics, said):
    found = diagnose(LEARNS | metrics)
    assert found == [] if said is None else len(found) == 1 and said in found[0], found


def test_of_nothing_nothing_else_is_judged():
    """A step without tokens is not judged by its means, which are 0 or NaN.

    Once they were taken for a wrong temperature.
    """
    strange = {"rollout_corr/ppl_ratio": 0.0, "rollout_corr/kl": math.nan,
               "rollout_corr/k3_kl": 9.0}
    cut = {"response/learned_fraction": 0.0, "response/truncated_fraction": 1.0}
    [sentence] = diagnose(LEARNS | strange | cut)
    assert "temperature" not in sentence and "raise rollout.max_tokens" in sentence


CASES = {
    "a token is no answer":
        (["rollout.max_tokens=1"], "every response was cut at rollout.max_tokens"),
    "all are masked":
        (["rollout.mask_truncated=true", "rollout.max_tokens=1"],
         "rollout.mask_truncated leaves out those"),
    "all wrong": ([], "no response was right"),
    "all right": ([], "every response was right"),
    "equal in groups": ([], "in each group all rewards are equal"),
    "all rejected":
        (["correction={rollout_rs: {token_k1: [1.0e6, null]}}"], "every token was rejected")}


@pytest.mark.parametrize("case", CASES)
def test_a_run_without_a_lesson_says_so_at_its_first_step_and_once(case, run, monkeypatch, capsys):
    overrides, said = CASES[case]
    rewards = {"all wrong": lambda p: 0, "all right": lambda p: 1,
               "equal in groups": lambda p: len(p.answer) % 2,
               "a token is no answer": lambda p: 0}
    if case in rewards:
        monkeypatch.setattr(Task, "reward",
                            lambda self, problem, response: float(rewards[case](problem)))
    if "rollout.max_tokens=1" in overrides:        # the end token is never drawn
        generate = TransformersEngine.generate
        monkeypatch.setattr(TransformersEngine, "generate",
                            lambda *a, **k: generate(*a, **{**k, "eos_ids": []}))
    code, lines = run(*overrides, "rollout.quantize_bits=null", "rollout.prompts=8")
    error = capsys.readouterr().err
    assert code == 0 and len(lines) == 2
    first, second = ([line for line in error.splitlines() if line.startswith(f"* step {step}: ")]
                     for step in (1, 2))
    assert sum(said in line for line in first) == 1 and not second, error
    assert case == "all rejected" or len(first) == 1, first


def test_reinforce_has_a_signal_where_groups_have_none(run, monkeypatch, capsys):
    """REINFORCE's baseline is the batch's mean: equal rewards in a group are no reason to stop."""
    monkeypatch.setattr(Task, "reward",
                        lambda self, problem, response: float(len(problem.answer) % 2))
    for kind, learns in (("grpo", False), ("rloo", False), ("reinforce", True)):
        _, lines = run(f"advantage.kind={kind}", "task.size=1", "rollout.prompts=16",
                       "train.mini_batches=1", name=kind)
        assert {line["reward/groups_without_signal"] for line in lines} == {1}
        assert [line["grad_norm"] > 0 for line in lines] == [learns] * 2
        assert ("reward/advantage_max is 0" in capsys.readouterr().err) != learns


def test_a_policy_that_collapses_is_named_when_it_does(run, monkeypatch, capsys):
    """A collapse is named after a restart, too: the metrics hold the best reward so far."""
    calls = []

    def reward(*_):
        calls.append(1)
        return float(len(calls) < 8 + 3 * 64 and len(calls) % 2)

    monkeypatch.setattr(Task, "reward", reward)
    settings = ["rollout.prompts=16", "train.eval_every=100", "train.save_every=2"]
    run(*settings, "train.steps=2")
    assert "collapsed" not in capsys.readouterr().err
    calls[:] = [0] * (8 + 3 * 64)
    _, lines = run(*settings, "train.steps=3")
    best = max(line["reward/mean"] for line in lines[:2])
    assert [line["reward/best"] for line in lines] == [best] * 3
    said = capsys.readouterr().err
    assert "* step 3: reward/mean is 0, and was 0.5: the policy has collapsed" in said


@pytest.mark.parametrize("before, after, n, said", [
    (0.58, 0.95, 1024, "rose by 0.370, and two standard errors are 0.034"),
    (0.95, 0.58, 1024, "FELL by 0.370"),
    (0.50, 0.53, 1024,
     "changed by 0.030, and two standard errors are 0.044: "
     "this run shows neither a rise nor a fall"),
    (0.0, 0.0, 8, "changed by 0.000, and two standard errors are 0.300"),
    (0.0, 1.0, 8, "rose by 1.000"),
    (0.5, 0.5, 1, "changed by 0.000")])
def test_the_last_line_says_whether_more_than_chance_changed(before, after, n, said):
    assert f"held-out accuracy {said}" in judge_accuracy(before, after, n)


def test_a_verdict_of_a_rise_is_rarely_wrong():
    """One verdict in 17 is false, at most, for two samples of n answers with one accuracy."""
    n = 30
    for accuracy in (0.02, 0.1, 0.5, 0.9):
        chance = [math.comb(n, k) * accuracy ** k * (1 - accuracy) ** (n - k) for k in range(n + 1)]
        wrong = sum(p * q for i, p in enumerate(chance) for j, q in enumerate(chance)
                    if not re.search("neither", judge_accuracy(i / n, j / n, n)))
        assert wrong < 0.06


def test_the_closing_table_keeps_its_columns_apart(run, capsys):
    """Columns stay apart even for the k3 of two equal policies, which is rounding: −1.755e-18."""
    run("rollout.quantize_bits=null", "train.lr=0")
    said = capsys.readouterr().err
    [row] = [line for line in said.splitlines() if line.startswith("rollout_corr/k3_kl")]
    assert len(row.split()) == 3
    assert "held-out accuracy changed by 0.000" in said
