"""What is called unbiased is equal in fractions, and what is called biased differs in them.

oracle/rational.py has policies whose probabilities are fractions, and the weights, criteria and
losses once more, from their definitions. A test that is marked "rational" compares fractions alone.
The others put the same probabilities into the core in float64: what it computes is the fraction to
1e-12, so that the proof is about the code. Which configurations are unbiased is computed from the
presets as they are, and compared with what chapters 3 and 14 say. Run with -s to see each bias as a
fraction, its size beside that of ∇J, and the k3 per token.
"""

import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch

from three_policies.correction import correct
from three_policies.estimators import rloo_advantages
from three_policies.kl import kl_ratio
from three_policies.losses import LossConfig, kl_loss, policy_loss
from three_policies.oracle import close, estimator_moments, exact_gradient
from three_policies.oracle.rational import (FAR, LATER, NEAR, PI, RESPONSES, REWARDS, STATES,
                                            WORLDS, World, at_level, centered, combined, expected,
                                            factors, grad_J, in_float64, k3_per_token, less,
                                            mean_of, numbers, of_tokens, pairs, parts, ratios,
                                            scores, unbiased)
from three_policies.presets import PRESETS
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import LEVELS
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import SUM, reinforce

MATH = Path(__file__).resolve().parents[2] / "math"
EXACT = "sequence ρ, C = ∞"                             # the first row of chapter 14's table
CONFIGS = {EXACT: PRESETS["bypass_pg_is"](math.inf),
           **{name: preset() for name, preset in PRESETS.items()}}
DIFFERENT = [name for i, name in enumerate(CONFIGS)                 # an older name adds none
             if CONFIGS[name] not in [*CONFIGS.values()][:i]]
PLACES = [(state, token) for state in STATES for token in range(3)]
ZERO = [Fraction(0)] * len(PLACES)
REWARD = dict(zip(RESPONSES, REWARDS))


def show(name, bias, world, bypass=False):
    """Print a bias: its largest component, its size beside ∇J's, and the k3 per token."""
    size = numbers(bias).norm() / numbers(grad_J(world.theta, REWARDS)).norm()
    k3 = k3_per_token(world.theta if bypass else world.old, world.mu)
    print(f"{name}: {max(bias, key=abs)}, in all {size:.3f} of ∇J, at a k3 of {k3:.4f} a token")


# ------------------------------------------------------------------------- the presets, as they are

def chapter(name):
    """Return a chapter's text; a wheel has the proofs without the book."""
    if not MATH.is_dir():
        pytest.skip("the chapters are not in a wheel: this statement is compared in a checkout")
    return (MATH / f"{name}.md").read_text()


def called_exact(column):
    """Return preset → whether chapter 14's table has a bold 0 for its bias, in a column."""
    text = chapter("14-methods-and-prices")
    [table] = re.findall(r"<!-- begin: prices-presets -->\n(.*?)\n<!-- end", text, re.DOTALL)
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    at, found = next(i for i, name in enumerate(header) if name.startswith(column)), {}
    for row in rows:
        cells = row[at].split("; bypass ")                          # the second is bypass mode's
        for name in re.findall(r"`(\w+)`", row[0]) or row[:1]:
            cell = cells[CONFIGS[name].bypass_mode and len(cells) - 1]
            found[name] = cell.startswith("**0** / ")
    return found


@certifies("rational")
@pytest.mark.parametrize("name, column", [
    ("near", "Δ = 0.05"), ("far", "Δ = 0.5"), ("later", "later")])
def test_the_presets_that_are_called_exact_are_and_no_other(name, column):
    """eq:correction: a preset has −E_μ[∇loss] = ∇J, for any reward, just where chapter 14 has 0."""
    world, claimed, found = WORLDS[name], called_exact(column), {}
    for preset, config in CONFIGS.items():
        of_preset = parts(config, world)
        found[preset] = unbiased(of_preset, world.theta)
        bias = less(mean_of(of_preset), grad_J(world.theta, REWARDS))
        if found[preset]:
            assert bias == ZERO
        else:
            show(f"{name}, {preset}", bias, world, config.bypass_mode)
            assert bias != ZERO
    assert claimed == {preset: found[preset] for preset in claimed}
    assert {*claimed} >= {EXACT, *(x for x in PRESETS if x.startswith(("decoupled_", "bypass_")))}


