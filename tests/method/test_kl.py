"""kl.py and losses.py: each KL estimator, and the KL term, has the value and gradient claimed.

Exact sums over all sequences, no sampling. Run with -s to see the biases' sizes.
"""

import math

import pytest
import torch

from three_policies.kl import KL_KINDS, kl_estimate, kl_penalty, kl_ratio
from three_policies.losses import Counts, count, kl_loss
from three_policies.oracle import (close, estimator_moments, exact_gradient, expectation, f64, kl,
                                   scores, token_kl)
from three_policies.ratios import aggregate_log_ratio, masked_log_ratio
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (MASK, MU, PI, REF, SUM, batch, by_loops,
                                                   every_aggregation)
from three_policies.tests.support.tolerances import gamma

LP = PI.log_probs()
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


def kl_moments(kind, mu=PI, ratio=None):
    lp, ref = PI.log_probs(), REF.log_probs().detach()
    live = (PI.log_probs() - mu.log_probs().detach()).exp()
    ratio = {"detached": live.detach(), "live": live, None: None}[ratio]
    return estimator_moments(PI, mu, lambda i: kl_loss(
        lp[i], ref[i], MASK[i], kind, SUM, ratio=None if ratio is None else ratio[i]))


@certifies("float64")
@pytest.mark.parametrize("kind, mu, ratio, target", [
    *((kind, PI, None, (PI, REF, PI)) for kind in ("k2", "k1+", "k2+", "k3+", "abs+")),
    ("k3", PI, None, (REF, PI, PI)), ("k3", MU, "detached", (REF, PI, MU)),
    *((kind, MU, "detached", (PI, REF, MU)) for kind in ("k2", "k1+", "k3+")),
    *((kind, MU, "live", (PI, REF, MU)) for kind in ("k1", "k3"))])
def test_kl_loss_gradients(kind, mu, ratio, target):
    """eq:kl-gradient, eq:kl-ratio: k2, "+", ρ·k3 give ∇KL(π‖ref) per token; k3 KL(ref‖π)'s."""
    assert close(kl_moments(kind, mu, ratio).mean, exact_gradient(PI, token_kl(*target)))


@certifies("float64")
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs+", "k1+", "k2+", "k3+"])
@pytest.mark.parametrize("level", ["token", "prefix"])
def test_kl_ratio_makes_every_kind_unbiased_on_samples_of_another_policy(kind, level):
    """eq:kl-ratio, eq:prefix: `kl_ratio` gives ∇KL per token in μ's states, by prefix in π's.

    Only k1 and k3, which keep the ratio's graph, follow with prefix products how the states change.
    """
    lp, mu_lp, ref = PI.log_probs(), MU.log_probs().detach(), REF.log_probs().detach()
    ratio = kl_ratio(lp, mu_lp, MASK, kind, level)
    assert ratio.requires_grad == (kind in ("k1", "k3"))
    found = estimator_moments(PI, MU, lambda i: kl_loss(
        lp[i], ref[i], MASK[i], kind, SUM, ratio=ratio[i])).mean
    visits = MU if level == "token" else PI
    whole = level == "prefix" and kind in ("k1", "k3")
    target = exact_gradient(PI, kl(PI, REF) if whole else token_kl(PI, REF, visits))
    assert close(found, target)


