"""estimators.py is the mathematics it claims: exact sums over all sequences, no sampling.

Each test names its claim, and its docstring the equation. Run with -s to see the biases' sizes.
"""

import itertools
import math

import pytest
import torch
from oracle import (Policy, close, estimator_moments, exact_gradient, expectation, f64, grad_J, kl,
                    rewards, scores, token_kl)
from tolerances import gamma

from adapters.dialects import kl_kind
from estimators import (SAFETY_BOUND, aggregate_log_ratio, chi_square, effective_sample_size,
                        exp_ratio, grpo_advantages, kl_estimate,
                        masked_log_ratio, perplexity, reinforce_advantages, rloo_advantages,
                        sampling_log_probs)

PI = Policy(3, 3, seed=0)
MU, REF, R = PI.perturbed(1, 0.5), PI.perturbed(3, 0.7), rewards(PI)
LP, MASK = PI.log_probs(), PI.mask
MU_LP, REF_LP = MU.log_probs().detach(), REF.log_probs().detach()
ELL = (LP - REF_LP).detach()                                        # ℓ_t
WEIGHT = (LP - MU_LP).exp()                                         # π_θ/μ, with its graph
PREFIX = (LP - MU_LP).cumsum(-1).exp().detach()                     # Π_{s≤t} of it
WHOLE = (LP - MU_LP).sum(-1, keepdim=True).exp().detach()           # Π over the sequence, [N, 1]
GOOD = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [False] * 3])
X = f64([[0.1, -0.3, 9.0], [0.5, 9.0, 9.0], [0.2, 0.4, -0.9], [9.0] * 3])
LEVELS, KINDS = ("token", "sequence", "geometric"), ("k1", "k2", "k3", "abs")


def moments(loss, sampler=PI):
    """Of ∇ Σ_t loss[i, t], the sequence i drawn from the sampler."""
    return estimator_moments(PI, sampler, lambda i: (loss[i] * MASK[i]).sum())


# -------------------------------------------------------------------------------- the oracle itself

def test_oracle_probabilities_and_scores():
    """eq:policy-gradient: Σ_y π(y) = 1, E_π[∇log π_t] = 0, ∇J = E_π[R Σ_t ∇log π_t]."""
    assert len(PI.tokens) == 15 and close(PI.probs().sum(), 1.0)
    assert close(grad_J(PI, R), expectation(PI, scores(PI).sum(1) * R))
    assert close(expectation(PI, scores(PI)), torch.zeros(3, PI.logits.numel()))


def test_oracle_step_kl_adds_up_to_sequence_kl():
    """KL(π‖ref) = Σ_t E_π[KL_t]; with frozen visits the right side's gradient is another."""
    assert close(kl(PI, REF), token_kl(PI, REF, PI))
    gap = exact_gradient(PI, kl(PI, REF)) - exact_gradient(PI, token_kl(PI, REF, PI))
    print(f"\nthe part of the KL gradient that frozen visits lack: {gap.norm():.3f}")
    assert gap.norm() > 0.01


# --------------------------------------------------------------------------------------- log-ratios

@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_reaches_neither_ratio_nor_gradient(junk):
    """eq:ratio, eq:levels: what stands in the padding is replaced before anything is computed."""
    dirty = torch.where(GOOD, X, junk).requires_grad_()
    ratio = masked_log_ratio(dirty, torch.where(GOOD, 0.25, junk), GOOD)
    assert close(ratio, torch.where(GOOD, X - 0.25, 0.0))
    for level in LEVELS:
        out = aggregate_log_ratio(dirty, GOOD, level)
        assert close(out, aggregate_log_ratio(X, GOOD, level)) and (out[~GOOD] == 0).all()
        gradient = torch.autograd.grad((out + ratio).sum(), dirty, retain_graph=True)[0]
        assert gradient.isfinite().all() and (gradient[~GOOD] == 0).all()
    assert close(perplexity(dirty, GOOD), perplexity(X, GOOD))
    assert close(effective_sample_size(dirty.exp(), GOOD), effective_sample_size(X.exp(), GOOD))
    assert close(chi_square(dirty, GOOD), chi_square(X, GOOD))


