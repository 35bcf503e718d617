"""The trainer trains with every preset and idea, also from cut sampling, and saves a whole model.

How the work is split is tested by test_gradient_in_parts.py, stops by test_resume.py, numbers that
are not finite by test_nonfinite.py, and what users get wrong by test_mistakes.py.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from three_policies import rollout, trainer
from three_policies.engines.choice import make_engine
from three_policies.presets import PRESETS
from three_policies.rollout import Sample, WeightSync
from three_policies.tests.support.launching import ROOT, shell
from three_policies.tests.support.small import SMALL
from three_policies.tests.support.tolerances import gamma
from three_policies.training import batches, files, tasks
from three_policies.training.faults import process_group
from three_policies.training.report import CURVES
from three_policies.training.settings import Config, LossSettings, leaves, load_config


# -------------------------------------------------------------------------------------- it trains

@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_two_steps(preset, run):
    """The curves are of metrics that every preset has, so those of one are drawn for each mode."""
    drawn = preset in ("decoupled_token_is", "bypass_pg_is")
    code, lines = run(f"correction.preset={preset}", draw=drawn)
    assert code == 0 and [line["step"] for line in lines] == [1, 2]
    assert not drawn or Path("runs/x/curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(value == value and abs(value) < 1e30 for line in lines for value in line.values())
    assert lines[0]["rollout_corr/k3_kl"] > 0      # four-bit weights: the two policies do differ
    assert {*CURVES, "loss/policy", "tokens_per_second", "time/update"} <= set(lines[0])


@pytest.mark.parametrize("preset, plain", [
    ("decoupled_seq_is_rs", "disabled"), ("bypass_ppo_clip_geo_rs", "bypass_ppo_clip")])
def test_a_correction_that_is_only_measured_trains_as_none(preset, plain, run, capsys):
    """The same losses and gradients, digit by digit, and the metrics of what was not applied."""
    runs = {}
    for name, given in (("measured", [f"correction.preset={preset}", "correction.metrics_only=true",
                                      "correction.rollout_is=sequence"]),
                        ("plain", [f"correction.preset={plain}"])):
        code, runs[name] = run(*given, name=name)
        assert code == 0
    for line, other in zip(runs["measured"], runs["plain"], strict=True):
        assert all(line[name] == other[name] for name in ("loss/policy", "grad_norm", "loss/ratio"))
        assert line["rollout_corr/rollout_is_raw_std"] > 0
        assert line["rollout_corr/rollout_rs_masked_fraction"] == 0
        [criterion] = {"seq_sum_k1", "seq_mean_k1"} & {
            name.split("rollout_rs_")[-1].removesuffix("_masked_fraction") for name in line}
        assert line[f"rollout_corr/rollout_rs_{criterion}_masked_fraction"] > 0
    said = capsys.readouterr().err
    assert "metrics_only: true}" in said and "none of them is applied" in said


POLICY_GRADIENT = "bypass_mode: true, loss_type: reinforce"
OPEN = "rollout_is_threshold: .inf"
IDEAS = [
    "rollout_is: prefix", f"rollout_is: prefix, {POLICY_GRADIENT}",
    f"score_centering: true, {POLICY_GRADIENT}",
    f"score_centering: true, rollout_is: token, rollout_is_threshold: 0.9, {POLICY_GRADIENT}",
    f"rollout_is: token, {OPEN}, rollout_rs: {{token_tv: 0.05}}, {POLICY_GRADIENT}",
    f"rollout_is: token, rollout_rs: {{token_tv_outward: 0.05}}, {POLICY_GRADIENT}",
    "rollout_rs: {second_moment: 0.04}", f"rollout_rs: {{second_moment: 0.04}}, {POLICY_GRADIENT}"]


@pytest.mark.parametrize("idea", IDEAS)
def test_every_idea_of_2026_trains(idea, engine_name, run):
    """Each trains on stale, rounded and cut rollouts; one that rejects does so for some tokens."""
    cut = ["rollout.top_p=0.9", "rollout.temperature=0.7"] if "centering" in idea else []
    code, lines = run(f"correction={{{idea}}}", "rollout.staleness=1", *cut, engine=engine_name)
    assert code == 0 and len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()) and line["grad_norm"] > 0
        assert "rs" not in idea or 0 < line["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_a_constant_reward_moves_nothing_with_centered_scores(engine_name, run, monkeypatch):
    """eq:score-centering: on real models a constant advantage gives a gradient of noise around 0.

    μ is rounded, the advantage is 1 for all, and all candidates are known. Without centering the
    gradient is a drift. It is summed over 400 samples of one prompt.
    """
    monkeypatch.setattr(trainer, "reinforce_advantages",
                        lambda rewards, keep: torch.ones_like(rewards))
    norms = {}
    for name, centered in (("plain", "false"), ("centered", "true")):
        code, lines = run(
            f"correction={{rollout_is: token, rollout_is_threshold: 0.8, {POLICY_GRADIENT}, "
            f"score_centering: {centered}}}", "advantage.kind=reinforce", "rollout.samples=200",
            "rollout.prompts=2", "rollout.quantize=3", "train.mini_batches=1",
            "train.micro_batch_size=400", "train.steps=1", "rollout.max_tokens=1", name=name,
            engine=engine_name)
        assert code == 0
        norms[name] = lines[0]["grad_norm"]
    print(engine_name, norms)
    assert norms["centered"] < 0.75 * norms["plain"]


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_a_policy_that_is_its_reference_stands_still(checkpointing, run, monkeypatch):
    """eq:kl-gradient: ∇KL is 0 at θ = ref. Of a difference by rounding AdamW makes a whole step."""
    monkeypatch.setattr(tasks.Task, "reward", lambda *_: 0.0)
    code, lines = run(f"policy.gradient_checkpointing={checkpointing}", "loss.kl_coef=0.1",
                      "train.mini_batches=1", "train.micro_batch_size=16")
    assert code == 0 and [(line["loss/kl"], line["grad_norm"]) for line in lines] == [(0, 0)] * 2


def test_an_engine_without_candidates_cannot_be_centered(run, monkeypatch):
    """An engine of a reader's own may return none: the loss says what it needs."""
    monkeypatch.setattr(rollout, "Sample", lambda *given, **named: Sample(
        *given, **named | {"candidates": None}))
    with pytest.raises(ValueError, match="score_centering needs candidates"):
        run(f"correction={{score_centering: true, {POLICY_GRADIENT}}}", engine="transformers")


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_pg_is", "bypass_ppo_clip_k3_rs"])
def test_presets_with_vllm_under_torchrun(preset, tiny_model, tmp_path, vllm_required):
    ranks = 2 if preset == "decoupled_token_is" else 1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(ranks)]
    result = shell([*torchrun, str(ROOT / "trainer.py"), *SMALL, f"policy.path={tiny_model}",
                    "rollout.engine=vllm", "rollout.dtype=bfloat16",
                    f"correction.preset={preset}", "run=v"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "engine vllm (bfloat16)" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    lines = files.read_metrics(tmp_path / "runs/v/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["rollout_corr/k3_kl"] > 0


def test_weights_that_an_evaluation_loaded_are_not_loaded_again(run, monkeypatch):
    """Fewer loads end with the same bits; a resumed run and other weights than these are loaded."""
    loads, update = [], rollout.TransformersEngine.update_weights
    monkeypatch.setattr(rollout.TransformersEngine, "update_weights",
                        lambda *given: loads.append(1) or update(*given))
    exact, found = ["rollout.quantize=null", "train.eval_every=2", "train.lr=0.01"], {}
    for name, settings, steps, expected in (
            ("exact", exact, 3, 4),                # at the start, and once after each step
            ("exact", exact, 5, 3),                # at the start of the resumed run, and after each
            ("rounded", [*exact, "rollout.quantize=4"], 3, 4 + 3),   # and each evaluation's
            ("stale", [*exact, "rollout.staleness=1"], 3, 4 + 3)):
        code, _ = run(*settings, f"train.steps={steps}", name=name)
        assert code == 0 and len(loads) == expected, name
        loads.clear()
    monkeypatch.setattr(WeightSync, "as_is", False)
    for name in ("exact", "twice"):
        run(*exact, "train.steps=5", name=name)
        found[name] = load_file(f"runs/{name}/model/model.safetensors")
    assert len(loads) == 6 + 4 and all(
        torch.equal(x, found["twice"][key]) for key, x in found["exact"].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_a_model_is_saved_in_its_sources_dtype_and_checkpoints_in_float32(
        dtype, run, tiny_model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(source)
    if dtype is None:                              # config.json does not say it
        config = json.loads((source / "config.json").read_text())
        del config["dtype"]
        (source / "config.json").write_text(json.dumps(config))
    code, _ = run(f"policy.path={source}", "train.steps=1")
    assert code == 0
    saved = load_file("runs/x/model/model.safetensors")
    [masters] = map(load_file, Path("runs/x/checkpoints").glob("step-000001/*.safetensors"))
    named = json.loads(Path("runs/x/model/config.json").read_text())["dtype"]
    assert {x.dtype for x in saved.values()} == {dtype or torch.float32}
    assert f"torch.{named}" == str(dtype or torch.float32)
    for name, x in saved.items():                  # rounded once, from what is trained on
        master = masters[f"policy.model.{name}"]
        assert master.dtype == torch.float32 and torch.equal(master.to(x.dtype), x)


CUT = ["rollout.top_p=0.9", "rollout.top_k=8", "train.steps=10", "train.lr=0.01",
       "loss.kl_coef=0.1"]
# k3 is E[ρ] − 1 − E[log ρ] in float32, of ρ near 1: e^x, five terms in a row, and what joins them.
NO_KL = gamma(16)


@pytest.mark.parametrize("settings", [
    [], ["rollout.staleness=2", "rollout.quantize=4"],
    ["correction.preset=bypass_pg_is", "train.mini_batches=1"]])
def test_sampling_cut_by_top_p_and_top_k_trains(engine_name, settings, run, monkeypatch):
    """ρ is 1 to rounding at every step without staleness: what is trained is what sampled."""
    sets, kept_ids = [], batches.gather_kept_ids
    monkeypatch.setattr(batches, "gather_kept_ids",
                        lambda *args: sets.append(kept_ids(*args)) or sets[-1])
    code, lines = run("rollout.quantize=null", *CUT, *settings, engine=engine_name)
    assert code == 0 and len(lines) == 10
    assert all(math.isfinite(value) for line in lines for value in line.values())
    late = "rollout.staleness=2" in settings
    assert all((line["rollout_corr/k3_kl"] < NO_KL) != late for line in lines)
    assert lines[-1]["loss/kl"] > 1e-5 and lines[-1]["grad_norm"] > 0
    assert len(sets) == 10
    assert {x.shape[:2] == (16, 5) and 1 < x.shape[2] <= 8 for x in sets} == {True}


def test_sampling_cut_by_min_p_trains(engine_name, run, monkeypatch):
    """k3 is that of two float32 computations without staleness, since the sets are the engine's.

    The sets do leave tokens out.
    """
    sets, kept_ids = [], batches.gather_kept_ids
    monkeypatch.setattr(batches, "gather_kept_ids",
                        lambda *args: sets.append(kept_ids(*args)) or sets[-1])
    code, lines = run("rollout.quantize=null", "rollout.min_p=0.2", "rollout.temperature=0.7",
                      "loss.kl_coef=0.1", engine=engine_name)
    assert code == 0 and len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["rollout_corr/k3_kl"] < NO_KL and line["grad_norm"] > 0
    assert len(sets) == 2
    assert {x.shape[:2] == (16, 5) and 1 < x.shape[2] < 20 for x in sets} == {True}


def test_a_metric_that_leaves_its_range_is_spoken_of_when_it_first_does_and_at_the_end(run, capfd):
    run("correction.preset=decoupled_geo_rs")          # 0.1 % is too narrow for four-bit weights
    said = capfd.readouterr().err
    assert said.count("* step 1: rollout_rs_seq_masked_fraction is") == 1
    assert "* step 2: rollout_rs_seq_masked_fraction" not in said
    assert "* rollout_rs_seq_masked_fraction is" in said.split("before")[-1]


def test_appendix_a_has_a_row_for_every_metric_of_a_run(run):
    """A row may shorten a name to its end: `response/count`, `/tokens`."""
    page = (ROOT / "math/appendix-metrics.md").read_text().split("\n## ")[2]
    named = re.findall("`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", page, re.M)))
    _, lines = run("loss.kl_coef=0.1")
    missing = {name for line in lines for name in line
               if not name.startswith(("rollout_corr/", "time/")) and name not in named
               and not any(short[0] in "_/" and name.endswith(short) for short in named)}
    assert missing == {"step"}


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_term_and_reference_policy(where, run):
    code, lines = run("loss.kl_coef=0.1", f"loss.kl_in={where}", "train.mini_batches=1",
                      "train.lr=0.01")
    assert code == 0
    assert abs(lines[0]["loss/kl"]) < 1e-5 < lines[1]["loss/kl"]       # it starts at the reference


def test_learning_is_no_mismatch(run):
    """The first mini-batch clips nothing where μ = π_old; later clips are this step's learning."""
    code, lines = run("correction.preset=bypass_ppo_clip", "rollout.quantize=null",
                      "train.lr=0.05", "train.mini_batches=4", "train.epochs=2",
                      "loss.clip_low=0.01", "loss.clip_high=0.01")
    assert code == 0
    assert all(line["loss/bypass_clip_fraction"] == 0 < line["loss/clip_fraction"]
               for line in lines)


def test_a_generation_config_that_transformers_would_not_write_is_written(
        run, tiny_model, tmp_path):
    """A temperature without do_sample, as some models have, was refused after the last step."""
    path, given = tmp_path / "source", {"eos_token_id": 1, "temperature": 0.9}
    shutil.copytree(tiny_model, path)
    (path / "generation_config.json").write_text(json.dumps(given))
    assert run(f"policy.path={path}", "train.steps=1")[0] == 0
    found = json.loads(Path("runs/x/model/generation_config.json").read_text())
    assert given.items() <= found.items() and Path("runs/x/model/model.safetensors").exists()


def test_every_sample_of_a_run_has_a_seed_of_its_own(run, monkeypatch):
    """Two samples of one seed would be drawn with the same noise."""
    seeds, generate = [], rollout.TransformersEngine.generate
    monkeypatch.setattr(rollout.TransformersEngine, "generate", lambda self, prompts, own, **how: (
        seeds.extend(own) or generate(self, prompts, own, **how)))
    run()
    assert len({seed % 2 ** 32 for seed in seeds}) == 2 * 16 + 8     # an evaluation's come again


def test_what_is_set_reaches_the_clip_and_the_optimizer(run, monkeypatch):
    given, clip, update = [], torch.nn.utils.clip_grad_norm_, trainer.update
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: (
        given.append(most) or clip(parameters, most)))
    monkeypatch.setattr(trainer, "update", lambda run, *of: given.append(
        run.loaded.optimizer.param_groups[0]["weight_decay"]) or update(run, *of))
    run("train.max_grad_norm=0.25", "train.weight_decay=0.5", "train.steps=1")
    assert given == [0.5, 0.25] * 2 and Config().train.weight_decay == 0     # torch's own is 0.01


def test_evaluations_are_where_they_are_due_and_accuracy_counts_whole_rewards(run, monkeypatch):
    monkeypatch.setattr(tasks.Task, "reward", lambda *_: 0.3)
    _, lines = run("train.steps=5", "train.eval_every=3")
    assert [x["step"] for x in lines if "eval/accuracy" in x] == [1, 3, 5]      # 1: before it
    assert all(x["reward/mean"] == pytest.approx(0.3) for x in lines)
    assert {x.get("eval/accuracy", 0.0) for x in lines} == {0.0}


NOTHING = "correction={rollout_rs: {seq_max_k1: [1e9, null]}}"
CENTERED = ("correction={score_centering: true, bypass_mode: true, loss_type: reinforce, "
            "rollout_rs: {token_k1: [1e9, null]}}")


@pytest.mark.parametrize("given, empty", [
    ([NOTHING], 2), (["correction.preset=decoupled_token_is"], 0),
    ([NOTHING, "loss.kl_coef=0.1"], 0), ([CENTERED, "rollout.candidates=4"], 0)])
def test_mini_batches_without_a_survivor_are_counted_and_named(given, empty, run, capsys):
    code, lines = run(*given, "train.weight_decay=1")
    assert code == 0 and [line["train/empty_updates"] for line in lines] == [empty] * 2
    same = lines[1]["eval/accuracy"] == lines[0]["eval/accuracy"]
    assert same or not empty                           # not even by weight decay
    named = "of some mini-batches nothing was kept; they took no step"
    assert (named in capsys.readouterr().err) == (empty > 0)


def test_in_bypass_mode_the_mismatch_is_that_of_the_first_epoch(run):
    """Later epochs compare μ with a policy that has moved."""
    one, two = (run("correction.preset=bypass_pg_is", "train.steps=1", "train.lr=0.01",
                    f"train.epochs={n}", name=f"{n}-epochs")[1][0] for n in (1, 2))
    names = [name for name in one if name.startswith("rollout_corr/")]
    assert names and [one[name] for name in names] == [two[name] for name in names]
    assert one["grad_norm"] != two["grad_norm"]


def test_kl_in_the_reward_is_a_return_to_go():
    old = torch.tensor([[-1.0, -2.0, -3.0, 9.0]])
    ref = torch.tensor([[-1.5, -2.0, -4.0, -9.0]])
    mask, config = torch.tensor([[True, True, True, False]]), trainer.Config()
    config.loss = LossSettings(kl_coef=2.0, kl_in="reward", kl_kind="k1")
    batch = trainer.Batch(None, None, mask, torch.ones(1, 4), old, old, ref)
    found = trainer.with_kl_in_reward(batch, config).advantages
    assert found.tolist() == [[-2.0, -1.0, -1.0, 1.0]]


# ------------------------------------------------------------------------- what it says and leaves

def test_finished_model_reloads_and_reproduces_the_accuracy(run):
    _, lines = run("train.lr=0.01", "task.eval_size=32")
    config = load_config(["runs/x/config.yaml"])
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/x/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("runs/x/model")
    saved = [json.loads(line) for line in Path("runs/x/eval.jsonl").read_text().splitlines()]
    engine = make_engine("transformers", "runs/x/model", dtype="float32", max_model_len=32)
    samples = engine.generate([tokenizer(a["question"]).input_ids for a in saved],
                              [tasks.seed_of(config.seed, "eval", i) for i in range(32)],
                              temperature=1.0, max_tokens=5, eos_ids=[model.config.eos_token_id])
    texts = [tokenizer.decode(s.tokens, skip_special_tokens=True) for s in samples]
    assert texts == [a["response"] for a in saved]
    assert sum(len(text) % 2 for text in texts) / 32 == lines[-1]["eval/accuracy"]


def test_a_preset_with_another_value_is_called_changed(run, capsys):
    for more, said in (([], "decoupled_token_is\n"),
                       (["correction.rollout_is_threshold=3"], "decoupled_token_is, changed\n")):
        assert run("train.steps=1", *more, name=f"x{len(more)}")[0] == 0
        assert f"correction {said}" in capsys.readouterr().err


def test_a_reader_of_the_help_may_go_early(forks):
    """As `| head -1` does."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as end:
        found = subprocess.run([sys.executable, *forks, ROOT / "trainer.py", "--help"], stdout=end,
                               stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_help_lists_every_setting_with_its_default_and_meaning(capsys):
    assert trainer.main(["--help"]) == 0
    said = capsys.readouterr().out
    for key, kind, of in leaves(Config):
        if not is_dataclass(kind):
            entry = rf"^  {re.escape(key)}=.*\n      {re.escape(of.metadata['meaning'])} \("
            assert re.search(entry, said, re.MULTILINE), key
    for line in ("  train.steps=150\n      steps of sampling and updating (a whole number, at "
                 "least 1)",
                 "  policy.path=null\n",
                 "  loss.kl_kind=null\n      the KL's estimator; null: k3+ in the loss, k1 in the "
                 "reward; + takes k2's gradient"):
        assert line in said


@pytest.mark.parametrize("masked, learned, length", [
    ("false", [1, 1, 1, 0, 0, 0, 1, 1], 4), ("true", [1, 1, 0, 0, 0, 0, 1, 0], 3)])
def test_what_a_step_says_of_its_responses(masked, learned, length):
    """The third prompt's rewards are no numbers; one response is empty, and two are cut."""
    nan = math.nan
    rewards = iter([-1.0, 1.0, 2.0, 2.0, nan, nan, 1.0, 1.0])
    lengths, named = [4, 2, 5, 0, 3, 5, 3, 6], []
    samples = [Sample([3] * n, [-1.0] * n, finished=i not in (2, 7),
                      versions=[i % 3 if t == n - 1 else 0 for t in range(n)])
               for i, n in enumerate(lengths)]
    config = load_config(["rollout.prompts=4", "rollout.samples=2", "advantage.kind=reinforce",
                          f"rollout.mask_truncated={masked}"])
    with process_group() as device:
        batch, found = trainer.sample(SimpleNamespace(
            config=config, device=device, loaded=SimpleNamespace(
                prompts=[[5]] * 8, engine=SimpleNamespace(sleep=list),
                tokenizer=SimpleNamespace(decode=str),
                task=SimpleNamespace(train=[tasks.Problem("", "", f"row {i}") for i in range(8)],
                                     order=lambda seed, first, n: range(first, first + n),
                                     reward=lambda problem, text: next(rewards))),
            record=SimpleNamespace(
                show_first=lambda *_: None, judge_match=lambda *_: None,
                nonfinite=lambda kind, sentences: named.extend(sentences)),
            generate=lambda *_: (samples, ["x" * n for n in lengths])), 2)
    assert [sentence.partition(" for ")[2] for sentence in named] == [
        "row 6 is nan"] * 2                            # of step 2, whose prompts are rows 4 to 7
    assert batch.response_mask.any(1).tolist() == [bool(x) for x in learned]
    assert {name: float(x) for name, x in found.items()} == {
        "reward/mean": 1, "reward/std": 1, "reward/groups_without_signal": 3 / 4,
        "reward/advantage_max": 2, "response/count": 8, "response/learned_fraction":
        sum(learned) / 8, "response/learned_length_mean": length, "response/crossed_fraction":
        5 / 8, "response/tokens": 28, "response/length_mean": 3.5, "response/length_max": 6,
        "response/truncated_fraction": 1 / 4, "response/empty_fraction": 1 / 8}
