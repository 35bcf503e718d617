"""The rational world: policies whose probabilities are fractions, so that equal means equal.

With the logits as parameters the gradient is rational in the probabilities,

    ∂ log π(a|s) / ∂ z_v = 1[v = a] − π(v|s)

so neither a logit nor a logarithm has to occur. The responses are those of oracle.py for V = T = 3,
and a policy is a row of three fractions for each prefix. Weights, criteria and losses are written
from their definitions, and read a configuration as it is: no bound is repeated here, and nothing
under test is called. A geometric mean of ratios is rational only where they are perfect powers, as
in POWERS. A bound on it is compared in powers instead, lo^n ≤ Πρ ≤ hi^n. A bound on k2, k3 or
opsm's mean is compared with a logarithm, by sympy, which takes as many digits as it needs.

    bias = less(mean_of(parts(config, world)), grad_J(world.theta, REWARDS))
"""

import itertools
import math
from fractions import Fraction
from itertools import accumulate
from math import prod
from operator import mul
from typing import NamedTuple

import sympy
import torch

from three_policies.oracle import Policy

# Prefixes, and responses, which token 0 ends, in the order of oracle.Policy(3, 3).
STATES: list[tuple[int, ...]] = [()]
RESPONSES: list[tuple[int, ...]] = []
for prefix in STATES:                                               # grows while it is walked
    for token in range(3):
        (STATES if token and len(prefix) < 2 else RESPONSES).append((*prefix, token))

Table = dict[tuple[int, ...], tuple[Fraction, ...]]                 # prefix → π(·|prefix)
Vector = list[Fraction]                                             # by state, then token


def twentieths(*rows: tuple[int, int, int]) -> Table:
    return {state: tuple(Fraction(x, 20) for x in row) for state, row in zip(STATES, rows)}


def balanced(*rows: tuple[str, str, str]) -> tuple[Table, Table]:
    """Return π and μ with ρ = (up⁶, 1, down⁶), in turn around the tokens, and μ of the middle."""
    pi, mu = {}, {}
    for at, (state, row) in enumerate(zip(STATES, rows)):
        up, down, middle = map(Fraction, row)
        rho = up ** 6, Fraction(1), down ** 6
        first = (1 - middle) * (1 - rho[2]) / (rho[0] - rho[2])     # so that Σ μρ = 1
        m = first, middle, 1 - middle - first
        pi[state], mu[state] = (tuple(x[(v + at) % 3] for v in range(3))
                                for x in ([a * b for a, b in zip(m, rho)], m))
    return pi, mu


class World(NamedTuple):
    """Three policies: π_θ, which is trained, π_old, and μ = π_rollout, which samples."""

    theta: Table
    old: Table
    mu: Table


PI = twentieths((6, 11, 3), (5, 8, 7), (10, 4, 6), (3, 10, 7), (6, 6, 8), (9, 5, 6), (6, 5, 9))
NEAR = twentieths((7, 10, 3), (6, 7, 7), (8, 4, 8), (3, 9, 8), (7, 7, 6), (8, 5, 7), (8, 5, 7))
FAR = twentieths((8, 5, 7), (8, 8, 4), (7, 7, 6), (9, 4, 7), (6, 7, 7), (6, 8, 6), (8, 8, 4))
LATER = twentieths((10, 7, 3), (3, 11, 6), (9, 6, 5), (5, 11, 4), (8, 6, 6), (9, 7, 4), (6, 7, 7))
ROOTS, OF_ROOTS = balanced(("8/7", "7/8", "1/3"), ("10/9", "9/10", "1/4"), ("6/5", "8/9", "1/2"),
                           ("9/8", "5/6", "1/5"), ("11/10", "7/8", "1/3"), ("7/6", "9/10", "1/4"),
                           ("10/9", "6/7", "2/5"))
REWARDS = [Fraction(x, 2) for x in (3, -2, 4, -1, 5, 7, -3, 2, 1, -4, 6, -5, 2, -1, 3)]

WORLDS = {"near": World(PI, PI, NEAR), "far": World(PI, PI, FAR), "later": World(LATER, PI, FAR),
          "powers": World(ROOTS, ROOTS, OF_ROOTS)}


# -------------------------------------------------------------------------- expectations, gradients

def of_tokens(policy: Table, y: tuple[int, ...]) -> Vector:
    """Return π(y_t | y_<t) of each token."""
    return [policy[y[:t]][token] for t, token in enumerate(y)]


def scores(policy: Table, y: tuple[int, ...], coefficients) -> Vector:
    """Return Σ_t c_t ∇log π(y_t | y_<t), by state and token."""
    total = [Fraction(0)] * (3 * len(STATES))
    for t, c in enumerate(coefficients):
        for v, p in enumerate(policy[y[:t]]):
            total[3 * STATES.index(y[:t]) + v] += c * ((v == y[t]) - p)
    return total


def combined(coefficients, vectors) -> Vector:
    """Return Σ c x over pairs of a number and a vector."""
    return [sum(map(mul, coefficients, column), Fraction(0)) for column in zip(*vectors)]


