"""metrics.py: each metric is what its name says, counted by hand; parts merge exactly.

`by_hand` computes every metric from lists of numbers, one response after another, without torch.
What the peers themselves return is compared in test_presets_and_peers.py.
"""

import math
import random

import mpmath
import pytest
import torch

from three_policies.correction import Correction, correct
from three_policies.metrics import Counted, Statistics, merge, offpolicy_metrics, to_host
from three_policies.oracle import close, f64
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import GOOD, KNOWN, X
from three_policies.tests.support.metrics_by_hand import at, by_hand
from three_policies.tests.support.tolerances import NO_SPREAD, gamma

# --------------------------------------------------------------------------------------- statistics

ASKED = {how: how for how in ("mean", "std", "sample_std", "min", "max", "ess")}


def collected(values, mask):
    return Statistics.of([(Counted.of(mask).moments(values), ASKED)])


def read(statistics):
    return {name.removeprefix("rollout_corr/"): value
            for name, value in statistics.metrics().items()}


def reduced(x):
    """Return every reduction of a flat tensor, by torch."""
    n = len(x)
    return {"mean": x.mean(), "std": x.std(correction=0), "min": x.min(), "max": x.max(),
            "sample_std": x.std() if n > 1 else x.new_zeros(()),
            "ess": x.sum() ** 2 / (n * x.square().sum())}


@certifies("float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_statistics_merge_exactly(dtype, pieces):
    """eq:merge: any split gives what torch gives on the whole, even with an empty part."""
    generator = torch.Generator().manual_seed(pieces)
    values = torch.randn(40, 3, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    tolerance = gamma(16) if dtype == torch.float32 else 1e-12      # a row of three, as in an ESS
    mask = torch.rand(40, 3, generator=generator) < 0.6
    cuts = sorted(torch.randint(0, 40, (pieces - 1,), generator=generator).tolist())
    parts = []
    for a, b in zip([0, *cuts, 40], [*cuts, 40, 40]):               # the last one is empty
        tokens = Counted.of(mask[a:b])
        parts.append(Statistics.of([
            (tokens.moments(torch.where(mask, values, math.nan)[a:b]), ASKED),
            (tokens.moments(2 - values[a:b]), {"other": "mean", "alias": "mean"})]))
    out = read(parts[0].merge(parts[1:]))
    expected = reduced(values.detach().double()[mask])
    for how, value in expected.items():
        assert close(out[how], value, tolerance)
        assert out[how].ndim == 0 and not out[how].requires_grad
    assert close(out["other"], 2 - expected["mean"], tolerance) and out["other"] == out["alias"]
    assert set(out) == {*ASKED, "other", "alias"}


@pytest.mark.parametrize("values", [
    [], [3.0], [-2.0, -2.0], [1e4, 1e4 + 1], [0.1, 0.2], [0.0, 0.0]])
def test_statistics_of_few_values(values):
    """eq:merge: nothing gives 0; one value has no spread; equal ones no negative variance."""
    x = f64([[*values, 7.0]])
    found = read(collected(x, torch.arange(x.shape[1])[None] < len(values)))
    expected = reduced(x[0, :-1]) if values else dict.fromkeys(ASKED, 0.0)
    for how, value in expected.items():
        value = 0.0 if values == [0.0, 0.0] and how == "ess" else value
        assert close(found[how], value, 1e-8), how


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_statistics_of_no_tokens_at_all(shape):
    """eq:merge: every statistic of nothing is 0."""
    found = read(collected(torch.zeros(shape), torch.ones(shape)))
    assert all(value == 0 for value in found.values())


def test_statistics_widen_half_precision():
    """eq:merge: bfloat16 values are summed as what they are.

    Their 8 bits and the 10 of 1 000 are exact in float32.
    """
    x = torch.full((3, 1000), 0.1, dtype=torch.bfloat16)
    found = read(collected(x, torch.ones(3, 1000)))
    assert found["mean"] == x[0, 0].item() and found["std"] == 0


@pytest.mark.parametrize("center", [1.0, math.e])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e-4, 1e-5])
def test_statistics_see_a_small_spread_in_float32(spread, center):
    """eq:merge: the spread of weights 1 ± 1e-5 is not lost in Σx², and a constant ρ has none."""
    x = center + spread * torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    exact = x.double().std(correction=0).item()
    found = read(collected(x, torch.ones(5, 1000)))["std"].item()
    # Σ(x − mean)² is a sum of 1 000 squares in float32, and Σx²/n − mean² cancels in float64.
    assert found == pytest.approx(exact, rel=gamma(1004), abs=NO_SPREAD * center)