@certifies("float64")
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("preset", DIFFERENT)
def test_the_code_computes_the_fractions(preset, name):
    """eq:correction: `correct` and `policy_loss` give the fractions, for any preset and level.

    All responses are in one batch, and an advantage is multiplied by N μ(y), so that the batch's
    mean is the expectation.
    """
    world, A = WORLDS[name], numbers(REWARDS)[:, None].expand(-1, 3)
    theta, old, mu = map(in_float64, world)
    lp, old_lp, mu_lp = theta.log_probs(), old.log_probs().detach(), mu.log_probs().detach()
    often = A * len(lp) * mu.probs().detach()[:, None]
    # A geometric mean is rational in one of the worlds alone.
    levels = [level for level in LEVELS if level != "geometric" or name == "powers"]
    for level in {CONFIGS[preset].rollout_is: 0, **dict.fromkeys(levels)}:
        config = replace(CONFIGS[preset], rollout_is=level)
        decided = correct(lp if config.bypass_mode else old_lp, mu_lp, theta.mask, config, A)
        train = world.theta if config.bypass_mode else world.old
        by_hand = [factors(config, of_tokens(train, y), of_tokens(world.mu, y), 1 if a > 0 else -1)
                   for y, a in REWARD.items()]
        weights = decided.weights if config.applies_weights else None
        assert close(decided.mask * (1 if weights is None else weights),
                     torch.stack([numbers([*row, 0, 0][:3]) for row in by_hand]))

        loss, _ = policy_loss(lp, old_lp, mu_lp, often, theta.mask, config,
                              LossConfig(aggregation=SUM), correction=decided)
        assert close(-exact_gradient(theta, loss), numbers(mean_of(parts(config, world))))


def test_both_worlds_have_the_same_responses():
    policy = in_float64(PI)
    assert RESPONSES == [tuple(y[m].tolist()) for y, m in zip(policy.tokens, policy.mask)]
    for table in itertools.chain(*WORLDS.values()):
        assert all(sum(row) == 1 and min(row) > 0 for row in table.values())


# ---------------------------------------------------------------------------------- levels, weights

@certifies("rational")
@pytest.mark.parametrize("mode", [{}, {"loss_type": "cispo"},
                                  {"bypass_mode": True, "loss_type": "reinforce"}])
def test_of_the_levels_the_sequence_alone_is_unbiased(mode):
    """eq:levels, eq:off-policy: of the untruncated weights Πρ alone is exact, for any reward."""
    world, found = WORLDS["powers"], {}
    for level in (None, *LEVELS):
        of_level = parts(Config(level, math.inf, **mode), world)
        found[level or "none"] = unbiased(of_level, world.theta)
        show(f"{mode} {level}", less(mean_of(of_level), grad_J(world.theta, REWARDS)), world)
    rows = re.findall(r"^\| (none|token|geometric|sequence) \| (\S+) \| \S+ \|$",
                      chapter("3-importance-weights"), re.MULTILINE)
    assert {level: exact for level, exact in found.items() if level != "prefix"} == {
        level: bias == "0.000" for level, bias in rows}
    assert not found["prefix"]


@certifies("rational")
def test_at_one_token_every_level_is_the_ratio():
    """eq:levels: at T = 1 all levels are ρ, so each is exact."""
    assert all(at_level([x / y], level) == [x / y] for level in LEVELS
               for x, y in zip(PI[()], FAR[()]))


@certifies("rational")
def test_the_mean_of_each_weight():
    """eq:levels, eq:prefix, eq:martingale: E_μ[Πρ] = E_μ[ρ_t | h] = 1; ρ_{1:t} has E_π|y|/E_μ|y|.

    A geometric mean has neither: where |y| varies, its mean may be above 1 or below.
    """
    world = WORLDS["powers"]
    chance = {y: prod(of_tokens(world.mu, y)) for y in RESPONSES}

    def mean(level, of_response):
        return sum(chance[y] * of_response(at_level(ratios(world, y), level)) for y in RESPONSES)
    of_mu, of_pi = (sum(prod(of_tokens(p, y)) * len(y) for y in RESPONSES)
                    for p in (world.mu, world.theta))
    assert mean("token", sum) == of_mu and mean("prefix", sum) == of_pi != of_mu
    assert mean("sequence", min) == 1 != mean("geometric", min)
    assert all(sum(m * (p / m) for p, m in zip(world.old[h], world.mu[h])) == 1 for h in STATES)