def ratios(world: World, y: tuple[int, ...]) -> Vector:
    """Return ρ = π_old/μ of each token."""
    return [a / b for a, b in zip(of_tokens(world.old, y), of_tokens(world.mu, y))]


def less(a: Vector, b: Vector) -> Vector:
    return [x - y for x, y in zip(a, b)]


def expected(policy: Table, of_response) -> Vector:
    """Return E_policy[f] for f: response → vector."""
    return combined([prod(of_tokens(policy, y)) for y in RESPONSES], map(of_response, RESPONSES))


def grad_J(policy: Table, rewards) -> Vector:
    """Return ∇J = Σ_y π(y) R(y) Σ_t ∇log π_t.  (eq:policy-gradient)"""
    reward = dict(zip(RESPONSES, rewards))
    return expected(policy, lambda y: scores(policy, y, [reward[y]] * len(y)))


def k3_per_token(old: Table, mu: Table) -> float:
    """Return KL(μ‖π_old) per token, the mean of k3: the one size here that is no fraction."""
    chance = {y: prod(of_tokens(mu, y)) for y in RESPONSES}
    gap = sum(chance[y] * math.log(m / p) for y in RESPONSES
              for p, m in zip(of_tokens(old, y), of_tokens(mu, y)))
    return gap / float(sum(c * len(y) for y, c in chance.items()))


# ----------------------------------------------------------------------------- weights and criteria

def root(x: Fraction, n: int) -> Fraction:
    """Return the n-th root, or raise ValueError where it is irrational."""
    roots = [sympy.integer_nthroot(part, n) for part in x.as_integer_ratio()]
    if not all(exact for _, exact in roots):
        raise ValueError(f"the root {n} of {x} is irrational")
    return Fraction(*(int(value) for value, _ in roots))


def at_level(rho: Vector, level: str | None) -> Vector:
    """Return ρ of each token, prefix, sequence or geometric mean.  (eq:levels, eq:prefix)"""
    n = len(rho)
    if level is None:
        return [Fraction(1)] * n
    if level == "token":
        return rho
    if level == "prefix":
        return [*accumulate(rho, mul)]
    whole = prod(rho, start=Fraction(1))
    return [whole if level == "sequence" else root(whole, n)] * n


def limited(rho: Fraction, bound) -> Fraction:
    """Return min(ρ, C), or ρ 1[lo ≤ ρ ≤ hi] for a pair.  (eq:tis, eq:mis)"""
    if isinstance(bound, tuple):
        return rho * inside(rho, bound)
    return rho if bound == math.inf else min(rho, Fraction(bound))


def at_most(x, bound) -> bool:
    """True if x ≤ bound, which must not be near: in float64 rounding would decide.

    x is a fraction, or a float if it is made of logarithms.
    """
    if abs(x - bound) < 1e-9:
        raise ValueError(f"{x} is too near to {bound} for a float to decide")
    return x < bound


def inside(x: Fraction, bound, n: int = 1) -> bool:
    """True if lo^n ≤ x ≤ hi^n, where an end of None is open."""
    lo, hi = (None if end is None else Fraction(end) ** n for end in bound)
    return (lo is None or at_most(lo, x)) and (hi is None or at_most(x, hi))


def two_outcomes(a: Fraction, b: Fraction) -> float:
    """Return KL of a token's probability a, and 1 − a of any other one, from b."""
    return a * math.log(a / b) + (0 if a == 1 else (1 - a) * math.log((1 - a) / (1 - b)))


def keeps(name: str, bound, p: Vector, m: Vector, sign: int) -> list[bool]:
    """True for each token that a criterion keeps.

    (eq:rejection, eq:opsm, eq:total-variation, eq:binary-kl, eq:vaco)
    """
    rho, n = [a / b for a, b in zip(p, m)], len(p)
    if name in ("token_tv", "token_tv_outward", "seq_mean_tv"):
        moved = [(a - b) * sign if name == "token_tv_outward" else abs(a - b)
                 for a, b in zip(p, m)]
        moved = [sum(moved) / n] * n if name == "seq_mean_tv" else moved
        return [at_most(x, Fraction(bound)) for x in moved]
    if name == "opsm":
        return [sign > 0 or at_most(-math.log(prod(rho)) / n, bound)] * n
    if name == "vaco":
        near = at_most(sum(abs(x - 1) for x in rho) / n, Fraction(bound))
        return [near or (x - 1) * sign <= 0 for x in rho]
    if name.endswith("binary_kl"):
        there = [two_outcomes(a, b) for a, b in zip(m, p)]
        if name == "seq_mean_binary_kl":
            return [at_most(sum(there) / n, bound)] * n
        return [at_most(max(x, two_outcomes(a, b)), bound) for x, a, b in zip(there, p, m)]

    of, kind = name.rsplit("_", 1)                                  # seq_mean, k1
    if kind == "k1":
        whole = {"seq_sum": (prod(rho), bound), "seq_mean": (prod(rho), bound, n)}
        each = [inside(*whole.get(of, (x, bound))) for x in rho]
        return [all(each)] * n if of == "seq_max" else each
    k = [{"k2": math.log(x) ** 2 / 2, "k3": float(x - 1) - math.log(x)}[kind] for x in rho]
    if of == "token":
        return [at_most(x, bound) for x in k]
    return [at_most({"seq_sum": sum(k), "seq_mean": sum(k) / n, "seq_max": max(k)}[of], bound)] * n


