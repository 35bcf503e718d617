"""kl.py: each KL estimator has the value and the gradient that are claimed.

Exact sums over all sequences, no sampling. Run with -s to see the biases' sizes.
"""

import math

import pytest
import torch

from three_policies.kl import KL_KINDS, kl_estimate
from three_policies.oracle import (Policy, close, estimator_moments, exact_gradient, expectation,
                                   f64, kl, rewards, scores, token_kl)
from three_policies.ratios import aggregate_log_ratio, masked_log_ratio
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.tolerances import gamma

PI = Policy(3, 3, seed=0)
MU, REF, R = PI.perturbed(1, 0.5), PI.perturbed(3, 0.7), rewards(PI)
LP, MASK = PI.log_probs(), PI.mask
MU_LP, REF_LP = MU.log_probs().detach(), REF.log_probs().detach()
ELL = (LP - REF_LP).detach()                                        # ℓ_t
WEIGHT = (LP - MU_LP).exp()                                         # π_θ/μ, with its graph
PREFIX = (LP - MU_LP).cumsum(-1).exp().detach()                     # Π_{s≤t} of it
WHOLE = (LP - MU_LP).sum(-1, keepdim=True).exp().detach()           # Π over the sequence, [N, 1]
LEVELS, KINDS = ("token", "sequence", "geometric"), KL_KINDS


def moments(loss, sampler=PI):
    """Return the moments of ∇ Σ_t loss[i, t], the sequence i drawn from the sampler."""
    return estimator_moments(PI, sampler, lambda i: (loss[i] * MASK[i]).sum())


# ------------------------------------------------------------------------------------------- values

@certifies("float64")
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
    """eq:kl-estimators, eq:straight-through: the gradient is the kind's own or, with +, ℓ."""
    log_prob = torch.tensor(ell - 1.0, dtype=torch.float64, requires_grad=True)
    out = kl_estimate(log_prob, f64(-1.0), kind + plus)
    limited = max(ell, -20)                  # below −20 k3 is constant: never towards less π
    value, slope = {"k1": (ell, 1), "k2": (ell * ell / 2, ell),
                    "k3": (math.expm1(-limited) + limited, -math.expm1(-ell) if ell > -20 else 0),
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


@pytest.mark.parametrize("kind", [f"{kind}{plus}" for kind in KINDS for plus in ("", "+")])
def test_half_precision_is_widened_before_the_subtraction(kind):
    """eq:kl-estimators: −2.3 − (−0.013) is −2.28387 in bfloat16's own numbers, and not −2.28125."""
    log_prob, ref = torch.tensor([[-2.3]]).bfloat16(), torch.tensor([[-0.013]]).bfloat16()
    exact = kl_estimate(log_prob.double(), ref.double(), kind)
    widened = kl_estimate(log_prob, ref, kind).double()
    torch.testing.assert_close(widened, exact, rtol=gamma(16), atol=0)


def test_half_precision_is_widened_before_it_overflows():
    """eq:kl-estimators: in float16 k2 would be inf at |ℓ| = 400; eq:ratio keeps the wider dtype."""
    far = torch.tensor([400.0, -400.0], dtype=torch.float16)
    for kind in ("k1", "k2", "k3", "abs", "k3+"):
        value = kl_estimate(far, torch.zeros_like(far), kind)
        assert value.dtype == torch.float32 and value.isfinite().all()
    ratio = masked_log_ratio(torch.zeros(1, 1), f64([[1e-9]]), torch.ones(1, 1))
    assert ratio.dtype == torch.float64 and ratio.item() == -1e-9


# ---------------------------------------------------------------------------------------- gradients

FROZEN = exact_gradient(PI, token_kl(PI, REF, PI))                  # per-token reverse KL
FROZEN_MU = exact_gradient(PI, token_kl(PI, REF, MU))
OTHER = exact_gradient(PI, token_kl(REF, PI, PI))                   # per-token forward KL
OTHER_MU = exact_gradient(PI, token_kl(REF, PI, MU))
FULL = exact_gradient(PI, kl(PI, REF))                              # the sequence's reverse KL


def estimate(kind):
    return kl_estimate(LP, REF_LP, kind)


def in_reward(kind, weight=1.0):
    """Return REINFORCE with the whole return Σ_s kl_s as a cost: log π(y) × sg(Σ_s kl_s)."""
    cost = (estimate(kind) * MASK).sum(-1, keepdim=True).detach()
    return LP * cost * weight


def half_square():
    """Return ½(Σ_t ℓ_t)², once per sequence: k2 of the sequence's log-ratio."""
    total = aggregate_log_ratio(LP - REF_LP, MASK, "sequence")
    return kl_estimate(total, torch.zeros_like(total), "k2") / MASK.sum(-1, keepdim=True).double()


def prefix_products():
    """Return Σ_t Σ_{s≥t} w_{1:s} ℓ_s log π_t."""
    return LP * (PREFIX * ELL * MASK).flip(-1).cumsum(-1).flip(-1)


def total_variation():
    """Return Σ_t E_π[Σ_v |π(v) − π_ref(v)|], visits frozen."""
    step = (PI.step_log_probs().exp() - REF.step_log_probs().detach().exp()).abs().sum(-1)
    return expectation(PI, torch.where(MASK, step[PI.states], 0.0).sum(-1))


TABLE = {
    # A row says what the loss is: (per-token loss, sampler, the exact gradient it estimates).
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


@certifies("float64")
@pytest.mark.parametrize("row", TABLE)
def test_kl_gradient_table(row):
    """eq:kl-gradient, eq:straight-through, eq:kl-ratio: twenty estimators have the
    expected gradients that their rows name.
    """
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
    """eq:kl-gradient: what is called biased above is biased by more than 3 % of the gradient."""
    loss, sampler, target = WRONG[row]
    size = (moments(loss, sampler).bias(target).norm() / target.norm()).item()
    print(f"\n{row}: bias {size:.0%} of the gradient")
    assert size > 0.03


@certifies("float64")
def test_ratio_times_k3_is_k2_sample_by_sample():
    """eq:kl-ratio: ∇(ratio·k3) = sg(ratio)·∇k2 for each sequence, for ratio·k1 in the mean."""
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


def test_k3_of_close_policies_is_not_negative_in_float32():
    """e^{−ℓ} − 1 + ℓ in float32 would be below 0 at a tenth of these, by as much as 6e-8."""
    ell = torch.cat([sign * torch.arange(1, 1001) * 1e-6 for sign in (-1, 1)])
    for kind in "k3", "k3+":
        value, exact = (kl_estimate(x, torch.zeros_like(x), kind) for x in (ell, ell.double()))
        assert (value >= 0).all()
        assert torch.allclose(value.double(), exact, rtol=gamma(4), atol=gamma(4) * 1e-3)
    assert ((-ell).exp() - 1 + ell < 0).sum() > 150
