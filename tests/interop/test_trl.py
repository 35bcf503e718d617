"""interop/trl.py agrees with TRL's own trainer, in TRL 1.16.0, with a stub in vLLM's place.

The stub answers as TRL's VLLMGeneration does: tokens drawn from a seed, and log-probs that differ
from the trainer's by noise, some of them missing. The model is float64, so that nothing depends on
the processor or its threads but the loss. TRL forms the loss in float32, so its tolerance is that
of a sum. The script and the command of interop/README.md train with TRL, word for word.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from three_policies.tests.support.tolerances import gamma, of_sum
from three_policies.tests.support.trl_stub import (LOSSES, MODES, both_losses, config, environment,
                                                   first_batches)

pytestmark = pytest.mark.usefixtures("trl_required")


# ------------------------------------------------------------------------------- the loss is ours

# A schedule is (accumulation, steps per generation, iterations).
# Each loss is in every mode and every schedule.
SCHEDULES = (2, 2, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2)
SQUARE = [(loss, list(MODES)[(i + j) % 4], schedule) for i, loss in enumerate(LOSSES)
          for j, schedule in enumerate(SCHEDULES)]


@pytest.mark.parametrize("loss, mode, schedule", SQUARE, ids=str)
def test_the_loss_is_trls(trainer, loss, mode, schedule):
    """eq:decoupled-ppo: the value is TRL's to rounding, the gradient exactly, on every micro-batch.

    Some rows are empty.
    """
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    names = dict(zip(
        ("gradient_accumulation_steps", "steps_per_generation", "num_iterations"), schedule))
    ours = trainer(PolicyLossGRPOTrainer, mode, config(mode), loss_type=loss.split()[0], **names,
                   **LOSSES[loss])
    empty = moved = 0
    for inputs in first_batches(ours, schedule[1] * schedule[2]):
        (theirs, expected), (mine, found), apart = both_losses(ours, inputs)
        assert abs(theirs - mine) <= apart and expected.equal(found)
        empty += (inputs["completion_mask"].sum(1) == 0).sum()
        moved += expected.norm() > 0
    assert empty > 0 and moved > 0


def test_evaluation_divides_by_the_batch(trainer):
    """eq:aggregation: evaluation accumulates nothing: the batch is its own generation batch."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    ours = trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"),
                   steps_per_generation=4)
    inputs = next(first_batches(ours, 1))
    ours.model.eval()
    (theirs, expected), (mine, found), apart = both_losses(ours, inputs)
    assert abs(theirs - mine) <= apart and expected.equal(found) and expected.norm() > 0
    assert [*ours._sums] == ["eval"]               # which is logged apart from training
    assert not any(x.requires_grad for x in ours._sums["eval"].values()), "a graph is held"
    mask = inputs["completion_mask"]
    of_tokens = inputs | {"advantages": inputs["advantages"][:, None].expand_as(mask)}
    assert ours._compute_loss(ours.model, of_tokens).item() == mine
    nothing = inputs | {"completion_mask": 0 * mask,
                        "num_items_in_batch": 0 * inputs["num_items_in_batch"]}
    assert ours._compute_loss(ours.model, nothing).item() == 0


def test_a_dual_clip_at_the_clips_own_end_is_carried(trainer):
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"), epsilon=0.25, delta=1.25)


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_tokens_of_all_processes_are_shared_among_them(loss, trainer, monkeypatch):
    """eq:aggregation: gradients are averaged, so each of two divides by half of the tokens."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    ours = trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"), loss_type=loss,
                   **LOSSES.get(loss, {}))
    *_, inputs = first_batches(ours, 2)
    (alone, _), *_ = both_losses(ours, inputs)
    monkeypatch.setattr(type(ours.accelerator), "num_processes", 2)
    (theirs, expected), (mine, found), apart = both_losses(ours, inputs)
    assert abs(theirs - mine) <= apart and expected.equal(found) and theirs != alone


def test_without_vllm_nothing_is_known_of_the_sampler(trainer):
    """eq:ppo-clip: without old_per_token_logps, as in aligned steps, π_old is this forward pass."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    from three_policies.presets import RolloutCorrectionConfig
    ours = trainer(PolicyLossGRPOTrainer, correction=RolloutCorrectionConfig(), use_vllm=False,
                   mask_truncated_completions=False)
    for inputs in first_batches(ours, 2):
        assert not {"old_per_token_logps", "sampling_per_token_logps"} & inputs.keys()
        (theirs, expected), (mine, found), apart = both_losses(ours, inputs)
        assert abs(theirs - mine) <= apart and expected.equal(found) and expected.norm() > 0
    ours.correction = config("token_truncate")
    with pytest.raises(ValueError, match="rollout_log_prob is missing"):
        ours._compute_loss(ours.model, inputs)


