"""Exhibits: four bugs in the replay of a mixture's routes, which shipped or were proposed.

The sampler is the model with noise on its weights, which flips some routes (chapter 11). `replayed`
is the expected gradient of policy_loss with sequence weights over its samples; the exact one is
that of J at the sampler's routes. tests/support/exhibits.py says what an exhibit is.
"""

import math

import pytest
import torch

from three_policies.losses import LossConfig, policy_loss
from three_policies.oracle import routes
from three_policies.oracle.routes import BEFORE, PROMPT, TREE, forward, live, log_probs
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.exhibits import exhibit, filed_by, judge

THETA, REWARD, ROUTES, _, MU, *_ = routes.pair(0.03, 1)
HOW = LossConfig(aggregation="seq-mean-token-sum")
EXACT = routes.flat(torch.func.grad(routes.J)(THETA, REWARD, ROUTES))


def replayed(table, gate=live):
    """Return −E_μ[∇policy_loss] with sequence weights, where the trainer replays a table."""
    def loss(model):
        lp, config = log_probs(model, table, gate), Config("sequence", math.inf)
        advantage = (REWARD - MU.sum(-1).exp() @ REWARD)[:, None].expand_as(lp)
        return -sum(p * policy_loss(lp[[i]], lp[[i]].detach(), MU[[i]], advantage[[i]],
                                    TREE.mask[[i]], config, HOW)[0]
                    for i, p in enumerate(MU.sum(-1).exp()))
    return routes.flat(torch.func.grad(loss)(THETA))


@exhibit("NeMo-RL, found in review: https://github.com/NVIDIA-NeMo/RL/pull/3208",
         "eq:replay-gradient")
def missing_routes_filled_with_expert_0():
    """Rows without a record got zeros, and 0 is an expert: padding there, here the prompt.

    The prompt has no loss, but every token of the response reads it.
    """
    filled = torch.cat([0 * ROUTES[:, :PROMPT], ROUTES[:, PROMPT:]], 1)
    return replayed(filled), replayed(ROUTES), EXACT


@exhibit("Megatron-LM lite, reported: https://github.com/ISEEKYAN/Megatron-LM/pull/49, corrected: "
         "https://github.com/ISEEKYAN/Megatron-LM/pull/79", "eq:replay-gradient")
def scores_zeroed_before_the_replay():
    """Scores outside the trainer's own choice were set to 0 first: an expert that flips is mute.

    Its gate is 0, and so is the router's gradient there.
    """
    def zeroed(score, route, layer):
        own = score.topk(route.shape[-1]).indices
        return torch.zeros_like(score).scatter(-1, own, live(score, own, layer)).gather(-1, route)
    return replayed(ROUTES, zeroed), replayed(ROUTES), EXACT


@exhibit("verl, dense layers were counted: https://github.com/verl-project/verl/pull/5037; "
         "NeMo-RL, a prediction layer took a decoder layer's: "
         "https://github.com/NVIDIA-NeMo/RL/pull/3903", "eq:replay-gradient")
def routes_of_another_layer():
    """A layer replayed the routes of another one: both are valid, and nothing crashes."""
    return replayed(ROUTES.flip(0)), replayed(ROUTES), EXACT


@exhibit("miles, rows of another token: https://github.com/radixark/miles/pull/3146; verl, tokens "
         "of alignment counted: https://github.com/verl-project/verl/pull/7106",
         "eq:replay-gradient")
def routes_one_token_late():
    """Each token replayed the route of the one before it. The mean of ρ stays 1."""
    late = ROUTES[:, BEFORE]
    rho = (log_probs(THETA, late) - MU).sum(-1).exp()
    assert abs(MU.sum(-1).exp() @ rho - 1) < 1e-12
    return replayed(late), replayed(ROUTES), EXACT


@pytest.mark.parametrize("name", filed_by(__name__))
def test_exhibit(name):
    judge(name)


def test_a_mute_expert_is_one_that_flipped():
    assert (forward(THETA)[1] != ROUTES).any()