def test_statistics_over_ranks(monkeypatch):
    """eq:merge over a process group: sums are summed, extremes maximised; the own part stays."""
    here, there = collected(X[:2], GOOD[:2]), collected(X[2:], GOOD[2:])

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        assert group == "ranks"
        summed = op == torch.distributed.ReduceOp.SUM
        tensor.copy_(tensor + there.table[:, :3] if summed
                     else torch.maximum(tensor, there.table[:, 3:]))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    before = here.metrics()
    out = read(here.all_reduce("ranks"))
    assert all(close(out[how], value) for how, value in reduced(X[GOOD]).items())
    assert before == here.metrics()


def drawn(rng):
    """Draw a batch and a configuration: with empty responses, huge ρ, bounds that exclude 1."""
    rows, length, scale = rng.randint(1, 6), rng.randint(1, 8), rng.choice([1e-3, 0.3, 3.0, 40.0])
    g = torch.Generator().manual_seed(rng.randrange(2 ** 20))
    rollout = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64)
    train = rollout + scale * torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < rng.choice([0.4, 0.8, 1.0])
    signs = torch.randint(-1, 2, (rows, 1), generator=g).double().expand(rows, length)

    def pair():
        lo, hi = sorted(rng.uniform(0.05, 3) for _ in range(2))
        return rng.choice([(lo, hi), (None, hi), (lo, None)])
    criteria = {name: pair() if name.endswith("k1") else rng.uniform(1e-3, 3)
                for name in rng.sample(KNOWN, rng.randint(0, 4))}
    config = Config(rng.choice([None, "token", "prefix", "sequence", "geometric"]),
                    rng.choice([0.05, 0.7, 2.0, pair()]), rng.random() < 0.5, criteria,
                    metrics_only=rng.random() < 0.2,
                    rollout_is_count_below=rng.choice([None, 0.0, 0.3]))
    return train, rollout, mask, config, signs


@pytest.mark.parametrize("seed", range(8))
def test_every_metric_is_what_it_is_by_hand(seed):
    """eq:chi2, eq:ess, eq:levels, eq:perplexity, eq:rejection: each metric is that by hand.

    So are those of eq:kl-estimators.
    """
    rng = random.Random(seed)
    for _ in range(60):
        train, rollout, mask, config, signs = drawn(rng)
        result = correct(train, rollout, mask, config, signs)
        found, expected = read(result.statistics), by_hand(train, rollout, mask, config, signs)
        assert set(found) == set(expected)
        for name, value in expected.items():
            # A standard deviation of 0 is the root of a cancelling difference: 1e-8 of its mean.
            of_mean = expected.get(name.removesuffix("std") + "mean", 0.0)
            tolerance = 1e-7 * max(1.0, abs(of_mean)) if name.endswith("std") else 1e-9
            near = pytest.approx(value, rel=1e-6, abs=tolerance)
            assert found[name].item() == near, (name, config)


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_single_precision_is_as_good_as_double(scale, level):
    """Sums over 2 000 tokens in float32 lose nothing that the log-probs themselves still have.

    In the worst case a sum of n loses n roundings of 6e-8. In an order with independent roundings
    it loses √n of them (Higham and Mary 2019), 3e-6 here. 2e-4 is allowed.
    """
    g = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(40, 2000, generator=g)
    train = rollout + scale * torch.randn(40, 2000, generator=g)
    mask = torch.arange(2000) < torch.randint(1, 2001, (40, 1), generator=g)
    config = Config(level, 1.0 + scale, rollout_rs={"token_k1": (1 - scale, 1 + scale)})
    single = to_host(correct(train, rollout, mask, config).metrics)
    double = to_host(correct(train.double(), rollout.double(), mask, config).metrics)
    # torch's e^x is within one unit in the last place, ε, of the exact one; on some processors its
    # errors lean to one side. A z divides their mean, at most ε, by the spread over √N.
    of_z = torch.finfo(torch.float32).eps * mask.sum().item() ** 0.5 / scale
    for name, value in single.items():
        tolerance = of_z if name.endswith("_z") else 1e-8
        assert value == pytest.approx(double[name], rel=2e-4, abs=tolerance), name


