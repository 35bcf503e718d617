"""The algebra of the chapters, proved by sympy for all numbers, and the code's functions beside it.

One test for each identity, named by its equation. An expression is then evaluated at rational
points and compared with what the core computes there in float64, to 1e-12.
"""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import sympy
import torch
from sympy import Rational as Q
from sympy import diff, exp, expand, log, simplify

from three_policies.correction import batch_normalize, importance_weights
from three_policies.doctor.tokens import log_odds
from three_policies.estimators import (chi_square, effective_sample_size, grpo_advantages,
                                       perplexity, rloo_advantages)
from three_policies.kl import kl_estimate, kl_ratio
from three_policies.losses import LossConfig, kl_loss, policy_loss
from three_policies.metrics import Counted, Statistics
from three_policies.oracle import close, f64
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.surrogates import (cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss,
                                       sapo_loss)
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import reinforce

LP, LMU, LREF, A = sympy.symbols("log_pi log_mu log_ref A", real=True)
R = sympy.Symbol("r", positive=True)                    # π_θ/π_old
ELL = LP - LREF
K = {"k1": ELL, "k2": ELL ** 2 / 2, "k3": exp(-ELL) - 1 + ELL}
POINTS = [{LP: Q(-5, 4), LMU: Q(-7, 4), LREF: Q(-1, 3), A: Q(3, 2)},
          {LP: Q(-9, 7), LMU: Q(-1, 2), LREF: Q(-2), A: Q(-2, 3)},
          {LP: Q(-1, 5), LMU: Q(-1, 6), LREF: Q(-1, 4), A: Q(5)}]
Z = sympy.symbols("z0:3", real=True)
SOFTMAX = [exp(z) / sum(map(exp, Z)) for z in Z]
LOGITS = (Q(1, 2), Q(-2, 3), Q(1, 4))
ONE = torch.ones(1, 1)


def at(expression, point):
    """Return an expression's value at a point, from twenty digits."""
    return float(sympy.sympify(expression).subs(point).evalf(20))


def column(point, *symbols):
    """Return each symbol's value at a point, as a tensor [1, 1]."""
    return [f64([[float(point[x])]]) for x in symbols]


def slope(function, log_prob):
    """Return ∂ of a function's value by log π_θ."""
    leaf = log_prob.clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


# ------------------------------------------------------------------------------ the policy gradient

@certifies("sympy")
def test_the_policy_gradient():
    """eq:policy-gradient, eq:reinforce: for a softmax ∂E_π[R]/∂z = E_π[R ∂log π/∂z]."""
    reward = sympy.symbols("R0:3")
    mean = sum(p * x for p, x in zip(SOFTMAX, reward))
    for z in Z:
        assert simplify(diff(mean, z) - sum(
            p * x * diff(log(p), z) for p, x in zip(SOFTMAX, reward))) == 0
    point = {**dict(zip(Z, LOGITS)), **dict(zip(reward, (2, Q(-1, 3), Q(5, 7))))}
    logits = f64([float(z) for z in LOGITS]).requires_grad_()
    lp, given = logits.log_softmax(-1), f64([float(point[x]) for x in reward])
    loss = (lp.detach().exp() * reinforce_loss(lp, given)).sum()
    assert close(-torch.autograd.grad(loss, logits)[0], [at(diff(mean, z), point) for z in Z])


@certifies("sympy")
def test_scores_have_mean_zero_and_leaving_one_out_is_a_multiple_of_the_mean():
    """eq:baseline: Σ_v ∂π(v)/∂z = 0; for n = 3 R − the others' mean is 3/2 of R − the mean."""
    assert simplify(sum(diff(p, Z[0]) for p in SOFTMAX)) == 0
    r = sympy.symbols("r1:4")
    leave = r[0] - (r[1] + r[2]) / 2
    assert expand(leave - Q(3, 2) * (r[0] - sum(r) / 3)) == 0
    point, groups = dict(zip(r, (Q(3, 2), Q(-1, 3), Q(4, 5)))), torch.zeros(3)
    rewards = f64([float(x) for x in point.values()])
    assert close(rloo_advantages(rewards, groups)[0], at(leave, point))
    of_mean = grpo_advantages(rewards, groups, normalize_std=False)[0]
    assert close(of_mean, at(leave * Q(2, 3), point))


# -------------------------------------------------------------------------------------- the weights

