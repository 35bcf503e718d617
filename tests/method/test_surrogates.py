"""surrogates.py: a token's loss has its value and slope; losses.py makes one number of tokens.

Micro-batches aggregate into the whole.
"""

import itertools
import math

import pytest
import torch

from three_policies.correction import correct
from three_policies.losses import (AGGREGATIONS, Counts, LossConfig, aggregate_loss, count,
                                   loss_means, policy_loss, width_without_holes)
from three_policies.oracle import close, estimator_moments, expectation, f64, scores
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.surrogates import LOSSES, cispo_loss, gspo_loss, ppo_clip_loss, sapo_loss
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (MASK, PI, R, batch, by_loops, config_of,
                                                   every_aggregation, every_denominator, every_mode)

GRID = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
VALUES = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)


@certifies("float64")
@every_aggregation
@pytest.mark.parametrize("mask, counted", [
    (GRID, None), (KEPT, None), (KEPT, GRID), (KEPT.bool(), GRID.double())])
@pytest.mark.parametrize("horizon", [None, 10])
def test_aggregation_against_loops(how, mask, counted, horizon):
    """eq:aggregation: mask says what is summed, denominator_mask what counts; empty rows add 0."""
    loss = aggregate_loss(VALUES, mask, how, denominator_mask=counted, horizon=horizon)
    assert close(loss, by_loops(VALUES, mask, how, mask if counted is None else counted, horizon))


@certifies("float64")
@pytest.mark.parametrize("how, weights", [
    ("token-mean", [1 / 7, 1 / 7, 1 / 7]), ("token-sum", [1, 1, 1]),
    ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
    ("seq-mean-token-mean", [1 / 12, 1 / 6, 1 / 3]),
    ("seq-mean-token-sum-norm", [1 / 12, 1 / 12, 1 / 12])])
def test_what_each_aggregation_weighs(how, weights):
    """eq:aggregation: a token's weight depends on its sequence's length, here 4, 2 and 1."""
    values = VALUES.clone().requires_grad_()
    gradient = torch.autograd.grad(aggregate_loss(values, GRID, how), values)[0]
    assert close(gradient[:3, 0], weights) and (gradient[GRID == 0] == 0).all()


def test_counts():
    """eq:aggregation: `counts` has tokens and non-empty sequences, also as plain numbers."""
    assert count(GRID) == Counts(torch.tensor(7.0), torch.tensor(3.0))
    assert all(n.dtype == torch.float32 and n.ndim == 0 for n in count(GRID))
    for how in AGGREGATIONS:
        assert close(aggregate_loss(VALUES, GRID, how, counts=Counts(14, 6)),
                     by_loops(VALUES, GRID, how, GRID, None) / (1 if how == "token-sum" else 2))


@pytest.mark.parametrize("mask, width", [
    ([[1, 1, 1]], 3), ([[1, 0, 0], [1, 1, 0]], 3),              # room that the sampler had counts
    ([[1, 0, 1, 0], [1, 0, 0, 0]], 3), ([[1, 0, 1], [0, 1, 1]], 3),     # a hole in all rows or not
    ([[0, 1]], 1), ([[0, 0, 1, 0]], 2), ([[0, 0, 1], [0, 1, 0]], 2),    # before the first token
    ([[0, 0]], 2), ([[]], 1)])
def test_width_without_holes(mask, width):
    """eq:tool-length: columns that no row uses, before the last token, are of prompts and tools."""
    assert width_without_holes(torch.tensor(mask, dtype=torch.bool)) == width


@every_mode
@every_aggregation
def test_prompts_in_front_of_the_responses_change_nothing(mode, how):
    """eq:tool-length: a caller may give whole rows, prompts padded on the left, or responses."""
    config, (*given, mask) = config_of(mode, "sequence", 1.5, True, {"seq_mean_k2": 0.2}), batch()
    wide = [torch.nn.functional.pad(x, (4, 0), value=junk)
            for x, junk in zip((*given, mask), (-1.0, -2.0, 0.0, 3.0, 0))]
    slopes, losses = [], []
    for log_prob, *others in ((*given, mask), wide):
        log_prob = log_prob.detach().requires_grad_()
        losses.append(policy_loss(log_prob, *others, config, LossConfig(aggregation=how))[0])
        slopes.append(torch.autograd.grad(losses[-1], log_prob)[0])
    assert close(*losses) and close(slopes[0], slopes[1][:, 4:]) and not slopes[1][:, :4].any()