@pytest.mark.parametrize("dtype, out", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_log_ratio_is_float32_at_least(dtype, out):
    """eq:ratio: 16-bit log-probs are widened before the subtraction."""
    a, b = torch.tensor([[-10.0]], dtype=dtype), torch.tensor([[-1e-3]], dtype=dtype)
    ratio = masked_log_ratio(a, b, torch.ones(1, 1))
    assert ratio.dtype == out and close(ratio, a.to(out) - b.to(out))


def test_exp_ratio_is_exp_within_its_bound_and_finite_beyond():
    """eq:ratio: the one clamp, ±20 nats; e^20 squared is still a float32."""
    assert SAFETY_BOUND == 20 and exp_ratio(torch.tensor(1e30)).square().isfinite()
    x = f64([-1e9, -20.5, -19.9, 0.0, 19.9, 20.5, 1e9])
    assert close(exp_ratio(x), [math.exp(min(max(v, -20), 20)) for v in x.tolist()])


def test_levels_by_hand():
    """eq:levels: the token's, the sum over the sequence, its mean; an empty row stays 0."""
    assert aggregate_log_ratio(X, GOOD, "token").tolist() == torch.where(GOOD, X, 0.0).tolist()
    for level, rows in (("sequence", [-0.2, 0.5, -0.3, 0.0]),
                        ("geometric", [-0.1, 0.5, -0.1, 0.0])):
        by_hand = f64(rows)[:, None] * GOOD
        assert close(aggregate_log_ratio(X, GOOD, level), by_hand)


def test_sequence_ratio_has_mean_one_and_the_other_levels_do_not():
    """eq:levels: E_μ[π(y)/μ(y)] = 1; E_μ of a geometric mean is < 1 (Jensen)."""
    rho = {level: exp_ratio(aggregate_log_ratio(LP - MU_LP, MASK, level)) for level in LEVELS}
    means = {level: expectation(MU, rho[level][:, 0]).item() for level in LEVELS}
    print(f"\nE_μ[first token's ρ]: {means}")
    assert close(means["sequence"], 1.0) and close(means["token"], 1.0)
    assert means["geometric"] < 0.995


@pytest.mark.parametrize("level", LEVELS)
def test_one_token_makes_all_levels_equal(level):
    """eq:levels at T = 1."""
    first = torch.where(GOOD, X, 0.0)[:, :1]
    assert close(aggregate_log_ratio(X[:, :1], GOOD[:, :1], level), first)


# --------------------------------------------------------------------------------------- KL: values

def test_k1_and_k3_are_unbiased_values_and_k2_is_not():
    """eq:kl-estimators: E_π[Σ_t k1] = E_π[Σ_t k3] = KL(π‖ref); k2 and abs have another value."""
    value = {k: expectation(PI, (kl_estimate(LP, REF_LP, k) * MASK).sum(-1)) for k in KINDS}
    assert close(value["k1"], kl(PI, REF)) and close(value["k3"], kl(PI, REF))
    assert close(value["k2"], expectation(PI, ELL.square().sum(-1) / 2))
    assert close(value["abs"], expectation(PI, ELL.abs().sum(-1)))
    bias = {kind: (value[kind] - kl(PI, REF)).item() for kind in ("k2", "abs")}
    print(f"\nKL {kl(PI, REF):.4f}; bias of k2 {bias['k2']:+.4f}, of abs {bias['abs']:+.4f}")
    assert abs(bias["k2"]) > 0.005 and bias["abs"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("ell", [-1e4, -25.0, -3.0, -1e-3, 1e-3, 0.5, 19.0, 25.0, 1e4])
def test_kl_value_and_gradient_pointwise(kind, plus, ell):
    """eq:kl-estimators, eq:straight-through: the kind's value; its own gradient or, with +, ℓ."""
    log_prob = torch.tensor(ell - 1.0, dtype=torch.float64, requires_grad=True)
    out = kl_estimate(log_prob, f64(-1.0), kind + plus)
    inverse, inside = math.exp(min(max(-ell, -20), 20)), abs(ell) < 20
    value, slope = {"k1": (ell, 1), "k2": (ell * ell / 2, ell),
                    "k3": (inverse - 1 + ell, 1 - inverse * inside),
                    "abs": (abs(ell), math.copysign(1, ell))}[kind]
    assert close(out, value, 1e-11)
    assert close(torch.autograd.grad(out, log_prob)[0], ell if plus else slope, 1e-11)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kl_is_finite_for_huge_log_ratios(kind, dtype):
    """eq:kl-estimators: value and gradient are finite at ℓ = ±1e4, where a bare e^{−ℓ} is not."""
    log_prob = torch.tensor([-1e4, -1.0], dtype=dtype, requires_grad=True)
    out = kl_estimate(log_prob, torch.tensor([-1.0, -1e4], dtype=dtype), kind)
    assert out.isfinite().all() and torch.autograd.grad(out.sum(), log_prob)[0].isfinite().all()


# ------------------------------------------------------------------------------------ KL: gradients

FROZEN = exact_gradient(PI, token_kl(PI, REF, PI))                  # per-token reverse KL
FROZEN_MU = exact_gradient(PI, token_kl(PI, REF, MU))
OTHER = exact_gradient(PI, token_kl(REF, PI, PI))                   # per-token forward KL
OTHER_MU = exact_gradient(PI, token_kl(REF, PI, MU))
FULL = exact_gradient(PI, kl(PI, REF))                              # the sequence's reverse KL


def estimate(kind):
    return kl_estimate(LP, REF_LP, kind)


def in_reward(kind, weight=1.0):
    """REINFORCE with the whole return Σ_s kl_s as a cost: log π(y) × sg(Σ_s kl_s)."""
    cost = (estimate(kind) * MASK).sum(-1, keepdim=True).detach()
    return LP * cost * weight


def half_square():
    """½(Σ_t ℓ_t)², once per sequence: k2 of the sequence's log-ratio."""
    total = aggregate_log_ratio(LP - REF_LP, MASK, "sequence")
    return kl_estimate(total, torch.zeros_like(total), "k2") / MASK.sum(-1, keepdim=True).double()


def prefix_products():
    """Σ_t Σ_{s≥t} w_{1:s} ℓ_s log π_t."""
    return LP * (PREFIX * ELL * MASK).flip(-1).cumsum(-1).flip(-1)


def total_variation():
    """Σ_t E_π[Σ_v |π(v) − π_ref(v)|], visits frozen."""
    step = (PI.step_log_probs().exp() - REF.step_log_probs().detach().exp()).abs().sum(-1)
    return expectation(PI, torch.where(MASK, step[PI.states], 0.0).sum(-1))


TABLE = {
    # what the loss is: (per-token loss, sampler, the exact gradient it estimates)
    "on: k1 is zero": (estimate("k1"), PI, 0 * FULL),
    "on: k2 is the per-token part": (estimate("k2"), PI, FROZEN),
    "on: k1+ likewise": (estimate("k1+"), PI, FROZEN),
    "on: k3+ likewise": (estimate("k3+"), PI, FROZEN),
    "on: abs+ likewise": (estimate("abs+"), PI, FROZEN),
    "on: k3 is the other direction": (estimate("k3"), PI, OTHER),
    "on: abs is the total variation's":
        (estimate("abs"), PI, exact_gradient(PI, total_variation())),
    "on: k1 in the reward is the full KL": (in_reward("k1"), PI, FULL),
    "on: k3 in the reward misses the other direction": (in_reward("k3"), PI, FULL - OTHER),
    "on: half the square of the sum is the full KL": (half_square(), PI, FULL),
    "off: k1 is minus the gradient of KL(μ‖π)":
        (estimate("k1"), MU, -exact_gradient(PI, token_kl(MU, PI, MU))),
    "off: sg(ratio)·k2 repairs the token level": (WEIGHT.detach() * estimate("k2"), MU, FROZEN_MU),
    "off: sg(ratio)·k3+ likewise": (WEIGHT.detach() * estimate("k3+"), MU, FROZEN_MU),
    "off: sg(ratio)·k3 is the other direction": (WEIGHT.detach() * estimate("k3"), MU, OTHER_MU),
    "off: ratio·k3 with its graph is right": (WEIGHT * estimate("k3"), MU, FROZEN_MU),
    "off: ratio·k1 with its graph is right": (WEIGHT * estimate("k1"), MU, FROZEN_MU),
    "off: ratio·k2 with its graph has ℓ + ℓ²/2": (WEIGHT * estimate("k2"), MU, expectation(
        MU, (scores(PI) * (WEIGHT * (ELL + ELL**2 / 2))[..., None]).sum(1))),
    "off: prefix products give the full KL": (prefix_products(), MU, FULL),
    "off: k1 in the reward × Πρ": (in_reward("k1", WHOLE), MU, FULL),
    "off: half the square × Πρ": (half_square() * WHOLE, MU, FULL),
}


@pytest.mark.parametrize("row", TABLE)
def test_kl_gradient_table(row):
    """eq:kl-gradient, eq:straight-through, eq:kl-ratio: each row's expected gradient, exactly."""
    loss, sampler, target = TABLE[row]
    assert close(moments(loss, sampler).mean, target)


WRONG = {
    "k1 as a loss, on-policy, against the KL's gradient": (estimate("k1"), PI, FROZEN),
    "k2 as a loss, against the full KL": (estimate("k2"), PI, FULL),
    "k3 as a loss, against reverse": (estimate("k3"), PI, FROZEN),
    "k3 in the reward, against full": (in_reward("k3"), PI, FULL),
    "k1 as a loss, off-policy": (estimate("k1"), MU, FROZEN_MU),
    "k2 as a loss, off-policy, no ratio": (estimate("k2"), MU, FROZEN_MU),
    "k3+ as a loss, off-policy, no ratio": (estimate("k3+"), MU, FROZEN_MU),
    "sg(ratio)·k3, against reverse": (WEIGHT.detach() * estimate("k3"), MU, FROZEN_MU),
    "ratio·k2 with its graph": (WEIGHT * estimate("k2"), MU, FROZEN_MU),
    "k1 in the reward, off-policy, no ratio": (in_reward("k1"), MU, FULL),
}


@pytest.mark.parametrize("row", WRONG)
def test_kl_gradient_biases_are_there(row):
    """eq:kl-gradient: what is called biased above is so, by more than 3 % of the gradient here."""
    loss, sampler, target = WRONG[row]
    size = (moments(loss, sampler).bias(target).norm() / target.norm()).item()
    print(f"\n{row}: bias {size:.0%} of the gradient")
    assert size > 0.03


def test_ratio_times_k3_is_k2_sample_by_sample():
    """eq:kl-ratio: ∇(ratio·k3) = sg(ratio)·∇k2 for each sequence; ratio·k1 in the mean."""
    k3 = moments(WEIGHT * estimate("k3"), MU)
    k2 = moments(WEIGHT.detach() * estimate("k2"), MU)
    k1 = moments(WEIGHT * estimate("k1"), MU)
    assert close(k3.gradients, k2.gradients) and close(k1.mean, k2.mean)
    print(f"\nvariance: ratio·k1 {k1.variance:.3f}, ratio·k3 {k3.variance:.3f}")
    assert k1.variance > 2 * k3.variance


def test_prefix_products_vary_less_than_the_whole_ratio():
    """eq:prefix: both are exact for the full KL; the prefix leaves out the ratios yet to come."""
    prefix, whole = moments(prefix_products(), MU), moments(in_reward("k1", WHOLE), MU)
    print(f"\nvariance: prefix {prefix.variance:.3f}, whole {whole.variance:.3f}")
    assert close(prefix.mean, whole.mean) and prefix.variance < 0.9 * whole.variance


# ------------------------------------------------------------------------------- quality of weights

def test_ess_by_hand():
    """eq:ess: (1+2+3)²/(3·14); one weight alone: 1/N; equal weights: 1; none: 0; scale-free."""
    w, on = f64([1.0, 2.0, 3.0, 50.0]), torch.tensor([1, 1, 1, 0])
    assert close(effective_sample_size(w, on), 36 / 42)
    assert close(effective_sample_size(f64([0.0, 5.0, 0.0]), torch.ones(3)), 1 / 3)
    assert close(effective_sample_size(torch.full((7,), 0.3).double(), torch.ones(7)), 1.0)
    for scale in (1e-30, 1e30, SAFETY_BOUND):
        assert close(effective_sample_size((w * scale).float(), on), 36 / 42, gamma(21))       # 11 in (Σw)², 8 in Σw², 2 after
    for empty in (effective_sample_size(0 * w, on), effective_sample_size(w, 0 * on)):
        assert empty.item() == 0


def test_ess_is_one_over_one_plus_chi_square():
    """eq:ess, eq:chi2: μ = (4, 2, 1, 1)/8 drawn 8 times: the sample mean is exact."""
    mu, pi = f64([4, 2, 1, 1]) / 8, f64([0.2, 0.5, 0.25, 0.05])
    log_rho = (pi / mu).log()[torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])]
    exact = (pi * pi / mu).sum() - 1
    assert close(chi_square(log_rho, torch.ones(8)), exact)
    assert close(effective_sample_size(log_rho.exp(), torch.ones(8)), 1 / (1 + exact))


