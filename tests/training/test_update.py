"""`update` itself is enumerated: a tabular policy, every response, float64, no model.

The gradient that the trainer's optimizer is given, averaged over all responses of μ, is the row of
chapter 13's table that the settings name. A mini-batch with a gradient of 0 takes no step.
"""

import math
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from three_policies import trainer
from three_policies.oracle import (Policy, close, exact_gradient, expectation, grad_J, kl, rewards,
                                   token_kl)
from three_policies.tests.support.tolerances import gamma
from three_policies.training.faults import process_group
from three_policies.training.remarks import remarks
from three_policies.training.settings import TrainConfig, correction_of, load_config

PI = Policy(3, 3, seed=0)
MU, REF = PI.perturbed(1, 0.5), PI.perturbed(3, 0.5)
FULL = exact_gradient(PI, kl(PI, REF))
OF_TOKENS = exact_gradient(PI, token_kl(PI, REF, visits=MU))        # in the states that μ visits
OF_TOKENS_ON_POLICY = exact_gradient(PI, token_kl(PI, REF, visits=PI))
EXACT = "{rollout_is: sequence, rollout_is_threshold: .inf}"
MODES = {
    "no weights": "{preset: disabled}",
    "token weights": "{rollout_is: token, rollout_is_threshold: .inf}",
    "sequence weights": EXACT, "truncated": "{rollout_is: token, rollout_is_threshold: 1.1}",
    "normalised": "{rollout_is: token, rollout_is_batch_normalize: true}",
    "bypass": "{bypass_mode: true}", "bypass gspo": "{bypass_mode: true, loss_type: gspo}",
    "bypass sapo": "{bypass_mode: true, loss_type: sapo}",
    "bypass reinforce": "{bypass_mode: true, loss_type: reinforce}",
    "bypass reinforce, sequence weights":
        "{bypass_mode: true, loss_type: reinforce, rollout_is: sequence}"}


class Table(nn.Module):
    """A Table is an oracle's policy in a model's place: rows are prompt (a token) and response."""

    def __init__(self, policy):
        super().__init__()
        self.logits, self.states = nn.Parameter(policy.logits.detach().clone()), {}
        for tokens, states, mask in zip(policy.tokens.tolist(), policy.states, policy.mask,
                                        strict=True):
            self.states[tuple(tokens)] = states, mask

    def forward(self, tokens, attention, width, shape=None, kept_ids=None):
        found = (self.states[tuple(row)] for row in tokens[:, 1:].tolist())
        states, masks = (torch.stack(x) for x in zip(*found))
        chosen = self.logits.log_softmax(-1)[states].gather(-1, tokens[:, 1:, None])[..., 0]
        return torch.where(masks, chosen, 0.0)


@pytest.fixture
def run():
    """run(*overrides) returns settings, a sharded table, and the gradients of its optimizer."""
    with process_group() as device:
        def opened(*overrides, pi=PI):
            config = load_config([
                "task.size=1", "train.max_grad_norm=1e9", "loss.aggregation=seq-mean-token-sum",
                "loss.clip_low=1", "loss.clip_high=1e9", "rollout.samples=1", *overrides])
            mesh = torch.distributed.init_device_mesh(device.type, (1,))
            policy: Any = fully_shard(Table(pi), mesh=mesh)
            found = []

            def step():
                found.append(policy.logits.grad.full_tensor().flatten().clone())

            return SimpleNamespace(
                config=config, found=found, loaded=SimpleNamespace(
                    policy=policy,
                    optimizer=SimpleNamespace(step=step, zero_grad=policy.zero_grad)))
        yield opened


def of_response(i, advantages, ref=None):
    """Return responses as a batch: all that the trainer would know of them."""
    tokens = torch.cat([torch.zeros(len(i), 1, dtype=torch.long), PI.tokens[i]], 1)
    attention = torch.cat([torch.ones(len(i), 1, dtype=torch.long), PI.mask[i].long()], 1)
    return trainer.Batch(tokens, attention, PI.mask[i], advantages[i], MU.log_probs().detach()[i],
                         ref_log_prob=None if ref is None else ref.log_probs().detach()[i])