@certifies("sympy")
def test_a_ratio_changes_the_sampler():
    """eq:off-policy, eq:decoupled-ppo: Σ μ (π/μ) f = Σ π f, for any μ > 0 and any f."""
    p, m, f = (sympy.symbols(f"{name}0:3", positive=True) for name in "pmf")
    weighted = sum(b * (a / b) * x for a, b, x in zip(p, m, f))
    assert expand(weighted - sum(a * x for a, x in zip(p, f))) == 0
    values = Q(1, 2), Q(1, 3), Q(1, 6), Q(1, 5), Q(2, 5), Q(2, 5), Q(3), Q(-2), Q(1, 7)
    point = dict(zip((*p, *m, *f), values))
    pi, mu, value = (f64([float(point[x]) for x in xs])[:, None] for xs in (p, m, f))
    for level in ("token", "prefix", "sequence", "geometric"):      # at one token all are one
        w = importance_weights((pi / mu).log(), torch.ones(3, 1), level, math.inf)
        assert close((mu * w * value).sum(), at(weighted, point))


@certifies("sympy")
@pytest.mark.parametrize("point", POINTS)
def test_a_weight_must_be_detached(point):
    """eq:detached: ∂ρ = ρ, but ∂(ρ log π) = ρ (1 + log π); the code's coefficient is ρ."""
    rho = exp(LP - LMU)
    assert diff(rho, LP) == rho and simplify(diff(rho * LP, LP) - rho * (1 + LP)) == 0
    lp, mu, a = column(point, LP, LMU, A)

    def by_parts(x):
        return importance_weights(x - mu, ONE, "token", math.inf) * reinforce_loss(x, a)
    for loss in (by_parts, lambda x: policy_loss(x, None, mu, a, ONE, reinforce("token"))[0]):
        assert close(slope(loss, lp), [[at(-rho * A, point)]])


@certifies("sympy")
def test_the_levels_of_a_ratio():
    """eq:levels, eq:prefix: sums of log ρ are products of ρ, their mean the root of the product."""
    a, b, c = sympy.symbols("a b c", positive=True)
    expected = {"token": (a, b, c), "prefix": (a, a * b, a * b * c), "sequence": (a * b * c,) * 3,
                "geometric": ((a * b * c) ** Q(1, 3),) * 3}
    assert simplify(exp(log(a) + log(b) + log(c)) - expected["sequence"][0]) == 0
    assert simplify(exp((log(a) + log(b) + log(c)) / 3) - expected["geometric"][0]) == 0
    point = {a: Q(3, 2), b: Q(2, 7), c: Q(9, 4)}
    log_rho = f64([[float(x) for x in point.values()]]).log()
    for level, ratios in expected.items():
        found = aggregate_log_ratio(log_rho, torch.ones(1, 3), level).exp()
        assert close(found, [[at(x, point) for x in ratios]])


@certifies("sympy")
def test_later_ratios_have_mean_one():
    """eq:prefix: E_μ[ρ_1 ρ_2 R_1] = E_μ[ρ_1 R_1], since Σ_v μ(v) π(v)/μ(v) = 1 after any token."""
    p1, p2, m1, m2, r1 = sympy.symbols("p1 p2 m1 m2 r1", positive=True)
    later = m2 * (p2 / m2) + (1 - m2) * ((1 - p2) / (1 - m2))
    assert simplify(later) == 1 and simplify(m1 * (p1 / m1) * later * r1 - p1 * r1) == 0


@certifies("sympy")
@pytest.mark.parametrize("point", POINTS)
def test_a_ratio_that_is_counted_twice(point):
    """eq:double-count: ∂(sg(ρ) ρ A) = ρ² A; bypass mode has ρ A, with any weights."""
    fixed, rho = sympy.Symbol("sg"), exp(LP - LMU)
    assert simplify(diff(fixed * rho * A, LP).subs(fixed, rho) - rho ** 2 * A) == 0
    lp, mu, a = column(point, LP, LMU, A)
    for level in (None, "token"):
        config = Config(level, math.inf, bypass_mode=True)
        wide = LossConfig(clip_low=1, clip_high=99)
        found = slope(lambda x: policy_loss(x, None, mu, a, ONE, config, wide)[0], lp)
        assert close(found, [[at(-rho * A, point)]])