@pytest.mark.parametrize("mode", MODES)
def test_tools_tokens_are_masked(trainer, mode):
    """eq:aggregation: tools' tokens are masked in the loss, in the weights and in what divides."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    ours = trainer(PolicyLossGRPOTrainer, mode, config(mode), environment, loss_type="bnpo")
    for inputs in first_batches(ours, 2):
        assert (inputs["tool_mask"] == 0).any()
        (theirs, expected), (mine, found), apart = both_losses(ours, inputs)
        assert abs(theirs - mine) <= apart and expected.equal(found) and expected.norm() > 0


def test_a_rollout_func_without_vllm(trainer):
    """eq:decoupled-ppo: a rollout_func gives log-probs (NaN: none); ρ is of this forward pass."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    ours = trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"), use_vllm=False,
                   rollout_func=environment)
    missing = 0
    for inputs in first_batches(ours, 2):
        assert "old_per_token_logps" not in inputs
        missing += inputs["sampling_per_token_logps"].isnan().sum()
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        log_prob, *_ = ours._get_per_token_logps_and_entropies(
            ours.model, ids, attention, inputs["completion_ids"].shape[1])
        rho = (log_prob.detach() - inputs["sampling_per_token_logps"]).nan_to_num(0.0).exp()
        inputs["importance_sampling_ratio"] = rho.clamp(max=2.0)
        ours.use_vllm = True                                        # so that TRL's loss takes it
        (theirs, expected), (mine, found), apart = both_losses(ours, inputs)
        ours.use_vllm = False
        assert abs(theirs - mine) <= apart and torch.allclose(
            expected, found, rtol=0, atol=2 * gamma(24) * expected.abs().max().item())
        assert expected.norm() > 0
    assert missing > 0