def mean_gradient(run, advantages):
    """Return E_μ of the gradient of one response's update, as `train` prepares it."""
    config, options, gradients = run.config, correction_of(run.config), []
    for i in range(len(PI.tokens)):
        batch = of_response([i], advantages, REF if config.loss.kl_coef else None)
        if not options.bypass_mode or trainer.penalizes(config):
            batch = batch._replace(old_log_prob=trainer.score(run.loaded.policy, batch, config))
        batch = trainer.with_kl_in_reward(batch, config)
        correction = None if options.bypass_mode else trainer.correct(
            batch.old_log_prob, batch.rollout_log_prob, batch.response_mask, options,
            batch.advantages)
        trainer.update(run, batch, options, correction)
        gradients.append(run.found[-1])
    return expectation(MU, torch.stack(gradients))


# ----------------------------------------------------------------------------------- the KL's rows

NOTHING = torch.zeros(len(PI.tokens), 3, dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind, level, target", [
    ("k3+", "token", OF_TOKENS), ("k2", "token", OF_TOKENS),
    ("k3", "token", OF_TOKENS), ("k1", "token", OF_TOKENS),
    ("k1", "prefix", FULL), ("k3", "prefix", FULL), ("k3+", "prefix", OF_TOKENS_ON_POLICY),
    ("k2", "prefix", OF_TOKENS_ON_POLICY), (None, None, OF_TOKENS)])
def test_the_kl_in_the_loss_is_its_row_of_the_table(mode, kind, level, target, run):
    """eq:kl-ratio, eq:prefix: the KL in the loss has its own weights, whatever the mode's are."""
    given = [f"loss.kl_kind={kind}", f"loss.kl_correction={level}"] if kind else []
    opened = run(f"correction={MODES[mode]}", "loss.kl_coef=1", *given)
    assert close(mean_gradient(opened, NOTHING), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "prefix"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("log_pi, log_mu, log_ref", [
    (-12.0, -12.0, -2.0), (-21.0, -21.0, -2.0), (-24.0, -24.0, -2.0),
    (-20.0, -1.0, -1.0), (-22.0, -3.0, -1.0), (-30.0, -1.0, -1.0)])
def test_a_kl_beyond_its_clamps_has_size_and_sign(log_pi, log_mu, log_ref, kind, level, dtype, run):
    """eq:kl-ratio: what the optimizer is given is ρℓ∇log π (k1: ρ(ℓ + 1)∇log π), at any ℓ.

    For the first of two tokens, ∇log π is (1 − π, π − 1). ℓ is −10 to −29, ρ is 1 or stale.
    """
    pi = Policy(2, 1)
    pi.logits = torch.tensor([[log_pi, math.log1p(-math.exp(log_pi))]], dtype=dtype,
                             requires_grad=True)
    opened = run("correction={preset: disabled}", "loss.kl_coef=1", f"loss.kl_kind={kind}",
                 f"loss.kl_correction={level}", pi=pi)
    row = pi.tokens[:, 0].tolist().index(0)
    mask, given = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[log_mu], [log_ref]]).to(dtype)
    tokens = torch.cat([torch.zeros(1, 1, dtype=torch.long), pi.tokens[[row]]], 1)
    batch = trainer.Batch(tokens, torch.ones(1, 2, dtype=torch.long), mask, 0 * given[:1],
                          given[:1], ref_log_prob=given[1:])
    batch = batch._replace(old_log_prob=trainer.score(opened.loaded.policy, batch, opened.config))
    trainer.update(opened, batch, correction_of(opened.config), None)
    rho, ell = math.exp(log_pi - log_mu), log_pi - log_ref
    right = rho * (ell + (kind == "k1")) * -math.expm1(log_pi)
    # log π is rounded, and so is ρ with it; k3 has 3·√ε beside it.
    rel = gamma(int(8 - 2 * log_pi), dtype) + torch.finfo(dtype).eps ** 0.5
    assert opened.found[-1].tolist() == pytest.approx([right, -right], rel=rel)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bypass sapo"])
