"""losses.py is the derivation: expected gradients, biases and variances as sums over sequences.

Unless said otherwise a sequence comes from μ = MU, the loss is `policy_loss` on that one sequence,
and "mean" is the expectation of its gradient. Losses are minimised: unbiased means mean = −∇J.
Run with -s to see the sizes of the biases and variances.
"""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import (MarkovPolicy, Policy, close, estimator_moments, exact_gradient, expectation,
                    f64, grad_J, kl, rewards, scores, token_kl)
from tolerances import gamma

from correction import RolloutCorrectionConfig as Config
from correction import Correction, correct
from estimators import aggregate_log_ratio
from losses import (AGGREGATIONS, Counts, LossConfig, aggregate_loss, cispo_loss, count, gspo_loss, kl_loss,
                    loss_means, policy_loss, ppo_clip_loss, reinforce_loss, sapo_loss)
from doctor import diagnose

PI = Policy(3, 3, seed=0)
MU, OLD, REF = PI.perturbed(1, 0.5), PI.perturbed(2, 0.3), PI.perturbed(3, 0.7)
MASK, R = PI.mask, rewards(PI)
A = R.expand(-1, 3)
G = scores(PI)                                                      # ∇log π_t, [N, T, P]
RHO = (PI.log_probs() - MU.log_probs()).detach().exp()              # ρ_t = π_θ/μ
WHOLE = RHO.prod(-1, keepdim=True)                                  # Πρ, [N, 1]
GEOMETRIC = WHOLE ** (1 / MASK.sum(-1, keepdim=True).double())      # (Πρ)^{1/|y|}
SUM, PLAIN = "seq-mean-token-sum", math.inf                         # C = ∞: nothing is truncated
LOSS_TYPES = ("ppo_clip", "gspo", "cispo", "sapo")
MODES = [*itertools.product((False, True), LOSS_TYPES), (True, "reinforce")]


def named(mode):
    return f"{'bypass' if mode[0] else 'decoupled'} {mode[1]}"


def config_of(mode, *settings):
    """A config in one of MODES: level, threshold, batch normalisation, rejection."""
    return Config(*settings, bypass_mode=mode[0], loss_type=mode[1])


every_mode = pytest.mark.parametrize("mode", MODES, ids=named)
every_aggregation = pytest.mark.parametrize("how", AGGREGATIONS)
every_denominator = pytest.mark.parametrize("denominator", ["fixed", "kept"])


def reinforce(level=None, threshold=PLAIN, **options):
    return Config(level, threshold, bypass_mode=True, loss_type="reinforce", **options)


def moments(config, pi=PI, old=OLD, mu=MU, advantages=A, batch=1, **options):
    """Of ∇policy_loss on one sequence (or `batch` of them) of μ, summed over tokens."""
    lp, old_lp, mu_lp = pi.log_probs(), old.log_probs().detach(), mu.log_probs().detach()
    def loss(i):
        return policy_loss(lp[i], old_lp[i], mu_lp[i], advantages[i], pi.mask[i], config,
                           LossConfig(aggregation=SUM, **options))[0]
    return estimator_moments(pi, mu, loss, batch)


def mean_of(weight, advantages=A):
    """−E_μ[Σ_t weight_t A_t ∇log π_t]: the closed form that a weighted REINFORCE loss must have."""
    return -expectation(MU, (G * (weight * advantages)[..., None]).sum(1))


# ---------------------------------------------------------------------------------------- REINFORCE

def test_reinforce_is_the_policy_gradient():
    """eq:reinforce: on-policy the mean is −∇J."""
    assert close(moments(reinforce(), mu=PI).mean, -grad_J(PI, R))


@pytest.mark.parametrize("baseline", [-1.0, 0.3, 5.0])
def test_constant_baseline_moves_the_variance_alone(baseline):
    """eq:baseline: E_π[b ∇log π] = 0."""
    plain = moments(reinforce(), mu=PI)
    shifted = moments(reinforce(), mu=PI, advantages=A - baseline)
    print(f"\nbaseline {baseline}: variance {plain.variance:.3f} → {shifted.variance:.3f}")
    assert close(shifted.mean, plain.mean) and abs(shifted.variance / plain.variance - 1) > 0.03


@pytest.mark.parametrize("threshold", [PLAIN, 1e9, (None, 1e9), (1e-9, None)])
def test_untruncated_sequence_weights_are_unbiased(threshold):
    """eq:off-policy: E_μ[ρ ∇log π A] = ∇J for the full product ρ, whatever μ is."""
    for mu in (MU, OLD, REF):
        assert close(moments(reinforce("sequence", threshold), mu=mu).mean, -grad_J(PI, R))


def test_without_weights_the_objective_is_another():
    """eq:off-policy: no weight at all estimates E_μ[A ∇log π]."""
    plain = moments(reinforce())
    size = plain.bias(-grad_J(PI, R)).norm() / grad_J(PI, R).norm()
    print(f"\nbias without correction: {size:.0%} of ∇J")
    assert close(plain.mean, mean_of(torch.ones_like(A))) and size > 0.1


def test_weight_must_be_detached():
    """eq:detached: a weight with its graph adds −ρ A log π ∇log π; it is detached here."""
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    live = estimator_moments(PI, MU, lambda i: (
        (lp - mu_lp)[i].sum().exp() * reinforce_loss(lp[i], A[i]) * MASK[i]).sum())
    extra = mean_of(WHOLE * lp.detach().sum(-1, keepdim=True))
    size = live.bias(-grad_J(PI, R)).norm() / grad_J(PI, R).norm()
    print(f"\nbias of a weight with its graph: {size:.0%} of ∇J")
    assert close(live.bias(-grad_J(PI, R)), extra) and size > 0.3
    weights = correct(lp, mu_lp, MASK, reinforce("sequence")).weights
    assert not weights.requires_grad and close(weights, WHOLE * MASK)


# ----------------------------------------------------------------------- weights: bias and variance

@pytest.mark.parametrize("level, weight", [
    ("token", RHO), ("sequence", WHOLE), ("geometric", GEOMETRIC)])