@certifies("rational")
def test_a_baseline_is_free_where_nothing_caps_the_weight():
    """eq:baseline, eq:levels: E_μ[Σ_t w_t g_t] = 0 for untruncated ρ_t, ρ_{1:t} and Πρ alone."""
    drift = {(level, cap): mean_of(parts(reinforce(level, cap), WORLDS["powers"]), [1] * 15)
             for level in (None, *LEVELS) for cap in (math.inf, 1.25)}
    assert {key for key, mean in drift.items() if mean == ZERO} == {
        (level, math.inf) for level in ("token", "prefix", "sequence")}


@certifies("rational")
@pytest.mark.parametrize("place", PLACES)
def test_prefix_weights_are_exact_for_advantages_of_the_past(place):
    """eq:prefix: E_μ[Σ ρ_{1:t} A_t g_t] = E_π[Σ A_t g_t] for every A_t that y_1 … y_t decide."""
    def mean(policy, level):                                        # A_t is 1 at the place, else 0
        return expected(policy, lambda y: scores(PI, y, [
            w * ((y[:t], y[t]) == place)
            for t, w in enumerate(at_level(ratios(WORLDS["far"], y), level))]))
    assert mean(FAR, "prefix") == mean(FAR, "sequence") == mean(PI, None)
    # A token's own ratio leaves out how its state was reached.
    assert (mean(FAR, "token") == mean(PI, None)) == (place[0] == ())


@certifies("rational")
@pytest.mark.parametrize("cap", [0.5, 1.0, 1.5, 2.0, 5.0])
def test_the_bias_of_truncation_and_of_masking(cap):
    """eq:tis, eq:mis: the bias is −E_π[s Σ A g], s = (1 − C/ρ)₊ at a cap, 1[not kept] at a mask."""
    world = WORLDS["far"]

    def lost(share):
        return expected(PI, lambda y: scores(PI, y, [
            -share(prod(ratios(world, y))) * REWARD[y]] * len(y)))
    for bound, share in ((cap, lambda rho: max(1 - Fraction(cap) / rho, Fraction(0))),
                         ((None, cap), lambda rho: Fraction(rho > cap)),
                         ((cap / 4, cap), lambda rho: Fraction(not cap / 4 <= rho <= cap))):
        bias = less(mean_of(parts(reinforce("sequence", bound), world)), grad_J(PI, REWARDS))
        assert bias == lost(share) != ZERO


# -------------------------------------------------------------------------- centering, a later step

CENTERED = [reinforce(), reinforce("token", 1.25), reinforce("token", (0.6, 1.6)),
            reinforce(rollout_rs={"token_k1": (0.7, 1.3)}),
            reinforce("token", rollout_rs={"token_tv": 0.14}),
            reinforce("token", 2.0, rollout_rs={"token_tv_outward": 0.06, "token_k3": 0.3})]


@certifies("rational")
@pytest.mark.parametrize("config", CENTERED, ids=str)
def test_a_constant_advantage_moves_nothing_once_scores_are_centered(config):
    """eq:score-centering: E_μ[w g − E_μ[w g | h]] = 0, where w alone leaves a drift."""
    world = WORLDS["far"]
    for constant in (1, -2):
        assert centered(config, world, [constant] * 15) == ZERO
        assert mean_of(parts(config, world), [constant] * 15) != ZERO


@certifies("float64")
@pytest.mark.parametrize("config", CENTERED, ids=str)
def test_the_code_centers_to_the_fractions(config):
    """eq:score-centering, eq:total-variation: with candidates `policy_loss` gives the fractions."""
    theta, mu, world = in_float64(PI), in_float64(FAR), WORLDS["far"]
    every = theta.step_log_probs()[theta.states], mu.step_log_probs().detach()[theta.states]
    lp = theta.log_probs()
    often = len(lp) * mu.probs().detach()[:, None] * numbers(REWARDS)[:, None]
    loss, _ = policy_loss(lp, None, mu.log_probs().detach(), often, theta.mask,
                          replace(config, score_centering=True), LossConfig(aggregation=SUM),
                          candidates=every)
    assert close(-exact_gradient(theta, loss), numbers(centered(config, world, REWARDS)))


