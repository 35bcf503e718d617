"""Enumeration of tiny mixtures of experts gives what a replay of routes estimates (chapter 18)."""

import pytest
import torch
from torch.func import grad

from three_policies.oracle import close, routes
from three_policies.oracle.routes import (J, PROMPT, TREE, expected, flat, forward, frozen, live,
                                          log_probs, scores)
from three_policies.tests.support.certified import certifies

THETA, REWARD, ROUTES, FROZEN_GATES, MU, T1, T2 = routes.pair(0.03, 1)
SAMPLER = routes.nearby(THETA, 0.03, 1001)
PROB, OWN = MU.sum(-1).exp(), forward(THETA)[1]
ROUTER_ONLY = THETA | {"router": routes.nearby(THETA, 0.3, 1001)["router"]}


def of_state(mu_lp, lp):
    """Return E_μ[ρ_t | state] of every state, [S], from the responses alone."""
    prob, rho = mu_lp.sum(-1).exp()[:, None] * TREE.mask, (lp - mu_lp).exp()
    total = torch.zeros(2, len(TREE.logits), dtype=torch.float64)
    for t in range(TREE.T):
        total[0].index_add_(0, TREE.states[:, t], (prob * rho)[:, t])
        total[1].index_add_(0, TREE.states[:, t], prob[:, t])
    return total[0] / total[1]


def test_the_pair_of_these_tests_has_flips_and_a_mismatch():
    assert (OWN != ROUTES).any() and not close(log_probs(THETA, ROUTES), log_probs(THETA))
    assert not close(log_probs(THETA, ROUTES), MU)


@pytest.mark.parametrize("row", range(len(TREE.tokens)))
def test_the_tree_has_the_log_probs_of_each_response_run_alone(row):
    """eq:route-replay: a causal model that reads the whole response chooses the same routes."""
    length = int(TREE.mask[row].sum())
    tokens = torch.tensor([0, 1, *(PROMPT + TREE.tokens[row, :length - 1])])
    h, last = THETA["embed"][tokens], len(tokens)
    for mix, router, experts in zip(THETA["mix"], THETA["router"], THETA["experts"]):
        h = torch.stack([h[t] + h[:t + 1].mean(0) @ mix for t in range(last)])
        score = (h @ router).softmax(-1)
        h = torch.stack([x + sum(p[e] * (x @ experts[e]).tanh() for e in p.topk(2).indices)
                         for x, p in zip(h, score)])
    alone = (h[PROMPT - 1:] @ THETA["head"]).log_softmax(-1)
    chosen = alone.gather(-1, TREE.tokens[row, :length, None])[:, 0]
    assert close(log_probs(THETA)[row, :length], chosen)


@certifies("float64")
@pytest.mark.parametrize("seed", range(8))
def test_replayed_routes_make_a_proper_policy(seed):
    """eq:route-replay: Σ_y π(y; e) = 1 and E_μ[ρ] = 1, of a response and after each prefix."""
    theta, _, table, _, mu_lp, *_ = routes.pair(0.1, seed)
    lp = log_probs(theta, table)
    assert close(lp.sum(-1).exp().sum(), 1)
    assert close(mu_lp.sum(-1).exp() @ (lp - mu_lp).sum(-1).exp(), 1)
    assert close(of_state(mu_lp, lp), torch.ones(len(TREE.logits)))


@certifies("float64")
@pytest.mark.parametrize("seed", range(8))
def test_r3_with_sequence_weights_is_the_gradient_at_the_samplers_routes(seed):
    """eq:replay-gradient: with Πρ a replay of e has ∂J(θ, e)/∂θ; of the trainer's own routes T1."""
    theta, reward, table, _, mu_lp, aim, _ = routes.pair(0.1, seed)
    at_the_samplers = flat(grad(J)(theta, reward, table))
    assert close(expected(theta, mu_lp, reward, "sequence", table), at_the_samplers)
    assert close(expected(theta, mu_lp, reward, "sequence"), aim)
    prob, score = mu_lp.sum(-1).exp(), scores(theta, table)
    for level in (None, "token", "sequence"):
        of_tokens = routes.coefficients(log_probs(theta, table), mu_lp, reward, level)
        by_scores = torch.einsum("b,bt,btp->p", prob, of_tokens, score)
        assert close(expected(theta, mu_lp, reward, level, table), by_scores)


@certifies("float64")
def test_what_each_form_of_r3_misses():
    """eq:replay-targets: with Πρ R3 is off T1 by its routes, off T2 by θ; without Πρ by scores.

    Uncorrected, only the scores differ from T2.
    """
    weighted = expected(THETA, MU, REWARD, "sequence", ROUTES)
    both, own_routes, own_weights = (flat(grad(J)(model, REWARD, table)) for model, table in (
        (THETA, ROUTES), (THETA, OWN), (SAMPLER, ROUTES)))
    assert close(weighted - T1, both - own_routes) and close(weighted - T2, both - own_weights)
    A = (REWARD - PROB @ REWARD)[:, None] * TREE.mask
    gap = torch.einsum("b,bt,btp->p", PROB, A, scores(THETA, ROUTES) - scores(SAMPLER, ROUTES))
    assert close(expected(THETA, MU, REWARD, None, ROUTES) - T2, gap)
    assert min(gap.norm(), (weighted - T1).norm(), (weighted - T2).norm()) > 0.01


