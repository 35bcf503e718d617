"""Numbers that are not finite are named or left out, and steps without a lesson are counted.

Neither stops a run that was told to go on, nor changes what it trains.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file

from three_policies import trainer
from three_policies.policy import Policy
from three_policies.rollout import Sample, TransformersEngine
from three_policies.tests.support.small import weights
from three_policies.trainer import without_nonfinite
from three_policies.training import tasks
from three_policies.training.batches import nonfinite_rows, pad
from three_policies.training.faults import process_group
from three_policies.training.settings import AdvantageConfig, load_config

WORDS: Any = SimpleNamespace(decode=lambda ids: str(ids.tolist()))       # a tokenizer


def spoil(monkeypatch, policy):
    """Spoil one number: on the first step's third row a token or the reward, or a gradient."""
    calls = []
    if policy == "reward":
        def spoiled_reward(self, problem, response):
            calls.append(1)
            third = len(calls) == 8 + 3                # after the 8 of the evaluation
            return math.nan if third else float(len(response) % 2)
        monkeypatch.setattr(tasks.Task, "reward", spoiled_reward)
    elif policy == "π_rollout":
        generate = TransformersEngine.generate

        def spoiled(*args, **kwargs):
            samples = generate(*args, **kwargs)
            calls.append(1)
            if len(calls) == 2:
                first, _, *others = samples[2].rollout_log_prob
                samples[2] = replace(samples[2], rollout_log_prob=[first, -math.inf, *others])
            return samples
        monkeypatch.setattr(TransformersEngine, "generate", spoiled)
    elif policy == "gradient":
        clip = torch.nn.utils.clip_grad_norm_

        def spoiled_gradient(parameters, *args):
            parameters = list(parameters)
            calls.append(parameters[0].grad.mul_(math.nan if not calls else 1))
            return clip(parameters, *args)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoiled_gradient)
    else:
        wanted = {"π_old": [1], "π_ref": [5], "π_θ": range(5, 99)}[policy]
        forward = Policy.forward

        def spoiled_forward(self, *args):
            log_prob: Any = forward(self, *args)
            calls.append(len(args[0]) > 2)
            if sum(calls) not in wanted:                 # `load_policy` checks itself with two
                return log_prob
            return log_prob * torch.where(torch.arange(log_prob.shape[1]) == 1, math.nan, 1.0)
        monkeypatch.setattr(Policy, "forward", spoiled_forward)


@pytest.mark.parametrize("policy, skipped", [
    ("π_rollout", "samples"), ("π_old", "samples"), ("π_ref", "samples"), ("reward", "samples"),
    ("π_θ", "updates"), ("gradient", "updates")])
def test_what_is_not_finite_is_named_or_left_out(policy, skipped, run, monkeypatch, capsys):
    preset = "bypass_pg_is" if policy == "π_θ" else "token_is"
    settings = ["loss.kl_coef=0.1", "rollout.max_tokens=5", f"correction.preset={preset}"]
    spoil(monkeypatch, policy)
    code, lines = run(*settings, name="raise")
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and lines == [] and "step 1: " in said and "train.on_nonfinite=skip" in said
    if policy == "reward":
        assert "the reward of " in said and "is nan" in said
    elif policy == "gradient":
        assert "the gradient of π_θ is not finite, though its log-probs are" in said
    else:
        assert f"{policy} has the log-prob " in said and "for token 2, " in said
        assert "after the prompt " in said and "+" in said


@pytest.mark.parametrize("policy, skipped", [
    ("π_rollout", "samples"), ("π_old", "samples"), ("π_ref", "samples"), ("reward", "samples"),
    ("gradient", "updates")])
def test_what_is_not_finite_is_left_out_counted_and_said(policy, skipped, run, monkeypatch, capsys):
    spoil(monkeypatch, policy)
    code, lines = run("loss.kl_coef=0.1", "train.on_nonfinite=skip", name="skip")
    assert code == 0
    assert [line[f"train/skipped_{skipped}"] > 0 for line in lines] == [True, False]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert "* step 1: " in capsys.readouterr().err
    assert all(x.isfinite().all() for x in weights("skip").values())


def test_the_whole_response_is_left_out_and_a_masked_token_may_be_anything():
    samples = [Sample([3, 4], [-1.0, x], True) for x in (-2.0, -math.inf, -math.inf)]
    with process_group() as device:
        batch = pad([[5]] * 3, samples, torch.zeros(3), device)
        batch.response_mask[2, 1] = False
        named = []
        left = without_nonfinite(SimpleNamespace(
            record=SimpleNamespace(nonfinite=lambda *said: named.append(said)),
            loaded=SimpleNamespace(tokenizer=WORDS)), batch)
    assert left.response_mask.tolist() == [[True, True], [False, False], [True, False]]
    assert named == [("samples", [
        "π_rollout has the log-prob -inf for token 2, '4', after the prompt '[5]'"])]


