"""Enumeration gives the expected gradient with three policies (decoupled) and two (bypass mode)."""

import math

import pytest

from three_policies.correction import correct
from three_policies.losses import policy_loss
from three_policies.oracle import (Policy, close, estimator_moments, exact_gradient, grad_J, kl,
                                   rewards)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.surrogates import ppo_clip_loss
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (A, LOSS_TYPES, MASK, MU, OLD, PI, PLAIN, R, REF,
                                                   moments, reinforce)


@certifies("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_decoupled_loss_does_not_depend_on_mu(loss_type):
    """eq:batch-size, eq:decoupled-ppo: E_μ[w·L(π_θ/π_old)] = E_old[L] with the full product w."""
    full = Config("sequence", PLAIN, loss_type=loss_type)
    clip = {"clip_low": 0.1, "clip_high": 0.15}
    on_policy = moments(Config(loss_type=loss_type), mu=OLD, **clip).mean
    for mu in (MU, REF, PI):
        assert close(moments(full, mu=mu, **clip).mean, on_policy)
    by_token = moments(Config("token", PLAIN, loss_type=loss_type), **clip)
    drift = by_token.bias(on_policy).norm() / on_policy.norm()
    print(f"\n{loss_type}: bias with token weights {drift:.1%}")
    assert drift > 0.03


@certifies("float64")
@pytest.mark.parametrize("loss_type", ["ppo_clip", "cispo", "sapo"])
def test_the_first_step_is_reinforce(loss_type):
    """eq:ppo-clip, eq:cispo, eq:sapo: at θ = θ_old the gradient is REINFORCE's, by sequence."""
    first = moments(Config("sequence", PLAIN, loss_type=loss_type), old=PI)
    assert close(first.gradients, moments(reinforce("sequence")).gradients)
    assert close(first.mean, -grad_J(PI, R))


@certifies("float64")
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_decoupled_is_plain_when_old_is_the_sampler(level, loss_type):
    """eq:decoupled-ppo: π_old = μ makes every weight 1, truncated or not."""
    assert close(moments(Config(level, 2.0, loss_type=loss_type), old=MU).gradients,
                 moments(Config(loss_type=loss_type), old=MU).gradients)


@certifies("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bypass_puts_the_sampler_in_the_place_of_old(loss_type):
    """eq:bypass: the loss is L(π_θ/μ) without a weight, and old_log_prob is not read."""
    bypass = moments(Config(bypass_mode=True, loss_type=loss_type))
    assert close(bypass.gradients, moments(Config(loss_type=loss_type), old=MU).gradients)
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    config = Config(bypass_mode=True, loss_type=loss_type)
    losses = [policy_loss(lp, old, mu_lp, A, MASK, config)[0] for old in (None, lp * math.nan, lp)]
    assert close(losses[0], losses[1]) and close(losses[0], losses[2])


@certifies("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bypass_takes_no_weight(loss_type):
    """eq:double-count: requested weights do not multiply a ratio that is π_θ/μ already."""
    with pytest.warns(UserWarning, match="eq:double-count"):
        weighted = Config("sequence", PLAIN, bypass_mode=True, loss_type=loss_type)
    plain = moments(Config(bypass_mode=True, loss_type=loss_type))
    assert close(moments(weighted).gradients, plain.gradients)
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    assert correct(lp, mu_lp, MASK, weighted).weights is not None


@certifies("float64")
def test_counting_the_ratio_twice_is_wrong():
    """eq:double-count: at T = 1 E_μ[−rA] has the gradient −∇J, unclipped; a factor ρ changes it."""
    pi = Policy(5, 1, seed=4)
    mu, r = pi.perturbed(5, 0.6), rewards(pi)
    once = moments(Config(bypass_mode=True), pi, pi, mu, r, clip_low=1.0, clip_high=1e9)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    twice = estimator_moments(pi, mu, lambda i: ((lp - mu_lp)[i].exp().detach() * ppo_clip_loss(
        lp[i], mu_lp[i], r[i], 1.0, 1e9)).sum())
    size = twice.bias(-grad_J(pi, r)).norm() / grad_J(pi, r).norm()
    print(f"\nbias of a ratio counted twice: {size:.0%} of ∇J")
    assert close(once.mean, -grad_J(pi, r)) and size > 0.1


@certifies("float64")
def test_the_kl_in_the_reward_is_the_full_one():
    """eq:kl-gradient: REINFORCE with A = R − β Σ_s ℓ_s descends −J + β KL(π‖ref) of sequences."""
    cost = (PI.log_probs() - REF.log_probs()).detach().sum(-1, keepdim=True)
    target = -grad_J(PI, R) + 0.3 * exact_gradient(PI, kl(PI, REF))
    advantages = (R - 0.3 * cost).expand(-1, 3)
    assert close(moments(reinforce(), mu=PI, advantages=advantages).mean, target)
