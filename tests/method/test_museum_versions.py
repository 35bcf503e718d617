"""Exhibits of chapter 9: what shipped for weights that change in the middle of a response.

All are of one model: version `start` draws two tokens, `end` the rest, and π has moved on. The form
is tests/method/test_museum.py's. Where a response is discarded, `right` trains it a step later.
"""

import math

import pytest
import torch

from three_policies.losses import LossConfig, policy_loss
from three_policies.oracle import J, exact_gradient, grad_J
from three_policies.oracle.versions import SWITCH, Recurrent, model
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.exhibits import exhibit, filed_by, judge

PI, START, END, R = model(Recurrent, seed=9)
LP, MASK, LONG = PI.log_probs(), PI.mask, PI.mask[:, [SWITCH]]
FIRST, LAST = START.log_probs().detach(), END.log_probs().detach()
OLD = torch.arange(PI.T) < SWITCH
RECORD, UP = torch.where(OLD, FIRST, LAST), -grad_J(PI, R)
A = (R - J(PI, R).detach()).expand(-1, PI.T)
SEQUENCE_IS = Config("sequence", math.inf, bypass_mode=True, loss_type="reinforce")


def drawn(by):
    """Return the chance of each response, [B, 1], if each token is drawn with these log-probs."""
    return by.sum(-1, keepdim=True).exp()


def trained(chance, log_mu, mask=MASK, advantages=A):
    """Return the expected gradient of policy_loss on responses that have this chance."""
    losses = torch.stack([policy_loss(
        LP[[i]], LP[[i]], log_mu[[i]], advantages[[i]], mask[[i]], SEQUENCE_IS,
        LossConfig(aggregation="seq-mean-token-sum"))[0] for i in range(len(R))])
    return exact_gradient(PI, chance[:, 0] @ losses)


@exhibit("labs-molt: https://github.com/NVIDIA-NeMo/labs-molt/pull/124", "eq:rescored")
def crossing_response_scored_by_one_version():
    """Two versions drew a response, and a third scored it: the record was called no policy's."""
    return trained(drawn(RECORD), LP.detach()), trained(drawn(RECORD), RECORD), UP


@exhibit("prime-rl: https://github.com/PrimeIntellect-ai/prime-rl/pull/2957; "
         "slime: https://github.com/THUDM/slime/pull/1192", "eq:old-masked")
def tokens_of_earlier_versions_masked():
    """Old tokens stayed in the context without a gradient: long responses' beginnings."""
    mask = MASK & ~(OLD & LONG)
    return trained(drawn(RECORD), RECORD, mask), trained(drawn(RECORD), RECORD), UP


@exhibit("found by miles: https://github.com/radixark/miles/pull/2783; "
         "NeMo-RL: https://github.com/NVIDIA-NeMo/RL/pull/4018", "eq:recorded")
def cache_of_earlier_weights_scored_afresh():
    """The engine kept its cache over an update; the trainer scored all with a fresh one."""
    kept = END.log_probs(START).detach()
    return trained(drawn(kept), RECORD), trained(drawn(kept), kept), UP


@exhibit("tinker-cookbook: https://github.com/thinking-machines-lab/tinker-cookbook/pull/822; "
         "verl-omni: https://github.com/verl-project/verl-omni/issues/586", "eq:restarted")
def slow_responses_drawn_again():
    """What the update found unfinished was drawn again: short responses had two chances.

    Every log μ is right, and of one version.
    """
    again = (drawn(FIRST) * LONG).sum() * drawn(LAST)
    wrong = trained(drawn(FIRST) * ~LONG, FIRST) + trained(again, LAST)
    return wrong, trained(drawn(RECORD), RECORD), UP


@exhibit("miles: https://github.com/radixark/miles/pull/3200", "eq:discarded")
def truncated_responses_paid_the_mean():
    """Truncated responses had no gradient, but a reward in the baseline: each was paid the mean."""
    mu = LP.detach()                                                # π = μ; a reward for each
    cut = MASK.sum(-1, keepdim=True) == PI.T
    return trained(drawn(mu), mu, MASK & ~cut), trained(drawn(mu), mu), UP


@exhibit("open-instruct: https://github.com/allenai/open-instruct/pull/1738", "eq:survivors")
def stale_results_replaced_by_other_prompts():
    """Results that came late were dropped, and others filled the batch: ∇E[R | in time]."""
    in_time = drawn(LP.detach()) * ~LONG
    mean = (in_time * R).sum() / in_time.sum()
    wrong = trained(drawn(FIRST) * ~LONG / in_time.sum(), FIRST, advantages=(R - mean).expand_as(A))
    right = trained(drawn(LAST) * ~LONG, LAST) + trained(drawn(RECORD) * LONG, RECORD)
    return wrong, right, UP


@pytest.mark.parametrize("name", filed_by(__name__))
def test_exhibit(name):
    judge(name)
