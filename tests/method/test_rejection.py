"""rejection.py: each criterion keeps what it should, on numbers that can be checked by hand.

What holds for any criterion is tested in test_any_criterion_and_loss.py; that all are ANDed, in
test_correction.py.
"""

import math
import random

import pytest
import torch

from three_policies.correction import correct
from three_policies.doctor import diagnose
from three_policies.metrics import merge
from three_policies.oracle import (close, f64)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.rejection import CRITERIA, Evidence, rejection_mask, second_moment_limit
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import KNOWN, RATIOS, bound_of
from three_policies.tests.support.tolerances import gamma


# --------------------------------------------------------------------------- bounds on ρ, k2 and k3

LOG2 = math.log(2)


def mask_of(**criteria):
    """Return what criteria keep of RATIOS, whose first row has A < 0 and whose second A > 0."""
    return correct(RATIOS.log(), 0 * RATIOS, torch.ones(2, 3), Config(rollout_rs=criteria),
                   f64([[-1.0] * 3, [1.0] * 3])).mask.tolist()


@certifies("float64")
@pytest.mark.parametrize("criteria, kept", [
    ({"token_k1": [0.5, 2.0]}, [[1, 1, 1], [0, 1, 1]]),     # bounds met exactly keep
    ({"token_k1": [0.6, 2.0]}, [[1, 0, 1], [0, 1, 1]]),     # asymmetric: on ρ, not on 1/ρ
    ({"token_k1": [0.5, 1.9]}, [[0, 1, 1], [0, 1, 1]]),
    ({"token_k1": [None, 2.0]}, [[1, 1, 1], [0, 1, 1]]),
    ({"token_k1": [1.0, None]}, [[1, 0, 1], [1, 1, 1]]),
    ({"token_k2": LOG2**2 / 2}, [[1, 1, 1], [0, 1, 1]]),
    ({"token_k3": 2 - 1 - LOG2}, [[1, 1, 1], [0, 1, 1]]),
    ({"seq_sum_k1": [1.0, 3.9]}, [[1] * 3, [0] * 3]),
    ({"seq_sum_k1": [1.1, 4.0]}, [[0] * 3, [1] * 3]),
    ({"seq_mean_k1": [0.9, 1.5]}, [[1] * 3, [0] * 3]),      # 4^(1/3) = 1.587…
    ({"seq_mean_k1": [0.9, 1.6]}, [[1] * 3, [1] * 3]),
    ({"seq_max_k1": [0.6, None]}, [[0] * 3, [1] * 3]),      # the veto: one bad token is enough
    ({"seq_max_k1": [None, 3.0]}, [[1] * 3, [0] * 3]),
    ({"seq_sum_k2": LOG2**2 * 1.01}, [[1] * 3, [0] * 3]),   # 2·(log 2)²/2 against 4·(log 2)²/2
    ({"seq_mean_k2": LOG2**2 / 3 * 0.99}, [[0] * 3, [0] * 3]),
    ({"seq_max_k2": LOG2**2 / 2}, [[1] * 3, [0] * 3]),
    ({"seq_max_k3": 2 - 1 - LOG2}, [[1] * 3, [0] * 3]),
    ({"seq_sum_k3": 0.5}, [[1] * 3, [0] * 3]),              # 0.307 + 0.193 = 0.5 against 1.614
    ({"seq_mean_k3": 0.17}, [[1] * 3, [0] * 3]),
    ({"opsm": 1e-9}, [[1] * 3, [1] * 3]),                   # mean −log ρ is 0 and < 0
    ({"token_k1": [0.6, 5.0], "seq_sum_k1": [None, 3.0]}, [[1, 0, 1], [0] * 3]),
])
def test_each_criterion_on_numbers_one_can_check(criteria, kept):
    """eq:rejection: each criterion compares its own statistic with its bound, and all must keep."""
    assert mask_of(**criteria) == kept


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"])
def test_bounds_on_rho_act_however_far_from_1_they_are(name):
    """eq:rejection: nothing is exponentiated, so even a bound of e^−23 or e^23 acts."""
    apart = torch.tensor([[-30.0], [-22.0], [0.0], [22.0], [30.0]], dtype=torch.float64)
    kept = correct(apart, torch.zeros_like(apart), torch.ones_like(apart),
                   Config(rollout_rs={name: (1e-10, 1e10)}))
    assert kept.mask.flatten().tolist() == [0, 1, 1, 1, 0]
    veto = correct(torch.tensor([[-31.0, -1.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2),
                   Config(rollout_rs={"seq_max_k1": (1e-10, None)}))
    assert veto.mask.sum() == 0 and veto.metrics["rollout_corr/rollout_is_veto_fraction"] == 1


def test_small_divergences_are_not_rejected_for_their_rounding():
    """e^x − 1 − x of a tiny x is rounded to below 0, and is still within [0, bound]."""
    train = 1e-6 * torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    criteria = {f"{level}_k3": 0.01 for level in ("token", "seq_sum", "seq_mean", "seq_max")}
    assert correct(train, torch.zeros_like(train), torch.ones(4, 100),
                   Config(rollout_rs=criteria)).mask.all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", KNOWN)
def test_what_is_not_finite_is_within_no_bound(criterion, value):
    """eq:rejection: a token is kept while its statistic is ≤ the bound, which NaN never is.

    The metrics say so.
    """
    if criterion in ("opsm", "token_tv_outward") and value == math.inf:
        return              # A < 0 and π_old above π_rollout: both keep such a token, rightly
    rollout, wide = torch.full((2, 3), -1.0), bound_of(criterion, (0.5, 2.0), 0.1)
    train, against = rollout.clone(), 1 if criterion == "vaco" and value == math.inf else -1
    train[0, 1] += value
    result = correct(train, rollout, torch.ones(2, 3), Config(rollout_rs={criterion: wide}),
                     torch.full((2, 3), float(against)))
    assert not result.mask[0, 1] and result.mask[1].all()
    assert any("not finite" in sentence for sentence in diagnose(result.metrics))


@certifies("float64")
def test_opsm_rejects_only_negative_advantages_of_drifted_sequences():
    """eq:opsm: a token goes where A < 0 and its sequence's mean of −log ρ is above δ.

    That is where the geometric mean of ρ is below exp(−δ).
    """
    log_ratio = f64([[-0.3, -0.1], [-0.3, -0.1], [0.3, 0.1]])       # mean −log ρ: 0.2, 0.2, −0.2
    advantages = f64([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])
    args = (log_ratio, torch.zeros_like(log_ratio), torch.ones(3, 2))
    assert correct(*args, Config(rollout_rs={"opsm": 0.19}),
                   advantages).mask.tolist() == [[0, 1], [1, 1], [1, 1]]
    geometric = aggregate_log_ratio(log_ratio, args[2], "geometric").exp()
    assert correct(*args, Config(rollout_rs={"opsm": 0.19}), advantages).mask.tolist() == (
        (advantages >= 0) | (geometric >= math.exp(-0.19))).int().tolist()
    assert correct(*args, Config(rollout_rs={"opsm": 0.21}), advantages).mask.all()
    with pytest.raises(ValueError, match="opsm needs the advantages"):
        correct(*args, Config(rollout_rs={"opsm": 0.19}))
    for wrong in (advantages[:, 0], advantages[:, :1]):         # [3] and [3, 1] would broadcast
        with pytest.raises(ValueError, match=r"opsm needs advantages for each token, \(3, 2\)"):
            correct(*args, Config(rollout_rs={"opsm": 0.19}), wrong)


@certifies("float64")
def test_vaco_rejects_what_moves_on_in_sequences_that_have_moved():
    """eq:vaco: mean |ρ − 1| is (1 + 0.5)/2 = 0.75 and 0.1; A = 1 pushes on where ρ > 1.

    The mean is exactly met by its own value. Where A or log ρ is 0 nothing is pushed.
    """
    log_rho = f64([[2.0, 0.5, 1.0], [1.1, 0.9, 1.0]]).log()
    mask, a = f64([[1, 1, 0], [1, 1, 0]]), torch.ones(2, 3)
    for bound, sign, kept in ((0.5, 1, [[0, 1, 0], [1, 1, 0]]), (0.5, -1, [[1, 0, 0], [1, 1, 0]]),
                              (0.5, 0, mask.tolist()), (0.75, 1, mask.tolist()),
                              (0.05, 1, [[0, 1, 0], [0, 1, 0]])):
        assert rejection_mask(log_rho, mask, {"vaco": bound}, sign * a).tolist() == kept


# -------------------------------------------------------------------------- bounds on probabilities

@certifies("float64")
def test_binary_kl_is_that_of_two_outcomes():
    """eq:binary-kl: KL(0.5‖0.8) = 0.2231, KL(0.8‖0.5) = 0.1927; KL(1‖1) = 0, and no NaN.

    A token goes by the larger of both, a sequence by the mean of KL(μ‖π).
    """
    mu, pi = f64([[0.5, 0.8, 1.0], [0.5, 0.5, 0.0]]), f64([[0.8, 0.5, 1.0], [0.5, 0.5, 0.0]])
    mask = f64([[1, 1, 1], [1, 1, 0]])
    there, back = 0.5 * math.log(0.25 / 0.16), 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    given = torch.where(mask > 0, (pi / mu).log(), math.nan), mask
    def kept(**criteria):
        return rejection_mask(*given, criteria, rollout_log_prob=mu.log()).int().tolist()
    assert kept(token_binary_kl=there * (1 + 1e-12)) == [[1, 1, 1], [1, 1, 0]]
    assert kept(token_binary_kl=there * (1 - 1e-12)) == [[0, 0, 1], [1, 1, 0]]
    mean = (there + back) / 3
    assert kept(seq_mean_binary_kl=mean * (1 + 1e-12)) == [[1, 1, 1], [1, 1, 0]]
    assert kept(seq_mean_binary_kl=mean * (1 - 1e-12)) == [[0, 0, 0], [1, 1, 0]]
    assert kept(seq_mean_tv=0.2 + 1e-12) == [[1, 1, 1], [1, 1, 0]]
    assert kept(seq_mean_tv=0.2 - 1e-12) == [[0, 0, 0], [1, 1, 0]]



@certifies("float64")
def test_total_variation_of_the_sampled_token():
    """eq:total-variation: |π − μ| ≤ δ: from 1e-4 a token may grow tenfold, from 0.5 not by 0.31.

    A bound that is exactly met keeps the token.
    """
    mu, pi = f64([[1e-4, 0.5, 0.5, 0.6, 0.3]]), f64([[1e-3, 0.81, 0.8, 0.3, 0.3]])
    log_rho, mask = (pi / mu).log(), torch.ones(1, 5)
    kept = rejection_mask(log_rho, mask, {"token_tv": 0.3 + 1e-12}, rollout_log_prob=mu.log())
    assert kept.tolist() == [[True, False, True, True, True]]
    assert not rejection_mask(log_rho, mask, {"token_k1": (0.5, 2.0)})[0, 0]
    seen = Evidence(log_rho, mask.bool(), rollout_log_prob=mu.log())
    verdict = CRITERIA["token_tv"].judge(seen, 0.3)
    assert close(verdict.statistic, (pi - mu).abs())


def test_of_an_advantage_the_sign_alone_decides():
    """eq:total-variation: log π − log μ = 0.2 at μ = e⁻¹ moves 0.08 outward, for A = 0.01 too."""
    given = f64([[0.2]]), torch.ones(1, 1), {"token_tv_outward": 0.05}
    for a, kept in ((0.01, False), (3.0, False), (0.0, True), (-0.01, True)):
        assert rejection_mask(*given, f64([[a]]), f64([[-1.0]])).item() == kept


def test_a_bound_met_exactly_keeps():
    """≤ holds for |π − μ|, its outward half, opsm's mean and the second moment, all exactly."""
    mu, pi = f64([[0.25, 0.5]]), f64([[0.5, 0.25]])
    given, ones = ((pi / mu).log(), torch.ones(1, 2)), torch.ones(1, 2)
    for name, advantages in (("token_tv", ones), ("token_tv_outward", f64([[1.0, -1.0]]))):
        seen = Evidence(given[0], ones.bool(), advantages, mu.log())
        exact = CRITERIA[name].judge(seen, 1.0).statistic
        below = math.nextafter(exact.min().item(), 0)
        for bound, kept in ((exact.max().item(), True), (below, False)):
            assert rejection_mask(*given, {name: bound}, advantages, mu.log()).any() == kept
            assert rejection_mask(*given, {name: bound}, advantages, mu.log()).all() == kept
    drifted = torch.full((1, 2), -0.5, dtype=torch.float64)
    for bound, kept in ((0.5, True), (math.nextafter(0.5, 0), False)):
        assert rejection_mask(drifted, ones, {"opsm": bound}, -ones).all() == kept
    for bound, kept in ((0.25, True), (math.nextafter(0.25, 0), False)):
        assert rejection_mask(drifted, ones, {"second_moment": bound}).all() == kept


@pytest.mark.parametrize("sign, kept", [
    (1, [False, True, True]), (-1, [True, False, True]), (0, [True, True, True])])
def test_outward_means_further_the_way_the_advantage_pushes(sign, kept):
    """DPPO bounds |π − μ| only where π is above μ and A > 0, or below μ and A < 0."""
    mu, pi = f64([[0.2, 0.7, 0.4]]), f64([[0.6, 0.3, 0.5]])
    found = rejection_mask((pi / mu).log(), torch.ones(1, 3), {"token_tv_outward": 0.2},
                           torch.full((1, 3), float(sign)), mu.log())
    assert found.tolist() == [kept]


def test_a_ratio_of_impossible_probabilities_stays_finite():
    """The difference of probabilities stays finite even for log-probs above 0, since π ≤ 1."""
    log_rho = torch.tensor([[200.0, -200.0, math.log(2)]])
    seen = Evidence(log_rho, torch.ones(1, 3).bool(), rollout_log_prob=torch.zeros(1, 3))
    verdict = CRITERIA["token_tv"].judge(seen, 0.3)
    assert verdict.statistic.tolist() == [[0.0, 1.0, 0.0]]


def test_an_impossible_token_is_rejected_by_its_probability():
    """eq:total-variation: μ = 0 and π = 0.9 have |π − μ| = 0.9, though log ρ is ∞."""
    train, rollout = torch.tensor([[0.9, math.exp(-1)]]).log(), torch.tensor([[-math.inf, -1.0]])
    for name in ("token_tv", "token_tv_outward"):
        config = Config("token", math.inf, rollout_rs={name: 0.3}, bypass_mode=True,
                        loss_type="reinforce")
        assert correct(train, rollout, torch.ones(1, 2), config,
                       torch.ones(1, 2)).mask.tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["token_tv", "token_tv_outward"])
def test_a_bound_on_probabilities_needs_one_of_them(name):
    with pytest.raises(ValueError, match=f"rollout_rs.{name} needs rollout_log_prob"):
        rejection_mask(RATIOS.log(), torch.ones(2, 3), {name: 0.3}, RATIOS)


def test_outward_needs_advantages():
    with pytest.raises(ValueError, match="rollout_rs.token_tv_outward needs the advantages"):
        correct(RATIOS.log(), 0 * RATIOS, torch.ones(2, 3),
                Config(rollout_rs={"token_tv_outward": 0.2}))


# ------------------------------------------------------------------- the second moment of the batch

def dropped_by_hand(squares, bound):
    """Drop the largest until the others' mean is at most `bound`; equal ones go together."""
    left = sorted(squares)
    while left and sum(left) / len(left) > bound:
        left = [x for x in left if x < left[-1]]
    return [x not in left for x in squares]


@certifies("float64")
@pytest.mark.parametrize("seed", range(40))
def test_the_worst_tokens_go_until_the_mean_is_met(seed):
    """eq:second-moment: the largest go, ties together, until the others' mean is ≤ the bound."""
    rng = random.Random(seed)
    rows, width, scale = rng.randint(1, 5), rng.randint(1, 9), rng.choice([1e-3, 0.2, 1.0, 30.0])
    steps = rng.choice([1, 4, 64])          # dyadic numbers: their sums are exact, and they tie
    log_rho = f64([[rng.randint(-steps, steps) / steps * scale for _ in range(width)]
                   for _ in range(rows)]).float()
    mask = torch.tensor([[rng.random() < 0.8 for _ in range(width)] for _ in range(rows)])
    bound = rng.choice([0.04, 0.5, 1e-9, 1e4])
    kept = rejection_mask(log_rho, mask, {"second_moment": bound})
    expected = dropped_by_hand(log_rho.square()[mask].tolist(), bound)
    assert kept[mask].tolist() == [not gone for gone in expected] and not kept[~mask].any()


@pytest.mark.parametrize("x", [1e-30, 0.04, 1.0, 1e30])
def test_neighbouring_numbers_are_told_apart(x):
    """The larger one of two neighbouring float32 numbers is dropped alone."""
    least = torch.tensor(x)
    squares = torch.stack([least, torch.nextafter(least, torch.tensor(math.inf))])[None]
    assert second_moment_limit(squares, torch.ones(1, 2), least.item()) == least


@pytest.mark.parametrize("swapped", [False, True])        # the limit is in one rank alone
def test_the_second_moment_of_all_ranks(swapped, monkeypatch):
    """Two ranks of different shapes drop what one batch of both would: they share sums."""
    g = torch.Generator().manual_seed(0)
    here = torch.randn(3, 5, generator=g), torch.ones(3, 5)
    there = 3 * torch.randn(2, 7, generator=g), torch.ones(2, 7)
    here, there = (there, here) if swapped else (here, there)
    both, n = torch.cat([x.flatten() for x in (here[0], there[0])])[None], here[0].numel()
    whole = rejection_mask(both, torch.ones_like(both), {"second_moment": 0.3})
    limits = second_moment_limit(both.square(), torch.ones_like(both), 0.3)
    other = there[0].square()

    def all_reduce(sums, op=None, group=None):      # of the rank that holds `there`, in step
        assert group == "ranks"
        bits = state["low"], state["high"]
        if op == torch.distributed.ReduceOp.MAX:    # in the end, the largest that any keeps
            x = torch.tensor(bits[0], dtype=torch.int32).view(torch.float32)
            return sums.copy_(torch.maximum(sums, other[other <= x].max()))
        middle = (sum(bits) + 1) // 2
        x = torch.tensor(middle, dtype=torch.int32).view(torch.float32)
        sums += torch.tensor([other[other <= x].sum(dtype=torch.float64), (other <= x).sum()])
        fits = sums[0] <= 0.3 * sums[1]
        state["low"], state["high"] = (middle, bits[1]) if fits else (bits[0], middle - 1)

    state = {"low": 0, "high": 0x7F800000}
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    alone = rejection_mask(*here, {"second_moment": 0.3})
    state = {"low": 0, "high": 0x7F800000}
    kept = rejection_mask(*here, {"second_moment": 0.3}, group="ranks")
    state = {"low": 0, "high": 0x7F800000}
    assert second_moment_limit(here[0].square(), here[1], 0.3, "ranks") == limits
    assert torch.equal(kept, here[0].square() <= limits)
    assert torch.equal(kept.flatten(), whole[0, :n])
    assert torch.equal(kept, alone) == swapped


def test_a_rank_alone_finds_the_limit_by_halving_too(monkeypatch):
    """Even between neighbours among the float32 numbers, of which the larger one is too much."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    for a in torch.rand(8, generator=torch.Generator().manual_seed(0)):
        pair = torch.stack([a, a.nextafter(torch.tensor(1.0))])[None]
        for group in (None, "ranks"):
            assert second_moment_limit(pair, torch.ones(1, 2), a.item(), group) == a
    far = torch.full((1, 2), -3.0)                              # no bound: ∞ · 0 must not be NaN
    assert rejection_mask(far, torch.ones(1, 2), {"second_moment": math.inf}, group="ranks").all()


@pytest.mark.parametrize("group", [None, "ranks"])
@pytest.mark.parametrize("mask, bound, limit", [
    ([1, 1, 1], math.inf, math.inf), ([1, 1, 0], math.inf, 0.25), ([1, 0, 0], 1e30, 0.25),
    ([1, 1, 1], 1e30, 0.25), ([0, 0, 1], math.inf, math.inf), ([0, 0, 1], 1.0, 0.0),
    ([0, 0, 0], math.inf, 0.0)])
def test_an_infinite_square_is_kept_by_an_infinite_bound_alone(
        mask, bound, limit, group, monkeypatch):
    """eq:second-moment: in one process as over ranks; padding is no value, infinite or not."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    log_rho, mask = torch.tensor([[0.5, 0.25, math.inf, -math.inf]]), torch.tensor([[*mask, 0]])
    assert second_moment_limit(log_rho.square(), mask, bound, group) == limit
    kept = rejection_mask(log_rho, mask, {"second_moment": bound}, group=group)
    assert kept.tolist() == (mask.bool() & (log_rho.square() <= limit)).tolist()


def test_what_is_logged_of_the_second_moment_is_the_largest_term_that_stays():
    """eq:second-moment: the logged bound is the largest kept term, the same on every rank.

    The metrics merge as others do.
    """
    log_rho = f64([[0.1, -0.2, 0.15, 2.0, -0.1], [0.3, 0.0, 0.0, -3.0, 0.2]])
    mask, config = torch.ones(2, 5), Config(rollout_rs={"second_moment": 0.04})
    seen = Evidence(log_rho, mask.bool())
    _, interval, below, above = CRITERIA["second_moment"].judge(seen, 0.04)
    assert interval[1] == torch.tensor(0.3).double().square().float()
    assert not below.any() and above.sum() == 2
    whole = correct(log_rho, torch.zeros_like(log_rho), mask, config).metrics
    limit = float(interval[1])
    limited = log_rho.square().float().clamp(max=limit).double()
    prefix = "rollout_corr/rollout_rs_second_moment"
    assert close(whole[f"{prefix}_std"], limited.std(correction=0), gamma(8))   # of float32 terms
    assert whole[f"{prefix}_seq_fraction_high"] == 1                # both rows' means are above
    assert close(whole[f"{prefix}_masked_fraction"], 0.2)
    parts = [correct(log_rho[i:i + 1], torch.zeros(1, 5).double(), mask[:1], config)
             for i in (0, 1)]
    alone = merge(parts)            # each by its own limit: without a group they cannot agree
    assert close(alone[f"{prefix}_masked_fraction"], 0.2)
    assert alone[f"{prefix}_max"] == whole[f"{prefix}_max"] == 9.0


def test_nothing_is_kept_where_the_smallest_term_is_above_the_bound():
    apart = torch.tensor([[1.0, -2.0]])
    assert second_moment_limit(apart.square(), torch.ones(1, 2), 0.5) == 0
    assert not rejection_mask(apart, torch.ones(1, 2), {"second_moment": 0.5}).any()