SPLITS = ([[0, 1, 2, 3, 4, 5]], [[0], [1, 2, 3], [4, 5]], [[5, 0], [3], [1, 4], [2]])


@certifies("float64")
@every_mode
@every_denominator
@every_aggregation
def test_micro_batches_add_up_to_the_full_batch(mode, denominator, how):
    """eq:aggregation: with `counts`, any split's losses, metrics, gradients sum to the whole's."""
    config = config_of(mode, "token", 1.5, True, {"token_k1": (0.5, 1.8), "seq_mean_k2": 0.2})
    lp, old, mu, advantages, mask = batch()
    correction = correct(lp if config.bypass_mode else old, mu, mask, config)
    assert 0 < correction.mask.sum() < mask.sum()
    how = LossConfig(aggregation=how, denominator=denominator, horizon=7, dual_clip=3.0)
    loss, metrics = policy_loss(lp, old, mu, advantages, mask, config, how, correction=correction)
    gradient = torch.autograd.grad(loss, lp)[0]
    assert gradient.abs().max() > 0.01 and not any("rollout_corr" in name for name in metrics)
    counts = count(mask if denominator == "fixed" else correction.mask)
    for split in SPLITS:
        parts = [policy_loss(lp[i], old[i], mu[i], advantages[i], mask[i], config, how,
                             counts=counts, correction=correction.rows(i))
                 for i in map(torch.tensor, split)]
        assert close(sum(part for part, _ in parts), loss)
        assert close(torch.autograd.grad(sum(part for part, _ in parts), lp)[0], gradient)
        summed = loss_means({key: sum(m[key] for _, m in parts)
                             for key in (*metrics, "loss/kept_tokens")})
        assert all(close(summed[key], metrics[key]) for key in metrics)


@every_mode
def test_means_beside_a_summed_loss(mode):
    """eq:aggregation: with `counts` all are summands; `loss_means` divides all but the loss."""
    lp, old, mu, advantages, mask = batch(10)
    how = LossConfig(clip_low=0.1, clip_high=0.1)
    inputs = lp, old, mu, advantages, mask, config_of(mode, "token", 1.5)
    plain = policy_loss(*inputs, how)[1]
    counts = Counts(*(4 * n for n in count(mask)))
    loss, summands = policy_loss(*inputs, how, counts=counts)
    metrics = loss_means(summands)
    assert close(metrics["loss/policy"], loss)
    of_bypass = {"loss/bypass_clip_fraction"} & set(plain)
    for name in ("loss/ratio", "loss/approx_kl", "loss/clip_fraction", *of_bypass):
        assert close(metrics[name], plain[name]) and close(summands[name], plain[name] * mask.sum())


# ---------------------------------------------------------------------------------------- pointwise

def slope(loss, log_r, advantage, **options):
    """Return a token's loss and its slope in log π_θ, at r = e^{log_r}; log π_old is −1."""
    log_prob = f64([[log_r - 1.0]]).requires_grad_()
    value = loss(log_prob, f64([[-1.0]]), f64([[advantage]]), **options)
    return value.item(), torch.autograd.grad(value.sum(), log_prob)[0].item()