def test_a_ratio_times_k3_has_the_product_rules_gradient_in_two_parts():
    """eq:kl-ratio, eq:prefix: ∇(ρ_{1:t} k3) = ρ_{1:t}(ℓ_t g_t + k3 Σ_{s<t} g_s), sample by sample.

    So it is with any ratio that keeps its graph: that of one token has the first part alone.
    """
    lp, mu_lp, ref = PI.log_probs(), MU.log_probs().detach(), REF.log_probs().detach()
    ell, each = (lp - ref).detach(), scores(PI)
    k3 = torch.expm1(-ell) + ell
    before = each.cumsum(1) - each
    for level in ("token", "prefix"):
        ratio = kl_ratio(lp, mu_lp, MASK, "k3", level)
        weight = (ratio.detach() * MASK)[..., None]
        parts = weight * (ell[..., None] * each + (level == "prefix") * k3[..., None] * before)
        found = estimator_moments(PI, MU, lambda i: kl_loss(
            lp[i], ref[i], MASK[i], "k3", SUM, ratio=ratio[i]))
        by_the_product_rule = estimator_moments(PI, MU, lambda i: (
            ratio[i] * kl_estimate(lp[i], ref[i], "k3") * MASK[i]).sum())
        assert close(found.gradients, parts.sum(1))
        assert close(found.gradients, by_the_product_rule.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_far_below_the_reference_has_its_own_gradient_and_the_prefix_a_limited_share(dtype):
    """eq:prefix: ℓ = (0.5, −19); the first token sees k3 = e^19 up to ε^{−1/2}."""
    ref = torch.tensor([[-1.5, -2.0]], dtype=dtype)
    log_prob = torch.tensor([[-1.0, -21.0]], dtype=dtype, requires_grad=True)
    ratio = kl_ratio(log_prob, log_prob.detach(), torch.ones(1, 2), "k3", "prefix")
    loss = kl_loss(log_prob, ref, torch.ones(1, 2), "k3", "token-sum", ratio=ratio)
    first, last = torch.autograd.grad(loss, log_prob)[0][0].tolist()
    exact, limit = math.exp(19) - 1 - 19, torch.finfo(dtype).eps ** -0.5
    assert last == pytest.approx(-19, rel=2 * limit * torch.finfo(dtype).eps / 19)
    assert first == pytest.approx(0.5 + min(exact, limit), rel=gamma(40, dtype))
    assert loss.item() == pytest.approx(exact + math.expm1(-0.5) + 0.5, rel=gamma(40, dtype))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_a_token_that_the_policy_cannot_draw_adds_nothing_beside_its_ratio(kind):
    """eq:kl-ratio: ρℓ is 0 at π_θ = 0; neither value nor gradient is a NaN, and the others stay."""
    log_mu, ref, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -1.5]]), torch.ones(1, 2)
    for level in ("token", "prefix"):
        losses, slopes = [], []
        for of_first in (-math.inf, -1e4):
            log_prob = torch.tensor([[-0.75, of_first]], requires_grad=True)
            loss = kl_loss(log_prob, ref, mask, kind, "token-sum",
                           ratio=kl_ratio(log_prob, log_mu, mask, kind, level))
            losses.append(loss)
            slopes.append(torch.autograd.grad(loss, log_prob)[0])
        assert torch.equal(*losses) and torch.equal(*slopes) and slopes[0][0, 0] != 0
        penalty = kl_penalty(torch.tensor([[-0.75, -math.inf]]), ref, log_mu, mask, kind, level)
        assert penalty[0, 1] == 0 and penalty.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
def test_a_penalty_is_the_ratio_times_the_estimate_below_any_bound(kind, dtype):
    """eq:kl-gradient: ρ is 0 in the limit and never e^−20 instead; above e^20 it is clamped."""
    for log_rho in (-60.0, -20.125, -19.875, 0.5, 19.875, 20.125):
        for ell in (-20.125, -19.875, -3.0, 2.0, 20.125):
            old, mask = torch.tensor([[-70.0]], dtype=dtype), torch.ones(1, 1)
            found = kl_penalty(old, old - ell, old - log_rho, mask, kind, "token").item()
            limited = max(ell, -20)                       # where k3 is clamped
            value = {"k1": ell, "k2": ell * ell / 2}.get(kind, math.expm1(-limited) + limited)
            right = math.exp(min(log_rho, 20)) * value
            assert found == pytest.approx(right, rel=gamma(40, dtype))


