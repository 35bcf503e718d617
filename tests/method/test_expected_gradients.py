"""The expected gradient with weights, with three policies (decoupled) and with two (bypass mode).

Weights change its bias and variance, as sums over all sequences show.

Unless said otherwise a sequence comes from μ = MU, the loss is `policy_loss` on that one sequence,
and "mean" is the expectation of its gradient. Losses are minimised: unbiased means mean = −∇J.
Run with -s to see the sizes of the biases and variances.
"""

import math

import pytest
import torch

from three_policies.correction import batch_normalize, correct, importance_weights
from three_policies.losses import LossConfig, policy_loss
from three_policies.oracle import (J, MarkovPolicy, Policy, close, estimator_moments,
                                   exact_gradient, expectation, f64, grad_J, kl, rewards, scores)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.surrogates import ppo_clip_loss, reinforce_loss
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (A, LOSS_TYPES, MASK, MU, OLD, PI, PLAIN, R, REF,
                                                   SUM, moments, reinforce)

G = scores(PI)                                                      # ∇log π_t, [N, T, P]
RHO = (PI.log_probs() - MU.log_probs()).detach().exp()              # ρ_t = π_θ/μ
WHOLE = RHO.prod(-1, keepdim=True)                                  # Πρ, [N, 1]
GEOMETRIC = WHOLE ** (1 / MASK.sum(-1, keepdim=True).double())      # (Πρ)^{1/|y|}


def mean_of(weight, advantages=A):
    """Return −E_μ[Σ_t weight_t A_t ∇log π_t], the mean that weighted REINFORCE must have."""
    return -expectation(MU, (G * (weight * advantages)[..., None]).sum(1))


# ---------------------------------------------------------------------------------------- REINFORCE

@certifies("float64")
def test_reinforce_is_the_policy_gradient():
    """eq:reinforce: on-policy the loss's expected gradient is −∇J."""
    assert close(moments(reinforce(), mu=PI).mean, -grad_J(PI, R))


@certifies("float64")
@pytest.mark.parametrize("baseline", [-1.0, 0.3, 5.0])
def test_constant_baseline_moves_the_variance_alone(baseline):
    """eq:baseline: E_π[b ∇log π] = 0."""
    plain = moments(reinforce(), mu=PI)
    shifted = moments(reinforce(), mu=PI, advantages=A - baseline)
    print(f"\nbaseline {baseline}: variance {plain.variance:.3f} → {shifted.variance:.3f}")
    assert close(shifted.mean, plain.mean) and abs(shifted.variance / plain.variance - 1) > 0.03


@certifies("float64")
@pytest.mark.parametrize("threshold", [PLAIN, 1e9, (None, 1e9), (1e-9, None)])
def test_untruncated_sequence_weights_are_unbiased(threshold):
    """eq:off-policy: E_μ[ρ ∇log π A] = ∇J for the full product ρ and any μ that can draw all."""
    for mu in (MU, OLD, REF):
        assert close(moments(reinforce("sequence", threshold), mu=mu).mean, -grad_J(PI, R))


@certifies("float64")
def test_without_weights_the_objective_is_another():
    """eq:off-policy: no weight at all estimates E_μ[A ∇log π]."""
    plain = moments(reinforce())
    size = plain.bias(-grad_J(PI, R)).norm() / grad_J(PI, R).norm()
    print(f"\nbias without correction: {size:.0%} of ∇J")
    assert close(plain.mean, mean_of(torch.ones_like(A))) and size > 0.1


@certifies("float64")
def test_weight_must_be_detached():
    """eq:detached: a weight with its graph adds −ρ A log π ∇log π; it is detached here."""
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    live = estimator_moments(PI, MU, lambda i: (
        (lp - mu_lp)[i].sum().exp() * reinforce_loss(lp[i], A[i]) * MASK[i]).sum())
    extra = mean_of(WHOLE * lp.detach().sum(-1, keepdim=True))
    size = live.bias(-grad_J(PI, R)).norm() / grad_J(PI, R).norm()
    print(f"\nbias of a weight with its graph: {size:.0%} of ∇J")
    assert close(live.bias(-grad_J(PI, R)), extra) and size > 0.3
    weights = correct(lp, mu_lp, MASK, reinforce("sequence")).weights
    assert not weights.requires_grad and close(weights, WHOLE * MASK)


# ----------------------------------------------------------------------- weights: bias and variance

