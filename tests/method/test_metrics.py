"""metrics.py: each metric is what its name says, counted by hand; parts merge exactly.

`by_hand` computes every metric from lists of numbers, one response after another, without torch.
What the peers themselves return is compared in test_peers.py.
"""

import itertools
import math
import random

import mpmath
import pytest
import torch

from three_policies.correction import Correction, correct
from three_policies.metrics import Counted, Statistics, merge, offpolicy_metrics, to_host
from three_policies.oracle import (close, f64)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import GOOD, KNOWN, X
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


# --------------------------------------------------------------------------------- metrics, by hand

def exp(x, bound=20.0):
    return math.exp(max(-bound, min(bound, x)))


def mean(values):
    return sum(values) / len(values) if values else 0.0


def std(values, lost=0):
    squares = sum((v - mean(values)) ** 2 for v in values)
    return math.sqrt(squares / max(1, len(values) - lost)) if values else 0.0


def ess(values):
    squares = sum(v * v for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def spread(prefix, rows, center, weights=True):
    """Return the metrics of a list of numbers for every response."""
    flat, means = [v for row in rows for v in row], [mean(row) for row in rows]
    found = {"mean": mean(flat), "max": max(flat, default=0), "min": min(flat, default=0),
             "seq_mean": mean(means), "seq_max": max(means, default=0),
             "seq_min": min(means, default=0), "seq_std": std(means, 1),
             "seq_max_deviation": max((abs(m - center) for m in means), default=0)}
    if weights:
        found |= {"std": std(flat), "eff_sample_size": ess(flat), "seq_eff_sample_size": ess(means)}
    return {f"{prefix}_{name}": value for name, value in found.items()}


def at(level, rows):
    """Return log ρ of a level, on every token."""
    if level == "token":
        return rows
    if level == "prefix":
        return [list(itertools.accumulate(row)) for row in rows]
    return [[sum(row) / (len(row) if level == "geometric" else 1)] * len(row) for row in rows]


def z(values):
    squares = sum(v * v for v in values)
    return sum(values) / math.sqrt(squares) if squares else 0.0


def share(rows, of_rows=False):
    flat = [any(row) for row in rows] if of_rows else [v for row in rows for v in row]
    return mean([float(v) for v in flat])


def of_ratio(prefixes, logs, applied, bounds, by_row):
    """Return the metrics of ρ and of the applied weights, with shares beyond the bounds."""
    lo, hi = 0 if bounds[0] is None else bounds[0], math.inf if bounds[1] is None else bounds[1]
    rho, found = [[exp(x) for x in row] for row in logs], {}
    for prefix, rows in zip(prefixes, (rho, applied), strict=False):
        found |= spread(prefix, rows, 1)
        found |= {
            f"{prefix}_ratio_fraction_low": share(
                [[lo > 0 and x < math.log(lo) for x in row] for row in logs], by_row),
            f"{prefix}_ratio_fraction_high": share(
                [[hi < math.inf and x > math.log(hi) for x in row] for row in logs], by_row),
            f"{prefix}_seq_fraction_low": mean([float(mean(row) < lo) for row in rho]),
            f"{prefix}_seq_fraction_high": mean([float(mean(row) > hi) for row in rho])}
    return found


def second_moment(rows, bound):
    """Return the largest term up to which the mean is at most `bound`; 0 where there is none."""
    flat = [v for row in rows for v in row]
    return max((v for v in flat if mean([w for w in flat if w <= v]) <= bound), default=0.0)


def of_criterion(name, bound, logs, advantages, mu):
    """Return the metrics of one criterion, and which tokens it rejects."""
    prefix = f"rollout_rs_{name}"
    limited = [[max(-20.0, min(20.0, x)) for x in row] for row in logs]
    estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    if name == "opsm":
        rows, least, most = at("geometric", [[-x for x in row] for row in logs]), -math.inf, bound
    elif name == "second_moment":
        rows = [[torch.tensor(x * x).float().item() for x in row] for row in logs]
        least, most = -math.inf, second_moment(rows, bound)
    elif name.startswith("token_tv"):
        apart = [[math.exp(min(0.0, m + x)) - math.exp(m) for x, m in zip(*pair)]
                 for pair in zip(logs, mu)]
        signs = [[(a > 0) - (a < 0) if name.endswith("outward") else 1 if v > 0 else -1
                  for a, v in zip(*pair)] for pair in zip(advantages, apart)]
        rows = [[a * s for a, s in zip(*pair)] for pair in zip(apart, signs)]
        least, most = -math.inf, bound
    else:
        rows = [[estimate[name[-2:]](x) for x in row] for row in limited]
        least, most = -math.inf, bound
        if name.endswith("k1"):
            least, most = (-math.inf if bound[1] is None else -math.log(bound[1]),
                           math.inf if bound[0] is None else -math.log(bound[0]))
    lowest = highest = rows
    if name.startswith("seq_max"):
        lowest, highest = ([[end(row)] * len(row) for row in rows] for end in (min, max))
    elif name.startswith("seq"):
        lowest = highest = at("sequence" if name.startswith("seq_sum") else "geometric", rows)
    judged = lowest, highest
    if name.endswith("k1"):                     # judged as it is, reported within ±20 a token
        own = [[-x for x in row] for row in logs]
        level = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}.get(name[:-3])
        judged = [at(level, own)] * 2 if level else [
            [[end(row)] * len(row) for row in own] for end in (min, max)]
    low = [[v < least for v in row] for row in judged[0]]
    high = [[v > most for v in row] for row in judged[1]]
    if name == "opsm":
        high = [[h and a < 0 for h, a in zip(*pair)] for pair in zip(high, advantages)]
    gone = [[a or b for a, b in zip(*pair)] for pair in zip(low, high)]
    found = spread(prefix, highest, 0, weights=False)
    found[f"{prefix}_std"] = std([max(least, min(most, v)) for row in highest for v in row])
    for end, hit, far in (("low", low, [mean(row) < least for row in highest]),
                          ("high", high, [mean(row) > most for row in highest])):
        by_row = not name.startswith("token") and name != "second_moment"
        found[f"{prefix}_fraction_{end}"] = share(hit, by_row)
        found[f"{prefix}_seq_fraction_{end}"] = (
            share(hit, True) if by_row else mean([float(f) for f in far]))
    found |= {f"{prefix}_masked_fraction": share(gone),
              f"{prefix}_seq_masked_fraction": share(gone, True)}
    level = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}.get(name)
    if level:
        found |= of_ratio([f"{prefix}_rho"], at(level, logs), None, bound, level != "token")
    return found, gone