def test_bypass_and_reinforce(trainer):
    """eq:bypass, eq:off-policy: bypass is PPO on π_θ/μ, REINFORCE is −min(π_θ/μ, 2) A log π_θ."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    from three_policies.presets import PRESETS
    ours = trainer(PolicyLossGRPOTrainer, correction=PRESETS["bypass_ppo_clip"](), loss_type="grpo")
    *_, inputs = first_batches(ours, 2)
    mask, A = inputs["completion_mask"], inputs["advantages"][:, None]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], mask], 1)
    log_prob = ours._get_per_token_logps_and_entropies(
        ours.model, ids, attention, mask.shape[1])[0].detach()
    mu = inputs["sampling_per_token_logps"]
    r = torch.where(mu.isnan(), 0.0, log_prob - mu).exp()
    terms = {"bypass_ppo_clip": -torch.minimum(r * A, r.clamp(0.8, 1.2) * A),
             "bypass_pg_is": (-(r.log() * mask).sum(1, keepdim=True).exp().clamp(max=2.0)
                              * A * log_prob)}
    for preset, values in terms.items():
        ours.correction = PRESETS[preset]()
        expected = ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean() / 2
        size = ((values.abs() * mask).sum(1) / mask.sum(1).clamp(min=1)).mean().item() / 2
        apart = 2 * of_sum(size, mask.numel(), before=24)                   # as in both_losses
        assert (torch.allclose(ours._compute_loss(ours.model, inputs), expected, rtol=0, atol=apart)
                and expected != 0)


# --------------------------------------------------------------------------------- what TRL logs

TOKEN_MEANS = "loss/ratio", "loss/approx_kl", "loss/clip_fraction"


@pytest.mark.parametrize(
    "loss, schedule", [("grpo", (2, 2, 1)), ("dapo", (4, 2, 1)), ("dapo", (2, 4, 1))], ids=str)
def test_a_ratio_of_one_is_logged_as_one(trainer, loss, schedule):
    """eq:aggregation: with a learning rate of 0 every r is 1.

    And loss/policy is the loss that TRL logs.
    """
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    accumulated, steps, _ = schedule
    ours = trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"), loss_type=loss,
                   learning_rate=0.0, gradient_accumulation_steps=accumulated,
                   steps_per_generation=steps)
    ours.train()
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        # log π is rounded to float32 twice, and is below 20. A loss of weights up to 2 and
        # |A| = 0.71 is below 2.
        assert [row[name] for name in TOKEN_MEANS] == pytest.approx(
            [1.0, 0.0, 0.0], rel=0, abs=2 * gamma(1) * 20)
        assert (row["loss/policy"] == pytest.approx(
            row["loss"], rel=0, abs=2 * of_sum(2.0, 4, before=3)) and row["loss"] != 0)
        assert "loss/kept_tokens" not in row


def test_logged_means_are_over_all_kept_tokens(trainer, monkeypatch):
    """eq:aggregation, eq:merge: logged means are over everything since the last log.

    The mean of the micro-batches' means is another number.
    """
    from three_policies.interop import trl as recipe
    from three_policies.correction import correct
    from three_policies.losses import policy_loss
    from three_policies.metrics import merge, to_host
    seen, corrections = [], []

    def remember(*args, **options):
        loss, sums = policy_loss(*args, **options)
        seen.append({name: x.item() for name, x in sums.items()})
        return loss, sums

    monkeypatch.setattr(recipe, "policy_loss", remember)
    monkeypatch.setattr(recipe, "correct", lambda *args:
                        corrections.append(correct(*args)) or corrections[-1])
    correction = config("token_truncate", rollout_rs={"token_k1": (0.7, 1.4)}, bypass_mode=True)
    ours = trainer(recipe.PolicyLossGRPOTrainer, correction=correction, logging_steps=2)
    ours.train()
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(seen) == 8 and len(rows) == 2
    for row, calls, parts in zip(rows, (seen[:4], seen[4:]), (corrections[:4], corrections[4:])):
        kept = [x["loss/kept_tokens"] for x in calls]
        assert len(set(kept)) > 1
        for name in (*TOKEN_MEANS, "loss/bypass_clip_fraction"):
            size = sum(abs(x[name]) for x in calls) / sum(kept)
            assert row[name] == pytest.approx(
                sum(x[name] for x in calls) / sum(kept), rel=0, abs=of_sum(size, 4, before=1))
        unweighted = sum(x["loss/ratio"] / max(x["loss/kept_tokens"], 1) for x in calls) / 4
        assert abs(row["loss/ratio"] - unweighted) > 1e-4
        for name, expected in to_host(merge(parts)).items():
            assert row[name] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_logged_means_over_two_ranks(trainer, monkeypatch):
    """eq:aggregation: two micro-batches are logged alike on two ranks and, in turn, on one."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    ours = trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"), loss_type="grpo")
    batches, sent = list(first_batches(ours, 2)), []

    def logged(batches, elsewhere=0.0):
        monkeypatch.setattr(
            ours.accelerator, "reduce", lambda x, _: sent.append(x) or x + elsewhere)
        for inputs in batches:
            ours._compute_loss(ours.model, inputs)
        ours.log(row := {})
        return row

    one_rank = logged(batches)
    logged(batches[:1])
    two_ranks = logged(batches[1:], sent[-1])
    for name in (*TOKEN_MEANS, "loss/policy"):
        # a + b = b + a, to the bit
        assert two_ranks[name] == pytest.approx(one_rank[name], rel=1e-12, abs=1e-12)
    assert abs(one_rank["loss/ratio"] - 1) > 1e-3


# ------------------------------------------------------------------------- TRL's loss, our weights