@certifies("float64")
@pytest.mark.parametrize("level, weight", [
    ("token", RHO), ("prefix", RHO.cumprod(-1)), ("sequence", WHOLE), ("geometric", GEOMETRIC)])
@pytest.mark.parametrize("cap", [0.6, 1.0, 1.5, PLAIN])
def test_truncation_bias_is_minus_the_excess(level, weight, cap):
    """eq:tis, eq:levels: a cap adds −E_μ[(ρ−C)₊ g] to the mean, g = −A∇log π, at every level."""
    excess = (weight - cap).clamp(min=0)
    mean = moments(reinforce(level, cap)).mean
    assert close(mean, mean_of(weight.clamp(max=cap)))
    assert close(mean - moments(reinforce(level)).mean, -mean_of(excess))
    assert (mean_of(excess).norm() > 1e-3) == (cap < PLAIN)


@certifies("float64")
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_token_and_geometric_weights_are_biased(level):
    """eq:levels: ρ_t has the bias E_μ[Σ_t (Πρ − ρ_t) A ∇log π_t], and so has the geometric mean."""
    weight = {"token": RHO, "geometric": GEOMETRIC}[level]
    bias = moments(reinforce(level)).bias(-grad_J(PI, R))
    size = bias.norm() / grad_J(PI, R).norm()
    print(f"\nbias of {level} weights: {size:.1%} of ∇J")
    assert close(bias, mean_of(weight - WHOLE)) and size > 0.05


@certifies("float64")
def test_at_one_token_all_levels_are_unbiased():
    """eq:levels: at T = 1 token, sequence and geometric mean are one, and unbiased."""
    pi = Policy(5, 1, seed=4)
    mu, r = pi.perturbed(5, 1.0), rewards(pi)
    for level in ("token", "sequence", "geometric"):
        assert close(moments(reinforce(level), pi, pi, mu, r).mean, -grad_J(pi, r))


@certifies("float64")
@pytest.mark.parametrize("level, weight", [("token", RHO), ("sequence", WHOLE)])
def test_masking_estimates_the_inside_alone(level, weight):
    """eq:mis: a pair [lo, hi] estimates E_μ[ρ 1[lo ≤ ρ ≤ hi] g]."""
    inside = ((weight >= 0.7) & (weight <= 1.6)).double()
    assert close(moments(reinforce(level, (0.7, 1.6))).mean, mean_of(weight * inside))
    assert 0 < (inside * MASK).sum() < MASK.sum()


@certifies("float64")
def test_rejection_leaves_terms_out_and_weights_multiply():
    """eq:rejection: a criterion is a factor 1[lo ≤ S ≤ hi] of terms; with weights it is masking.

    seq_mean_k1 sees (Πρ)^{1/|y|}.
    """
    bounds = (0.7, 1.6)
    inside = ((WHOLE >= 0.7) & (WHOLE <= 1.6)).double() * MASK
    assert close(moments(reinforce(rollout_rs={"seq_sum_k1": bounds})).mean, mean_of(inside))
    both = moments(reinforce("sequence", rollout_rs={"seq_sum_k1": bounds}))
    assert close(both.gradients, moments(reinforce("sequence", bounds)).gradients)
    kept = ((GEOMETRIC >= 0.8) & (GEOMETRIC <= 1.2)).double() * MASK
    assert close(moments(reinforce(rollout_rs={"seq_mean_k1": (0.8, 1.2)})).mean, mean_of(kept))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_self_normalisation_bias_falls_like_one_over_n(n):
    """eq:self-normalised: over all batches of n the bias of E[Σwg/Σw] is ≲ 1/n; at 1 w cancels."""
    pi = Policy(2, 2, seed=0)
    mu, r = pi.perturbed(1, 0.8), rewards(pi)
    a = r.expand(-1, 2)
    config = reinforce("sequence", rollout_is_batch_normalize=True)
    exact = moments(config, pi, pi, mu, a, batch=n)
    bias = exact.bias(-grad_J(pi, r)).norm()
    alone = moments(reinforce(), pi, pi, mu, a).bias(-grad_J(pi, r)).norm()       # w/w = 1
    print(f"\nN = {n}: bias of self-normalised weights {bias:.4f}, N × bias {n * bias:.4f}")
    assert close(bias, alone) if n == 1 else 1e-3 < bias < 1.5 * alone / n
    rho = (pi.log_probs() - mu.log_probs()).sum(-1).exp().detach()
    g = -(scores(pi) * a[..., None]).sum(1)
    batches = torch.cartesian_prod(*[torch.arange(len(r))] * n).reshape(-1, n)
    ratio = (rho[batches][..., None] * g[batches]).sum(1) / rho[batches].sum(1, keepdim=True)
    assert close(exact.gradients, ratio)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vanishing_weights_are_not_normalised(level):
    """eq:self-normalised: weights with a mean of 10⁻⁹ stay, and with 10⁻⁷ become ones."""
    w, mask = torch.ones(2, 3).double(), torch.ones(2, 3)
    assert torch.equal(batch_normalize(1e-9 * w, mask, level), 1e-9 * w)
    assert close(batch_normalize(1e-7 * w, mask, level), w)