def test_chi_square_is_the_variance_of_the_sequence_ratio():
    """eq:chi2 by enumeration: E_μ[ρ²] − 1, each sequence seen on its own through the function."""
    log_rho = aggregate_log_ratio((LP - MU_LP).detach(), MASK, "sequence")[:, 0]
    single = torch.stack([chi_square(x[None], torch.ones(1)) for x in log_rho])
    assert close(expectation(MU, single), expectation(MU, (WHOLE[:, 0] - 1).square()))


def test_chi_square_small_large_and_empty():
    """eq:chi2: expm1 keeps 1e-6 in float32; a huge ratio and an empty mask stay finite."""
    tiny = torch.full((4,), 5e-7)
    assert chi_square(tiny, torch.ones(4)).item() == pytest.approx(1e-6, rel=gamma(9))
    huge = chi_square(torch.full((2,), 1e4), torch.ones(2)).item()
    assert huge == pytest.approx(math.expm1(40), rel=gamma(9))
    assert close(chi_square(f64([-1e4, -1e4]), torch.ones(2)), math.expm1(-40))
    assert chi_square(tiny, torch.zeros(4)).item() == 0


def test_perplexity_ratio_is_the_inverse_geometric_mean():
    """eq:perplexity: ppl_π/ppl_μ = 1/(Πρ)^{1/|y|}; exp of the mean surprise; 1 for an empty row."""
    geometric = exp_ratio(aggregate_log_ratio(LP - MU_LP, MASK, "geometric"))[:, 0]
    assert close(perplexity(LP, MASK) / perplexity(MU_LP, MASK), 1 / geometric)
    one = torch.tensor([[1, 1, 1, 0]])
    assert close(perplexity(f64([[-1, -2, -1.5, 9]]), one), [math.exp(1.5)])
    assert perplexity(X, GOOD)[3] == 1
    assert close(perplexity(f64([[-1e4]]), torch.ones(1, 1)), [math.exp(80)])
    assert perplexity(torch.tensor([[-1e4]]), torch.ones(1, 1)).isfinite()