@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_weights_alone(trainer, monkeypatch, mode, tools):
    """eq:tis, eq:mis: our weights replace importance_sampling_ratio, whatever TRL's mode is.

    A tool's tokens have none, and are no part of a response's.
    """
    from trl import GRPOTrainer

    from three_policies.interop.trl import WeightedGRPOTrainer
    generate, seen = GRPOTrainer._generate_and_score_completions, []

    def remember(self, inputs):
        seen.append(generate(self, inputs))
        return dict(seen[-1])

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", remember)
    ours = trainer(WeightedGRPOTrainer, mode, config(mode), environment if tools else None)
    ours.model.train()
    batch = ours._generate_and_score_completions(
        [{"prompt": f"{i}="} for i in range(8) for _ in range(2)])
    assert ("tool_mask" in batch) == tools
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    ratio = seen[0]["importance_sampling_ratio"] * mask
    assert torch.allclose(batch["importance_sampling_ratio"], ratio, rtol=2 * gamma(24), atol=0)
    assert batch["importance_sampling_ratio"].unique().numel() > 3
    assert ours._metrics["train"]["rollout_corr/rollout_is_mean"][0] > 0


def test_rejection_alone(trainer):
    """eq:rejection: the ratio is 1 where a token is kept and 0 where it is not.

    NaN agrees with all.
    """
    from three_policies.interop.trl import WeightedGRPOTrainer
    from three_policies.presets import RolloutCorrectionConfig
    correction = RolloutCorrectionConfig(rollout_rs={"token_k1": (0.8, 1.2), "opsm": 1e-3})
    ours = trainer(WeightedGRPOTrainer, correction=correction)
    ours.model.eval()
    batch = ours._generate_and_score_completions(
        [{"prompt": f"{i}="} for i in range(8) for _ in range(2)])
    log_rho = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).nan_to_num(0.0)
    log_rho, mask = log_rho * batch["completion_mask"], batch["completion_mask"].bool()
    drift = -log_rho.sum(1) / mask.sum(1).clamp(min=1)
    kept = mask & (log_rho.exp() >= 0.8) & (log_rho.exp() <= 1.2)
    kept &= ~((drift > 1e-3) & (batch["advantages"] < 0))[:, None]
    assert batch["importance_sampling_ratio"].equal(kept.float()) and 0 < kept.sum() < mask.sum()
    assert "rollout_corr/kl" in ours._metrics["eval"] and not ours._metrics["train"]


def test_what_is_of_the_whole_batch_is_of_all_ranks(trainer, monkeypatch):
    """eq:merge: the mean weight and the logged metrics are reduced over the group of ranks."""
    from three_policies.interop import trl as recipe
    groups, make = [], recipe.correct
    monkeypatch.setattr(recipe, "_group", lambda: "all ranks")
    monkeypatch.setattr(recipe, "correct", lambda *given: groups.append(
        given[5:]) or make(*given[:5]))
    monkeypatch.setattr(recipe, "merge", lambda _, *group: groups.append(group) or {})
    ours = trainer(recipe.WeightedGRPOTrainer, correction=config("token_truncate"))
    ours._generate_and_score_completions([{"prompt": f"{i}="} for i in range(8) for _ in range(2)])
    assert groups == [("all ranks",)] * 2
    ours = trainer(recipe.PolicyLossGRPOTrainer, correction=config("token_truncate"))
    for inputs in first_batches(ours, 1):
        ours._compute_loss(ours.model, inputs)
    monkeypatch.setattr(type(ours._statistics["train"]), "all_reduce",
                        lambda self, group: groups.append(group) or self)
    ours.log({})
    assert groups[-1] == "all ranks"


@pytest.mark.parametrize("loss, mode", [("dapo", "token_truncate"), ("dr_grpo", "sequence_mask")])
def test_training_ends_with_trls_weights(trainer, loss, mode):
    """eq:decoupled-ppo: ten steps end alike by TRL's loss, by our weights and by our loss."""
    from trl import GRPOTrainer

    from three_policies.interop.trl import PolicyLossGRPOTrainer, WeightedGRPOTrainer
    ended = []
    for kind in (GRPOTrainer, WeightedGRPOTrainer, PolicyLossGRPOTrainer):
        run = trainer(kind, mode, None if kind is GRPOTrainer else config(mode), loss_type=loss,
                      steps_per_generation=4, max_steps=10)
        start = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
        run.train()
        ended.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert ended[0].equal(ended[1]) and ended[0].equal(ended[2]) and not ended[0].equal(start)
    assert any("rollout_corr/kl" in row and "loss/ratio" in row for row in run.state.log_history)