def factors(config, p: Vector, m: Vector, sign: int = 1) -> Vector:
    """Return w_t κ_t of one response.  (eq:correction)

    p, m: the tokens' probabilities under π_old (bypass mode: π_θ) and μ. The loss that already has
    the ratio π_θ/μ takes no weight (eq:double-count).
    """
    level = None if config.bypass_mode and config.loss_type != "reinforce" else config.rollout_is
    weights = at_level([a / b for a, b in zip(p, m)], level)
    if level is not None:
        weights = [limited(w, config.rollout_is_threshold) for w in weights]
    for name, bound in config.rollout_rs.items():
        weights = [w * kept for w, kept in zip(weights, keeps(name, bound, p, m, sign))]
    return weights


# --------------------------------------------------------------------------------------- the losses

def slope(loss_type: str, r: Fraction, sign: int) -> Fraction:
    """Return −∂L/∂log π_θ of a token with A = sign, ε = 1/5.  (eq:ppo-clip, eq:cispo)"""
    ends = Fraction(4, 5), Fraction(6, 5)
    clipped = r if inside(r, ends) else min(max(r, ends[0]), ends[1])
    return {"reinforce": Fraction(sign), "cispo": clipped * sign,
            "ppo_clip": sign * r if sign * r <= sign * clipped else Fraction(0)}[loss_type]


Parts = dict[int, dict[tuple[int, ...], Vector]]                    # sign of A → response → part


def parts(config, world: World) -> Parts:
    """Return each response's part of −E_μ[∇loss], for the advantages 1 and −1.

    Another |A| multiplies the part of its own response, and no other. So a sum whose parts are
    right for A = ±1 is right for every advantage of responses.
    """
    theta, old, mu = world
    train, anchor = (theta, mu) if config.bypass_mode else (old, old)
    found: Parts = {1: {}, -1: {}}
    for sign, y in itertools.product(found, RESPONSES):
        p, m, q, a = (of_tokens(policy, y) for policy in (train, mu, theta, anchor))
        c = [prod(m) * f * slope(config.loss_type, x / z, sign)
             for f, x, z in zip(factors(config, p, m, sign), q, a)]
        found[sign][y] = scores(theta, y, c)
    return found


def mean_of(found: Parts, advantages=REWARDS) -> Vector:
    """Return −E_μ[∇loss] for one advantage per response; it is ∇J where nothing is biased."""
    return combined([abs(a) for a in advantages],
                    [found[1 if a >= 0 else -1][y] for y, a in zip(RESPONSES, advantages)])


def unbiased(found: Parts, theta: Table) -> bool:
    """True if −E_μ[∇loss] = ∇J for every advantage of responses."""
    return all(part == scores(theta, y, [sign * prod(of_tokens(theta, y))] * len(y))
               for sign, of_sign in found.items() for y, part in of_sign.items())


def centered(config, world: World, advantages) -> Vector:
    """Return E_μ[Σ_t A (w κ g(y_t) − Σ_v μ(v) w(v) κ(v) g(v))].  (eq:score-centering)"""
    def factor(state, v, a):
        return factors(config, [world.old[state][v]], [world.mu[state][v]], 1 if a > 0 else -1)[0]

    def of_response(y):
        a = advantages[RESPONSES.index(y)]
        total = scores(world.theta, y, [a * factor(y[:t], v, a) for t, v in enumerate(y)])
        for t, v in itertools.product(range(len(y)), range(3)):
            mean = a * world.mu[y[:t]][v] * factor(y[:t], v, a)
            total = less(total, scores(world.theta, (*y[:t], v), [0] * t + [mean]))
        return total
    return expected(world.mu, of_response)


def pairs(world: World, coefficient) -> Vector:
    """Return Σ μ(y) μ(z) c(y, z) Σ_t ∇log π(y_t): the mean of a batch of two, by symmetry."""
    chance = {y: prod(of_tokens(world.mu, y)) for y in RESPONSES}
    return combined([chance[y] * sum(chance[z] * coefficient(y, z) for z in RESPONSES)
                     for y in RESPONSES],
                    [scores(world.theta, y, [1] * len(y)) for y in RESPONSES])


# ------------------------------------------------------------------- the same policies, in float64

def in_float64(policy: Table) -> Policy:
    """Return the oracle's policy with these probabilities, to rounding."""
    found = Policy(3, 3)
    rows = [[float(p) for p in policy[state]] for state in STATES]
    found.logits = torch.tensor(rows, dtype=torch.float64).log().requires_grad_()
    return found


def numbers(vector) -> torch.Tensor:
    return torch.tensor([float(x) for x in vector], dtype=torch.float64)