@pytest.mark.parametrize("cap", [0.6, 1.0, 1.5, PLAIN])
def test_truncation_bias_is_minus_the_excess(level, weight, cap):
    """eq:tis, eq:levels: mean(C) − mean(∞) = −E_μ[(ρ−C)₊ g], g = −A∇log π, at every level."""
    excess = (weight - cap).clamp(min=0)
    mean = moments(reinforce(level, cap)).mean
    assert close(mean, mean_of(weight.clamp(max=cap)))
    assert close(mean - moments(reinforce(level)).mean, -mean_of(excess))
    assert (mean_of(excess).norm() > 1e-3) == (cap < PLAIN)


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_token_and_geometric_weights_are_biased(level):
    """eq:levels: the other tokens' ratios are left out: bias E_μ[Σ_t (Πρ − ρ_t) A ∇log π_t]."""
    weight = {"token": RHO, "geometric": GEOMETRIC}[level]
    bias = moments(reinforce(level)).bias(-grad_J(PI, R))
    size = bias.norm() / grad_J(PI, R).norm()
    print(f"\nbias of {level} weights: {size:.1%} of ∇J")
    assert close(bias, mean_of(weight - WHOLE)) and size > 0.05


def test_at_one_token_all_levels_are_unbiased():
    """eq:levels at T = 1."""
    pi = Policy(5, 1, seed=4)
    mu, r = pi.perturbed(5, 1.0), rewards(pi)
    for level in ("token", "sequence", "geometric"):
        assert close(moments(reinforce(level), pi, pi, mu, r).mean, -grad_J(pi, r))


@pytest.mark.parametrize("level, weight", [("token", RHO), ("sequence", WHOLE)])
def test_masking_estimates_the_inside_alone(level, weight):
    """eq:mis: a pair [lo, hi] estimates E_μ[ρ 1[lo ≤ ρ ≤ hi] g]."""
    inside = ((weight >= 0.7) & (weight <= 1.6)).double()
    assert close(moments(reinforce(level, (0.7, 1.6))).mean, mean_of(weight * inside))
    assert 0 < (inside * MASK).sum() < MASK.sum()


def test_rejection_leaves_terms_out_and_weights_multiply():
    """eq:rejection: rejection is 1[…]; with weights it is masking; seq_mean_k1 sees (Πρ)^{1/|y|}."""
    bounds = (0.7, 1.6)
    inside = ((WHOLE >= 0.7) & (WHOLE <= 1.6)).double() * MASK
    assert close(moments(reinforce(rollout_rs={"seq_sum_k1": bounds})).mean, mean_of(inside))
    both = moments(reinforce("sequence", rollout_rs={"seq_sum_k1": bounds}))
    assert close(both.gradients, moments(reinforce("sequence", bounds)).gradients)
    kept = ((GEOMETRIC >= 0.8) & (GEOMETRIC <= 1.2)).double() * MASK
    assert close(moments(reinforce(rollout_rs={"seq_mean_k1": (0.8, 1.2)})).mean, mean_of(kept))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_self_normalisation_bias_falls_like_one_over_n(n):
    """eq:self-normalised: E[Σwg/Σw] over all batches of n; at n = 1 w cancels; bias ≲ 1/n."""
    pi = Policy(2, 2, seed=0)
    mu, r = pi.perturbed(1, 0.8), rewards(pi)
    a = r.expand(-1, 2)
    config = reinforce("sequence", rollout_is_batch_normalize=True)
    exact = moments(config, pi, pi, mu, a, batch=n)
    bias = exact.bias(-grad_J(pi, r)).norm()
    alone = moments(reinforce(), pi, pi, mu, a).bias(-grad_J(pi, r)).norm()       # w/w = 1
    print(f"\nN = {n}: bias of self-normalised weights {bias:.4f}, N × bias {n * bias:.4f}")
    assert close(bias, alone) if n == 1 else 1e-3 < bias < 1.5 * alone / n
    rho = (pi.log_probs() - mu.log_probs()).sum(-1).exp().detach()
    g = -(scores(pi) * a[..., None]).sum(1)
    batches = torch.cartesian_prod(*[torch.arange(len(r))] * n).reshape(-1, n)
    ratio = (rho[batches][..., None] * g[batches]).sum(1) / rho[batches].sum(1, keepdim=True)
    assert close(exact.gradients, ratio)


def test_variance_orderings():
    """eq:levels, eq:tis, eq:prefix: token < prefix < whole sequence; it grows with the cap."""
    far = PI.perturbed(1, 1.0)
    lp, caps = PI.log_probs(), (0.5, 1, 2, PLAIN)
    prefix = (lp - far.log_probs()).detach().cumsum(-1).exp()
    by_prefix = estimator_moments(
        PI, far, lambda i: (prefix[i] * reinforce_loss(lp[i], A[i]) * MASK[i]).sum())
    variance = {"token": moments(reinforce("token"), mu=far).variance, "prefix": by_prefix.variance}
    for c in caps:
        variance[f"sequence, C = {c}"] = moments(reinforce("sequence", c), mu=far).variance
    print("\n" + "\n".join(f"{name:20} {value:8.3f}" for name, value in variance.items()))
    assert variance["token"] < variance["prefix"] < variance["sequence, C = inf"]
    capped = [variance[f"sequence, C = {c}"] for c in caps]
    assert capped == sorted(capped) and capped[0] < 0.5 * capped[-1]


# ---------------------------------------------------------------------------- decoupled PPO, bypass

@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_decoupled_loss_does_not_depend_on_mu(loss_type):
    """eq:batch-size, eq:decoupled-ppo: E_μ[w·L(π_θ/π_old)] = E_old[L] with the full product, not by token."""
    full = Config("sequence", PLAIN, loss_type=loss_type)
    clip = {"clip_low": 0.1, "clip_high": 0.15}
    on_policy = moments(Config(loss_type=loss_type), mu=OLD, **clip).mean
    for mu in (MU, REF, PI):
        assert close(moments(full, mu=mu, **clip).mean, on_policy)
    by_token = moments(Config("token", PLAIN, loss_type=loss_type), **clip)
    drift = by_token.bias(on_policy).norm() / on_policy.norm()
    print(f"\n{loss_type}: bias with token weights {drift:.1%}")
    assert drift > 0.03