@certifies("sympy")
def test_normalised_weights_have_a_bias_of_one_over_n():
    """eq:self-normalised: to second order the bias is −E_μ[ρ²(f − E_π f)]/N; N·bias tends there."""
    F, a, b, s, t = sympy.symbols("F a b s t")          # s = E_μ[ρ²], t = E_μ[ρ² f]
    x = sympy.Symbol("x")                               # of the size of a and b
    second = sympy.series((F + a * x) / (1 + b * x), x, 0, 3).removeO().coeff(x, 2)
    assert expand(second - (F * b ** 2 - a * b)) == 0
    squares, products = s - 1, t - F                    # N E[b²], N E[ab]
    assert expand(F * squares - products + (t - F * s)) == 0

    p, m = Fraction(1, 2), Fraction(1, 4)               # two responses, f = 1 and 0, E_π f = p
    up, down = p / m, (1 - p) / (1 - m)
    limit = -(m * up ** 2 * (1 - p) + (1 - m) * down ** 2 * (0 - p))

    def times_bias(n):                                  # exact: a batch is how often it has f = 1
        return n * (sum(math.comb(n, k) * m ** k * (1 - m) ** (n - k) * k * up
                        / (k * up + (n - k) * down) for k in range(n + 1)) - p)
    off = [times_bias(n) - limit for n in (80, 160, 320)]
    assert all(1.9 < one / two < 2.1 for one, two in pairwise(off))

    found = 0.0
    for k in range(6):                                  # the six kinds of batches of five
        f = f64([[1.0]] * k + [[0.0]] * (5 - k))
        w = batch_normalize(2 * f + 2 / 3 * (1 - f), torch.ones(5, 1), "sequence")
        found += math.comb(5, k) * 0.25 ** k * 0.75 ** (5 - k) * (w * f).mean()
    assert close(5 * (found - 0.5), float(times_bias(5)))


# ----------------------------------------------------------------------------------- the surrogates

RATIOS = [Q(1, 2), Q(3, 4), Q(9, 10), Q(1), Q(11, 10), Q(5, 4), Q(14, 5), Q(7)]
CLIP = sympy.Max(Q(4, 5), sympy.Min(R, Q(6, 5)))


@certifies("sympy")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("r", RATIOS)
def test_where_a_clip_takes_the_gradient(r, sign):
    """eq:ppo-clip, eq:dual-clip: ∂L/∂log π = −rA, or 0 beyond the end that A points to, or c."""
    a, c = sign * Q(3, 2), 3
    ppo = -sympy.Min(R * a, CLIP * a)
    for term, dual in ((ppo, None), (sympy.Min(ppo, -c * a) if a < 0 else ppo, float(c))):
        gone = r > Q(6, 5) if a > 0 else r < Q(4, 5) or (dual is not None and r > c)
        exact = (R * diff(term, R)).subs(R, r).doit()
        assert exact == (0 if gone else -r * a)
        old, lp = f64([[-1.0]]), f64([[float(r)]]).log() - 1
        found = slope(lambda x: ppo_clip_loss(x, old, f64(float(a)), dual_clip=dual), lp)
        assert close(found, [[at(exact, {})]])


@certifies("sympy")
@pytest.mark.parametrize("r", RATIOS)
def test_cispo_is_reinforce_with_a_clipped_weight(r):
    """eq:cispo: ∂L/∂log π = −clip(r) A, never 0; at r = 1 it is −A, REINFORCE's and PPO's."""
    weight = sympy.Symbol("sg_clip")                        # detached: a constant
    assert diff(-weight * A * LP, LP) == -weight * A
    exact = (-CLIP * A).subs({R: r, A: Q(-3, 2)})
    old, lp, a = f64([[-1.0]]), f64([[float(r)]]).log() - 1, f64(-1.5)
    found = slope(lambda x: cispo_loss(x, old, a), lp)
    assert close(found, [[at(exact, {})]]) and exact >= Q(4, 5) * Q(3, 2)
    if r == 1:
        assert close(slope(lambda x: reinforce_loss(x, a), lp), found)
        assert close(slope(lambda x: ppo_clip_loss(x, old, a), lp), found)


@certifies("sympy")
@pytest.mark.parametrize("sign", [1, -1])
def test_sapos_slope(sign):
    """eq:sapo: ∂L/∂r = −4 σ (1 − σ) A, which is −A at r = 1 for every τ."""
    tau, a = sympy.Symbol("tau", positive=True), sign * Q(3, 2)
    sigma = 1 / (1 + exp(-tau * (R - 1)))
    loss = -4 / tau * sigma * a
    assert simplify(diff(loss, R) + 4 * sigma * (1 - sigma) * a) == 0
    assert simplify(diff(loss, R).subs(R, 1) + a) == 0
    for r in RATIOS:
        old, lp = f64([[-1.0]]), f64([[float(r)]]).log() - 1
        found = slope(lambda x: sapo_loss(x, old, f64(float(a)), 1.0, 1.05), lp)
        assert close(found, [[at(R * diff(loss, R), {R: r, tau: 1 if sign > 0 else Q(21, 20)})]])