def test_variance_orderings():
    """eq:levels, eq:tis, eq:prefix: token < prefix < sequence; variance grows with the cap."""
    far = PI.perturbed(1, 1.0)
    lp, caps = PI.log_probs(), (0.5, 1, 2, PLAIN)
    prefix = (lp - far.log_probs()).detach().cumsum(-1).exp()
    by_prefix = estimator_moments(
        PI, far, lambda i: (prefix[i] * reinforce_loss(lp[i], A[i]) * MASK[i]).sum())
    variance = {"token": moments(reinforce("token"), mu=far).variance, "prefix": by_prefix.variance}
    for c in caps:
        variance[f"sequence, C = {c}"] = moments(reinforce("sequence", c), mu=far).variance
    print("\n" + "\n".join(f"{name:20} {value:8.3f}" for name, value in variance.items()))
    assert variance["token"] < variance["prefix"] < variance["sequence, C = inf"]
    capped = [variance[f"sequence, C = {c}"] for c in caps]
    assert capped == sorted(capped) and capped[0] < 0.5 * capped[-1]


# ----------------------------------------------------------------------------------- prefix weights

FAR = PI.perturbed(1, 0.8)                                          # the μ of this section
LOG_RHO = (PI.log_probs() - FAR.log_probs()).detach()


def prefix():
    """Return ρ_{1:t}, the running products, 0 on padding."""
    return torch.where(MASK, LOG_RHO, 0.0).cumsum(-1).exp() * MASK


def test_prefix_weights_are_running_products():
    """eq:prefix: they are truncated or zeroed like any other level; padding adds nothing."""
    expected = torch.stack([prefix()[:, :t + 1].gather(1, torch.full((len(MASK), 1), t))[:, 0]
                            for t in range(3)], 1)
    assert close(importance_weights(LOG_RHO, MASK, "prefix", math.inf), expected)
    assert close(importance_weights(LOG_RHO, MASK, "prefix", 0.9), expected.clamp(max=0.9))
    inside = (expected >= 0.7) & (expected <= 1.2)
    assert close(importance_weights(LOG_RHO, MASK, "prefix", (0.7, 1.2)), expected * inside)
    gap = torch.tensor([[1.0, 0.0, 1.0]])
    assert close(aggregate_log_ratio(f64([[0.1, math.nan, 0.2]]), gap, "prefix"),
                 f64([[0.1, 0.0, 0.3]]))


@certifies("float64")
def test_prefix_weights_are_exact_for_advantages_of_the_past():
    """eq:prefix: E_μ[Σ ρ_{1:t} A_t g_t] = E_π[Σ A_t g_t] where A_t is a function of y_1 … y_t.

    The whole product is exact too, and has more variance.
    """
    of_states = torch.randn(PI.logits.shape, generator=torch.Generator().manual_seed(5)).double()
    advantages = torch.where(MASK, of_states[PI.states, PI.tokens], 0.0)
    target = torch.einsum("n,nt,ntp->p", PI.probs().detach(), advantages, G)
    found = {level: moments(reinforce(level), mu=FAR, advantages=advantages)
             for level in ("prefix", "sequence")}
    assert all(close(-of_level.mean, target) for of_level in found.values())
    assert found["prefix"].variance.sum() < found["sequence"].variance.sum()