@pytest.mark.parametrize("loss_type", ["ppo_clip", "cispo", "sapo"])
def test_the_first_step_is_reinforce(loss_type):
    """eq:ppo-clip, eq:cispo, eq:sapo at θ = θ_old: REINFORCE's gradient, by sequence."""
    first = moments(Config("sequence", PLAIN, loss_type=loss_type), old=PI)
    assert close(first.gradients, moments(reinforce("sequence")).gradients)
    assert close(first.mean, -grad_J(PI, R))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_decoupled_is_plain_when_old_is_the_sampler(level, loss_type):
    """eq:decoupled-ppo: π_old = μ makes every weight 1, truncated or not."""
    assert close(moments(Config(level, 2.0, loss_type=loss_type), old=MU).gradients,
                 moments(Config(loss_type=loss_type), old=MU).gradients)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bypass_puts_the_sampler_in_the_place_of_old(loss_type):
    """eq:bypass: L(π_θ/μ), no weight; old_log_prob is not looked at."""
    bypass = moments(Config(bypass_mode=True, loss_type=loss_type))
    assert close(bypass.gradients, moments(Config(loss_type=loss_type), old=MU).gradients)
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    config = Config(bypass_mode=True, loss_type=loss_type)
    losses = [policy_loss(lp, old, mu_lp, A, MASK, config)[0] for old in (None, lp * math.nan, lp)]
    assert close(losses[0], losses[1]) and close(losses[0], losses[2])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bypass_takes_no_weight(loss_type):
    """eq:double-count: weights asked for do not multiply a ratio that is π_θ/μ already."""
    with pytest.warns(UserWarning, match="eq:double-count"):
        weighted = Config("sequence", PLAIN, bypass_mode=True, loss_type=loss_type)
    plain = moments(Config(bypass_mode=True, loss_type=loss_type))
    assert close(moments(weighted).gradients, plain.gradients)
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    assert correct(lp, mu_lp, MASK, weighted).weights is not None


def test_counting_the_ratio_twice_is_wrong():
    """eq:double-count: unclipped and at T = 1, E_μ[−rA] has the gradient −∇J; times ρ another."""
    pi = Policy(5, 1, seed=4)
    mu, r = pi.perturbed(5, 0.6), rewards(pi)
    once = moments(Config(bypass_mode=True), pi, pi, mu, r, clip_low=1.0, clip_high=1e9)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    twice = estimator_moments(pi, mu, lambda i: ((lp - mu_lp)[i].exp().detach() * ppo_clip_loss(
        lp[i], mu_lp[i], r[i], 1.0, 1e9)).sum())
    size = twice.bias(-grad_J(pi, r)).norm() / grad_J(pi, r).norm()
    print(f"\nbias of a ratio counted twice: {size:.0%} of ∇J")
    assert close(once.mean, -grad_J(pi, r)) and size > 0.1


# ---------------------------------------------------------------------------- the losses, pointwise

def slope(loss, log_r, advantage, **options):
    """A token's loss and its derivative in log π_θ, at r = e^{log_r}; the old log-prob is −1."""
    log_prob = f64([[log_r - 1.0]]).requires_grad_()
    value = loss(log_prob, f64([[-1.0]]), f64([[advantage]]), **options)
    return value.item(), torch.autograd.grad(value.sum(), log_prob)[0].item()