@pytest.mark.parametrize("kind", [f"{kind}{plus}" for kind in KINDS for plus in ("", "+")])
def test_half_precision_is_widened_before_the_subtraction(kind):
    """eq:kl-estimators: −2.3 − (−0.013) is −2.28387 in bfloat16's own numbers, and not −2.28125."""
    log_prob, ref = torch.tensor([[-2.3]]).bfloat16(), torch.tensor([[-0.013]]).bfloat16()
    exact = kl_estimate(log_prob.double(), ref.double(), kind)
    torch.testing.assert_close(kl_estimate(log_prob, ref, kind).double(), exact, rtol=gamma(16), atol=0)


@pytest.mark.parametrize("verls, ours", [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")])
def test_verls_names_of_the_estimators(verls, ours):
    assert kl_kind(verls) == kl_kind(ours) == ours
    with pytest.raises(ValueError, match=f"not {verls!r}".replace("+", r"\+")):
        kl_estimate(LP, REF_LP, verls)
    with pytest.raises(ValueError, match="'full': that takes the whole vocabulary"):
        kl_estimate(LP, REF_LP, "full")


# ------------------------------------------------------------------------ the sampling distribution

def slow_sampling(logits, temperature, top_k, top_p, min_p):
    """The same by lists: the kept tokens in order of probability, then renormalised."""
    q = torch.softmax(f64(logits) / temperature, -1).tolist()
    order = sorted((v for v in range(len(q)) if q[v] >= min_p * max(q)), key=lambda v: -q[v])[:top_k or None]
    total, running, kept = sum(q[v] for v in order), 0.0, []
    for v in order:
        kept.append(v)
        running += q[v] / total
        if running >= top_p:
            break
    mass = sum(q[v] for v in kept)
    return [math.log(q[v] / mass) if v in kept else -math.inf for v in range(len(q))], mass


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", list(itertools.product(
    (0.5, 1.0, 3.0), (0, 1, 3, 99), (0.3, 0.8, 1.0), (0.0, 0.05, 0.25, 0.6))))
