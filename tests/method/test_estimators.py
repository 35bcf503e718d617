"""ratios.py and estimators.py compute what they claim: exact sums over all sequences.

Each test names its claim, and its docstring the equation. Run with -s to see the biases' sizes.
The KL is in test_kl.py, the sampling distribution in test_sampling.py.
"""

import math

import pytest
import torch

from three_policies.estimators import (effective_sample_size, grpo_advantages, perplexity,
                                       reinforce_advantages, rloo_advantages)
from three_policies.kl import kl_estimate
from three_policies.losses import aggregate_loss
from three_policies.metrics import offpolicy_metrics, to_host
from three_policies.oracle import (Policy, close, estimator_moments, exact_gradient, expectation,
                                   f64, grad_J, kl, rewards, scores, token_kl)
from three_policies.ratios import (SAFETY_BOUND, aggregate_log_ratio, exp_ratio, masked_log_ratio,
                                   sequence_log_ratio)
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import GOOD, X, chi_square_of
from three_policies.tests.support.tolerances import gamma

PI = Policy(3, 3, seed=0)
MU, REF, R = PI.perturbed(1, 0.5), PI.perturbed(3, 0.7), rewards(PI)
LP, MASK = PI.log_probs(), PI.mask
MU_LP, REF_LP = MU.log_probs().detach(), REF.log_probs().detach()
WHOLE = (LP - MU_LP).sum(-1, keepdim=True).exp().detach()           # Π over the sequence, [N, 1]
LEVELS, KINDS = ("token", "sequence", "geometric"), ("k1", "k2", "k3", "abs")


# -------------------------------------------------------------------------------- the oracle itself

@certifies("float64")
def test_oracle_probabilities_and_scores():
    """eq:policy-gradient: Σ_y π(y) = 1, E_π[∇log π_t] = 0, ∇J = E_π[R Σ_t ∇log π_t]."""
    assert len(PI.tokens) == 15 and close(PI.probs().sum(), 1.0)
    assert close(grad_J(PI, R), expectation(PI, scores(PI).sum(1) * R))
    assert close(expectation(PI, scores(PI)), torch.zeros(3, PI.logits.numel()))


def test_oracle_step_kl_adds_up_to_sequence_kl():
    """KL(π‖ref) = Σ_t E_π[KL_t] holds; with frozen visits the right side's gradient is another."""
    assert close(kl(PI, REF), token_kl(PI, REF, PI))
    gap = exact_gradient(PI, kl(PI, REF)) - exact_gradient(PI, token_kl(PI, REF, PI))
    print(f"\nthe part of the KL gradient that frozen visits lack: {gap.norm():.3f}")
    assert gap.norm() > 0.01


# --------------------------------------------------------------------------------------- log-ratios

@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_reaches_neither_ratio_nor_gradient(junk):
    """eq:ratio, eq:levels: padding is replaced before anything is computed from it."""
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


