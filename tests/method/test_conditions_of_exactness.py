"""What is exact needs a condition: without it another identity holds, and the size is a number.

Coverage: μ can draw whatever π can. A fixed baseline: it does not depend on the response. A router
that decides token by token. The chapters print a number beside each sentence, and quote it.
"""

import re
from pathlib import Path

import pytest
import torch

from three_policies.correction import importance_weights
from three_policies.estimators import grpo_advantages, rloo_advantages, sampling_log_probs
from three_policies.oracle import (J, Policy, close, exact_gradient, expectation, grad_J, rewards,
                                   routes, scores, turns, versions)
from three_policies.ratios import masked_log_ratio
from three_policies.tests.support.certified import certifies

ROOT = Path(__file__).resolve().parents[2]

SEEDS = range(500, 504)                                            # no chapter has these


# ----------------------------------------------------------------------------------------- coverage

def pair(seed, top_p=None):
    """Return π and a μ near it, cut by top-p if asked for: its logits are −∞ where it is cut."""
    pi = Policy(V=4, T=3, seed=seed)
    mu = pi.perturbed(seed + 100, 0.3)
    if top_p:
        mu.logits = sampling_log_probs(mu.logits.detach(), top_p=top_p)[0]
    return pi, mu


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["sequence", "token", "prefix"])
def test_a_cut_sampler_leaves_out_what_it_cannot_draw(level, seed):
    """eq:off-policy, eq:prefix: E_μ[ρ f] = E_π[1[μ > 0] f], and a constant has a gradient."""
    found = {}
    for top_p in (None, 0.8):
        pi, mu = pair(seed, top_p)
        log_rho = masked_log_ratio(pi.log_probs(), mu.log_probs(), pi.mask).detach()
        weights = importance_weights(log_rho, pi.mask, level, torch.inf)
        each = torch.einsum("nt,ntp->np", weights, scores(pi))
        found[top_p] = expectation(mu, each)

        if level == "sequence":
            drawn = (mu.probs() > 0).double()
            assert close(found[top_p], exact_gradient(pi, pi.probs() @ drawn))
            assert close(expectation(mu, weights[:, 0]), (pi.probs() @ drawn).detach())
    assert close(found[None], torch.zeros_like(found[None]))       # a baseline moves nothing
    assert found[0.8].norm() > 0.05                                # here it does


@pytest.mark.parametrize("seed", SEEDS)
def test_a_geometric_mean_is_a_policys_ratio_only_where_the_sampler_is_cut(seed):
    """Responses have one length: the mean is below 1, and the rest may go where μ never does."""
    pi, mu = (Policy(V=3, T=3, seed=seed + i) for i in (0, 100))
    full = pi.mask.all(-1) & (pi.tokens > 0).all(-1)               # eight responses, by either
    chances = [p.probs().detach()[full] for p in (pi, mu)]
    p, m = (x / x.sum() for x in chances)
    weight = (p / m) ** (1 / 3)
    assert (m * weight).sum() < 1 - 1e-3 and close((m * (p / m)).sum(), 1.0)
    policy = torch.cat([m * weight, 1 - (m * weight).sum(0, keepdim=True)])
    sampler = torch.cat([m, torch.zeros(1)])                       # cannot draw the ninth
    assert close(policy.sum(), 1.0) and (policy > 0).all()
    assert close(policy[:-1] / sampler[:-1], weight)


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_log_p_lets_pi_play_the_part_of_the_tool_that_comes(seed):
    """eq:tool-ratio: E_μ[ρ f] = E_π[1[P(o) > 0] f]; with P > 0 everywhere that is E_π[f]."""
    for certain in (False, True):
        x = turns.agent(seed, certain=certain)
        found, of_answers, of_all, mean = turns.log_p_in_rho(x)
        mass = (x.pi.probs() @ (x.acts.probs() > 0).double()).detach()
        assert close(found, of_answers) and close(mean, mass)
        assert close(found, of_all) != certain and (mass < 0.99) == certain
        exact = turns.rho(x.lp, x.draws.log_probs(), x.own)        # without the tool's tokens
        assert close(expectation(x.draws, turns.trained(x.lp, x.A, x.own, x.g, exact)), x.target)


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_record_of_a_cut_sampler_weighs_what_it_can_draw(seed):
    """eq:recorded: nothing looks ahead, and yet E[ρ] is π's mass on what both versions can draw."""
    pi, start, end, R = versions.model(Policy, seed)
    old = torch.arange(pi.T) < versions.SWITCH
    whole, cut = (torch.where(pi.mask, torch.where(old, *(
        sampling_log_probs(p.logits.detach(), top_p=top_p)[0][pi.states, pi.tokens]
        for p in (start, end))), 0.0) for top_p in (1.0, 0.9))
    assert versions.trained(pi, R, whole, whole) == "0.000, 1.000"
    bias, mean = map(float, versions.trained(pi, R, cut, cut).split(", "))
    mass = pi.probs().detach() @ (cut.sum(-1) > -torch.inf).double()
    assert bias > 0.01 and abs(mean - mass) <= 0.0005 and mass < 0.99


# ----------------------------------------------------------------------------- what a token can see