def test_sampling_distribution_against_lists(temperature, top_k, top_p, min_p):
    """eq:sampling: log μ and the surviving mass for every combination; μ sums to 1; two rows."""
    rows = [[0.1, 2.0, -1.0, 1.2, 0.7], [3.0, -2.0, 0.0, -0.1, 0.4]]
    log_mu, mass = sampling_log_probs(f64(rows), temperature, top_k, top_p, min_p)
    for row, got, kept in zip(rows, log_mu, mass):
        expected, expected_mass = slow_sampling(row, temperature, top_k, top_p, min_p)
        assert close(got.exp(), f64(expected).exp()) and close(kept, expected_mass)
        assert close(got.exp().sum(), 1.0)
        assert (got == -math.inf).tolist() == [x == -math.inf for x in expected]


def test_sampling_with_everything_kept_is_the_softmax():
    """eq:sampling: the defaults are log_softmax with mass 1; the temperature divides the logits."""
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).double()
    log_mu, mass = sampling_log_probs(logits)
    assert close(log_mu, logits.log_softmax(-1)) and close(mass, torch.ones(4))
    assert close(sampling_log_probs(logits, 2.0)[0], (logits / 2).log_softmax(-1))


def test_top_p_stops_as_soon_as_the_mass_is_reached():
    """eq:sampling: the fewest tokens whose mass reaches p; met exactly, no further one."""
    quarters, logits = torch.zeros(4).double(), f64([0.5, 0.25, 0.125, 0.125]).log()
    for p, n in ((0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)):
        assert (sampling_log_probs(logits, top_p=p)[0] > -math.inf).sum() == n
    for p, n in ((0.25, 1), (0.5, 2), (0.75, 3)):
        log_mu, mass = sampling_log_probs(quarters, top_p=p)
        assert (log_mu > -math.inf).sum() == n
        assert close(mass, p) and close(log_mu.max(), -math.log(n))