@pytest.mark.parametrize("level, target", [("token", OF_TOKENS), ("prefix", FULL)])
def test_the_kl_in_the_reward_is_its_row_of_the_table(mode, level, target, run):
    """eq:kl-gradient, eq:prefix: the loss's own weights are divided out, so they act once."""
    opened = run(f"correction={MODES[mode]}", "loss.kl_coef=1", "loss.kl_in=reward",
                 f"loss.kl_correction={level}")
    assert close(mean_gradient(opened, NOTHING), target)


@pytest.mark.parametrize("mode, exact", [(mode, mode == "sequence weights") for mode in MODES])
def test_without_ratios_a_penalty_is_weighted_as_the_reward_is(mode, exact, run):
    """Off-policy a penalty in the reward is as right as the weights, with uncapped ones exactly."""
    opened = run(f"correction={MODES[mode]}", "loss.kl_coef=1", "loss.kl_in=reward")
    error = ((mean_gradient(opened, NOTHING) - FULL).norm() / FULL.norm()).item()
    print(f"{mode}: {error:.3f}")
    assert error < 1e-12 if exact else error > 0.05


def test_uncorrected_the_kl_is_another(run):
    """k3+ without a ratio is 0.59 of ‖∇KL‖ away from the gradient per token."""
    opened = run("correction={preset: disabled}", "loss.kl_coef=1", "loss.kl_correction=none")
    found = mean_gradient(opened, NOTHING)
    assert f"{((found - OF_TOKENS).norm() / FULL.norm()).item():.2f}" == "0.59"


def test_the_reward_and_its_penalty_together(run):
    """Exact weights give ∇(J − β KL), for the penalty in the loss and in the reward."""
    R = rewards(PI)
    for place in (["loss.kl_kind=k1"], ["loss.kl_in=reward"]):
        opened = run(f"correction={EXACT}", "loss.kl_coef=0.5", "loss.kl_correction=prefix", *place)
        assert close(-mean_gradient(opened, R.expand(-1, 3)), grad_J(PI, R) - 0.5 * FULL)


def test_the_longest_response_that_is_allowed_divides_loss_and_kl(run):
    """eq:aggregation: whatever the batch's own longest response is."""
    given = [f"correction={EXACT}", "loss.kl_coef=1", "rollout.max_tokens=7"]
    plain, by_length = (mean_gradient(run(*given, *more), rewards(PI).expand(-1, 3)) for more in (
        [], ["loss.aggregation=seq-mean-token-sum-norm"]))
    assert close(7 * by_length, plain)


def test_the_kl_in_the_loss_is_divided_by_all_tokens_whatever_is_kept(run):
    given = ["correction={rollout_rs: {token_k1: [0.8, 1.2]}}", "loss.aggregation=token-mean",
             "loss.kl_coef=1"]
    fixed, kept = (mean_gradient(run(*given, f"loss.denominator={x}"), NOTHING)
                   for x in ("fixed", "kept"))
    assert close(kept, fixed) and fixed.norm() > 0


def test_in_bypass_mode_the_penalty_is_of_the_trainers_policy(run):
    """The penalty is that of π_θ in bypass mode, too.

    With the sampler's log-prob it would have the gradient of KL(π‖π_ref) − KL(π‖μ).
    """
    opened = run("correction={bypass_mode: true, loss_type: reinforce, rollout_is: sequence, "
                 "rollout_is_threshold: .inf}", "loss.kl_coef=1", "loss.kl_in=reward")
    assert close(mean_gradient(opened, NOTHING), FULL)
    assert "does not save its forward pass" in remarks(opened.config)[0]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "sapo", "cispo"])
def test_a_loss_whose_ratio_cannot_be_divided_out_says_so(loss, run):
    opened = run(f"correction={{bypass_mode: true, loss_type: {loss}}}", "loss.kl_coef=1",
                 "loss.kl_in=reward", "loss.kl_correction=prefix", "loss.clip_high=0.2")
    error = ((mean_gradient(opened, NOTHING) - FULL).norm() / FULL.norm()).item()
    print(f"{loss}: {error:.3f}")
    assert error > 0.01 and any("only roughly" in sentence for sentence in remarks(opened.config))