@pytest.mark.parametrize("spread", [1e-4, 1e-5, 1e-6])
def test_k3_and_z_see_a_mismatch_of_rounding_alone(spread):
    """eq:kl-estimators, eq:martingale: ρ − 1 is summed, since ρ itself would round it away.

    Each ρ − 1 may be ε·spread off, and so may its mean.
    """
    x = spread * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    single, double = (to_host(offpolicy_metrics(log_rho, torch.zeros_like(x), torch.ones(64, 1000)))
                      for log_rho in (x, x.double()))
    off = 4 * torch.finfo(torch.float32).eps
    k3, z = "rollout_corr/k3_kl", "rollout_corr/is_ratio_z"
    assert single[k3] == pytest.approx(double[k3], abs=off * spread)
    assert single[z] == pytest.approx(double[z], abs=off * x.numel() ** 0.5)


@pytest.mark.parametrize("level", ["token", "prefix", "sequence", "geometric"])
@pytest.mark.parametrize("spread", [1e-7, 1e-8, 1e-10])
def test_a_spread_far_below_the_root_of_float64s_precision_is_measured(spread, level):
    """eq:kl-estimators: k3 and all deviations of ρ and of weights equal to it, by mpmath.

    A weight is stored beside 1, to ε/2; a few roundings of it are what its deviation may lose.
    """
    g = torch.Generator().manual_seed(0)
    log_rho, mask = spread * torch.randn(6, 40, generator=g).double(), torch.ones(6, 40)
    found = to_host(correct(log_rho, 0 * log_rho, mask, Config(level, 2.0)).metrics)
    found = {name.removeprefix("rollout_corr/"): x for name, x in found.items()}

    def std(values, lost=0):
        middle = mpmath.fsum(values) / len(values)
        squares = mpmath.fsum((x - middle) ** 2 for x in values)
        return float(mpmath.sqrt(squares / (len(values) - lost)))
    with mpmath.workdps(40):
        rows = [[mpmath.expm1(mpmath.mpf(x)) for x in row]
                for row in at(level, [[*map(mpmath.mpf, row)] for row in log_rho.tolist()])]
        flat, means = sum(rows, []), [mpmath.fsum(row) / len(row) for row in rows]
        tokens = [*map(mpmath.mpf, log_rho.flatten().tolist())]
        k3 = float(mpmath.fsum(mpmath.expm1(x) - x for x in tokens) / len(tokens))
        expected = {"is_ratio_std": std([*map(mpmath.expm1, tokens)], 1)} | {
            f"rollout_is_{raw}{name}": of for raw in ("", "raw_")
            for name, of in (("std", std(flat)), ("seq_std", std(means, 1)))}
    # Two means, each off by ε·spread, of which k3 is the small difference spread²/2.
    assert found["k3_kl"] == pytest.approx(k3, rel=8 * 2.0 ** -53 / max(spread, 1e-8))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9 + 8 * 2.0 ** -53 / value), name


def test_a_ratio_of_next_to_nothing_is_not_0():
    """eq:ess: e⁻¹⁹ − 1 rounds to −1 in float32, but equal weights still have ESS/N = 1."""
    for dtype in (torch.float32, torch.float64):
        lower = torch.full((2, 3), -19.0, dtype=dtype)
        found = to_host(correct(lower, 0 * lower, torch.ones(2, 3), Config("token")).metrics)
        for name in ("mean", "min", "max"):
            assert found[f"rollout_corr/is_ratio_{name}"] == pytest.approx(
                math.exp(-19), rel=gamma(8))       # an exponential, its mean, and what joins them
        assert found["rollout_corr/rollout_is_raw_eff_sample_size"] == pytest.approx(
            1, rel=gamma(8))


def test_one_infinite_log_prob_makes_infinite_metrics_and_no_nan():
    """eq:merge: a row with log π = −∞ has an infinite mean, and no differences from it."""
    train = torch.tensor([[-1.0, -math.inf], [-1.0, -2.0]])
    found = to_host(offpolicy_metrics(train, torch.full((2, 2), -1.0), torch.ones(2, 2)))
    assert found["rollout_corr/kl"] == found["rollout_corr/training_log_ppl"] == math.inf
    assert found["rollout_corr/is_ratio_mean"] == pytest.approx(
        (2 + math.exp(-1) + math.exp(-20)) / 4, rel=gamma(8))