@pytest.mark.parametrize("dtype, out", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_log_ratio_is_float32_at_least(dtype, out):
    """eq:ratio: 16-bit log-probs are widened before the subtraction."""
    a, b = torch.tensor([[-10.0]], dtype=dtype), torch.tensor([[-1e-3]], dtype=dtype)
    ratio = masked_log_ratio(a, b, torch.ones(1, 1))
    assert ratio.dtype == out and close(ratio, a.to(out) - b.to(out))


@certifies("float64")
def test_exp_ratio_is_exp_within_its_bound_and_finite_beyond():
    """eq:ratio: the one clamp is at ±20 nats; e^20 squared is still a float32."""
    assert SAFETY_BOUND == 20 and exp_ratio(torch.tensor(1e30)).square().isfinite()
    x = f64([-1e9, -20.5, -19.9, 0.0, 19.9, 20.5, 1e9])
    assert close(exp_ratio(x), [math.exp(min(max(v, -20), 20)) for v in x.tolist()])


def test_levels_by_hand():
    """eq:levels: a level is the token's, the sequence's sum or its mean; an empty row stays 0."""
    assert aggregate_log_ratio(X, GOOD, "token").tolist() == torch.where(GOOD, X, 0.0).tolist()
    for level, rows in (("sequence", [-0.2, 0.5, -0.3, 0.0]),
                        ("geometric", [-0.1, 0.5, -0.1, 0.0])):
        by_hand = f64(rows)[:, None] * GOOD
        assert close(aggregate_log_ratio(X, GOOD, level), by_hand)


@certifies("float64")
def test_sequence_ratio_has_mean_one_and_the_other_levels_do_not():
    """eq:levels: E_μ[π(y)/μ(y)] = 1; E_μ of a geometric mean is another number, here below 1.

    At one length Jensen's inequality has it below 1; where lengths differ it may be above.
    """
    rho = {level: exp_ratio(aggregate_log_ratio(LP - MU_LP, MASK, level)) for level in LEVELS}
    means = {level: expectation(MU, rho[level][:, 0]).item() for level in LEVELS}
    print(f"\nE_μ[first token's ρ]: {means}")
    assert close(means["sequence"], 1.0) and close(means["token"], 1.0)
    assert means["geometric"] < 0.995


@pytest.mark.parametrize("level", LEVELS)
def test_one_token_makes_all_levels_equal(level):
    """eq:levels: at T = 1 each is the token's own log-ratio."""
    first = torch.where(GOOD, X, 0.0)[:, :1]
    assert close(aggregate_log_ratio(X[:, :1], GOOD[:, :1], level), first)


# ------------------------------------------------------------------------------- quality of weights

def test_ess_by_hand():
    """eq:ess: weights 1, 2, 3 have (1+2+3)²/(3·14), one weight 1/N, equal ones 1, none 0."""
    w, on = f64([1.0, 2.0, 3.0, 50.0]), torch.tensor([1, 1, 1, 0])
    assert close(effective_sample_size(w, on), 36 / 42)
    assert close(effective_sample_size(f64([0.0, 5.0, 0.0]), torch.ones(3)), 1 / 3)
    assert close(effective_sample_size(torch.full((7,), 0.3).double(), torch.ones(7)), 1.0)
    for scale in (1e-30, 1e30, SAFETY_BOUND):
        single = effective_sample_size((w * scale).float(), on)
        assert close(single, 36 / 42, gamma(21))                # 11 in (Σw)², 8 in Σw², 2 after
    for empty in (effective_sample_size(0 * w, on), effective_sample_size(w, 0 * on),
                  effective_sample_size(w[:0], on[:0])):
        assert empty.item() == 0


@certifies("float64")
def test_ess_is_one_over_one_plus_chi_square():
    """eq:ess, eq:chi2: ESS/N is 1/(1 + χ²), exactly for eight samples as frequent as in μ."""
    mu, pi = f64([4, 2, 1, 1]) / 8, f64([0.2, 0.5, 0.25, 0.05])
    log_rho = (pi / mu).log()[torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])]
    exact = (pi * pi / mu).sum() - 1
    assert close(chi_square_of(log_rho, torch.ones(8)), exact)
    assert close(effective_sample_size(log_rho.exp(), torch.ones(8)), 1 / (1 + exact))


@certifies("float64")
def test_chi_square_is_the_variance_of_the_sequence_ratio():
    """eq:chi2: enumeration gives E_μ[ρ²] − 1, the function seeing one sequence at a time."""
    log_rho = aggregate_log_ratio((LP - MU_LP).detach(), MASK, "sequence")[:, 0]
    single = torch.stack([chi_square_of(x[None], torch.ones(1)) for x in log_rho])
    assert close(expectation(MU, single), expectation(MU, (WHOLE[:, 0] - 1).square()))


def test_chi_square_small_large_and_empty():
    """eq:chi2: float64 keeps 1e-6; a huge ratio and an empty mask stay finite."""
    tiny = torch.full((4,), 5e-7)
    assert chi_square_of(tiny, torch.ones(4)).item() == pytest.approx(1e-6, rel=gamma(9))
    huge = chi_square_of(torch.full((2,), 1e4), torch.ones(2)).item()
    assert huge == pytest.approx(math.expm1(40), rel=gamma(9))
    assert close(chi_square_of(f64([-1e4, -1e4]), torch.ones(2)), math.expm1(-40))
    assert chi_square_of(tiny, torch.zeros(4)).item() == 0


@certifies("float64")
def test_perplexity_ratio_is_the_inverse_geometric_mean():
    """eq:perplexity: ppl_π/ppl_μ is 1/(Πρ)^{1/|y|}; a ppl is exp of the mean surprise, or 1."""
    geometric = exp_ratio(aggregate_log_ratio(LP - MU_LP, MASK, "geometric"))[:, 0]
    assert close(perplexity(LP, MASK) / perplexity(MU_LP, MASK), 1 / geometric)
    one = torch.tensor([[1, 1, 1, 0]])
    assert close(perplexity(f64([[-1, -2, -1.5, 9]]), one), [math.exp(1.5)])
    assert perplexity(X, GOOD)[3] == 1
    assert close(perplexity(f64([[-1e4]]), torch.ones(1, 1)), [math.exp(80)])
    assert perplexity(torch.tensor([[-1e4]]), torch.ones(1, 1)).isfinite()


