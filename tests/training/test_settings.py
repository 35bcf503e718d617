"""Settings come from a file and a command; limits, and settings without effect, are reported."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from three_policies.checks import UserError
from three_policies.surrogates import LOSSES
from three_policies.tests.support.small import OWN, steady
from three_policies.trainer import loss_of
from three_policies.training.remarks import remarks
from three_policies.training.settings import (Config, TaskConfig, TrainConfig, as_yaml, check_run,
                                              flat, help_text, load_config, load_yaml)

ROOT = Path(__file__).resolve().parents[2]


def test_own_questions_begin_with_the_settings_of_gsm8k():
    config = flat(yaml.safe_load((ROOT / "configs/gsm8k.yaml").read_text()))
    for key in "task.path", "task.eval_path", "task.eval_size", "policy.path":
        del config[key]
    assert config["rollout.engine"] == "auto" and config["task.instruction"]
    config |= {"policy.packed": False, "train.micro_batch_size": 16}   # what any model can
    for kind in "jsonl", "parquet":
        found = load_config([f"task.kind={kind}", *OWN[1:]])
        assert config | {"task.kind": kind} == {
            key: x for key, x in flat(asdict(found)).items() if key in config}
        assert (found.run and found.run.startswith(f"{kind},")
                and "gsm8k" not in found.run and "demo" not in found.run)
        assert (found.task.path, found.task.eval_path, found.task.eval_size, found.policy.path) == (
            "train.jsonl", None, None, "a/model")
    assert load_config([*OWN, "rollout.max_tokens=7", "run=mine"]).rollout.max_tokens == 7
    assert load_config(["task={kind: jsonl, path: train.jsonl}"]).rollout.max_tokens == 512


def test_a_file_that_is_given_is_the_only_base(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: {kind: jsonl, path: x}")
    found = load_config([str(tmp_path / "mine.yaml"), "train.lr=0.5"])
    assert found == replace(
        Config(), run="mine,train.lr=0.5", task=TaskConfig(kind="jsonl", path="x"),
        train=TrainConfig(lr=0.5), correction={"preset": "decoupled_token_is"})
    assert load_config([str(ROOT / "configs/demo.yaml"), *OWN]).rollout.quantize == 6
    assert load_config([]).run == "demo" and load_config([]).rollout.quantize == 6


def test_a_run_has_no_settings_but_one(tmp_path):
    (tmp_path / "x.yaml").write_text("run: {dump: 2}")
    for given, key in ([["run.dumps=2"], "dumps"], [[str(tmp_path / "x.yaml")], "dump"]):
        with pytest.raises(UserError, match=rf"^run.{key} is not a setting; did you mean run.dump"):
            load_config(given)


# ----------------------------------------------------------------------------- limits that are said

@pytest.mark.parametrize("given, said", [
    ("seed=9999999999", "seed must be at most 2147483648, not 9999999999"),
    ("seed=-1", "seed must be at least 0, not -1"),
    ("loss.kl_coef=1e99", "loss.kl_coef must be at most 2147483648, not 1e+99"),
    ("train.max_grad_norm=0", "train.max_grad_norm must be at least 1e-06, not 0.0"),
    ("train.max_grad_norm=nan", "train.max_grad_norm must be at least 1e-06, not nan"),
    ("rollout.top_p=2", "rollout.top_p must be 0.01 to 1, not 2.0"),
    ("task.on_bad_row=drop", "task.on_bad_row must be one of raise, skip, not 'drop'"),
    ("task.eval_path=held.jsonl",
     "task.eval_path must be null for task.kind=arithmetic, whose held-out problems are made as "
     "the others are, not 'held.jsonl'")])
def test_the_limit_that_was_passed_is_the_one_that_is_said(given, said):
    with pytest.raises(UserError) as found:
        load_config([given])
    assert str(found.value) == said


def test_an_infinite_gradient_norm_clips_nothing(run):
    endless, large = (run(f"train.max_grad_norm={limit}", name=str(i))
                      for i, limit in enumerate(("inf", "1e9")))
    assert endless[0] == large[0] == 0 and endless[1][0]["grad_norm"] > 0
    assert steady(endless[1]) == steady(large[1])
    assert load_config(["runs/0/config.yaml"]).train.max_grad_norm == float("inf")
    # The same run is continued.
    assert run("train.max_grad_norm=inf", "train.steps=3", name="0")[0] == 0
    assert "if it is longer; .inf: never (a number, at least 1e-06)" in help_text()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a b", "é", "..", "x" * 101])
def test_a_run_name_in_a_file_is_reported_as_it_was_given(name, tmp_path):
    (tmp_path / "x.yaml").write_text(json.dumps({"run": name}))
    for arguments in ([str(tmp_path / "x.yaml")], [str(tmp_path / "x.yaml"), "seed=1"]):
        with pytest.raises(UserError) as found:
            load_config(arguments)
        assert str(found.value) == (
            "run must be a plain name of at most 100 letters, digits and .,=+-_ since it is "
            f"a directory inside runs/, not {name!r}")
    check_run("demo,train.lr=1e-3")


@pytest.mark.parametrize("kind, samples, said", [
    ("grpo", 1, True), ("rloo", 1, True), ("reinforce", 1, False), ("grpo", 2, False)])
def test_groups_of_one_have_no_baseline_and_it_is_said(kind, samples, said):
    found = remarks(load_config([f"advantage.kind={kind}", f"rollout.samples={samples}"]))
    assert found == [
        f"rollout.samples=1 leaves advantage.kind={kind} no baseline, which is made of a group's "
        "other samples: every advantage is the reward itself; take advantage.kind=reinforce, whose "
        "baseline is the batch's mean"] * said


@pytest.mark.parametrize("value", [
    "${oc.env:HOME}", r'"\x24{oc.env:HOME}"', r'"\u0024{oc.env:HOME}"', '"$\\\n  {oc.env:HOME}"',
    r'{"\x24{oc.env:HOME}": 1}'])
def test_nothing_is_replaced_however_a_dollar_is_written(value, tmp_path):
    """Elsewhere a variable of the environment would be put in."""
    (tmp_path / "x.yaml").write_text(f"run: {value}")
    for given in (str(tmp_path / "x.yaml"), f"train.schedule={value}"):
        with pytest.raises(UserError, match=r"'\$\{…\}' is not replaced here"):
            load_config([given])


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_cut_that_keeps_one_token_is_said_to_teach_nothing(top_k):
    found = remarks(load_config([f"rollout.top_k={top_k}"]))
    assert found == ["rollout.top_k=1 keeps one token, which has the log-prob 0 whatever the "
                     "weights are, so nothing can be learned"] * (top_k == 1)


@pytest.mark.parametrize("loss, key, said", [
    ("ppo_clip", "clip_low", False), ("gspo", "dual_clip", False), ("cispo", "dual_clip", True),
    ("sapo", "clip_high", True), ("ppo_clip", "tau_positive", True),
    ("ppo_clip", "tau_negative", True), ("sapo", "tau_negative", False)])
def test_a_number_that_the_loss_does_not_take_is_named(loss, key, said):
    value = 2 if key == "dual_clip" else 1
    found = remarks(load_config([f"correction.loss_type={loss}", f"loss.{key}={value}",
                                 "loss.aggregation=seq-mean-token-mean"]))
    assert found == [f"loss.{key} has no effect: correction.loss_type={loss} has no such "
                     "number"] * said


NOTHING = ("correction: these keys correct nothing: they ask for neither weights nor rejection nor "
           "bypass mode")
CENTERED = ("correction={bypass_mode: true, loss_type: reinforce, score_centering: true, "
            "rollout_rs: {token_tv: %s}}")


@pytest.mark.parametrize("given, said", [
    (["correction.rollout_is=null", "correction.rollout_is_threshold=3"],
     [NOTHING, "correction.rollout_is_threshold has no effect: correction.rollout_is is null, so "
      "there are no weights"]),
    (["correction={rollout_is: null, rollout_is_batch_normalize: true}"],
     [NOTHING, "correction.rollout_is_batch_normalize has no effect: correction.rollout_is is "
      "null, so there are no weights"]),
    (["train.micro_batch_size=8", "train.micro_batch_tokens=99"],
     ["train.micro_batch_size has no effect: train.micro_batch_tokens is set"]),
    (["correction.rollout_is_threshold=3"], []),                    # of the demo's preset
    (["correction.preset=disabled", "correction.rollout_is=token", "correction.bypass_mode=true"],
     ["correction: rollout_is=token is not applied with bypass_mode and loss_type=ppo_clip, whose "
      "ratio already is π_θ/π_rollout (eq:double-count): its metrics are rollout_is_raw_*"]),
    (["rollout.candidates=9"],
     ["rollout.candidates has no effect: correction.score_centering is false"]),
    (["loss.kl_kind=k2", "loss.kl_in=reward"],
     [f"loss.kl_{key} has no effect: loss.kl_coef is 0" for key in ("kind", "in")]),
    (["advantage.kind=rloo", "advantage.normalize_std=false"],
     ["advantage.normalize_std has no effect: advantage.kind=rloo divides by no deviation"]),
    (["advantage.normalize_std=false"], []),
    (["task.depth=2", "task.instruction=x"],
     ["task.depth has no effect: task.kind=arithmetic has no such setting",
      "task.instruction is for a model that reads text, and the demo model knows digits and "
      "brackets only"]),
    (["task.kind=dyck", "task.size=3", "task.length=8"],
     ["task.size has no effect: task.kind=dyck has no such setting"]),
    (["train.steps=3", "train.warmup_steps=3", "rollout.staleness=3"],
     ["train.warmup_steps=3 is not over after train.steps=3, so the learning rate never reaches "
      "train.lr", "rollout.staleness=3 is as large as train.steps=3, so the engine keeps the first "
      "weights"]),
    (["train.lr=0"], ["train.lr=0 moves nothing"]),
    ([CENTERED % 0.1, "rollout.candidates=9"], []), ([CENTERED % 0.1, "rollout.candidates=8"], [
        "rollout.candidates=8 is too few for correction.rollout_rs.token_tv=0.1: other tokens have "
        "up to 1/9 of μ each, and score centering keeps them all; take at least 9 (chapter 14)"]),
    ([CENTERED % 0.1, "rollout.candidates=8", "rollout.top_k=5"], []),
    ([CENTERED % 0.01], [
        "rollout.candidates=64 is too few for correction.rollout_rs.token_tv=0.01: other tokens "
        "have up to 1/65 of μ each, and score centering keeps them all; take at least 99 "
        "(chapter 14)"]),
    (["policy.lora_alpha=3", "policy.lora_save_merged=true"],
     [f"policy.{key} has no effect: policy.lora_rank is null, so the whole model is trained"
      for key in ("lora_alpha", "lora_save_merged")])])
def test_a_setting_that_another_one_switches_off_is_named(given, said):
    assert remarks(load_config(given)) == said


@pytest.mark.parametrize("clip, said", [(1, 0), (1.5, 1)])
def test_a_clip_without_a_lower_end_is_named(clip, said):
    found = remarks(load_config([f"loss.clip_low={clip}"]))
    assert sum("so the clip has no lower end" in x for x in found) == said


def test_the_horizon_is_a_setting_and_else_the_longest_response():
    """eq:aggregation: H of seq-mean-token-sum-norm."""
    given = ["loss.aggregation=seq-mean-token-sum-norm", "rollout.max_tokens=9"]
    assert loss_of(load_config(given)).horizon == 9
    assert loss_of(load_config([*given, "loss.horizon=7"])).horizon == 7
    assert remarks(load_config(["loss.horizon=7"])) == [
        "loss.horizon has no effect: loss.aggregation=token-mean has no horizon"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_its_own_numbers_unless_others_are_given(name):
    row, more = LOSSES[name], ["correction.bypass_mode=true"] * (LOSSES[name].level is None)
    config = load_config([f"correction.loss_type={name}", "correction.rollout_is=token", *more])
    assert loss_of(config).numbers(row) == row.own
    taught = row._replace(own=dict.fromkeys(row.own, 7.0))        # as in a row of another
    assert loss_of(config).numbers(taught) == taught.own


@pytest.mark.parametrize("given, words", [
    ("train.steps=???", "train.steps must be a whole number, not '[?]{3}'"),
    ("rollout.quantize=[3]", "rollout.quantize must be text or a whole number or null"),
    ("rollout.enforce_eager=5", "rollout.enforce_eager must be true or false or null, not 5"),
    ("trainer.steps=4", "trainer.steps is not a setting; did you mean train.steps"),
    ("algorithm.rollout_correction.rollout_is=token", "of another system: put its block under"),
    ("rollout.rollout_is=token", "of a correction: put its block under"),
    ("algorithm={adv_estimator: grpo, rollout_correction: {rollout_is: token}}",
     "algorithm.adv_estimator is a setting of another system: put its block under")])
def test_what_another_system_would_take_is_refused(given, words):
    with pytest.raises(UserError, match=words):
        load_config([given])


@pytest.mark.parametrize("text", [
    "train: {steps: 1, steps: 2}", "train:\n  lr: 1\ntrain: {steps: 2}"])
def test_a_key_that_stands_twice_is_refused(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=r"a.yaml cannot be .* line \d: a key stands twice"):
        load_config([str(tmp_path / "a.yaml")])


@pytest.mark.parametrize("text, value", [
    ("1e-3", 1e-3), ("+1E5", 1e5), ("1_0.5", 10.5), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf),
    ("0x10", 16), ("1_0", 10), ("2026-11-27", "2026-11-27"), ("1e", "1e"), ("e3", "e3"),
    ("~", None), ("1.2.3", "1.2.3"), (".", "."), ("info", "info"), ("on", True)])
def test_what_yaml_reads(text, value):
    found = load_yaml(text)
    assert found == value and type(found) is type(value)


def test_what_a_run_writes_of_its_settings_is_read_as_the_same(tmp_path):
    """A text that looks like a number, a truth or a date stays a text."""
    given = ["task.instruction=1e3", "policy.path=2026-11-27", "train.lr=1e-05", "run=007"]
    config = load_config([*given, "task.eval_path=null", "train.max_grad_norm=inf"])
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert load_config([str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize("correction, said", [
    ("preset: decoupled_token_is", False), ("preset: decoupled_token_icepop", True),
    ("preset: decoupled_geo_rs", True), ("preset: bypass_pg_token_icepop", True),
    ("rollout_is: token, rollout_is_threshold: [0.5, 2], bypass_mode: true", False)])
def test_a_penalty_that_is_rejected_with_its_token_is_named(correction, said):
    """eq:kl-gradient: where the mask or the weight is 0, the KL in the reward is lost."""
    given = [f"correction={{{correction}}}", "loss.kl_coef=1", "loss.kl_in=reward"]
    for level in "token", "prefix":
        found = remarks(load_config([*given, f"loss.kl_correction={level}"]))
        assert any("leaves out the tokens that are rejected" in x for x in found) == said
    assert not any("leaves out" in x for x in remarks(load_config(given)))


def test_a_penalty_without_a_ratio_has_no_remark_on_the_ratios_level():
    given = ["loss.kl_coef=0.1", "loss.kl_in=reward", "correction.preset=bypass_ppo_clip"]
    assert not any("loss.kl_correction=" in x for x in remarks(load_config(given)))