@certifies("sympy")
def test_gspos_ratio_moves_by_its_share():
    """eq:gspo: ∂r̄/∂log π_t = r̄/|y|; GSPO-token has the slope −A r̄ in its own token and no other."""
    x = sympy.symbols("x0:3")
    mean = exp(sum(x) / 3)
    assert all(simplify(diff(mean, v) - mean / 3) == 0 for v in x)
    point = dict(zip(x, (Q(1, 5), Q(-1, 7), Q(1, 9))))
    log_r = f64([[float(v) for v in point.values()]])
    old, ones = torch.zeros(1, 3).double(), torch.ones(1, 3).double()
    for t in range(3):
        found = slope(lambda y: gspo_loss(y, old, 2 * ones, ones, 0.5, 0.5)[:, t], log_r)
        assert close(found, -2 * at(mean, point) * (torch.arange(3) == t).double()[None])


# ----------------------------------------------------------------------------------------------- KL

@certifies("sympy")
def test_k3_has_the_mean_of_k1():
    """eq:kl-estimators: E_π[k3] = E_π[k1] = KL(π‖π_ref), and k3 is k2 to second order."""
    x, y, ell = sympy.symbols("x y ell", positive=True)     # π = (x, 1 − x), π_ref = (y, 1 − y)
    sides = [(x, log(x / y)), (1 - x, log((1 - x) / (1 - y)))]
    assert simplify(sum(p * (exp(-v) - 1 + v) - p * v for p, v in sides)) == 0
    assert sympy.series(exp(-ell) - 1 + ell, ell, 0, 3).removeO() == ell ** 2 / 2
    p, ref = f64([[2 / 3], [1 / 3]]), f64([[1 / 4], [3 / 4]])
    for kind in ("k1", "k3"):
        found = (p * kl_estimate(p.log(), ref.log(), kind)).sum()
        assert close(found, at(sum(a * v for a, v in sides), {x: Q(2, 3), y: Q(1, 4)}))


@certifies("sympy")
@pytest.mark.parametrize("point", POINTS)
def test_the_slopes_of_the_estimators(point):
    """eq:kl-gradient: ∂k1 = 1, ∂k2 = ℓ, ∂k3 = 1 − e^{−ℓ}, times ∇log π."""
    expected = {"k1": 1, "k2": ELL, "k3": 1 - exp(-ELL)}
    assert all(simplify(diff(K[kind], LP) - of) == 0 for kind, of in expected.items())
    lp, ref = column(point, LP, LREF)
    for kind, of in expected.items():
        assert close(kl_estimate(lp, ref, kind), [[at(K[kind], point)]])
        assert close(slope(lambda x: kl_estimate(x, ref, kind), lp), [[at(of, point)]])


@certifies("sympy")
@pytest.mark.parametrize("point", POINTS)
def test_straight_through(point):
    """eq:straight-through: k2 − sg(k2) + sg(k) has the value k and the slope of k2, ℓ."""
    sg2, sg = sympy.symbols("sg_k2 sg_k")
    plus = K["k2"] - sg2 + sg
    assert plus.subs(sg2, K["k2"]) == sg and simplify(diff(plus, LP) - ELL) == 0
    lp, ref = column(point, LP, LREF)
    for kind, value in K.items():
        assert close(kl_estimate(lp, ref, f"{kind}+"), [[at(value, point)]])
        assert close(slope(lambda x: kl_estimate(x, ref, f"{kind}+"), lp), [[at(ELL, point)]])


@certifies("sympy")
@pytest.mark.parametrize("point", POINTS)
def test_a_ratio_times_an_estimator(point):
    """eq:kl-ratio: ∂(ρ k3) = sg(ρ) ∂k2; ∂(ρ k1) = ρ (ℓ + 1), and ∂(ρ k2) = ρ (ℓ + ℓ²/2), wrong."""
    rho = exp(LP - LMU)
    expected = {"k1": rho * (ELL + 1), "k2": rho * (ELL + ELL ** 2 / 2), "k3": rho * ELL}
    assert all(simplify(diff(rho * K[kind], LP) - of) == 0 for kind, of in expected.items())
    lp, mu, ref = column(point, LP, LMU, LREF)
    for kind, of in {**expected, "k2": rho * ELL, "k3+": rho * ELL}.items():    # what the code has
        found = slope(lambda x: kl_loss(x, ref, ONE, kind, ratio=kl_ratio(
            x, mu, ONE, kind, "token")), lp)
        assert close(found, [[at(of, point)]])