@pytest.mark.parametrize("advantage", [2.0, 0.5, -0.5, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 0.95, 1.0, 1.27, 1.29, 2.9, 3.1, 9.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_where_the_clip_takes_the_gradient(advantage, ratio, dual):
    """eq:ppo-clip, eq:dual-clip: A > 0: above 1+ε_high; A < 0: below 1−ε_low, and above c."""
    value, derivative = slope(ppo_clip_loss, math.log(ratio), advantage,
                              clip_low=0.2, clip_high=0.28, dual_clip=dual)
    above, below, beyond = ratio > 1.28, ratio < 0.8, dual is not None and ratio > 3
    gone = above if advantage > 0 else below or beyond
    bound = {True: 1.28, False: 3.0 if beyond else 0.8}[advantage > 0]
    assert close(value, -advantage * (bound if gone else ratio))
    assert close(derivative, 0.0 if gone else -advantage * ratio)


@pytest.mark.parametrize("advantage", [2.0, 0.5, -0.5, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.1, 4.0])
def test_cispo_pointwise(advantage, ratio):
    """eq:cispo: slope −clip(r)A, never 0."""
    clipped = min(max(ratio, 0.8), 1.28)
    value, derivative = slope(cispo_loss, math.log(ratio), advantage, clip_high=0.28)
    assert close(derivative, -clipped * advantage)
    assert close(value, -clipped * advantage * (math.log(ratio) - 1))


@pytest.mark.parametrize("advantage", [2.0, 0.5, -0.5, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.1, 4.0])
def test_sapo_pointwise(advantage, ratio):
    """eq:sapo: −A(4/τ)σ(τ(r−1)), τ = 1 for A > 0, 1.05 for A < 0."""
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    value, derivative = slope(sapo_loss, math.log(ratio), advantage)
    assert close(value, -advantage * 4 / tau * gate)
    assert close(derivative, -advantage * 4 * gate * (1 - gate) * ratio)


def test_default_clip_ranges():
    """eq:ppo-clip, eq:gspo, eq:cispo: 0.2 either way; 3e-4 and 4e-4 for GSPO."""
    one = torch.ones(1, 1)
    for loss, low, high in ((ppo_clip_loss, 0.2, 0.2), (cispo_loss, 0.2, 0.2),
                            (gspo_loss, 3e-4, 4e-4)):
        options = {"response_mask": one} if loss is gspo_loss else {}
        for ratio, bound in ((0.5, 1 - low), (2.0, 1 + high)):
            sign = 1.0 if ratio > 1 else -1.0
            value, derivative = slope(loss, math.log(ratio), sign, **options)
            assert close(derivative if loss is cispo_loss else value, -sign * bound)


def test_gspo_clips_the_sequence():
    """eq:gspo: one r̄ = (Πr)^{1/|y|} for all tokens, slope −A r̄/|y| on each; PPO at |y| = 1."""
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


# -------------------------------------------------------------------------------------- aggregation

GRID = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
VALUES = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)


def by_loops(values, mask, mode, counted, horizon):
    total = 0.0
    for row, kept, on in zip(values.tolist(), mask.tolist(), counted.tolist()):
        divide = {"seq-mean-token-mean": max(sum(on), 1),
                  "seq-mean-token-sum-norm": horizon or len(row)}.get(mode, 1)
        total += sum(x for x, k in zip(row, kept) if k) / divide
    if mode == "token-sum":
        return total
    number = sum if mode == "token-mean" else any
    return total / sum(number(on) for on in counted.tolist())


@every_aggregation
@pytest.mark.parametrize("mask, counted", [
    (GRID, None), (KEPT, None), (KEPT, GRID), (KEPT.bool(), GRID.double())])
@pytest.mark.parametrize("horizon", [None, 10])
def test_aggregation_against_loops(how, mask, counted, horizon):
    """eq:aggregation: mask says what is summed, denominator_mask what counts; empty rows do not."""
    loss = aggregate_loss(VALUES, mask, how, denominator_mask=counted, horizon=horizon)
    assert close(loss, by_loops(VALUES, mask, how, mask if counted is None else counted, horizon))


@pytest.mark.parametrize("how, weights", [
    ("token-mean", [1 / 7, 1 / 7, 1 / 7]), ("token-sum", [1, 1, 1]), ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
    ("seq-mean-token-mean", [1 / 12, 1 / 6, 1 / 3]),
    ("seq-mean-token-sum-norm", [1 / 12, 1 / 12, 1 / 12])])
def test_what_each_aggregation_weighs(how, weights):
    """eq:aggregation: what a token of a sequence of 4, of 2 and of 1 tokens weighs."""
    values = VALUES.clone().requires_grad_()
    gradient = torch.autograd.grad(aggregate_loss(values, GRID, how), values)[0]
    assert close(gradient[:3, 0], weights) and (gradient[GRID == 0] == 0).all()


def test_counts():
    """eq:aggregation: tokens and non-empty sequences, also as plain numbers in `counts`."""
    assert count(GRID) == Counts(torch.tensor(7.0), torch.tensor(3.0))
    assert all(n.dtype == torch.float32 and n.ndim == 0 for n in count(GRID))
    for how in AGGREGATIONS:
        assert close(aggregate_loss(VALUES, GRID, how, counts=Counts(14, 6)),
                     by_loops(VALUES, GRID, how, GRID, None) / (1 if how == "token-sum" else 2))


def batch(seed=0, rows=6, T=5, junk=0.0):
    """Random log-probs and lengths: (log_prob, old, rollout, advantages, mask)."""
    generator = torch.Generator().manual_seed(seed)
    base, *noise, advantages = torch.randn(5, rows, T, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.randint(1, T + 1, (rows, 1), generator=generator)
    policies = [torch.where(mask, base - 2 + 0.4 * x, junk) for x in noise]
    return policies[0].requires_grad_(), *policies[1:], torch.where(mask, advantages, junk), mask


SPLITS = ([[0, 1, 2, 3, 4, 5]], [[0], [1, 2, 3], [4, 5]], [[5, 0], [3], [1, 4], [2]])


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
        summed = loss_means({key: sum(m[key] for _, m in parts) for key in (*metrics, "loss/kept_tokens")})
        assert all(close(summed[key], metrics[key]) for key in metrics)


# --------------------------------------------------------------------------- policy_loss as a whole

@every_mode
@every_denominator
@every_aggregation
def test_policy_loss_is_its_parts(mode, denominator, how):
    """eq:correction, eq:decoupled-ppo, eq:bypass: loss × weights over what is kept."""
    config = config_of(mode, "token", 1.2, False, {"token_k1": (0.5, 1.5)})
    lp, old, mu, advantages, mask = batch(3)
    anchor, train = (mu, lp) if config.bypass_mode else (old, old)
    rho, ratio = (train - mu).detach().exp(), (lp - anchor).detach().exp()
    kept = mask & (rho >= 0.5) & (rho <= 1.5)
    clip = {"clip_low": 0.1, "clip_high": 0.3}
    terms = {"reinforce": lambda: reinforce_loss(lp, advantages),
             "ppo_clip": lambda: ppo_clip_loss(lp, anchor, advantages, **clip, dual_clip=1.2),
             "gspo": lambda: gspo_loss(lp, anchor, advantages, mask, **clip, dual_clip=1.2),
             "cispo": lambda: cispo_loss(lp, anchor, advantages, **clip),
             "sapo": lambda: sapo_loss(lp, anchor, advantages)}[config.loss_type]()
    if config.loss_type == "reinforce" or not config.bypass_mode:
        terms = terms * rho.clamp(max=1.2)
    counted = mask if denominator == "fixed" else kept
    loss, metrics = policy_loss(lp, old, mu, advantages, mask, config,
                                LossConfig(**clip, dual_clip=1.2, aggregation=how, denominator=denominator, horizon=9))
    assert close(loss, by_loops(terms, kept, how, counted, 9))
    s = aggregate_log_ratio(ratio.log(), mask, "geometric").exp() if config.loss_type == "gspo" else ratio
    held = torch.where(advantages > 0, s > 1.3, (s < 0.9) | (s > 1.2))               # 1.2: the dual clip
    held = {"cispo": (ratio > 1.3) | (ratio < 0.9), "sapo": torch.zeros_like(mask),
            "reinforce": torch.zeros_like(mask)}.get(config.loss_type, held)
    by_hand = {"ratio": ratio, "approx_kl": -ratio.log(), "clip_fraction": held.double()}
    for name, values in by_hand.items():                        # over what is kept, whatever is counted
        assert close(metrics[f"loss/{name}"], by_loops(values, kept, "token-mean", kept, None))
    assert close(metrics["loss/policy"], loss) and not metrics["loss/policy"].requires_grad
    assert (metrics["loss/clip_fraction"] > 0) == held[kept].any() and "rollout_corr/kl" in metrics


def test_default_options_of_policy_loss():
    """eq:ppo-clip, eq:aggregation: clip 0.2, no dual clip, token-mean, fixed denominator."""
    lp, old, mu, advantages, mask = batch(5)
    config = Config(rollout_rs={"token_k1": (0.5, 1.5)})
    inputs = lp, old, mu, advantages, mask, config
    explicit = policy_loss(*inputs, how=LossConfig(clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="token-mean", denominator="fixed"))[0]
    assert close(policy_loss(*inputs)[0], explicit)
    assert not close(policy_loss(*inputs, how=LossConfig(denominator="kept"))[0], explicit)


@pytest.mark.parametrize("advantage, ratio, left", [
    (0.5, 1.3, 1), (0.5, 1.27, 0), (0.5, 0.7, 0), (-0.5, 0.79, 1), (-0.5, 0.81, 0), (-0.5, 1.4, 0),
    (0.0, 1.4, 0), (0.0, 0.7, 0)])
def test_clip_fraction_counts_the_sides_without_gradient(advantage, ratio, left):
    """eq:ppo-clip: above 1 + 0.28 for A > 0, below 1 − 0.2 for A < 0; with A = 0 none is taken."""
    one = torch.ones(1, 1).double()
    _, metrics = policy_loss(math.log(ratio) * one, 0 * one, 0 * one, advantage * one, one,
                             Config(), LossConfig(clip_low=0.2, clip_high=0.28))
    assert metrics["loss/clip_fraction"] == left


@pytest.mark.parametrize("options, clips", [({}, True), ({"clip_low": 1, "clip_high": 1e9}, False)])
def test_bypass_mode_says_what_its_clip_does_to_mismatch_before_any_update(options, clips):
    """eq:bypass: π_θ has not moved, so what PPO's clip around μ holds is μ's error; decoupled, nothing."""
    lp, _, mu, advantages, mask = batch(6)
    inputs = lp, lp.detach(), mu, advantages, mask
    metrics = policy_loss(*inputs, Config.bypass_ppo_clip(), LossConfig(**options))[1]
    warned = [x for x in diagnose(metrics) if x.startswith("loss/bypass_clip_fraction")]
    assert metrics["loss/bypass_clip_fraction"] == metrics["loss/clip_fraction"]
    assert (metrics["loss/clip_fraction"] > 0) == clips == any("bypass_mode false" in x for x in warned)
    on_time = policy_loss(lp, None, lp.detach(), advantages, mask, Config.bypass_ppo_clip(), LossConfig(**options))[1]
    assert on_time["loss/bypass_clip_fraction"] == 0 and diagnose(on_time) == []
    for config in (Config.decoupled_token_is(), Config.bypass_pg_is()):
        assert "loss/bypass_clip_fraction" not in policy_loss(*inputs, config, LossConfig(**options))[1]


def test_at_the_edge_of_the_interval_nothing_is_clipped():
    """eq:ppo-clip: r = 1 with a range of [1, 1] has not left it, for either sign of A."""
    one = torch.ones(1, 1)
    for advantage in (one, -one):
        _, metrics = policy_loss(0 * one, 0 * one, 0 * one, advantage, one, Config(), LossConfig(clip_low=0, clip_high=0))
        assert metrics["loss/clip_fraction"] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_mask_may_have_any_dtype(dtype):
    """eq:aggregation: a mask of 0 and 1 in any dtype is the same mask."""
    lp, old, mu, advantages, mask = batch(6)
    config = Config("token", rollout_rs={"token_k1": (0.5, 1.5)})
    for how in ("fixed", "kept"):
        expected, loss = (policy_loss(lp, old, mu, advantages, m, config, LossConfig(denominator=how))[0]
                          for m in (mask, mask.to(dtype)))
        assert close(loss, expected)
    assert close(kl_loss(lp, old, mask.to(dtype)), kl_loss(lp, old, mask))


def test_no_gradient_through_old_or_rollout_or_advantages():
    """eq:detached: π_old, μ and A are constants of the step, even when they come with a graph."""
    for mode in MODES:
        config = config_of(mode, "token", 1.5)
        lp, old, mu, advantages, mask = batch(7)
        old.requires_grad_()
        mu.requires_grad_()
        loss = policy_loss(lp, old, mu, advantages, mask, config)[0]
        assert all(g is None for g in torch.autograd.grad(loss, (old, mu), allow_unused=True))


@every_mode
@every_denominator
@every_aggregation
def test_everything_rejected_is_a_zero_loss_with_its_graph(mode, denominator, how):
    """eq:rejection, eq:aggregation: a gradient of zeros, finite metrics, and a count."""
    config = config_of(mode, "token", (1e6, 1e7), False, {"token_k1": (1e6, None)})
    lp, old, mu, advantages, mask = batch(1)
    for valid in (mask, torch.zeros_like(mask)):
        loss, metrics = policy_loss(lp, old, mu, advantages, valid, config, LossConfig(aggregation=how, denominator=denominator))
        assert loss == 0 and (torch.autograd.grad(loss, lp)[0] == 0).all()
        assert all(torch.as_tensor(m).isfinite() for m in metrics.values())
        assert metrics["rollout_corr/all_rejected"] == valid.any()


@every_mode
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_padding_reaches_neither_loss_nor_gradient(mode, junk):
    """eq:ratio: NaN or ±inf in the padding of any input, at every level, in every aggregation."""
    for how, level in zip(AGGREGATIONS, ("token", "sequence", "geometric", None)):
        config = config_of(mode, level, 1.5, True, {"seq_mean_k3": 0.1, "token_k1": (0.5, None)})
        out = []
        for padding in (0.0, junk):
            lp, old, mu, advantages, mask = batch(2, junk=padding)
            loss, metrics = policy_loss(lp, old, mu, advantages, mask, config, LossConfig(aggregation=how))
            figures = torch.stack([torch.as_tensor(m).double() for m in metrics.values()])
            out.append((loss.detach(), torch.autograd.grad(loss, lp)[0], figures))
        assert all(close(clean, dirty) for clean, dirty in zip(*out))
        assert out[0][1].abs().max() > 1e-3 and (out[1][1][~mask] == 0).all()


# -------------------------------------------------------------------------------------- the KL loss

def kl_moments(kind, mu=PI, ratio=None):
    lp, ref = PI.log_probs(), REF.log_probs().detach()
    live = (PI.log_probs() - mu.log_probs().detach()).exp()
    ratio = {"detached": live.detach(), "live": live, None: None}[ratio]
    return estimator_moments(PI, mu, lambda i: kl_loss(
        lp[i], ref[i], MASK[i], kind, SUM, ratio=None if ratio is None else ratio[i]))


@pytest.mark.parametrize("kind, mu, ratio, target", [
    *((kind, PI, None, (PI, REF, PI)) for kind in ("k2", "k1+", "k2+", "k3+", "abs+")),
    ("k3", PI, None, (REF, PI, PI)), ("k3", MU, "detached", (REF, PI, MU)),
    *((kind, MU, "detached", (PI, REF, MU)) for kind in ("k2", "k1+", "k3+")),
    *((kind, MU, "live", (PI, REF, MU)) for kind in ("k1", "k3"))])
def test_kl_loss_gradients(kind, mu, ratio, target):
    """eq:kl-gradient, eq:kl-ratio: (p, q, visits) of the per-token KL(p‖q) whose gradient it is."""
    assert close(kl_moments(kind, mu, ratio).mean, exact_gradient(PI, token_kl(*target)))


def test_kl_loss_of_k1_has_no_gradient_and_ratio_times_k2_the_wrong_one():
    """eq:kl-gradient: E_π[∇k1] = 0; eq:kl-ratio: ratio·k2 with its graph is off."""
    assert close(kl_moments("k1").mean, torch.zeros(PI.logits.numel()))
    wrong = kl_moments("k2", MU, "live").bias(exact_gradient(PI, token_kl(PI, REF, MU)))
    print(f"\nbias of ratio·k2, not detached: {wrong.norm():.3f}")
    assert wrong.norm() > 0.02


@every_aggregation
@pytest.mark.parametrize("junk", [0.0, math.nan])
def test_kl_loss_value_aggregation_and_padding(how, junk):
    """eq:aggregation: k3+ and token-mean are the defaults; ratio, horizon and counts are used."""
    lp, ref, _, _, mask = batch(4, junk=junk)
    ell = torch.where(mask, lp - ref, 0.0).detach()
    ratio = torch.where(mask, f64(1.7), junk)
    value = (-ell).exp() - 1 + ell
    assert close(kl_loss(lp, ref, mask, mode=how, horizon=8), by_loops(value, mask, how, mask, 8))
    weighted = kl_loss(lp, ref, mask, mode=how, ratio=ratio)
    assert close(weighted, by_loops(1.7 * value, mask, how, mask, None))
    assert torch.autograd.grad(weighted, lp)[0].isfinite().all()
    tenth = kl_loss(lp, ref, mask, mode=how, counts=Counts(*(10 * n for n in count(mask))))
    assert close((1 if how == "token-sum" else 10) * tenth, kl_loss(lp, ref, mask, mode=how))
    assert close(kl_loss(lp, ref, mask), by_loops(value, mask, "token-mean", mask, None))
    assert close(torch.autograd.grad(kl_loss(lp, ref, mask), lp)[0], ell / mask.sum())


def test_the_kl_in_the_reward_is_the_full_one():
    """eq:kl-gradient: REINFORCE with A = R − β Σ_s ℓ_s descends −J + β KL(π‖ref) of sequences."""
    cost = (PI.log_probs() - REF.log_probs()).detach().sum(-1, keepdim=True)
    target = -grad_J(PI, R) + 0.3 * exact_gradient(PI, kl(PI, REF))
    advantages = (R - 0.3 * cost).expand(-1, 3)
    assert close(moments(reinforce(), mu=PI, advantages=advantages).mean, target)


# ------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("options, words", [
    ({"aggregation": "token-means"}, "aggregation cannot be 'token-means'; did you mean 'token-mean'?"),
    ({"denominator": "all"}, "denominator cannot be 'all'; allowed: fixed, kept")])