@certifies("rational")
@pytest.mark.parametrize("loss_type", ["ppo_clip", "cispo"])
def test_the_decoupled_loss_does_not_depend_on_mu(loss_type):
    """eq:decoupled-ppo, eq:batch-size: E_μ[Πρ ∇L(r)] = E_old[∇L(r)] for any μ; not with ρ_t."""
    target = parts(Config(loss_type=loss_type), World(LATER, PI, PI))
    for mu in (NEAR, FAR, LATER):
        world = World(LATER, PI, mu)
        assert parts(Config("sequence", math.inf, loss_type=loss_type), world) == target
        bias = less(mean_of(parts(Config("token", math.inf, loss_type=loss_type), world)),
                    mean_of(target))
        show(f"{loss_type}, token weights", bias, world)
        assert bias != ZERO


@certifies("rational")
def test_a_ratio_that_is_counted_twice_is_wrong():
    """eq:double-count: at T = 1 E_μ[ρ A g] = ∇J, and E_μ[ρ² A g] ≠ ∇J."""
    def mean(times):
        return combined([m * (p / m) ** times * a for p, m, a in zip(PI[()], FAR[()], REWARDS)],
                        [scores(PI, (v,), [1]) for v in range(3)])
    target = combined([p * a for p, a in zip(PI[()], REWARDS)],
                      [scores(PI, (v,), [1]) for v in range(3)])
    assert mean(1) == target != mean(2)


# ------------------------------------------------------------------------- batches of two responses

def mean_of_pairs(config, advantages):
    """Return −E_μ[∇policy_loss] over all 15² pairs, in float64; A is of the pair's rewards."""
    theta, mu, rewards = in_float64(PI), in_float64(FAR), numbers(REWARDS)
    lp, mu_lp = theta.log_probs(), mu.log_probs().detach()
    return -estimator_moments(theta, mu, lambda i: policy_loss(
        lp[i], None, mu_lp[i], advantages(rewards[i]), theta.mask[i], config,
        LossConfig(aggregation=SUM))[0], batch=2).mean


@certifies("rational")
@pytest.mark.parametrize("name", ["near", "far", "powers"])
def test_leaving_one_out_is_unbiased_and_the_mean_of_two_halves(name):
    """eq:baseline, eq:off-policy: with Πρ R − the other's R gives ∇J, R − both's mean ∇J/2."""
    world = WORLDS[name]
    whole = {y: prod(ratios(world, y)) for y in RESPONSES}
    target = grad_J(world.theta, REWARDS)
    assert pairs(world, lambda y, z: whole[y] * (REWARD[y] - REWARD[z])) == target
    of_both = pairs(world, lambda y, z: whole[y] * (REWARD[y] - (REWARD[y] + REWARD[z]) / 2))
    assert of_both == [x / 2 for x in target]


@certifies("rational")
def test_weights_divided_by_their_mean_are_none_alone_and_biased_in_pairs():
    """eq:self-normalised: at N = 1 w/w is no weight, and at N = 2 the bias is not 0."""
    world = WORLDS["far"]
    whole = {y: prod(ratios(world, y)) for y in RESPONSES}
    alone = expected(FAR, lambda y: scores(PI, y, [whole[y] / whole[y] * REWARD[y]] * len(y)))
    assert alone == mean_of(parts(reinforce(), world))
    bias = less(normalised(whole), grad_J(PI, REWARDS))
    show("normalised, N = 2", bias, world)
    assert bias != ZERO


def normalised(weights):
    return pairs(WORLDS["far"], lambda y, z: 2 * weights[y] / (weights[y] + weights[z]) * REWARD[y])


@certifies("float64")
def test_the_code_computes_pairs_to_the_fractions():
    """eq:self-normalised, eq:baseline: in pairs the code's weights and baseline are fractions."""
    world = WORLDS["far"]
    weights = {y: factors(reinforce("sequence", 2.0), of_tokens(PI, y), of_tokens(FAR, y))[0]
               for y in RESPONSES}
    config = reinforce("sequence", 2.0, rollout_is_batch_normalize=True)
    assert close(mean_of_pairs(config, lambda r: r), numbers(normalised(weights)))
    rloo = pairs(world, lambda y, z: weights[y] * (REWARD[y] - REWARD[z]))
    config = reinforce("sequence", 2.0)
    assert close(mean_of_pairs(config, lambda r: rloo_advantages(r, torch.zeros(2))), numbers(rloo))