def test_min_p_cuts_before_top_p_and_after_the_temperature():
    """eq:sampling, by hand: the share that top-p asks for is of what min-p left; q is already at the temperature."""
    logits = f64([0.5, 0.3, 0.15, 0.05]).log()
    for settings, n in (({"min_p": 0.2}, 3), ({"top_p": 0.82}, 3), ({"min_p": 0.2, "top_p": 0.82}, 2),
                        ({"min_p": 0.2, "temperature": 0.5}, 2), ({"min_p": 0.2, "temperature": 2.0}, 4),
                        ({"min_p": 0.2, "top_k": 2}, 2), ({"min_p": 0.7, "top_k": 2}, 1)):
        log_mu, mass = sampling_log_probs(logits, **settings)
        assert (log_mu > -math.inf).tolist() == [True] * n + [False] * (4 - n), settings
        q = (logits / settings.get("temperature", 1.0)).softmax(-1)[:n]
        assert close(mass, q.sum()) and close(log_mu[:n].exp(), q / q.sum())


def test_what_ties_with_min_p_of_the_likeliest_is_kept():
    """eq:sampling: ≥ and not >; so 1 keeps the likeliest and its ties, and min-p bounds no number of tokens."""
    log_mu, _ = sampling_log_probs(f64([0.0, math.log(0.5), math.log(0.5) - 1e-9]), min_p=0.5)
    assert (log_mu > -math.inf).tolist() == [True, True, False]
    log_mu, _ = sampling_log_probs(f64([1.0, 2.0, 2.0, 0.0]), min_p=1.0)
    assert close(log_mu.exp(), f64([0.0, 0.5, 0.5, 0.0]))
    assert close(sampling_log_probs(torch.zeros(5000).double(), min_p=1.0)[1], 1.0)