@certifies("float64")
@pytest.mark.parametrize("level, sampler", [(None, PI), ("token", MU), ("prefix", MU)])
def test_k1_in_the_reward_has_the_gradient_of_the_kl(level, sampler):
    """eq:kl-gradient, eq:prefix: k1 in the reward is ∇KL, by prefix ratios on samples of μ."""
    lp, mu_lp, ref = PI.log_probs(), sampler.log_probs().detach(), REF.log_probs().detach()
    penalty = kl_penalty(lp, ref, mu_lp, MASK, "k1", level)
    found = estimator_moments(PI, sampler, lambda i: (penalty[i] * lp[i] * MASK[i]).sum()).mean
    target = token_kl(PI, REF, MU) if level == "token" else kl(PI, REF)
    assert close(found, exact_gradient(PI, target))


def test_a_penalty_has_no_gradient():
    """eq:detached: it is subtracted from advantages, whichever log-prob has a graph."""
    given = [x.log_probs().detach().clone().requires_grad_() for x in (PI, REF, MU)]
    assert not any(kl_penalty(*given, MASK, "k1", level).requires_grad
                   for level in (None, "token", "prefix"))


@pytest.mark.parametrize("level", [None, "token", "prefix"])
def test_a_penalty_with_weights_of_its_own_has_those_of_the_loss_divided_out(level):
    """A penalty without a level is a reward like any other, and the loss weights it."""
    lp, mu_lp, ref = (x.log_probs().detach() for x in (PI, MU, REF))
    weights = torch.arange(MASK.numel()).reshape(MASK.shape).double() % 4           # 0, 1, 2, 3, …
    plain, divided = (kl_penalty(lp, ref, mu_lp, MASK, "k1", level, w) for w in (None, weights))
    assert close(divided, plain if level is None else torch.where(
        weights > 0, plain / weights.clamp(min=1), 0.0))
    assert (divided[~MASK] == 0).all()


@certifies("float64")
def test_kl_loss_of_k1_has_no_gradient_and_ratio_times_k2_the_wrong_one():
    """eq:kl-gradient, eq:kl-ratio: E_π[∇k1] = 0; ratio·k2 with the ratio's graph is wrong."""
    assert close(kl_moments("k1").mean, torch.zeros(PI.logits.numel()))
    wrong = kl_moments("k2", MU, "live").bias(exact_gradient(PI, token_kl(PI, REF, MU)))
    print(f"\nbias of ratio·k2, not detached: {wrong.norm():.3f}")
    assert wrong.norm() > 0.02


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k3+"])
def test_no_gradient_through_the_reference_or_the_sampler(kind):
    """eq:detached: π_ref and μ are constants of the step, even when they come with a graph."""
    lp, ref, mu, _, mask = batch(4)
    for constant in (ref.requires_grad_(), mu.requires_grad_()):
        loss = kl_loss(lp, ref, mask, kind, ratio=kl_ratio(lp, mu, mask, kind, "token"))
        assert torch.autograd.grad(loss, constant, allow_unused=True)[0] is None


@every_aggregation
@pytest.mark.parametrize("junk", [0.0, math.nan])
def test_kl_loss_value_aggregation_and_padding(how, junk):
    """eq:aggregation: k3+ and token-mean are the defaults; ratio, horizon and counts are used."""
    lp, ref, _, _, mask = batch(4, junk=junk)
    ell = torch.where(mask, lp - ref, 0.0).detach()
    ratio = torch.where(mask, f64(1.7), junk)
    value = (-ell).exp() - 1 + ell
    assert close(kl_loss(lp, ref, mask, mode=how, horizon=8), by_loops(value, mask, how, mask, 8))
    weighted = kl_loss(lp, ref, mask, mode=how, ratio=ratio)
    assert close(weighted, by_loops(1.7 * value, mask, how, mask, None))
    assert torch.autograd.grad(weighted, lp)[0].isfinite().all()
    tenth = kl_loss(lp, ref, mask, mode=how, counts=Counts(*(10 * n for n in count(mask))))
    assert close((1 if how == "token-sum" else 10) * tenth, kl_loss(lp, ref, mask, mode=how))
    assert close(kl_loss(lp, ref, mask), by_loops(value, mask, "token-mean", mask, None))
    assert close(torch.autograd.grad(kl_loss(lp, ref, mask), lp)[0], ell / mask.sum())