@certifies("float64")
@pytest.mark.parametrize("advantage", [2.0, 0.5, -0.5, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 0.95, 1.0, 1.27, 1.29, 2.9, 3.1, 9.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_where_the_clip_takes_the_gradient(advantage, ratio, dual):
    """eq:ppo-clip, eq:dual-clip: no gradient for A > 0 above 1+ε_high, for A < 0 below 1−ε_low.

    With a dual clip there is none for A < 0 above c, either.
    """
    value, derivative = slope(ppo_clip_loss, math.log(ratio), advantage,
                              clip_low=0.2, clip_high=0.28, dual_clip=dual)
    above, below, beyond = ratio > 1.28, ratio < 0.8, dual is not None and ratio > 3
    gone = above if advantage > 0 else below or beyond
    bound = {True: 1.28, False: 3.0 if beyond else 0.8}[advantage > 0]
    assert close(value, -advantage * (bound if gone else ratio))
    assert close(derivative, 0.0 if gone else -advantage * ratio)


@certifies("float64")
@pytest.mark.parametrize("advantage", [2.0, 0.5, -0.5, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.1, 4.0])
def test_cispo_pointwise(advantage, ratio):
    """eq:cispo: the slope is −clip(r)A, and never 0."""
    clipped = min(max(ratio, 0.8), 1.28)
    value, derivative = slope(cispo_loss, math.log(ratio), advantage, clip_high=0.28)
    assert close(derivative, -clipped * advantage)
    assert close(value, -clipped * advantage * (math.log(ratio) - 1))


@certifies("float64")
@pytest.mark.parametrize("advantage", [2.0, 0.5, -0.5, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.1, 4.0])
def test_sapo_pointwise(advantage, ratio):
    """eq:sapo: the loss is −A(4/τ)σ(τ(r−1)), with τ = 1 for A > 0 and 1.05 for A < 0."""
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    value, derivative = slope(sapo_loss, math.log(ratio), advantage)
    assert close(value, -advantage * 4 / tau * gate)
    assert close(derivative, -advantage * 4 * gate * (1 - gate) * ratio)


def test_default_clip_ranges():
    """eq:ppo-clip, eq:gspo, eq:cispo: the ranges are 0.2 either way; GSPO has 3e-4 and 4e-4."""
    one = torch.ones(1, 1)
    for loss, low, high in ((ppo_clip_loss, 0.2, 0.2), (cispo_loss, 0.2, 0.2),
                            (gspo_loss, 3e-4, 4e-4)):
        options = {"response_mask": one} if loss is gspo_loss else {}
        for ratio, bound in ((0.5, 1 - low), (2.0, 1 + high)):
            sign = 1.0 if ratio > 1 else -1.0
            value, derivative = slope(loss, math.log(ratio), sign, **options)
            assert close(derivative if loss is cispo_loss else value, -sign * bound)


@certifies("float64")
def test_gspo_clips_the_sequence():
    """eq:gspo: all tokens have r̄ = (Πr)^{1/|y|} and the slope −A r̄/|y|; at |y| = 1 it is PPO."""
    log_r, mask = f64([[0.3, -0.1, 0.1], [0.5, 0.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    log_prob, old, a = log_r.clone().requires_grad_(), torch.zeros_like(log_r), f64([[2.0], [-1.0]])
    s = f64([[0.1], [0.25]]).exp()
    out = gspo_loss(log_prob, old, a, mask, 0.2, 0.2)
    assert close(out[mask > 0], (-a * s * mask)[mask > 0])
    assert close(torch.autograd.grad((out * mask).sum(), log_prob)[0], -a * s * mask)
    clipped = gspo_loss(log_prob, old, a, mask, 0.2, 0.05)
    assert close(clipped[0], [-2 * 1.05] * 3) and close(clipped[1, 0], s[1, 0])
    assert close(gspo_loss(log_prob, old, a, mask, 0.2, 0.2, 1.1)[1, 0], 1.1)
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    for ratio, a in itertools.product((0.5, 0.9, 1.1, 2.0), (1.0, -1.0)):
        assert close(slope(gspo_loss, math.log(ratio), a, response_mask=torch.ones(1, 1), **clip),
                     slope(ppo_clip_loss, math.log(ratio), a, **clip))


# ----------------------------------------------------------------------------- GSPO, token by token

def gspo_of_the_sequence(lp, old, advantages, mask, **clip):
    """Compute the paper's first form, in which the gradient goes through s itself."""
    log_s = aggregate_log_ratio(lp - old, mask, "geometric")
    return ppo_clip_loss(log_s, torch.zeros_like(log_s), advantages, **clip)


@certifies("float64")
def test_gspo_of_tokens_and_of_sequences_agree_where_all_is_constant_over_a_sequence():
    """eq:gspo: with one advantage and weight for a response, both forms have one gradient."""
    lp, old, _, _, mask = batch(4)
    first, second = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    advantages = torch.randn(len(lp), 1, generator=first).double().expand_as(lp)
    weights = torch.rand(len(lp), 1, generator=second).double()
    for clip in ({"clip_low": 0.01, "clip_high": 0.02}, {"clip_low": 9.0, "clip_high": 9.0}):
        of = [aggregate_loss(weights * form(lp, old, advantages, mask, **clip), mask,
                             "seq-mean-token-mean")
              for form in (gspo_loss, gspo_of_the_sequence)]
        assert close(*of)
        assert close(*(torch.autograd.grad(loss, lp)[0] for loss in of))


def test_gspo_gives_a_rejected_token_no_gradient_through_its_neighbour():
    """eq:gspo: with log ρ = (0, 6) the second token has no gradient; through s both have −1/4."""
    old = torch.zeros(1, 2, dtype=torch.float64)
    mu, one = old - f64([[0.0, 6.0]]), torch.ones(1, 2)
    for config in (Config(rollout_rs={"token_k1": (0.5, 2.0)}, loss_type="gspo"),
                   Config("token", (0.5, 2.0), loss_type="gspo")):
        lp = old.clone().requires_grad_()
        loss, _ = policy_loss(lp, old, mu, one.double(), one, config,
                              LossConfig(aggregation="seq-mean-token-mean"))
        assert torch.autograd.grad(loss, lp)[0].tolist() == [[-0.5, 0.0]]
    lp = old.clone().requires_grad_()
    through_s = gspo_of_the_sequence(lp, old, one.double(), one)[:, :1].sum() / 2
    assert torch.autograd.grad(through_s, lp)[0].tolist() == [[-0.25, -0.25]]


@certifies("float64")
def test_gspo_with_advantages_of_tokens_is_each_tokens_own():
    """eq:gspo: by the oracle, the gradient at π_θ = π_old is E_π[Σ_t A_t ∇log π_t / T]."""
    advantages, lp = torch.arange(3).double() * R, PI.log_probs()           # one for each token
    old, config = lp.detach(), Config(loss_type="gspo")
    token = estimator_moments(PI, PI, lambda i: policy_loss(
        lp[i], old[i], None, advantages[i], MASK[i], config,
        LossConfig(aggregation="seq-mean-token-mean"))[0])
    share = MASK.double() / MASK.sum(-1, keepdim=True)
    exact = expectation(PI, (scores(PI) * (advantages * share)[..., None]).sum(1))
    assert close(-token.mean, exact)
    whole = estimator_moments(PI, PI, lambda i: aggregate_loss(gspo_of_the_sequence(
        lp[i], old[i], advantages[i], MASK[i]), MASK[i], "seq-mean-token-mean"))
    print(f"through s: bias {(whole.mean + exact).norm() / exact.norm():.2f} of the gradient")
    assert not close(-whole.mean, exact)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_sixteen_bits_are_widened_before_they_are_subtracted(name):
    """eq:gspo: in bfloat16 the difference itself would be off by more than GSPO's clip."""
    row = LOSSES[name]
    lp, old = torch.tensor([[[-2.3, -0.2]], [[-2.29, -0.013]]], dtype=torch.bfloat16)
    given = {"old_log_prob": old, "advantages": torch.ones(1, 2), "response_mask": torch.ones(1, 2)}
    narrow = row.function(lp, *(given[name] for name in row.takes))
    given["old_log_prob"] = old.float()
    assert torch.equal(narrow, row.function(lp.float(), *(given[name] for name in row.takes)))
