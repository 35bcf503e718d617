"""A run that cannot learn says so, with the reason; its end says what was gained."""

import math
import re

import pytest

from three_policies.doctor import diagnose
from three_policies.rollout import TransformersEngine
from three_policies.training.report import (CURVES, closing_table, ess, judge_accuracy, plot,
                                            summarize)
from three_policies.training.settings import Config, RolloutConfig, TrainConfig
from three_policies.training.tasks import Task

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

    A perplexity ratio of 0 is no sign of a wrong temperature there.
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
    code, lines = run(*overrides, "rollout.quantize=null", "rollout.prompts=8")
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
    (0.50, 0.55, 1024, "rose by 0.050, and two standard errors are 0.044"),
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
    run("rollout.quantize=null", "train.lr=0")
    said = capsys.readouterr().err
    [row] = [line for line in said.splitlines() if line.startswith("rollout_corr/k3_kl")]
    assert len(row.split()) == 3
    assert "held-out accuracy changed by 0.000" in said


def test_the_first_lines_name_only_settings_that_are_on():
    """Bits stand in the place of the engine's type, and tokens in the place of rows."""
    plain = Config(rollout=RolloutConfig(prompts=2, samples=3, max_tokens=5, temperature=0.7),
                   train=TrainConfig(steps=7, epochs=2, mini_batches=5, lr=1e-3))
    assert summarize(plain) == (
        "2 prompts × 3 responses of at most 5 tokens a step at temperature 0.7, from float32 "
        "weights; 7 steps of 10 updates at learning rate 0.001, 256 rows at a time")
    rollout = RolloutConfig(quantize=4, staleness=2, update_every=8)
    both = Config(rollout=rollout, train=TrainConfig(micro_batch_tokens=99))
    assert ("from 4-bit weights, 2 syncs stale and renewed every 8 tokens; 150 steps of 4 updates"
            in summarize(both) and summarize(both).endswith(", 99 tokens at a time"))


def test_the_closing_table_has_the_first_step_before_the_last():
    """Warnings are of the last step, whose χ² here is 1 by its tokens."""
    first = {"reward/mean": 0.25, "response/length_mean": 8.0, "rollout_corr/k3_kl": 0.5,
             "rollout_corr/rollout_is_raw_eff_sample_size": 0.75, "reward/advantage_max": 0.0}
    last = {"reward/mean": 0.5, "response/length_mean": 4.0, "rollout_corr/chi2_token": 1.0}
    blank, head, *rows, verdict = closing_table([first, {}, last], 0.5, 1.0, 100)
    assert (blank, head.split()) == ("", ["before", "after"])
    assert verdict == judge_accuracy(0.5, 1, 100)
    assert [row.split()[-2:] for row in rows] == [
        ["0.5", "1"], ["0.25", "0.5"], ["8", "4"], ["0.5", "nan"], ["0.75", "0.5"]]
    warned = closing_table([last, first], 0.5, 1.0, 100)[8:]
    assert warned == [f"* {sentence}" for sentence in diagnose(first)] and len(warned) == 2


def test_effective_samples_of_unequal_or_unmeasured_policies():
    """χ² of two equal policies may be rounded to below 0, and ESS/N is no more than 1."""
    assert [ess({"rollout_corr/chi2_token": x}) for x in (-1e-9, 3)] == [1, 0.25]
    both = {"rollout_corr/rollout_is_raw_eff_sample_size": 0.7,
            "rollout_corr/rollout_is_raw_seq_eff_sample_size": 0.1}
    assert [ess(both | {"rollout_corr/rollout_is_per_sequence": x}) for x in (0, 1)] == [0.7, 0.1]
    assert math.isnan(ess({})) and math.isnan(ess({"rollout_corr/chi2_token": math.nan}))


def test_curves_have_a_marker_only_where_steps_are_few_and_no_figure_stays_open(
        tmp_path, monkeypatch):
    """A step without a metric, such as one that was not evaluated, has no point."""
    from matplotlib import pyplot
    drawn, savefig, others = [], pyplot.Figure.savefig, pyplot.get_fignums()

    def keep(figure, *given, **options):
        drawn.append([axis.get_lines()[0] for axis in figure.axes])
        savefig(figure, *given, **options)
    monkeypatch.setattr(pyplot.Figure, "savefig", keep)
    for steps in (19, 20):
        lines = [{"step": i, **dict.fromkeys(CURVES, i / 10)} for i in range(1, steps + 1)]
        del lines[0]["eval/accuracy"], lines[1]["eval/accuracy"]
        plot([*lines, {"step": 99}], tmp_path / "curves.png")
    few, many = drawn
    assert [len(line.get_xdata()) for line in few] == [19, 17, 19, 19, 19, 19]
    assert few[1].get_xdata()[0] == 3 and few[1].get_ydata()[0] == 0.3
    assert [(a.get_marker(), b.get_marker()) for a, b in zip(few, many)] == [
        ("o", "None"), ("o", "o"), *[("o", "None")] * 4]
    assert pyplot.get_fignums() == others