# --------------------------------------------------------------------------------------- advantages

REWARDS = f64([1.0, 2.0, 6.0, 10.0, 10.0, 7.0])
GROUPS = torch.tensor([0, 0, 0, 5, 5, 9])                           # the last is a group of one


def test_advantages_by_hand():
    """eq:baseline: baselines are the group's mean, others' mean, the batch's mean; alone A = R."""
    centred = f64([-2.0, -1.0, 3.0, 0.0, 0.0, 7.0])
    assert close(grpo_advantages(REWARDS, GROUPS, normalize_std=False), centred)
    std = f64([7.0 ** 0.5 + 1e-6] * 3 + [1e-6] * 2 + [1.0])
    assert close(grpo_advantages(REWARDS, GROUPS), centred / std)
    assert close(rloo_advantages(REWARDS, GROUPS), f64([-3.0, -1.5, 4.5, 0.0, 0.0, 7.0]))
    assert close(reinforce_advantages(REWARDS), REWARDS - 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_rewards_have_no_advantage_however_they_are_rounded(dtype):
    """eq:baseline: a mean that is rounded like the rewards leaves a rest; over std it was 120."""
    for n in range(2, 65):
        for value in (0.1, 0.2, 0.9, 1.7, 250.3):
            rewards, groups = torch.full((n,), value, dtype=dtype), torch.zeros(n)
            for method in (grpo_advantages, rloo_advantages):
                found = method(rewards, groups)
                assert found.dtype == dtype and not found.any()
            assert not reinforce_advantages(rewards).any()


def test_whole_rewards_have_fractions_for_advantages():
    """eq:baseline: rewards may be integers, such as counts; 1 − 4/3 is not 0."""
    for method in (lambda r, g: grpo_advantages(r, g, False), rloo_advantages,
                   lambda r, g: reinforce_advantages(r)):
        whole = method(torch.tensor([1, 1, 2]), torch.zeros(3))
        assert close(whole, method(torch.tensor([1.0, 1.0, 2.0]), torch.zeros(3)), 0)


def test_whole_rewards_above_what_float32_counts_keep_their_difference():
    """eq:baseline: 2²⁴ + 1 is no float32; advantages are of the size of the differences."""
    rewards, groups = torch.tensor([2 ** 24 + 1, 2 ** 24]), torch.zeros(2)
    for found in (grpo_advantages(rewards, groups, False), reinforce_advantages(rewards)):
        assert found.tolist() == [0.5, -0.5] and found.dtype == torch.float32
    assert rloo_advantages(rewards, groups).tolist() == [1, -1]
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)], rel=2e-6)                # the deviation has 1e-6 added


@pytest.mark.parametrize("size", [1e-170, 1e-5, 3.0, 1e155, 1e307])
def test_a_deviation_has_the_size_of_its_rewards(size):
    """eq:baseline: the squares of 1e155 are infinite and those of 1e-170 are 0; each group alone.

    A group of another size changes nothing.
    """
    rewards = f64([size, -size, 0.5 * size, 1.0, 2.0, 1e200, -1e200])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    found = grpo_advantages(rewards, groups)
    of_unit = f64([1.0, -1.0, 0.5])
    deviation = of_unit.std()                                       # of one of size 1
    exact = (of_unit - of_unit.mean()) / (deviation + 1e-6 / size)
    assert found[:3].tolist() == pytest.approx(exact.tolist(), rel=1e-12)
    assert torch.equal(found[3:5], grpo_advantages(rewards[3:5], groups[3:5]))


def test_rejected_rows_are_not_in_the_baseline():
    """eq:baseline: with keep, a rejected reward of 100 leaves an advantage at 1.0, not −49.5."""
    r, groups, keep = f64([1.0, 100.0]), torch.zeros(2), torch.tensor([True, False])
    assert rloo_advantages(r, groups)[0] == -99
    assert grpo_advantages(r, groups, False)[0] == -49.5
    for advantages in (rloo_advantages(r, groups, keep), grpo_advantages(r, groups, False, keep),
                       grpo_advantages(r, groups, True, keep)):
        assert advantages[0] == 1
    assert reinforce_advantages(r, keep)[0] == 0                    # its mean is its own reward