def test_without_top_p_no_token_is_dropped():
    """eq:sampling: at top_p = 1 a token of tiny mass keeps its log-prob, in float32 too."""
    logits = torch.tensor([0.0, -30.0])
    log_mu, mass = sampling_log_probs(logits)
    assert close(log_mu, logits.log_softmax(-1)) and mass == 1


def test_scoring_with_the_raw_softmax_is_off_by_the_mass():
    """eq:sampling: log q − log μ = log(mass) on every kept token."""
    logits = f64([[2.0, 1.0, 0.0, -1.0]])
    log_mu, mass = sampling_log_probs(logits, 1.0, 2, 1.0)
    assert close((logits.log_softmax(-1) - log_mu)[log_mu > -math.inf], mass.log().expand(2))


@pytest.mark.parametrize("bad", [
    {"temperature": 0}, {"temperature": -1.0}, {"temperature": math.nan},
    {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan},
    {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan}])
def test_sampling_errors_name_the_setting(bad):
    """eq:sampling: a wrong setting is one sentence with its name and value."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        sampling_log_probs(torch.zeros(3), **bad)


# --------------------------------------------------------------------------------------- advantages

REWARDS = f64([1.0, 2.0, 6.0, 10.0, 10.0, 7.0])
GROUPS = torch.tensor([0, 0, 0, 5, 5, 9])                           # the last is a group of one


def test_advantages_by_hand():
    """eq:baseline: group mean, deviation + 1e-6, leave-one-out, batch mean; alone in a group: A = R."""
    centred = f64([-2.0, -1.0, 3.0, 0.0, 0.0, 7.0])
    assert close(grpo_advantages(REWARDS, GROUPS, normalize_std=False), centred)
    std = f64([7.0 ** 0.5 + 1e-6] * 3 + [1e-6] * 2 + [1.0])
    assert close(grpo_advantages(REWARDS, GROUPS), centred / std)
    assert close(rloo_advantages(REWARDS, GROUPS), f64([-3.0, -1.5, 4.5, 0.0, 0.0, 7.0]))
    assert close(reinforce_advantages(REWARDS), REWARDS - 6)


def test_rejected_rows_are_not_in_the_baseline():
    """eq:baseline with keep: a rejected reward of 100 makes 1.0 of the other, not −49.5."""
    r, groups, keep = f64([1.0, 100.0]), torch.zeros(2), torch.tensor([True, False])
    assert rloo_advantages(r, groups)[0] == -99
    assert grpo_advantages(r, groups, False)[0] == -49.5
    for advantages in (rloo_advantages(r, groups, keep), grpo_advantages(r, groups, False, keep),
                       grpo_advantages(r, groups, True, keep)):
        assert advantages[0] == 1
    assert reinforce_advantages(r, keep)[0] == 0                    # its mean is its own reward


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_advantages_with_keep_by_hand(dtype):
    """eq:baseline with keep: kept rows alone make the mean and the deviation."""
    keep = torch.tensor([1, 0, 1, 1, 1, 0]).to(dtype)
    assert close(grpo_advantages(REWARDS, GROUPS, False, keep), f64([-2.5, -1.5, 2.5, 0, 0, 7]))
    std = f64(12.5).sqrt() + 1e-6
    assert close(grpo_advantages(REWARDS, GROUPS, True, keep)[:3], f64([-2.5, -1.5, 2.5]) / std)
    assert close(rloo_advantages(REWARDS, GROUPS, keep), f64([-5.0, -1.5, 5.0, 0, 0, 7]))
    assert close(reinforce_advantages(REWARDS, keep), REWARDS - 27 / 4)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_rejected_or_foreign_reward_does_not_poison_the_baseline(junk):
    """eq:baseline: NaN or inf in a rejected row, or in another group, reaches no other row."""
    r, groups, keep = f64([1.0, junk, 3.0, 4.0]), f64([0, 0, 0, 1]), torch.tensor([1, 0, 1, 1])
    for method in (rloo_advantages, grpo_advantages):
        alone = method(f64([1.0, 3.0]), torch.zeros(2))
        assert close(method(r, groups, keep=keep)[[0, 2]], alone)
        assert close(method(r, groups)[3], 4.0)


def advantage_moments(advantages):
    """Of REINFORCE on all pairs of sequences of π, as one group."""
    def loss(i):
        return -(advantages(R[i, 0], torch.zeros(len(i)))[:, None] * LP[i] * MASK[i]).sum() / len(i)
    return estimator_moments(PI, PI, loss, batch=2)


def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks():
    """eq:baseline over all pairs: RLOO is ∇J; the mean with the own reward is (n−1)/n of it."""
    assert close(advantage_moments(rloo_advantages).mean, -grad_J(PI, R))
    grpo = advantage_moments(lambda r, g: grpo_advantages(r, g, normalize_std=False))
    assert close(grpo.mean, -grad_J(PI, R) / 2)
    assert close(grpo.gradients, advantage_moments(rloo_advantages).gradients / 2)


def test_dividing_by_the_deviation_changes_the_direction():
    """eq:baseline: GRPO's /std is no multiple of ∇J: the angle is printed."""
    grpo = advantage_moments(grpo_advantages).mean
    cosine = torch.cosine_similarity(grpo, -grad_J(PI, R), dim=0).item()
    print(f"\ncosine between GRPO's expected gradient (n = 2) and ∇J: {cosine:.4f}")
    assert cosine < 0.99