@pytest.mark.parametrize("given, said", [
    (["loss.kl_in=reward", "correction={preset: bypass_pg_is, rollout_is: token, "
      "score_centering: true}"], "loss.kl_in=reward is only roughly right with correction.score_"),
    (["loss.kl_in=reward", "loss.kl_kind=k3"],
     "loss.kl_kind=k3 in the reward has another gradient than the KL"),
    (["loss.kl_kind=kl", "loss.kl_correction=none"],
     "loss.kl_kind=k1 in the loss has a gradient of 0 on average"),
    (["loss.kl_kind=k1"], None), (["loss.kl_in=reward"], None), (["loss.kl_kind=k3"], None),
    ([], None)])
def test_what_cannot_be_right_is_said(given, said):
    found = remarks(load_config(["loss.kl_coef=0.1", *given]))
    assert found == [] if said is None else found[0].startswith(said)
    of_kl = [key for key in ("loss.kl_kind", "loss.kl_in", "loss.kl_correction")
             if any(setting.startswith(f"{key}=") for setting in given)]
    assert remarks(load_config(given)) == [                           # no KL term at all
        f"{key} has no effect: loss.kl_coef is 0" for key in of_kl]


# --------------------------------------------------------------------------- nothing to learn from

def updated(opened, advantages, rows=None):
    """Return how many steps one update of these rows takes, and how many empty ones it counts."""
    config, options = opened.config, correction_of(opened.config)
    batch = of_response(list(range(len(PI.tokens))) if rows is None else rows, advantages,
                        REF if config.loss.kl_coef else None)
    batch = batch._replace(old_log_prob=trainer.score(opened.loaded.policy, batch, config))
    correction = trainer.correct(batch.old_log_prob, batch.rollout_log_prob, batch.response_mask,
                                 options, batch.advantages)
    found = trainer.update(opened, batch, options, None if options.bypass_mode else correction)
    assert all(math.isfinite(value) for value in found.metrics.values())
    return len(opened.found), found.empty


ONES = torch.ones(len(PI.tokens), 3, dtype=torch.float64)


@pytest.mark.parametrize("settings, steps", [
    (["correction={rollout_rs: {seq_max_k1: [1e9, null]}}"], 0),
    (["correction={rollout_is: token, rollout_is_threshold: [1e9, 1e10]}"], 0),  # weights 0
    (["correction={bypass_mode: true, rollout_is: token, rollout_is_threshold: [1e9, 1e10]}"], 1),
    (["correction={rollout_rs: {seq_max_k1: [1e9, null]}}", "loss.denominator=kept"], 0),
    (["correction={bypass_mode: true, loss_type: reinforce, rollout_rs: {token_k1: [1e9, null]}}"],
     0),
    (["correction={rollout_rs: {seq_max_k1: [1e9, null]}}",
      "loss.kl_coef=0.1"], 1),                                          # the KL is of all tokens
    (["correction={rollout_rs: {seq_max_k1: [1e9, null]}}", "loss.kl_coef=0.1",
      "loss.kl_in=reward"], 0),
    (["correction={preset: decoupled_token_is}"], 1)])
def test_a_mini_batch_of_which_nothing_is_kept_takes_no_step(settings, steps, run):
    assert updated(run(*settings), ONES) == (steps, 1 - steps)


BYPASS = "bypass_mode: true, loss_type: reinforce"


@pytest.mark.parametrize("settings", [
    [f"correction={{{BYPASS}, rollout_is: token, rollout_is_batch_normalize: true}}"],
    [f"correction={{{BYPASS}, rollout_rs: {{second_moment: 0.1}}}}"],
    [f"correction={{{BYPASS}, rollout_rs: {{token_k1: [0.8, 1.2]}}}}", "loss.denominator=kept"]])
def test_in_bypass_mode_micro_batches_share_what_the_mini_batch_decides(settings, run):
    """The mean weight, the largest ratio and the number of tokens that are kept are the whole's."""
    whole, split = (run(*settings, "loss.aggregation=token-mean", f"train.micro_batch_size={n}")
                    for n in (len(PI.tokens), 3))
    for opened in whole, split:
        updated(opened, rewards(PI).expand(-1, 3))
    assert close(split.found[0], whole.found[0])