def test_a_wrong_option_is_one_sentence(options, words):
    """eq:aggregation."""
    with pytest.raises(ValueError, match=re.escape(words)):
        LossConfig(**options)


@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_shape_is_an_error(wrong):
    """eq:correction: [B, T] of one shape; a [B, 1] that broadcasts is none, but of advantages."""
    tensors = list(batch())
    tensors[wrong] = tensors[wrong][:, :2 if wrong == 3 else 1]
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(*tensors, Config())


@pytest.mark.parametrize("missing", ["log_prob", "rollout_log_prob", "advantages"])
@pytest.mark.parametrize("config", [Config("token"), Config(rollout_rs={"token_k3": 1.0}),
                                    Config(bypass_mode=True)], ids=["weights", "rejection", "bypass"])
def test_a_missing_tensor_is_an_error_that_names_it(missing, config):
    """eq:correction: old_log_prob alone may be missing where something is corrected."""
    names = "log_prob", "old_log_prob", "rollout_log_prob", "advantages"
    *tensors, mask = [None if name == missing else x for name, x in zip((*names, "mask"), batch())]
    with pytest.raises(ValueError, match=f"^{missing} is missing"):
        policy_loss(*tensors, mask, config)


# ------------------------------------------------------------------ what other trainers do not have

def same(one, other, lp):
    """Loss, gradient and metrics of two results of policy_loss are equal."""
    gradients = [torch.autograd.grad(loss, lp, retain_graph=True)[0] for loss, _ in (one, other)]
    return (close(one[0], other[0]) and close(*gradients) and one[1].keys() == other[1].keys()
            and all(close(one[1][name], other[1][name]) for name in one[1]))