# -------------------------------------------------------------------------------------- diagnostics

@certifies("sympy")
def test_chi_square_is_twice_the_kl_to_second_order():
    """eq:chi2: E_μ[ρ²] − 1 = Var_μ[ρ], which is 2 KL(π‖μ) to second order in π − μ."""
    x, d = sympy.symbols("x delta", positive=True)          # μ = (x, 1 − x), π = (x + δ, 1 − x − δ)
    rho = (x + d) / x, (1 - x - d) / (1 - x)
    chi2 = x * rho[0] ** 2 + (1 - x) * rho[1] ** 2 - 1
    assert simplify(chi2 - x * (rho[0] - 1) ** 2 - (1 - x) * (rho[1] - 1) ** 2) == 0
    kl = (x + d) * log(rho[0]) + (1 - x - d) * log(rho[1])
    for order in (0, 1, 2):
        assert simplify(diff(chi2 - 2 * kl, d, order).subs(d, 0)) == 0
    ratios = f64([float(q.subs({x: Q(3, 8), d: Q(1, 8)})) for q in rho])    # 3 samples and 5
    squares = ratios.square().repeat_interleave(torch.tensor([3, 5])).sum()
    assert close(chi_square(torch.tensor(8), squares), at(chi2, {x: Q(3, 8), d: Q(1, 8)}))


@certifies("sympy")
def test_ess_and_the_spread_of_merged_sums():
    """eq:ess, eq:merge: (Σw)²/(NΣw²) = 1/(1 + Var w/w̄²), and Var w = Σw²/N − w̄²."""
    w = sympy.symbols("w1:4", positive=True)
    mean, square = sum(w) / 3, sum(a ** 2 for a in w) / 3
    variance = sum((a - mean) ** 2 for a in w) / 3
    ess = sum(w) ** 2 / (3 * sum(a ** 2 for a in w))
    assert expand(variance - (square - mean ** 2)) == 0
    assert simplify(ess - 1 / (1 + variance / mean ** 2)) == 0
    point = dict(zip(w, (Q(1, 3), Q(5, 2), Q(4, 7))))
    weights = f64([[float(x)] for x in point.values()])
    assert close(effective_sample_size(weights, torch.ones(3, 1)), at(ess, point))
    names = {"ess": "ess", "std": "std"}
    parts = [Statistics.of([(Counted.of(torch.ones_like(x)).moments(x), names)])
             for x in weights.split([1, 2])]
    found = parts[0].merge(parts[1:]).metrics()
    assert close(found["rollout_corr/ess"], at(ess, point))
    assert close(found["rollout_corr/std"], at(sympy.sqrt(variance), point))


@certifies("sympy")
def test_a_quotient_of_perplexities():
    """eq:perplexity: ppl(π)/ppl(μ) is one over the geometric mean of ρ."""
    a, b, c, d = sympy.symbols("a b c d", positive=True)    # π and μ on two tokens
    quotient = exp(-(log(a) + log(b)) / 2) / exp(-(log(c) + log(d)) / 2)
    assert simplify(quotient * sympy.sqrt(a / c * b / d)) == 1
    point = {a: Q(1, 3), b: Q(2, 5), c: Q(1, 2), d: Q(1, 7)}
    pi, mu = (f64([[float(point[x]) for x in xs]]).log() for xs in ((a, b), (c, d)))
    found = perplexity(pi, torch.ones(1, 2)) / perplexity(mu, torch.ones(1, 2))
    assert close(found, [at(quotient, point)])


@certifies("sympy")
def test_log_odds_move_as_much_as_the_logit():
    """eq:log-odds: logit p(v) = z_v − log Σ_{w≠v} e^{z_w}: its slope in z_v is 1, log p's 1 − p."""
    p = SOFTMAX[0]
    odds = log(p / (1 - p))
    assert simplify(odds - Z[0] + log(exp(Z[1]) + exp(Z[2]))) == 0
    assert simplify(diff(odds, Z[0])) == 1 and simplify(diff(log(p), Z[0]) - (1 - p)) == 0
    point = dict(zip(Z, LOGITS))
    lp = f64(at(log(p), point))                             # the code adds 1e-3 to 1 − p
    assert close(log_odds(lp), at(log(p / (1 - p + Q(1, 1000))), point))