@certifies("float64")
def test_with_one_reward_at_the_end_the_past_is_right_and_the_future_is_not():
    """eq:prefix: E_μ[Σ ρ_{1:t} R g_t] = Σ_s d_π(s) Σ_v ∇π(v|s) Q^μ(s, v): visits π's, returns μ's.

    With token weights both are μ's.
    """
    found = -moments(reinforce("prefix"), mu=FAR).mean
    shape = PI.logits.shape

    def summed(values):
        nothing, places = torch.zeros(shape, dtype=torch.float64), (PI.states, PI.tokens)
        return nothing.index_put(places, values.detach(), accumulate=True)

    mu_taken = summed(MASK * FAR.probs()[:, None])                      # d_μ(s) μ(v|s)
    Q = summed(MASK * FAR.probs()[:, None] * R) / mu_taken
    visits = summed(MASK * PI.probs()[:, None]).sum(-1, keepdim=True)   # d_π(s)
    assert close(found, exact_gradient(PI, (visits * Q * PI.logits.softmax(-1)).sum()))
    target = grad_J(PI, R)
    less = (R - J(PI, R).detach()).expand(-1, 3)
    biases = {level: (moments(reinforce(level), mu=FAR, advantages=less).bias(-target).norm()
                      / target.norm()).item() for level in ("token", "prefix", "sequence")}
    print("bias with one reward at the end:", biases)
    assert biases["sequence"] < 1e-12 < 0.05 < biases["prefix"]


def test_one_and_the_same_batch_by_sum_and_by_mean():
    """28 200 tokens, each 0.01 % less likely, have the product 0.0596 and the mean 0.9999.

    The mean is the same at any length.
    """
    log_rho, mask = torch.full((1, 28_200), -1e-4, dtype=torch.float64), torch.ones(1, 28_200)
    assert round(importance_weights(log_rho, mask, "sequence", 2.0)[0, 0].item(), 4) == 0.0596
    assert round(importance_weights(log_rho, mask, "geometric", 2.0)[0, 0].item(), 4) == 0.9999
    weights = importance_weights(LOG_RHO, MASK, "sequence", math.inf)
    assert expectation(FAR, weights[:, 0]).item() == pytest.approx(1)


# ------------------------------------------------------------------------------ Monte Carlo, larger

BIG = MarkovPolicy(16, 12, seed=0)
BIG_MU: MarkovPolicy = BIG.perturbed(1, 0.35)  # pyright: ignore[reportAssignmentType]
REWARD = torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def z_score(config, old, seed=0, n=20_000):
    """Return how many standard errors the gradient on n of 16^12 sequences is from −∇J.

    It is measured along one direction, fixed beforehand: that in which μ's own policy gradient
    differs from π's.
    """
    tokens, mask = BIG_MU.sample(n, seed)
    log_prob = BIG.log_probs(tokens, mask)
    target = exact_gradient(BIG, BIG.J(REWARD))
    direction = (target - exact_gradient(BIG_MU, BIG_MU.J(REWARD))).reshape(16, 16)
    probs = BIG.logits.detach().softmax(-1)
    along = direction - (probs * direction).sum(-1, keepdim=True)   # ∇log π(next|last) · direction
    last = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], -1)
    returns = (REWARD[tokens] * mask).sum(-1, keepdim=True)
    leaf = log_prob.detach().requires_grad_()
    loss, _ = policy_loss(leaf, old.log_probs(tokens, mask).detach(),
                          BIG_MU.log_probs(tokens, mask).detach(),
                          (returns - BIG.J(REWARD).item()).expand_as(mask), mask, config,
                          LossConfig(aggregation=SUM))
    each = n * (torch.autograd.grad(loss, leaf)[0] * along[last, tokens]).sum(-1)       # [n]
    return ((each.mean() + target @ direction.flatten()) / (each.std() / n ** 0.5)).item()


@certifies("Monte Carlo: nine runs have |z| < 4, which chance exceeds in 1 of 16 000")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", [
    reinforce("sequence"), Config("sequence", PLAIN), Config("sequence", PLAIN, loss_type="sapo")])
def test_monte_carlo_confirms_the_unbiased(config, seed):
    """eq:off-policy, eq:decoupled-ppo: E_μ[Πρ ∇L] = −∇J at θ = θ_old, of 16^12 responses, too."""
    z = z_score(config, BIG, seed)
    print(f"\nz = {z:+.2f}")
    assert abs(z) < 4


@certifies("Monte Carlo: |z| > 6, which chance exceeds in 2 of 10⁹")
@pytest.mark.parametrize("config", [
    reinforce(), reinforce("token"), reinforce("geometric"), reinforce("sequence", 1.0),
    Config("token", 2.0), Config(rollout_rs={"seq_sum_k1": (0.5, 2.0)})])
def test_monte_carlo_detects_the_biased(config):
    """eq:levels, eq:tis: with 1, ρ_t, (Πρ)^{1/|y|}, a cap, rejection −E_μ[∇L] is not ∇J there."""
    z = z_score(config, BIG)
    print(f"\nz = {z:+.2f}")
    assert abs(z) > 6