@every_mode
def test_without_old_log_prob_it_is_this_one(mode):
    """eq:ppo-clip: r = 1, and ρ is from π_θ; in bypass mode nobody looks at it."""
    lp, old, mu, advantages, mask = batch(6)
    config = config_of(mode, "token", 1.2, False, {"token_k1": (0.5, 1.5)})
    missing = policy_loss(lp, None, mu, advantages, mask, config)
    given = policy_loss(lp, old if config.bypass_mode else lp.detach(), mu, advantages, mask, config)
    assert same(missing, given, lp)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_and_mask_made_elsewhere_need_no_rollout_log_prob(loss_type):
    """eq:decoupled-ppo: the loss sees μ through the correction alone."""
    lp, old, mu, advantages, mask = batch(7)
    config = Config("token", 1.2, rollout_rs={"token_k1": (0.5, 1.5)}, loss_type=loss_type)
    weights, kept, _ = correct(old, mu, mask, config)
    assert Correction(weights, kept).metrics == {} and kept.sum() < mask.sum()
    given = policy_loss(lp, old, None, advantages, mask, config, correction=Correction(weights, kept))
    computed = policy_loss(lp, old, mu, advantages, mask, config)
    computed = computed[0], {name: x for name, x in computed[1].items() if name in given[1]}
    assert same(given, computed, lp) and len(given[1]) == 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_rollout_log_prob_nothing_is_corrected(loss_type):
    """eq:ppo-clip: with one, the loss is the same, and the distance is measured."""
    lp, old, mu, advantages, mask = batch(8)
    missing = policy_loss(lp, old, None, advantages, mask, Config(loss_type=loss_type))
    given = policy_loss(lp, old, mu, advantages, mask, Config(loss_type=loss_type))
    assert "rollout_corr/kl" in given[1]
    assert same(missing, (given[0], {name: given[1][name] for name in missing[1]}), lp)