@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_expert_choice_is_no_policy_of_the_prefix(seed):
    """eq:route-replay, eq:route-ahead: later tokens change the first one's log-prob."""
    theta, first = routes.draw(seed), routes.TREE.tokens[:, 0] == 1
    by_token = routes.log_probs(theta, routes.EVERY)               # all experts, token by token
    by_expert = routes.expert_choice(theta)
    assert close(by_token.sum(-1).exp().sum(), 1.0)
    assert abs(by_expert.sum(-1).exp().sum() - 1) > 0.01
    assert by_token[first, 0].unique().numel() == 1 < by_expert[first, 0].unique().numel()


# ---------------------------------------------------------------------------------- fixed baselines

@certifies("float64")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_groups_mean_pays_the_discarded_in_expectation(seed, n):
    """eq:discarded: b = E[R] with RLOO, (n − 1)/n with the plain mean, GRPO if R is 0 or 1."""
    pi, R = Policy(V=3, T=3, seed=seed), rewards(Policy(V=3, T=3), seed)
    q, p = (~pi.mask[:, -1]).double(), pi.probs()

    def paid(R):
        return exact_gradient(pi, p @ (q * R[:, 0] + (1 - q) * J(pi, R).detach()))

    def mean(r, groups):
        return grpo_advantages(r, groups, normalize_std=False)
    assert close(versions.in_groups(pi, R, q, rloo_advantages, n), paid(R))
    assert close(versions.in_groups(pi, R, q, mean, n), (n - 1) / n * paid(R))
    ones = (R > R.median()).double()
    for rewarded, fits in ((ones, True), (R, False)):
        found, wanted = versions.in_groups(pi, rewarded, q, grpo_advantages, n), paid(rewarded)
        sine = (1 - torch.cosine_similarity(found, wanted, 0) ** 2).clamp(min=0).sqrt()
        assert (sine < 1e-6) == fits and (fits or sine > 0.02), sine


def test_what_fits_no_baseline_is_nothing_of_rloo():
    """eq:discarded: a gradient that some b pays has nothing left; GRPO's of normal rewards has."""
    left = [versions.unpaid(seed, grpo_advantages, zero_one=False) for seed in SEEDS]
    assert max(versions.unpaid(seed, rloo_advantages, False) for seed in SEEDS) < 1e-12
    assert min(left) > 1e-3


# ---------------------------------------------------------------------------- the bound of T(T − 1)

@pytest.mark.parametrize("T", [2, 3, 4])
@pytest.mark.parametrize("size", [0.05, 1.0])
def test_the_bias_of_token_weights_is_within_its_bound(T, size):
    """‖E_μ[Σ ρ_t A g_t] − ∇J‖ ≤ 2 G a T(T − 1) ε, a Euclidean norm; ε: a token's largest TV."""
    for seed in SEEDS:
        pi = Policy(V=3, T=T, seed=seed)
        mu, A = pi.perturbed(seed + 100, size), rewards(pi, seed + 200)
        log_rho = masked_log_ratio(pi.log_probs(), mu.log_probs(), pi.mask).detach()
        weights = importance_weights(log_rho, pi.mask, "token", torch.inf) * A
        bias = expectation(mu, torch.einsum("nt,ntp->np", weights, scores(pi))) - grad_J(pi, A)

        p, m = (x.logits.detach().softmax(-1) for x in (pi, mu))
        slopes = p[:, :, None] * (torch.eye(3) - p[:, None])       # ∂π(v)/∂z_w: [S, V, V]
        G, tv = slopes.norm(dim=-1).sum(-1).max(), (p - m).abs().sum(-1).max() / 2
        assert 0 < bias.norm() <= 2 * G * A.abs().max() * T * (T - 1) * tv


# ------------------------------------------------------------------------- the numbers in the prose

QUOTED = [
    ("3-importance-weights", r"8 (\S+) \S+",
     lambda share: f"comes within {100 - 100 * float(share):.1f} % of the bound"),
    ("3-importance-weights", r"(\S+) ± \S+ (\S+) ± \S+ (\S+) ± \S+",
     "bias is {}, {} and {} of".format),
    ("3-importance-weights", r"'\S+ \+ (\S+), \S+'", "gives the missing mass, {} in".format),
    ("16-versions", r"(\S+) ± \S+ \*\*0\*\*",
     lambda left: f"no $b$ explains {100 * float(left):.0f} % of"),
    ("17-turns-and-tools", r"True (0\.[1-9]\d) (\S+)",
     lambda away, mean: (f"below, E[ρ] is {mean}, and the gradient is off by "
                         f"{100 * float(away):.0f} %")),
    ("17-turns-and-tools", r"True 0\.[1-9]\d (\S+)", "the E[ρ] of {} above".format)]


@pytest.mark.parametrize("chapter, printed, sentence", QUOTED)
def test_a_number_in_the_prose_is_one_that_a_block_prints(chapter, printed, sentence):
    text = (ROOT / "math" / f"{chapter}.md").read_text()
    [found] = re.findall(rf"^{printed}$", text, re.MULTILINE)
    assert sentence(*([found] if isinstance(found, str) else found)) in " ".join(text.split())