def by_hand(train, rollout, mask, config, advantages):
    """Return {metric: value} of a batch; responses without a token are left aside."""
    def listed(x):
        return [[v for v, m in zip(row, on) if m]
                for row, on in zip(x.tolist(), mask.tolist()) if any(on)]
    logs = [[a - b for a, b in zip(*rows)] for rows in zip(listed(train), listed(rollout))]
    flat, rho = [x for row in logs for x in row], [exp(x) for row in logs for x in row]
    ppl = {name: [-mean(row) for row in listed(x)]
           for name, x in (("training", train), ("rollout", rollout))}
    apart = [-mean(row) for row in logs]
    found = {"kl": -mean(flat), "k3_kl": mean([r - 1 - x for r, x in zip(rho, flat)]),
             "chi2_token": mean([r * r - 1 for r in rho]), "is_ratio_mean": mean(rho),
             "is_ratio_std": std(rho, 1),
             "is_ratio_max": max(rho, default=0), "is_ratio_min": min(rho, default=0),
             "chi2_seq": mean([exp(2 * sum(row), 40) - 1 for row in logs]),
             "log_ppl_diff": mean(apart), "log_ppl_diff_max": max(apart, default=0),
             "log_ppl_diff_min": min(apart, default=0),
             "log_ppl_abs_diff": mean([abs(x) for x in apart]),
             "ppl_ratio": mean([exp(x, 80) for x in apart]),
             "kl_z": z([-x for x in flat]), "is_ratio_z": z([r - 1 for r in rho])}
    for name, values in ppl.items():
        found |= {f"{name}_log_ppl": mean(values),
                  f"{name}_ppl": mean([exp(x, 80) for x in values])}
    if config.rollout_is is not None:
        found |= weights_by_hand(logs, config)
    kept = [[True] * len(row) for row in logs]
    for name, bound in config.rollout_rs.items():
        metrics, gone = of_criterion(name, bound, logs, listed(advantages), listed(rollout))
        found |= metrics
        if not config.metrics_only:
            kept = [[k and not g for k, g in zip(*rows)] for rows in zip(kept, gone)]
    veto = (config.rollout_rs.get("seq_max_k1") or (None,))[0]
    vetoed = [[veto is not None and x < math.log(veto) for x in row] for row in logs]
    gone = [[not k for k in row] for row in kept]
    return found | {"rollout_is_catastrophic_token_fraction": share(vetoed),
                    "rollout_is_veto_fraction": share(vetoed, True),
                    "rollout_rs_masked_fraction": share(gone),
                    "rollout_rs_seq_masked_fraction": share(gone, True),
                    "all_rejected": float(bool(kept) and not any(k for row in kept for k in row))}


def weights_by_hand(logs, config):
    level, bound = config.rollout_is, config.rollout_is_threshold
    logs = at(level, logs)
    if isinstance(bound, tuple):
        inside = [[(bound[0] is None or x >= math.log(bound[0]))
                   and (bound[1] is None or x <= math.log(bound[1]))
                   for x in row] for row in logs]
        applied = [[exp(x) * keep for x, keep in zip(*rows)] for rows in zip(logs, inside)]
        zeroed = [[not keep for keep in row] for row in inside]
    else:
        applied = [[min(exp(x), bound) for x in row] for row in logs]
    bounds = bound if isinstance(bound, tuple) else (1 / bound, bound)
    if config.rollout_is_count_below is not None:
        bounds = config.rollout_is_count_below, bounds[1]
    found = of_ratio(["rollout_is_raw", "rollout_is"], logs, applied, bounds, level == "sequence")
    per_sequence = float(bool(logs) and level in ("sequence", "geometric"))
    if config.metrics_only:
        found = {name: value for name, value in found.items() if name.startswith("rollout_is_raw")}
        return found | {"rollout_is_per_sequence": per_sequence}
    found["rollout_is_per_sequence"] = per_sequence
    if isinstance(bound, tuple):
        found |= {"rollout_is_masked_fraction": share(zeroed),
                  "rollout_is_seq_masked_fraction": share(zeroed, True)}
    if config.rollout_is_batch_normalize:
        of_tokens = level in ("token", "prefix")
        found["rollout_is_batch_norm_factor"] = found[
            "rollout_is_mean" if of_tokens else "rollout_is_seq_mean"]
    return found


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