def test_a_right_answer_may_be_true():
    """Rewards of bools, as `answer == truth` gives them, are those of 0 and 1."""
    right, groups = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 1, 1])
    for method in (grpo_advantages, rloo_advantages, lambda r, _: reinforce_advantages(r)):
        assert close(method(right, groups), method(right.float(), groups))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_advantages_with_keep_by_hand(dtype):
    """eq:baseline: with keep, only kept rows make the mean and the deviation."""
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
    """Return the moments of REINFORCE on all pairs of sequences of π, as one group."""
    def loss(i):
        return -(advantages(R[i, 0], torch.zeros(len(i)))[:, None] * LP[i] * MASK[i]).sum() / len(i)
    return estimator_moments(PI, PI, loss, batch=2)


@certifies("float64")
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks():
    """eq:baseline: over all pairs RLOO is ∇J; the mean with the own reward is (n−1)/n of it."""
    assert close(advantage_moments(rloo_advantages).mean, -grad_J(PI, R))
    grpo = advantage_moments(lambda r, g: grpo_advantages(r, g, normalize_std=False))
    assert close(grpo.mean, -grad_J(PI, R) / 2)
    assert close(grpo.gradients, advantage_moments(rloo_advantages).gradients / 2)


@certifies("float64")
def test_dividing_by_the_deviation_changes_the_direction():
    """eq:baseline: with GRPO's /std the expected gradient is no multiple of ∇J.

    The angle is printed.
    """
    grpo = advantage_moments(grpo_advantages).mean
    cosine = torch.cosine_similarity(grpo, -grad_J(PI, R), dim=0).item()
    print(f"\ncosine between GRPO's expected gradient (n = 2) and ∇J: {cosine:.4f}")
    assert cosine < 0.99


@pytest.mark.parametrize("call", [
    lambda: grpo_advantages(torch.tensor([6.0]), torch.tensor([0, 0, 0])),
    lambda: rloo_advantages(torch.ones(3, 1), torch.tensor([0, 0, 0])),
    lambda: reinforce_advantages(torch.ones(3, 1)),
    lambda: reinforce_advantages(torch.ones(3), torch.ones(1, dtype=torch.bool)),
])
def test_rewards_that_do_not_fit_their_groups_are_one_sentence(call):
    with pytest.raises(ValueError, match=r"rewards \(.*must have (one|the) shape \[B\]"):
        call()


def test_one_kept_row_is_its_own_mean():
    """eq:baseline: R − mean(R) of a batch with one row that counts is 0 for that row."""
    assert reinforce_advantages(f64([3, 5]), torch.tensor([True, False])).tolist() == [0, 2]
    assert reinforce_advantages(f64([3])).tolist() == [0]


# ------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("call", [
    lambda: kl_estimate(X, X, "k4"), lambda: kl_estimate(X, X, "k1++"),
    lambda: aggregate_log_ratio(X, GOOD, "batch")])
def test_errors_name_the_value_and_the_choices(call):
    """eq:kl-estimators, eq:levels: an error is one sentence."""
    with pytest.raises(ValueError, match="must be one of .*, not '(k4|k1\\+\\+|batch)'"):
        call()


def test_what_would_be_broadcast_is_refused():
    """eq:perplexity, eq:kl-estimators: a row in the place of a batch would give other numbers."""
    for call in (lambda: perplexity(torch.ones(2, 3), torch.ones(2, 1)),
                 lambda: kl_estimate(torch.ones(2, 2), torch.ones(2), "k1")):
        with pytest.raises(ValueError, match="must have one shape .B, T."):
            call()
    with pytest.raises(ValueError, match="level must be sequence or geometric, not 'token'"):
        sequence_log_ratio(X, GOOD, "token")


def test_sums_over_16_bits_are_not_of_16_bits():
    """A sum in float16 overflows at 65 504, and one in bfloat16 has 8 bits."""
    ones, mask = torch.ones(1, 80_000), torch.ones(1, 80_000)
    for dtype in torch.float16, torch.bfloat16:
        assert effective_sample_size(ones.to(dtype), mask) == 1
        found = perplexity((-2 * ones).to(dtype), mask).item()
        assert found == pytest.approx(math.exp(2), rel=gamma(4))
        assert aggregate_loss((5 * ones).to(dtype), mask, "token-mean") == 5
        twice = (-2 * ones).to(dtype)
        metrics = to_host(offpolicy_metrics(twice, twice, mask))
        assert metrics["rollout_corr/rollout_log_ppl"] == 2
