"""kl.py and losses.py: the KL term as a loss has its expected gradient and its aggregation."""

import math

import pytest
import torch

from three_policies.kl import kl_estimate, kl_penalty, kl_ratio
from three_policies.losses import Counts, count, kl_loss
from three_policies.oracle import (close, estimator_moments, exact_gradient, f64, kl, scores,
                                   token_kl)
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (MU, PI, REF, MASK, SUM, batch, by_loops,
                                                   every_aggregation)
from three_policies.tests.support.tolerances import gamma


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