@certifies("float64")
def test_where_nothing_differs_both_targets_are_one():
    """eq:replay-targets: with the same weights every form of R3 is T1 and T2."""
    theta, reward, table, _, mu_lp, aim, other = routes.pair(0.0, 1)
    assert close(aim, other)
    for level in (None, "token", "sequence"):
        assert close(expected(theta, mu_lp, reward, level, table), aim)


@certifies("float64")
def test_replayed_gates_hide_a_router_and_take_its_gradient():
    """eq:replay-gates: ρ is 1 where only routers differ, and no gradient reaches a router."""
    _, table, gates = forward(ROUTER_ONLY)
    mu_lp, gate = log_probs(ROUTER_ONLY), frozen(gates)
    assert (table != OWN).any() and not close(log_probs(THETA, table), mu_lp)
    assert close(log_probs(THETA, table, gate), mu_lp)
    found = expected(THETA, mu_lp, REWARD, None, table, gate)
    held = grad(lambda model: log_probs(model, table, gate).sum(-1).exp() @ REWARD)(THETA)
    assert close(found, flat(held)) and not held["router"].any()
    aim = grad(J)(ROUTER_ONLY, REWARD)
    lost = {name: (held[name] - aim[name]).norm() / flat(aim).norm() for name in aim}
    assert lost["router"] > 0.05 and lost["embed"] > 0.05       # what flows through a router, too


@certifies("float64")
def test_the_mean_of_rho_finds_a_route_that_looked_ahead():
    """eq:route-ahead: E_μ[ρ_t | h] = Σ_v π(v | h; e(h, v)), which no policy's sum is."""
    tables = routes.ahead(ROUTES)
    found = of_state(MU, log_probs(THETA, tables))
    by_sum = torch.zeros(len(TREE.logits), dtype=torch.float64)
    for state in range(len(by_sum)):
        for v in range(TREE.V):
            here = (TREE.states == state) & (TREE.tokens == v) & TREE.mask
            row = int(here.any(-1).nonzero()[0])         # any response that goes on with v
            by_sum[state] += forward(THETA, tables[row])[0][state, v].exp()
    assert close(found, by_sum) and (found - 1).abs().max() > 0.05


# ----------------------------------------------------------------------- laws of a healthy replay

def broken(replay, gate_of):
    """Return which laws a replay breaks, given the sampler's routes and gates."""
    theta, _, table, gates, mu_lp, *_ = routes.pair(0.0, 1)
    same = close(log_probs(theta, replay(table), gate_of(gates)), mu_lp)
    gate, replayed = gate_of(FROZEN_GATES), replay(ROUTES)
    lp = log_probs(THETA, replayed, gate)
    return {law for law, holds in {
        "ρ is 1 with the same weights": same,
        "E[ρ] is 1": close(of_state(MU, lp), torch.ones(len(TREE.logits))),
        "sequence weights give ∂J(θ, e)/∂θ": close(
            expected(THETA, MU, REWARD, "sequence", replayed, gate),
            flat(grad(J)(THETA, REWARD, ROUTES)))}.items() if not holds}


PRACTICES = {name: (replay, lambda _, gate=gate: gate)
             for name, (replay, gate) in routes.PLANTED.items()}
PRACTICES |= {routes.OWN: (lambda table: None, lambda _: live),
              routes.GATES: (lambda table: table, frozen)}


@certifies("float64")
@pytest.mark.parametrize("name", PRACTICES)
def test_only_r3_keeps_the_laws_of_a_replay(name):
    """eq:replay-gradient: a replay is healthy if three laws hold, and each practice breaks one."""
    laws = broken(*PRACTICES[name])
    assert bool(laws) == (name != routes.R3), laws


def test_the_mean_of_rho_is_blind_to_every_planted_error_but_one():
    """eq:route-ahead: the others are policies, for which E[ρ] is 1 whatever they replay."""
    assert sum("E[ρ] is 1" in broken(*practice) for practice in PRACTICES.values()) == 1


def test_what_the_chapter_says_of_the_table():
    """eq:replay-targets: in most models R3 is nearer to T2 alone, and with token weights to T1."""
    found, r3, own = routes.prices(0.03), routes.R3, routes.OWN
    for one, other, most in (((r3, None), (own, None), [False, True]),
                             ((r3, "token"), (r3, None), [True, False])):
        counts = [routes.nearer(found, one, other, aim) for aim in (0, 1)]
        assert [n > of / 2 for n, of in counts] == most
    assert min(distance for distance, *_ in found[routes.GATES, None]) > 0.1
