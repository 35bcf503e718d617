"""Exhibits of chapter 10: a tool's tokens that were counted, and text that was encoded again."""

import pytest
import torch

from three_policies.kl import kl_penalty
from three_policies.losses import count
from three_policies.oracle import exact_gradient, expectation, kl, turns
from three_policies.tests.support.exhibits import exhibit, filed_by, judge

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


@pytest.mark.parametrize("name", filed_by(__name__))
def test_exhibit(name):
    judge(name)
