"""Exhibits of chapters 16 to 18: weights that change in a response, tools' tokens, replayed routes.

The form is that of test_museum.py; tests/support/exhibits.py says what an exhibit is. Of versions,
`start` draws two tokens, `end` the rest, and π has moved on. Where a response is discarded, `right`
trains it a step later. Of routes, the sampler is the model with noise on its weights, which flips
some routes (chapter 18). `replayed` is the expected gradient of policy_loss with sequence weights
over its samples; the exact one is that of J at the sampler's routes.
"""

import math

import pytest
import torch

from three_policies.kl import kl_penalty
from three_policies.losses import LossConfig, count, policy_loss
from three_policies.oracle import J, exact_gradient, expectation, grad_J, kl, routes, turns
from three_policies.oracle.routes import BEFORE, PROMPT, TREE, forward, live, log_probs
from three_policies.oracle.versions import SWITCH, Recurrent, model
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.exhibits import exhibit, filed_by, judge, once

THETA, REWARD, ROUTES, _, MU, *_ = routes.pair(0.03, 1)
HOW = LossConfig(aggregation="seq-mean-token-sum")
EXACT = routes.flat(torch.func.grad(routes.J)(THETA, REWARD, ROUTES))


@once
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


X, WRITER = turns.agent(1000), turns.writer(1000, -2.4)
MU_LP = X.draws.log_probs().detach()
RHO = turns.rho(X.lp, MU_LP, X.own)


def mean(weights, mask=X.own, x=X):
    """Return the expected gradient that an agent's responses give with these weights and mask."""
    return expectation(x.draws, turns.trained(x.lp, x.A, mask, x.g, weights))


@exhibit("verl-tool with mask_observations=False: "
         "https://github.com/TIGER-AI-Lab/verl-tool/issues/116", "eq:tool-mask")
def attention_mask_for_the_loss():
    """The loss mask was the attention mask, so what the tool wrote was trained on, at ρ = 1."""
    wrong = mean(RHO[:, :1] * X.mask, X.mask)
    return wrong, mean(RHO), X.target


@exhibit("SkyRL, before https://github.com/NovaSky-AI/SkyRL/pull/758", "eq:tool-ratio")
def log_mu_of_zero_in_the_mask():
    """An end token that code had appended was in the mask, its log μ a filler of 0."""
    recorded = torch.where(X.written, 0.0, MU_LP)
    return mean(turns.rho(X.lp, recorded, X.mask), X.mask), mean(RHO), X.target


@exhibit("Flash-RL: https://github.com/yaof20/Flash-RL/issues/19; the same filler in SkyRL, before "
         "https://github.com/NovaSky-AI/SkyRL/pull/758", "eq:tool-ratio")
def log_mu_of_one_at_masked_tokens():
    """Masked tokens had log μ = 1 and log π = 0, so each of them divided ρ by e: E[ρ] is not 1."""
    lp, recorded = (torch.where(X.written, x, y) for x, y in ((0.0, X.lp), (1.0, MU_LP)))
    wrong, right = (turns.rho(lp, recorded, mask)[:, 0] for mask in (X.mask, X.own))
    return expectation(X.draws, wrong), expectation(X.draws, right), 1.0


@exhibit("OpenRLHF: https://github.com/OpenRLHF/OpenRLHF/pull/1252", "eq:tool-length")
def span_of_the_turns_as_a_length():
    """The length for the overlong penalty ran from the first token to the last, tools included."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]])
    at = mask[0].nonzero()
    return at[-1] - at[0] + 1, count(mask).tokens[None], [9.0]


@exhibit("slime: https://github.com/THUDM/slime/issues/1370", "eq:tool-kl")
def kl_of_the_tools_tokens():
    """REINFORCE++ summed the KL over the tool's tokens as well, and charged the agent for them."""
    wrong = expectation(X.acts, kl_penalty(X.lp, X.ref, X.lp, X.mask)[:, 0])
    right = expectation(X.acts, kl_penalty(X.lp, X.ref, X.lp, X.own)[:, 0])
    return wrong, right, kl(X.acts, X.aims)


@exhibit("verl: https://github.com/verl-project/verl/pull/6376", "eq:trajectory")
def return_that_ends_at_the_tool():
    """A tool's token, 0 in the mask, ended the return: no call learned what came of it."""
    def gradient(cost):
        return expectation(X.acts, torch.einsum("nt,ntp->np", cost, X.g))
    k1 = X.lp - X.ref
    ends, running = torch.zeros_like(k1), torch.zeros(len(k1))
    for t in reversed(range(X.pi.T)):
        ends[:, t] = running = (running + k1[:, t]) * X.own[:, t]
    goes_on = kl_penalty(X.lp, X.ref, X.lp, X.own)
    return gradient(ends), gradient(goes_on), exact_gradient(X.pi, kl(X.acts, X.aims))


@exhibit("TimeSearch-R: https://github.com/Time-Search/TimeSearch-R/issues/7; "
         "RLinf: https://github.com/RLinf/RLinf/pull/318", "eq:context")
def tool_tokens_left_out_of_attention():
    """The loss mask was the attention mask: π was scored without what the tool had answered."""
    y = [tuple(row[m].tolist()) for row, m in zip(X.pi.tokens, X.mask)]
    row = {whole[:t]: at[t] for whole, at in zip(y, X.pi.states.tolist())
           for t in range(len(whole))}
    unread = X.pi.states.clone()
    for i, whole in enumerate(y):
        for t in range(len(whole)):
            unread[i, t] = row[tuple(v for s, v in enumerate(whole[:t]) if not X.written[i, s])]
    lp = X.pi.step_log_probs()[unread, X.pi.tokens]
    w = turns.rho(lp.detach(), MU_LP, X.own)
    wrong = exact_gradient(X.pi, expectation(X.draws, (w * X.A * lp).sum(-1)))
    return wrong, mean(RHO), X.target


@exhibit("rLLM: https://github.com/rllm-org/rllm/issues/816; "
         "TRL: https://github.com/huggingface/trl/issues/5224", "eq:respelled")
def new_ids_with_the_old_log_probs():
    """A response was decoded and encoded again; its log μ remained that of the ids drawn.

    Only 1 % of the responses have other ids then.
    """
    found = turns.spelling_practices(WRITER)
    sampler, gradients, _ = found["response, log μ as it was drawn"]
    kept = turns.rho(WRITER.lp, WRITER.mu.log_probs().detach(), WRITER.mask)
    right = turns.trained(WRITER.lp, WRITER.A, WRITER.mask, WRITER.g, kept)
    return expectation(sampler, gradients), expectation(sampler, right), WRITER.target


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


@once
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


def test_a_mute_expert_is_one_that_flipped():
    assert (forward(THETA)[1] != ROUTES).any()