def test_a_reward_that_is_not_finite_is_no_part_of_its_groups_baseline(run, monkeypatch):
    """All other rewards are 1, so their mean is 1 and there is nothing to learn."""
    calls = []
    monkeypatch.setattr(tasks.Task, "reward", lambda *_: calls.append(1) or (
        math.nan if len(calls) == 8 + 3 else 1.0))
    for kind in get_args(get_type_hints(AdvantageConfig)["kind"]):
        calls.clear()
        code, lines = run("train.on_nonfinite=skip", f"advantage.kind={kind}", name=kind)
        assert code == 0 and lines[0]["train/skipped_samples"] == 1
        assert lines[0]["reward/mean"] == 1 and lines[0]["grad_norm"] == 0
        assert lines[0]["reward/std"] == 0 and lines[0]["reward/groups_without_signal"] == 1
        assert lines[0]["reward/advantage_max"] == 0        # of the rows with a reward


def test_the_token_and_the_prompt_that_are_named_are_the_rows_own():
    samples = [Sample([3, 4], [-1.0, -2.0], True), Sample([6, 7, 8], [-1.0, -1.0, -math.inf], True)]
    with process_group() as device:
        batch = pad([[5, 5, 5], [9, 2]], samples, torch.zeros(2), device)
        assert nonfinite_rows(batch, {"π_rollout": batch.rollout_log_prob}, WORDS) == [
            "π_rollout has the log-prob -inf for token 3, '8', after the prompt '[9, 2]'"]


def test_an_update_is_skipped_for_a_metric_alone(run, monkeypatch):
    loss = trainer.policy_loss
    monkeypatch.setattr(trainer, "policy_loss", lambda *given, **more: (
        (found := loss(*given, **more))[0], found[1] | {"loss/ratio": torch.tensor(math.inf)}))
    code, (line,) = run("train.on_nonfinite=skip", "train.steps=1")
    assert code == 0 and line["train/skipped_updates"] == 2


def test_a_step_whose_updates_are_all_skipped_goes_on(run, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: clip(*args) * math.nan)
    code, lines = run("correction.preset=bypass_pg_is", "train.on_nonfinite=skip")
    assert code == 0 and [line["train/skipped_updates"] for line in lines] == [2, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_pg_is"])
@pytest.mark.parametrize("case", ["rejected", "equal", "empty", "no tokens", "masked"])
def test_steps_without_anything_to_learn_from_are_counted(case, preset, run, monkeypatch):
    settings, expected = [f"correction.preset={preset}"], ("reward/groups_without_signal", 1)
    if case == "rejected":
        settings += ["correction.rollout_rs={token_k1: [1.0e6, null]}"]
        expected = ("rollout_corr/all_rejected", 1)
    elif case == "equal":
        monkeypatch.setattr(tasks.Task, "reward", lambda *_: 1.0)
    elif case == "masked":             # the model's end token is never sampled in two tokens
        settings += ["rollout.mask_truncated=true", "rollout.max_tokens=2"]
        expected = ("response/truncated_fraction", 1)
        unfinished = cut(lambda s: replace(s, finished=False))
        monkeypatch.setattr(TransformersEngine, "generate", unfinished)
    else:
        only = Sample([1], [-1.0], True) if case == "empty" else Sample([], [], True)
        monkeypatch.setattr(TransformersEngine, "generate", cut(lambda _: only))
        expected = ("response/empty_fraction", 1)
    code, lines = run(*settings)
    assert code == 0 and len(lines) == 2 and all(line[expected[0]] == expected[1] for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    if case in ("rejected", "equal", "masked", "no tokens"):
        path = load_config(["runs/x/config.yaml"]).policy.path
        first = load_file(Path(path) / "model.safetensors")
        assert all(torch.equal(x, first[name]) for name, x in weights("x").items())


def cut(change, generate=TransformersEngine.generate):
    return lambda *args, **kwargs: [change(s) for s in generate(*args, **kwargs)]


def test_truncated_responses_can_be_masked(run):
    (all_of_them,), (finished,) = (
        run(f"rollout.mask_truncated={m}", "train.steps=1", name=f"{m}-x")[1]
        for m in ("false", "true"))
    assert 0 < all_of_them["response/truncated_fraction"] < 1
    # These rows still count in the baseline.
    assert all_of_them["reward/mean"] == finished["reward/mean"]
    assert all_of_them["grad_norm"] != finished["grad_norm"]


def test_a_held_out_answer_whose_reward_is_not_finite_is_not_right(run, monkeypatch):
    monkeypatch.setattr(tasks.Task, "reward", lambda self, p, text: (1.0, math.nan)[len(text) % 2])
    code, lines = run("train.on_nonfinite=skip")
    found = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert code == 0 and found and all(0 < accuracy < 1 for accuracy in found)
    answers = Path("runs/x/eval.jsonl").read_text()
    assert '"reward": 0.0' in answers and "NaN" not in answers