def test_in_bypass_mode_too_the_kept_tokens_may_divide(run):
    given = [f"correction={{{BYPASS}, rollout_rs: {{token_k1: [0.8, 1.2]}}}}",
             "loss.aggregation=token-mean"]
    fixed, kept = (run(*given, f"loss.denominator={x}") for x in ("fixed", "kept"))
    for opened in fixed, kept:
        updated(opened, rewards(PI).expand(-1, 3))
    stay = trainer.correct(PI.log_probs(), MU.log_probs(), PI.mask, correction_of(kept.config)).mask
    assert stay.sum() < PI.mask.sum()
    assert close(kept.found[0] * stay.sum(), fixed.found[0] * PI.mask.sum())


def test_a_mini_batch_without_a_difference_in_reward_takes_no_step(run):
    """All advantages are 0, but tokens are kept: that is no empty update."""
    assert updated(run("correction={preset: decoupled_token_is}"), NOTHING) == (0, 0)
    assert updated(run("correction={preset: bypass_pg_is}"), NOTHING) == (0, 0)


@pytest.mark.parametrize("schedule", get_args(get_type_hints(TrainConfig)["schedule"]))
def test_every_schedule_but_the_constant_one_moves(schedule):
    rates, run = [], SimpleNamespace(
        config=load_config([f"train.schedule={schedule}", "train.steps=5", "train.lr=1"]),
        loaded=SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}])))
    run.config.train.warmup_steps = 0
    for step in range(1, 6):
        trainer.set_learning_rate(run, step)
        rates.append(run.loaded.optimizer.param_groups[0]["lr"])
    assert rates[0] == 1 and (len(set(rates)) == 1) == (schedule == "constant")


@pytest.mark.parametrize("steps, warmup, rates", [
    (4, 0, [1, 0.8536, 0.5, 0.1464]), (1, 0, [1]), (4, 2, [1 / 3, 2 / 3, 1, 0.5]),
    (2, 9, [0.1, 0.2])])
def test_a_cosine_leaves_something_for_the_last_step(steps, warmup, rates):
    config = load_config(["train.schedule=cosine", f"train.steps={steps}", "train.lr=1",
                          f"train.warmup_steps={warmup}"])
    group, found = {}, []
    for step in range(1, steps + 1):
        trainer.set_learning_rate(SimpleNamespace(
            config=config, loaded=SimpleNamespace(
                optimizer=SimpleNamespace(param_groups=[group]))), step)
        found.append(group["lr"])
    assert found == pytest.approx(rates, abs=1e-4)


def test_adam_would_have_moved_the_weights(run):
    """After one real step, AdamW with a gradient of 0 goes on by 0.67 of it, by momentum alone."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer, places = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0), [0.0]
    for gradient in (1.0, 0.0):
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
        places.append(weight.item())
    assert f"{(places[2] - places[1]) / (places[1] - places[0]):.2f}" == "0.67"


# ------------------------------------------------------------------------- the losses' own numbers

def test_each_loss_has_its_own_clip_unless_one_is_given(run):
    """GSPO's clip of 4e-4 holds tokens of a policy that has moved; PPO's 0.2 never acts."""
    for given, acts in (([], True), (["loss.clip_low=0.2", "loss.clip_high=0.2"], False)):
        opened = run("correction={loss_type: gspo}",
                     *(given or ["loss.clip_low=null", "loss.clip_high=null"]),
                     pi=PI.perturbed(7, 0.05))
        batch = of_response(list(range(len(PI.tokens))), rewards(PI).expand(-1, 3))
        batch = batch._replace(old_log_prob=PI.log_probs().detach())
        correction = trainer.correct(batch.old_log_prob, batch.rollout_log_prob,
                                     batch.response_mask,
                                     correction_of(opened.config))
        found = trainer.update(opened, batch, correction_of(opened.config), correction).metrics
        share = found["loss/clip_fraction"]
        assert (share > 0.2) == acts and (share == 0) != acts


def test_sapos_gates_can_be_set(run):
    losses = []
    for given in ([], ["loss.tau_positive=3", "loss.tau_negative=0.5"]):
        opened = run("correction={loss_type: sapo, bypass_mode: true}", *given)
        batch = of_response(list(range(len(PI.tokens))), rewards(PI).expand(-1, 3))
        trainer.update(opened, batch, correction_of(opened.config))
        losses.append(opened.found[-1])
    assert (losses[0] - losses[1]).norm() > 1e-3