@every_mode
@pytest.mark.parametrize("shape", ["[B]", "[B, 1]"])
def test_one_advantage_for_a_sequence(mode, shape):
    """eq:policy-gradient: an outcome's advantage is that of all its tokens."""
    lp, old, mu, advantages, mask = batch(9)
    one = advantages[:, 0] if shape == "[B]" else advantages[:, :1]
    config = config_of(mode, "sequence", 1.2, False, {"opsm": 0.01})
    whole = policy_loss(lp, old, mu, advantages[:, :1].expand_as(mask), mask, config)
    assert same(policy_loss(lp, old, mu, one, mask, config), whole, lp)


def test_an_advantage_for_each_time_step_is_no_advantage_of_sequences():
    """eq:policy-gradient: [T] would broadcast in PyTorch, over the wrong axis."""
    lp, old, mu, advantages, mask = batch(9)
    assert lp.shape[0] != lp.shape[1]
    with pytest.raises(ValueError, match=r"advantages \(5,\) and response_mask \(6, 5\)"):
        policy_loss(lp, old, mu, advantages[0], mask, Config())


@every_mode
def test_means_beside_a_summed_loss(mode):
    """eq:aggregation: with `counts` everything is a summand; `loss_means` makes means of all but the loss."""
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


@every_mode
def test_a_missing_sampling_log_prob_is_not_hidden(mode):
    """eq:ratio: NaN is NaN in the metrics, and in a loss that it weights; a criterion rejects what is not a number."""
    lp, old, mu, advantages, mask = batch(11)
    gaps = mask & (torch.arange(5) % 2 == 0)
    assert 0 < gaps.sum() < mask.sum()
    for level in ("token", "sequence", "geometric"):
        config = config_of(mode, level, 1.3, False, {"seq_mean_k1": (0.5, 1.5)})
        holes, everything = torch.where(gaps, math.nan, mu), config_of(mode, level, 1.3, False, {})
        assert policy_loss(lp, old, holes, advantages, mask, everything)[0].isnan() or not config.applies_weights
        assert policy_loss(lp, old, holes, advantages, mask, config)[1]["rollout_corr/kl"].isnan()


def test_clips_and_temperatures_of_their_own():
    """eq:gspo, eq:sapo: GSPO's clip is a thousand times narrower; SAPO's two τ are options."""
    lp, old, mu, advantages, mask = batch(12)
    inputs = lp, old, mu, advantages, mask
    gspo, sapo = Config(loss_type="gspo"), Config(loss_type="sapo")
    narrow = policy_loss(*inputs, gspo, how=LossConfig(clip_low=3e-4, clip_high=4e-4))
    assert same(policy_loss(*inputs, gspo), narrow, lp)
    assert not close(narrow[0], policy_loss(*inputs, gspo, how=LossConfig(clip_low=0.2, clip_high=0.2))[0])
    gate = sapo_loss(lp, old, advantages, 0.5, 2.0)
    loss = policy_loss(*inputs, sapo, how=LossConfig(tau_positive=0.5, tau_negative=2.0))[0]
    assert close(loss, by_loops(gate, mask, "token-mean", mask, None))


ROOT = Path(__file__).resolve().parent.parent
CORE = "import estimators, metrics, correction, losses, adapters.dialects"


def test_the_core_needs_no_omegaconf():
    """eq:correction: a larger trainer may have another, or none."""
    program = f"import sys; sys.modules.update(omegaconf=None, yaml=None, transformers=None); {CORE}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# ------------------------------------------------------------------------------ Monte Carlo, larger

BIG = MarkovPolicy(16, 12, seed=0)
BIG_MU: MarkovPolicy = BIG.perturbed(1, 0.35)  # pyright: ignore[reportAssignmentType]
REWARD = torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def z_score(config, old, seed=0, n=20_000):
    """How many standard errors the sampled gradient is from −∇J: 16^12 sequences, n of them drawn.

    Along one direction, fixed beforehand: that in which μ's own policy gradient differs from π's.
    """
    tokens, mask = BIG_MU.sample(n, seed)
    log_prob = BIG.log_probs(tokens, mask)
    target = exact_gradient(BIG, BIG.J(REWARD))
    direction = (target - exact_gradient(BIG_MU, BIG_MU.J(REWARD))).reshape(16, 16)
    probs = BIG.logits.detach().softmax(-1)
    along = direction - (probs * direction).sum(-1, keepdim=True)   # ∇log π(next|last) · direction
    last = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], -1)
    returns = (REWARD[tokens] * mask).sum(-1, keepdim=True)
    leaf = log_prob.detach().requires_grad_()
    loss, _ = policy_loss(leaf, old.log_probs(tokens, mask).detach(),
                          BIG_MU.log_probs(tokens, mask).detach(),
                          (returns - BIG.J(REWARD).item()).expand_as(mask), mask, config, LossConfig(aggregation=SUM))
    each = n * (torch.autograd.grad(loss, leaf)[0] * along[last, tokens]).sum(-1)       # [n]
    return ((each.mean() + target @ direction.flatten()) / (each.std() / n ** 0.5)).item()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", [
    reinforce("sequence"), Config("sequence", PLAIN), Config("sequence", PLAIN, loss_type="sapo")])