# ------------------------------------------------------------------------------ what is not carried

@pytest.mark.parametrize("settings, words", [
    ({"beta": 0.1}, "beta"), ({"entropy_coef": 0.1}, "an entropy bonus"),
    ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
    ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold"),
    ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
    ({"loss_type": "vespo"}, "loss_type vespo"), ({"delta": 1.1}, "delta below 1 . epsilon_high"),
    ({"loss_type": "cispo"}, "epsilon_high below 1 under cispo"),
    ({"use_vllm": False}, "use_vllm=False without a rollout_func")])
def test_what_the_loss_does_not_carry_is_named(trainer, settings, words):
    """eq:correction: a setting that the loss does not carry is named rather than ignored."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    with pytest.raises(ValueError, match=f"PolicyLossGRPOTrainer does not carry {words}$"):
        trainer(PolicyLossGRPOTrainer, correction=config("token_truncate"), **settings)


@pytest.mark.parametrize("options, settings, words", [
    ({"rollout_is_batch_normalize": True}, {}, "rollout_is_batch_normalize"),
    ({"rollout_rs": {"second_moment": 0.04}}, {}, "rollout_rs second_moment"),
    ({"score_centering": True, "bypass_mode": True, "loss_type": "reinforce"}, {},
     "score_centering"),
    ({"loss_type": "gspo"}, {"loss_type": "sapo"}, "loss_type gspo under sapo")])
def test_corrections_that_the_loss_does_not_carry(trainer, options, settings, words):
    """eq:correction: so is a correction that it does not carry."""
    from three_policies.interop.trl import PolicyLossGRPOTrainer
    with pytest.raises(ValueError, match=f"does not carry {words}$"):
        trainer(PolicyLossGRPOTrainer, correction=config("token_truncate", **options), **settings)


@pytest.mark.parametrize("options, settings, words", [
    ({"bypass_mode": True}, {}, "bypass_mode"), ({"loss_type": "gspo"}, {}, "loss_type gspo"),
    ({"loss_type": "sapo"}, {}, "loss_type sapo"), ({}, {"loss_type": "vespo"}, "vespo"),
    ({}, {"use_vllm": False}, "use_vllm=False"),
    ({}, {"vllm_importance_sampling_correction": False},
     "vllm_importance_sampling_correction=False")])
def test_what_the_weights_do_not_carry_is_named(trainer, options, settings, words):
    """eq:correction: TRL would leave these out, or has no place for the weights."""
    from three_policies.interop.trl import WeightedGRPOTrainer
    with pytest.raises(ValueError, match=f"WeightedGRPOTrainer does not carry {words}$"):
        trainer(WeightedGRPOTrainer, correction=config("token_truncate", **options), **settings)


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("trl_required")
def test_the_script_of_the_page_trains(tiny_model, tmp_path):
    """eq:decoupled-ppo: three steps, in each of which bfloat16 alone sets ρ apart from 1.

    bfloat16 rounds to 1 part in 256. Samples of another policy than the trainer's, as of a cache
    that gradient checkpointing dropped, have a KL above 1; with the model's own penalty it is 0.02.
    By its generation_config.json any token ends a response.
    """
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(
        {"eos_token_id": [*range(26)], "pad_token_id": 0, "repetition_penalty": 1.1, "top_p": 0.8,
         "top_k": 5, "do_sample": True}))
    page = (ROOT / "interop/README.md").read_text(encoding="utf-8")
    script, command = re.search(r"Save this as `train_trl.py`.*?```python\n(.*?)```.*?"
                                r"```bash\n(python train_trl.*?)\n```", page, re.DOTALL).groups()
    (tmp_path / "train_trl.py").write_text(script)
    python, name, model = shlex.split(command)
    assert python == "python" and "/" in model
    run = subprocess.run(
        [sys.executable, name, "model"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    for key, low, high in (("grad_norm", 0.1, 100), ("rollout_corr/k3_kl", 1e-8, 0.002),
                           ("rollout_corr/is_ratio_max", 1.0001, 1.5),
                           ("completions/mean_length", 4, 16)):
        found = [float(x) for x in re.findall(f"'{key}': '(.*?)'", run.stdout)]
        assert len(found) == 3 and all(low < x < high for x in found), (key, found)