# ----------------------------------------------------------------------------------------------- KL

REF = NEAR          # its logarithms are symbols: an estimate that is linear in ℓ is one row a place


def rows(policy, coefficients):
    """Return, by place, E_policy[Σ_t c_t g_t] where ℓ is 1 at that place and 0 elsewhere.

    coefficients(y, ell): the c_t of a response, from its ℓ_t.
    """
    return [expected(policy, lambda y: scores(PI, y, coefficients(
        y, [Fraction((y[:t], y[t]) == place) for t in range(len(y))]))) for place in PLACES]


def to_go(x):
    return [sum(x[t:]) for t in range(len(x))]


def per_token(visits, of_state):
    """Return Σ_t E_visits[∇_π of a state's sum], by place: Σ_v ∇π(v) ℓ_v, visits held fixed."""
    chance = {state: prod(of_tokens(visits, state), start=Fraction(1)) for state in STATES}
    return [[chance[state] * of_state(state, token, v) if at == state else Fraction(0)
             for at, v in PLACES] for state, token in PLACES]


def of_kl(state, token, v):
    """Return ∂π(token)/∂z_v: what ℓ(token) has as its factor in ∇KL(π‖ref) of a state."""
    return PI[state][token] * ((token == v) - PI[state][v])


def weighted(x, y, level):
    return list(map(prod, zip(x, at_level(ratios(WORLDS["far"], y), level))))


@certifies("rational")
def test_the_gradient_of_the_kl_place_by_place():
    """eq:kl-gradient, eq:kl-ratio, eq:prefix: E[ℓ_t g_t] is ∇KL per token, E[Σ_{s≥t} ℓ_s g_t] all.

    They are equal in the factor of each log-ratio ℓ(v, h), so for any logarithms. The first is the
    gradient of k2 and of each "+", the second that of k1 in the reward. On samples of μ a token's
    ratio has the states of μ, a prefix those of π.
    """
    whole = rows(PI, lambda y, ell: [sum(ell)] * len(y))            # ∇Σ_y π(y) Σ_t ℓ_t, E[∇ℓ] = 0
    assert rows(PI, lambda y, ell: to_go(ell)) == whole
    assert rows(PI, lambda y, ell: ell) == per_token(PI, of_kl) != whole
    assert rows(FAR, lambda y, ell: weighted(ell, y, "token")) == per_token(FAR, of_kl)
    assert rows(FAR, lambda y, ell: weighted(ell, y, "prefix")) == per_token(PI, of_kl)
    assert rows(FAR, lambda y, ell: to_go(weighted(ell, y, "prefix"))) == whole


@certifies("rational")
def test_the_gradient_of_k3_is_the_other_directions():
    """eq:kl-gradient: E_π[∇k3] = −E_π[(π_ref/π) g] is ∇KL(π_ref‖π) per token; it has no logs."""
    found = expected(PI, lambda y: scores(PI, y, [
        1 - r / p for r, p in zip(of_tokens(REF, y), of_tokens(PI, y))]))
    chance = {state: prod(of_tokens(PI, state), start=Fraction(1)) for state in STATES}
    assert found == [chance[state] * (PI[state][v] - REF[state][v]) for state, v in PLACES]


@certifies("float64")
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("level", ["token", "prefix"])
def test_the_code_has_the_kls_factors(kind, level):
    """eq:kl-ratio, eq:prefix: `kl_loss` with `kl_ratio` has the fractions times log π/π_ref."""
    theta, mu, ref = map(in_float64, (PI, FAR, REF))
    lp, mu_lp, ref_lp = theta.log_probs(), mu.log_probs().detach(), ref.log_probs().detach()
    often = len(lp) * mu.probs().detach()[:, None]
    ratio = kl_ratio(lp, mu_lp, theta.mask, kind, level) * often
    loss = kl_loss(lp, ref_lp, theta.mask, kind, SUM, ratio=ratio)
    whole = level == "prefix" and kind in ("k1", "k3")
    factors_of = (rows(PI, lambda y, ell: to_go(ell)) if whole
                  else per_token(FAR if level == "token" else PI, of_kl))
    logs = numbers(math.log(PI[state][v] / REF[state][v]) for state, v in PLACES)
    assert close(exact_gradient(theta, loss),
                 logs @ torch.stack([numbers(row) for row in factors_of]))
