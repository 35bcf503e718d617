"""A token that π_θ cannot draw, log π_θ = −∞, is a number in every loss, or infinite; never a NaN.

π_θ may ban what μ has drawn: a mask of the vocabulary, an overflow of 16 bits. r and ρ are then 0,
or 1 where π_old bans the token as well. 0 · ∞ and ∞ − ∞ must not spoil the other tokens.
"""

import math
from dataclasses import replace

import pytest
import torch

from three_policies.centering import centering_loss
from three_policies.correction import Correction
from three_policies.losses import policy_loss
from three_policies.oracle import close, f64
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.surrogates import LOSSES
from three_policies.tests.support.examples import batch, config_of, every_mode, reinforce

NEVER, NEXT_TO_NEVER = -math.inf, -1e5


def outcome(loss_type, of_first, old=None, advantage=None, weight=None, **options):
    """Return loss and gradient where the first row's first token has log π_θ = `of_first`."""
    log_prob, anchor, mu, advantages, mask = batch(3)
    log_prob = log_prob.detach().clone()
    log_prob[0, 0] = of_first
    if old is not None:
        anchor[0, 0] = old
    if advantage is not None:
        advantages[0, 0] = advantage
    correction = None
    if weight is not None:
        weights = torch.ones_like(mu)
        weights[0, 0] = weight
        correction = Correction(weights, mask)
    options["bypass_mode"] = loss_type == "reinforce" or options.get("bypass_mode", False)
    log_prob.requires_grad_()
    loss, _ = policy_loss(log_prob, anchor, mu, advantages, mask,
                          Config(loss_type=loss_type, **options), correction=correction)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


HAS_A_RATIO = [name for name in LOSSES if name not in ("reinforce", "cispo")]


@pytest.mark.filterwarnings("ignore:rollout_is")
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("loss_type", HAS_A_RATIO)
def test_a_ratio_of_0_is_the_limit_of_a_small_one(loss_type, advantage, level, bypass):
    """eq:ppo-clip, eq:gspo, eq:sapo: loss and gradient are those of log π_θ = −10⁵."""
    never, nearly = (outcome(loss_type, x, advantage=advantage, rollout_is=level,
                             bypass_mode=bypass) for x in (NEVER, NEXT_TO_NEVER))
    assert all(close(*pair) and pair[0].isfinite().all() for pair in zip(never, nearly))
    assert never[1].abs().max() > 1e-3


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("of_zero", ["weight", "advantage"])
def test_nothing_times_infinity_is_nothing(loss_type, of_zero):
    """eq:reinforce, eq:cispo: with weight or advantage 0 a token adds 0, whatever log π_θ is."""
    never, plain = (outcome(loss_type, x, **{of_zero: 0.0}) for x in (NEVER, -1.0))
    assert never[0].isfinite() and never[1].isfinite().all() and never[1][0, 0] == 0
    if loss_type != "gspo":                                       # whose r̄ is the sequence's
        assert close(never[0], plain[0]) and close(never[1], plain[1])


@pytest.mark.parametrize("loss_type", ["reinforce", "cispo"])
def test_a_log_prob_that_is_taught_is_infinite_and_no_nan(loss_type):
    """eq:reinforce: −A log π_θ is ∞ for A > 0; its gradient is finite, and all others' as well."""
    loss, gradient = outcome(loss_type, NEVER, advantage=1.0)
    assert loss == math.inf and gradient.isfinite().all() and gradient[0, 0] < 0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_what_both_policies_ban_has_a_ratio_of_1(loss_type):
    """eq:ppo-clip: π_θ = π_old = 0 in a first update; other tokens have their own gradients."""
    found = [outcome(loss_type, x, old=x, advantage=0.5) for x in (NEVER, -1.0)]
    if loss_type == "reinforce":
        return                                                   # it looks at no π_old
    assert found[0][0].isfinite() and found[0][1].isfinite().all()
    others = torch.ones_like(found[0][1], dtype=torch.bool)
    others[0, 0] = False
    assert close(found[0][1][others], found[1][1][others])


@every_mode
def test_a_nan_is_no_impossible_token(mode):
    """A NaN stays one in the loss: it is not taken for a ratio of 0."""
    log_prob, old, mu, advantages, mask = batch(3)
    log_prob = log_prob.detach().clone()
    log_prob[0, 0] = math.nan
    assert policy_loss(log_prob, old, mu, advantages, mask, config_of(mode, None, 2.0))[0].isnan()


def test_a_banned_candidate_has_no_value_where_nothing_is_centered():
    """eq:score-centering: A = 0 makes 0 · −∞ of a candidate with log π = −∞."""
    log_mu = f64([[[0.5, 0.25]]]).log()
    config = replace(reinforce("token", 2.0), score_centering=True)
    log_prob = f64([[[-0.5, NEVER]]]).requires_grad_()
    loss = centering_loss(log_prob, log_mu, f64([[0.0]]), torch.ones(1, 1), config)
    assert loss.item() == 0
    assert torch.autograd.grad(loss.sum(), log_prob)[0].tolist() == [[[0, 0]]]