def test_monte_carlo_confirms_the_unbiased(config, seed):
    """eq:off-policy, eq:decoupled-ppo at θ = θ_old: |z| < 4; by chance once in 16 000 seeds."""
    z = z_score(config, BIG, seed)
    print(f"\nz = {z:+.2f}")
    assert abs(z) < 4


@pytest.mark.parametrize("config", [
    reinforce(), reinforce("token"), reinforce("geometric"), reinforce("sequence", 1.0),
    Config("token", 2.0), Config(rollout_rs={"seq_sum_k1": (0.5, 2.0)})])
def test_monte_carlo_detects_the_biased(config):
    """eq:levels, eq:tis: the same procedure sees each of these biases: |z| > 6."""
    z = z_score(config, BIG)
    print(f"\nz = {z:+.2f}")
    assert abs(z) > 6


# ------------------------------------------------------------------------------- GSPO, token by token

def gspo_of_the_sequence(lp, old, advantages, mask, **clip):
    """The paper's first form: the gradient goes through s itself."""
    log_s = aggregate_log_ratio(lp - old, mask, "geometric")
    return ppo_clip_loss(log_s, torch.zeros_like(log_s), advantages, **clip)


def test_gspo_of_tokens_and_of_sequences_agree_where_all_is_constant_over_a_sequence():
    """eq:gspo: with one advantage, weight and fate for a response, the mean over its tokens has one gradient."""
    lp, old, _, _, mask = batch(4)
    advantages = torch.randn(len(lp), 1, generator=torch.Generator().manual_seed(0)).double().expand_as(lp)
    weights = torch.rand(len(lp), 1, generator=torch.Generator().manual_seed(1)).double()
    for clip in ({"clip_low": 0.01, "clip_high": 0.02}, {"clip_low": 9.0, "clip_high": 9.0}):
        of = [aggregate_loss(weights * form(lp, old, advantages, mask, **clip), mask, "seq-mean-token-mean")
              for form in (gspo_loss, gspo_of_the_sequence)]
        assert close(*of)
        assert close(*(torch.autograd.grad(loss, lp)[0] for loss in of))


def test_gspo_gives_a_rejected_token_no_gradient_through_its_neighbour():
    """eq:gspo: log ρ = (0, 6): the second token's weight or mask is 0; through s both would get −1/4."""
    old = torch.zeros(1, 2, dtype=torch.float64)
    mu, one = old - f64([[0.0, 6.0]]), torch.ones(1, 2)
    for config in (Config(rollout_rs={"token_k1": (0.5, 2.0)}, loss_type="gspo"),
                   Config("token", (0.5, 2.0), loss_type="gspo")):
        lp = old.clone().requires_grad_()
        loss, _ = policy_loss(lp, old, mu, one.double(), one, config, LossConfig(aggregation="seq-mean-token-mean"))
        assert torch.autograd.grad(loss, lp)[0].tolist() == [[-0.5, 0.0]]
    lp = old.clone().requires_grad_()
    through_s = gspo_of_the_sequence(lp, old, one.double(), one)[:, :1].sum() / 2
    assert torch.autograd.grad(through_s, lp)[0].tolist() == [[-0.25, -0.25]]


def test_gspo_with_advantages_of_tokens_is_each_tokens_own():
    """eq:gspo, by the oracle: the expected gradient is E_π[Σ_t A_t ∇log π_t / T] at π_θ = π_old."""
    advantages, lp = torch.arange(3).double() * R, PI.log_probs()           # another one for each token
    old, config = lp.detach(), Config(loss_type="gspo")
    token = estimator_moments(PI, PI, lambda i: policy_loss(
        lp[i], old[i], None, advantages[i], MASK[i], config, LossConfig(aggregation="seq-mean-token-mean"))[0])
    share = MASK.double() / MASK.sum(-1, keepdim=True)
    exact = expectation(PI, (scores(PI) * (advantages * share)[..., None]).sum(1))
    assert close(-token.mean, exact)
    whole = estimator_moments(PI, PI, lambda i: aggregate_loss(gspo_of_the_sequence(
        lp[i], old[i], advantages[i], MASK[i]), MASK[i], "seq-mean-token-mean"))
    print(f"through s: bias {(whole.mean + exact).norm() / exact.norm():.2f} of the gradient")
    assert not close(-whole.mean, exact)


# ------------------------------------------------------------------------------------ loss metrics

@pytest.mark.parametrize("denominator", ["fixed", "kept"])
def test_metrics_of_the_loss_are_not_diluted_by_rejection(denominator):
    """eq:aggregation: half rejected and π_θ = π_old: the mean r is 1, whatever the denominator."""
    x = torch.zeros(2, 2)
    _, metrics = policy_loss(x, x, torch.tensor([[0.0, 9.0], [0.0, 9.0]]), x + 1, x + 1,
                             Config(rollout_rs={"token_k1": (0.5, 2.0)}), LossConfig(denominator=denominator))
    assert metrics["loss/ratio"] == 1


def test_half_precision_is_widened_before_the_ratio():
    """eq:gspo: bfloat16 cannot tell e^{2⁻⁷} from 1.0078125; the gradient returns in its own type."""
    lp = torch.tensor([[-2.0, -1.9921875]]).bfloat16().requires_grad_()
    old = torch.tensor([[-2.0, -2.0]]).bfloat16()
    one = torch.ones(1, 2)
    loss, metrics = policy_loss(lp, old, old, one.bfloat16(), one, Config(loss_type="gspo"))
    assert loss.dtype == torch.float32
    assert metrics["loss/ratio"].item() == pytest.approx((1 + math.exp(2 ** -7)) / 2, rel=gamma(5))    # e^x, two sums, a quotient
    assert torch.autograd.grad(loss, lp)[0].dtype == torch.bfloat16