@certifies("sympy")
def test_a_temperature_is_a_slope():
    """eq:temperature-slope, eq:same-prefix: logit π = τ logit μ − (1 − τ) H_τ; Δ log π = τ Δ log μ.

    With y = e^{z/τ}, μ(v) is y_v/Σy, and π(v) is y_v^τ/Σy^τ. H_τ is Rényi's entropy of μ without v.
    """
    tau, *y = sympy.symbols("tau y0:4", positive=True)
    others = sum(y[1:])
    renyi = log(sum((v / others) ** tau for v in y[1:])) / (1 - tau)
    odds_of_pi, odds_of_mu = log(y[0] ** tau / sum(v ** tau for v in y[1:])), log(y[0] / others)
    gap = odds_of_pi - (tau * odds_of_mu - (1 - tau) * renyi)
    assert simplify(sympy.expand_log(gap, force=True)) == 0
    pair = log(y[0] ** tau) - log(y[1] ** tau) - tau * (log(y[0]) - log(y[1]))
    assert simplify(sympy.expand_log(pair, force=True)) == 0


@certifies("sympy")
def test_a_division_after_the_softmax_leaves_an_entropy():
    """eq:unnormalised: log p(v)/τ − log μ(v) = log Σ p^{1/τ} for every v; μ = softmax(z/τ)."""
    tau, *p = sympy.symbols("tau p0:3", positive=True)
    total = sum(v ** (1 / tau) for v in p)
    for v in p:
        gap = log(v) / tau - log(v ** (1 / tau) / total) - log(total)
        assert simplify(sympy.expand_log(gap, force=True)) == 0


@certifies("sympy")
def test_a_cut_removes_the_largest_surprisals():
    """eq:tail: H(π) − E_μ[−log π] = (1 − Z)(S − E_μ[−log π]) ≥ 0, with S that of what is cut."""
    p = sympy.symbols("p1:4", positive=True)
    first, a, b = sympy.symbols("first a b", nonnegative=True)
    surprisal = (first, first + a, first + a + b)           # in order: what is cut has the largest

    def mean(kept):
        return sum(p[v] * surprisal[v] for v in kept) / sum(p[v] for v in kept)
    for k in (1, 2):
        gap, Z = mean(range(3)) - mean(range(k)), sum(p[:k]) / sum(p)
        assert simplify(gap - (1 - Z) * (mean(range(k, 3)) - mean(range(k)))) == 0
        assert sympy.factor(gap).is_nonnegative


# ---------------------------------------------------------------------------------- a clip around μ

@certifies("sympy")
def test_one_place_under_a_clip_around_mu():
    """eq:clip-one-place: the three cases' shares of the true update are the formula's terms."""
    p, m, q = sympy.symbols("p m q", positive=True)
    wrong = m * (p / m) * -((1 - m) * q) * -(1 - p)         # chance, ρ, A, ∂log π/∂ω
    right = (1 - m) * q * ((1 - p) / (1 - m)) * (1 - (1 - m) * q) * p
    rest = (1 - m) * (1 - q) * ((1 - p) / (1 - m)) * -((1 - m) * q) * p
    shares = [simplify(term / (q * p * (1 - p))) for term in (wrong, right, rest)]
    terms = [1 - m, 1 - q * (1 - m), -(1 - q) * (1 - m)]
    assert all(expand(share - term) == 0 for share, term in zip(shares, terms))
    assert expand(sum(shares)) == 1                         # nothing is clipped: the true update


@certifies("sympy")
def test_the_pull_of_a_clips_end():
    """eq:clip-pull: ⟨Σ_S a π ∇log π, log μ − log π⟩ = Σ_S a π (log μ/π + KL(π‖μ)) in logits."""
    p, a, gap = (sympy.symbols(f"{name}0:3") for name in ("p", "a", "gap"))    # gap: log μ/π
    pushed = sum(x * y for x, y in zip(a, p))               # a(v) is 0 outside S
    u = [x * y - y * pushed for x, y in zip(a, p)]          # Σ_v a π(v) (1[w = v] − π(w))
    kl = -sum(y * g for y, g in zip(p, gap))
    assert expand(sum(x * g for x, g in zip(u, gap))
                  - sum(x * y * (g + kl) for x, y, g in zip(a, p, gap))) == 0