@certifies("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_decoupled_loss_does_not_depend_on_mu(loss_type):
    """eq:batch-size, eq:decoupled-ppo: E_μ[w·L(π_θ/π_old)] = E_old[L] with the full product w."""
    full = Config("sequence", PLAIN, loss_type=loss_type)
    clip = {"clip_low": 0.1, "clip_high": 0.15}
    on_policy = moments(Config(loss_type=loss_type), mu=OLD, **clip).mean
    for mu in (MU, REF, PI):
        assert close(moments(full, mu=mu, **clip).mean, on_policy)
    by_token = moments(Config("token", PLAIN, loss_type=loss_type), **clip)
    drift = by_token.bias(on_policy).norm() / on_policy.norm()
    print(f"\n{loss_type}: bias with token weights {drift:.1%}")
    assert drift > 0.03


@certifies("float64")
@pytest.mark.parametrize("loss_type", ["ppo_clip", "cispo", "sapo"])
def test_the_first_step_is_reinforce(loss_type):
    """eq:ppo-clip, eq:cispo, eq:sapo: at θ = θ_old the gradient is REINFORCE's, by sequence."""
    first = moments(Config("sequence", PLAIN, loss_type=loss_type), old=PI)
    assert close(first.gradients, moments(reinforce("sequence")).gradients)
    assert close(first.mean, -grad_J(PI, R))


@certifies("float64")
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_decoupled_is_plain_when_old_is_the_sampler(level, loss_type):
    """eq:decoupled-ppo: π_old = μ makes every weight 1, truncated or not."""
    assert close(moments(Config(level, 2.0, loss_type=loss_type), old=MU).gradients,
                 moments(Config(loss_type=loss_type), old=MU).gradients)


@certifies("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bypass_puts_the_sampler_in_the_place_of_old(loss_type):
    """eq:bypass: the loss is L(π_θ/μ) without a weight, and old_log_prob is not read."""
    bypass = moments(Config(bypass_mode=True, loss_type=loss_type))
    assert close(bypass.gradients, moments(Config(loss_type=loss_type), old=MU).gradients)
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    config = Config(bypass_mode=True, loss_type=loss_type)
    losses = [policy_loss(lp, old, mu_lp, A, MASK, config)[0] for old in (None, lp * math.nan, lp)]
    assert close(losses[0], losses[1]) and close(losses[0], losses[2])


@certifies("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bypass_takes_no_weight(loss_type):
    """eq:double-count: requested weights do not multiply a ratio that is π_θ/μ already."""
    with pytest.warns(UserWarning, match="eq:double-count"):
        weighted = Config("sequence", PLAIN, bypass_mode=True, loss_type=loss_type)
    plain = moments(Config(bypass_mode=True, loss_type=loss_type))
    assert close(moments(weighted).gradients, plain.gradients)
    lp, mu_lp = PI.log_probs(), MU.log_probs().detach()
    assert correct(lp, mu_lp, MASK, weighted).weights is not None


@certifies("float64")
def test_counting_the_ratio_twice_is_wrong():
    """eq:double-count: at T = 1 E_μ[−rA] has the gradient −∇J, unclipped; a factor ρ changes it."""
    pi = Policy(5, 1, seed=4)
    mu, r = pi.perturbed(5, 0.6), rewards(pi)
    once = moments(Config(bypass_mode=True), pi, pi, mu, r, clip_low=1.0, clip_high=1e9)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    twice = estimator_moments(pi, mu, lambda i: ((lp - mu_lp)[i].exp().detach() * ppo_clip_loss(
        lp[i], mu_lp[i], r[i], 1.0, 1e9)).sum())
    size = twice.bias(-grad_J(pi, r)).norm() / grad_J(pi, r).norm()
    print(f"\nbias of a ratio counted twice: {size:.0%} of ∇J")
    assert close(once.mean, -grad_J(pi, r)) and size > 0.1


@certifies("float64")
def test_the_kl_in_the_reward_is_the_full_one():
    """eq:kl-gradient: REINFORCE with A = R − β Σ_s ℓ_s descends −J + β KL(π‖ref) of sequences."""
    cost = (PI.log_probs() - REF.log_probs()).detach().sum(-1, keepdim=True)
    target = -grad_J(PI, R) + 0.3 * exact_gradient(PI, kl(PI, REF))
    advantages = (R - 0.3 * cost).expand(-1, 3)
    assert close(moments(reinforce(), mu=PI, advantages=advantages).mean, target)