def test_a_row_of_tiny_ratios_is_summed_as_ratios_and_one_of_ratios_near_1_as_differences():
    """eq:ess: each of two rows loses its digits if the other's way is taken."""
    tiny, near = torch.full((1, 64), -15.0), torch.full((1, 64), 1e-6)
    tiny[0, 0] = -9
    for row in tiny, near:
        exact = row.double().exp()
        found = offpolicy_metrics(row, 0 * row, torch.ones(1, 64))
        mean = found["rollout_corr/is_ratio_mean"].item()
        assert mean == pytest.approx(exact.mean().item(), rel=gamma(64))
        assert mean - 1 == pytest.approx(exact.mean().item() - 1, rel=gamma(64))


def test_metrics_of_two_policies_hold_no_graph():
    train, rollout = (torch.full((2, 2), -1.0, requires_grad=True) for _ in range(2))
    found = offpolicy_metrics(train, rollout, torch.ones(2, 2))
    assert not any(x.requires_grad for x in found.values())


def test_offpolicy_metrics_are_those_of_a_correction():
    g = torch.Generator().manual_seed(0)
    train, rollout = torch.randn(2, 5, 7, generator=g, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=g) < 0.7
    found = offpolicy_metrics(train, rollout, mask)
    every = correct(train, rollout, mask, Config()).metrics
    assert found.items() <= every.items()
    assert {"rollout_corr/kl", "rollout_corr/ppl_ratio"} <= set(found)


def test_what_cannot_be_merged_is_refused_and_rows_of_one_correction_count_once():
    """eq:merge: eight micro-batches of one correction would make z √8 times as large."""
    g = torch.Generator().manual_seed(0)
    train, rollout, mask = *torch.randn(2, 8, 7, generator=g), torch.ones(8, 7)
    config = Config("token")
    whole = correct(train, rollout, mask, config)
    rows = [whole.rows(slice(i, i + 1)) for i in range(8)]
    assert to_host(merge(rows)) == to_host(whole.metrics)
    def parts():
        return (correct(train[i:i + 1], rollout[i:i + 1], mask[:1], config) for i in range(8))
    assert to_host(merge(parts())) == to_host(merge([*parts()]))        # no part takes another's id
    other = correct(train, rollout, mask, Config("sequence", rollout_rs={"token_k2": 1.0}))
    wider = correct(train, rollout, mask, Config("token", 3.0))
    for unlike in ([], [whole, other], [whole, wider], [whole, Correction(None, mask)]):
        with pytest.raises(ValueError, match="by one configuration"):
            merge(unlike)


def test_merged_parts_are_the_whole():
    g = torch.Generator().manual_seed(0)
    train, rollout = torch.randn(2, 6, 7, generator=g, dtype=torch.float64)
    config = Config("token", rollout_rs={"seq_mean_k1": (0.5, 1.5)})
    parts = [correct(train[i], rollout[i], torch.ones(len(i), 7), config)
             for i in ([0], [1, 2, 3], [4, 5])]
    whole = to_host(correct(train, rollout, torch.ones(6, 7), config).metrics)
    assert to_host(merge(parts)) == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_metrics_reach_the_host_as_they_were():
    """A count of 2²⁴ + 1 is no float32, and what is no tensor stays as it is, in its place."""
    found = to_host({"count": torch.tensor(2 ** 24 + 1), "mean": torch.tensor(0.5), "seconds": 1.5})
    assert list(found.items()) == [("count", 2 ** 24 + 1), ("mean", 0.5), ("seconds", 1.5)]


def test_ratios_that_are_all_small_keep_their_digits():
    """Near e⁻⁸ they are summed as ratios: in ρ − 1 float32 would keep four digits of them."""
    row = torch.full((1, 64), -8.0)
    row[0, ::2] = -8.5
    found = offpolicy_metrics(row, 0 * row, torch.ones(1, 64))["rollout_corr/is_ratio_mean"].item()
    assert found == pytest.approx(row.double().exp().mean().item(), rel=gamma(64))