@pytest.mark.parametrize("call", [
    lambda: kl_estimate(X, X, "k4"), lambda: kl_estimate(X, X, "k1++"),
    lambda: aggregate_log_ratio(X, GOOD, "batch")])
def test_errors_name_the_value_and_the_choices(call):
    """eq:kl-estimators, eq:levels: one sentence."""
    with pytest.raises(ValueError, match="must be one of .*, not '(k4|k1\\+\\+|batch)'"):
        call()


def test_half_precision_is_widened_before_it_overflows():
    """eq:kl-estimators: in float16 k2 would be inf at |ℓ| = 400; eq:ratio keeps the wider dtype."""
    far = torch.tensor([400.0, -400.0], dtype=torch.float16)
    for kind in ("k1", "k2", "k3", "abs", "k3+"):
        value = kl_estimate(far, torch.zeros_like(far), kind)
        assert value.dtype == torch.float32 and value.isfinite().all()
    ratio = masked_log_ratio(torch.zeros(1, 1), f64([[1e-9]]), torch.ones(1, 1))
    assert ratio.dtype == torch.float64 and ratio.item() == -1e-9


def test_ties_with_the_kth_token_are_kept():
    """eq:sampling: two equal logits cannot be told apart by a rank."""
    log_mu, mass = sampling_log_probs(f64([1.0, 2.0, 1.0, 0.0]), top_k=2)
    q = f64([1.0, 2.0, 1.0, 0.0]).softmax(-1)
    assert close(mass, q[:3].sum()) and close(log_mu[:3], (q[:3] / q[:3].sum()).log())
    assert log_mu[3] == -math.inf
    assert close(sampling_log_probs(f64([1.0, 2.0]), top_k=5)[1], 1.0)


@pytest.mark.parametrize("call", [
    lambda: grpo_advantages(torch.tensor([6.0]), torch.tensor([0, 0, 0])),
    lambda: rloo_advantages(torch.ones(3, 1), torch.tensor([0, 0, 0])),
    lambda: reinforce_advantages(torch.ones(3, 1)),
    lambda: reinforce_advantages(torch.ones(3), torch.ones(1, dtype=torch.bool)),
])
def test_rewards_that_do_not_fit_their_groups_are_one_sentence(call):
    with pytest.raises(ValueError, match=r"rewards \(.*must have one shape \[B\]"):
        call()


def test_one_kept_row_is_its_own_mean():
    """eq:baseline: R − mean(R) of a batch with one row that counts is 0 for that row, as documented."""
    assert reinforce_advantages(f64([3, 5]), torch.tensor([True, False])).tolist() == [0, 2]
    assert reinforce_advantages(f64([3])).tolist() == [0]
