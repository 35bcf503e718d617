"""correction.py: the peers' own figures, properties that hold for any batch, and the dialects.

`peers.json.gz` holds what verl 0.6.0, 0.6.1, 0.9.1 and SkyRL 0.3.0 return, as published, on twelve
random batches in float64. Each figure is reproduced to 1e-6, or it is one of the deviations below,
and then the test asserts what theirs is instead.
"""

import gzip
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerances import gamma

from adapters import names
from adapters.dialects import from_dialect
from correction import HISTORICAL, PRESETS, RolloutCorrectionConfig, correct, importance_weights
from rejection import CRITERIA
from estimators import (SAFETY_BOUND, aggregate_log_ratio, chi_square, effective_sample_size, exp_ratio,
                        kl_estimate, perplexity)
from losses import aggregate_loss
from doctor import diagnose
from metrics import merge, offpolicy_metrics, to_host

# The same examples on every run, and no verdict about the speed of the machine.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

Config = RolloutCorrectionConfig
K1 = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
VETO = {"seq_max_k1": (1e-4, None)}
PEERS = json.loads(gzip.decompress((Path(__file__).parent / "peers.json.gz").read_bytes()))


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def cases(peer):
    for batch in PEERS:
        train, rollout, mask, values = (f64(batch[k]) for k in ("train_log_prob", "rollout_log_prob", "mask", "values"))
        for case in batch["cases"]:
            if case["peer"] == peer:
                yield train, rollout, mask, values, case["config"], case["out"]


def same(ours, theirs):
    """Relative 1e-6; the 2e-8 beside it is verl's 1e-8 in every denominator."""
    return abs(ours - theirs) <= 1e-6 * max(abs(ours), abs(theirs)) + 2e-8


def same_std(ours, theirs, size):
    """Theirs is the root of E[w²] − mean², with 1e-8 in both denominators: compare before the root."""
    return abs(ours**2 - theirs**2) <= 1e-6 * theirs**2 + 2e-8 * (1 + size**2)


def ours(train, rollout, mask, config, named=names.verl):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                     # that k1 bounds are inverted: tested below
        result = correct(train, rollout, mask, from_dialect(config))
    metrics = {name.removeprefix("rollout_corr/"): v for name, v in named(to_host(result.metrics)).items()}
    weights = torch.ones_like(mask) if result.weights is None else result.weights
    return weights * result.mask, metrics


def assert_product(product, mask, out):
    """weights × mask: verl 0.6.0 puts rejection into the weights, SkyRL leaves weights on padding."""
    theirs = torch.ones_like(mask) if out.get("weights") is None else f64(out["weights"])
    theirs = theirs * (mask if out.get("mask") is None else f64(out["mask"])) * mask
    torch.testing.assert_close(product, theirs, rtol=1e-6, atol=1e-12)


def spread(values, mask):
    """Standard deviation (n below it) and ESS over valid entries."""
    x = values[mask.bool()]
    return x.std(unbiased=False).item(), effective_sample_size(values, mask).item()


def test_verl_0_9_1_is_reproduced():
    compared = 0
    for train, rollout, mask, _, config, out in cases("verl-0.9.1"):
        product, metrics = ours(train, rollout, mask, config)
        assert_product(product, mask, out)
        for name, theirs in out["metrics"].items():
            name = name.removeprefix("rollout_corr/")
            if name.endswith("_std") and "seq_std" not in name:
                assert same_std(metrics[name], theirs, metrics[name.removesuffix("_std") + "_mean"]), (name, config)
            else:
                assert same(metrics[name], theirs), (name, config, metrics[name], theirs)
            compared += 1
    assert compared > 5000


def test_verl_0_6_1_is_reproduced_with_raw_weights_under_raw_names():
    for train, rollout, mask, _, config, out in cases("verl-0.6.1"):
        product, metrics = ours(train, rollout, mask, config, names.verl_06)
        assert_product(product, mask, out)
        for name, theirs in out["metrics"].items():
            name = name.removeprefix("rollout_corr/")
            prefix = "rollout_is" if name.startswith("rollout_is") else "rollout_rs"
            if name in (f"{prefix}_std", f"{prefix}_eff_sample_size"):
                # deviation: theirs are taken after clamping ρ into its bounds, which hides degeneracy
                level = config[prefix]
                upper = config[f"{prefix}_threshold"]
                lower = 1 / upper if prefix == "rollout_is" else config["rollout_rs_threshold_lower"]
                rho = exp_ratio(aggregate_log_ratio(train - rollout, mask, level)) * mask
                clamped = spread(rho.clamp(lower, upper), mask)
                assert (same(clamped[1], theirs) if name.endswith("size") else same_std(clamped[0], theirs, upper))
                honest = metrics[name.replace("rollout_is", "rollout_is_raw")]
                assert honest == pytest.approx(spread(rho, mask)[name.endswith("size")], rel=1e-6, abs=1e-9)
            elif name.endswith("masked_fraction"):          # deviation: theirs leaves the veto out
                assert same(metrics[name.replace("rollout_rs", f"rollout_rs_{K1[config['rollout_rs']]}")], theirs)
            else:
                raw = name.replace("rollout_is_", "rollout_is_raw_")
                assert same(metrics.get(raw, metrics.get(name)), theirs), (name, config)


def test_verl_0_6_0_is_reproduced_with_raw_weights_under_raw_names():
    for train, rollout, mask, _, config, out in cases("verl-0.6.0"):
        product, metrics = ours(train, rollout, mask, config, names.verl_06)
        assert_product(product, mask, out)
        upper, lower = config["rollout_is_threshold"], config["rollout_is_threshold_lower"]
        other = lower is not None                           # than 1/upper, which the weights' metrics count
        lower = 1 / upper if lower is None else lower
        criterion = K1[config["rollout_is_level"]]
        rho = exp_ratio(aggregate_log_ratio(train - rollout, mask, config["rollout_is_level"])) * mask
        for name, theirs in out["metrics"].items():
            name = name.removeprefix("mismatch/").removeprefix("mismatch_")
            if name[-3:] in ("p25", "p50", "p75", "p95", "p99"):
                assert name not in metrics                  # deviation: percentiles cannot be merged
            elif name in ("rollout_is_std", "rollout_is_eff_sample_size"):
                clamped = spread(rho.clamp(lower, upper), mask)     # deviation, as in 0.6.1
                assert (same(clamped[1], theirs) if name.endswith("size") else same_std(clamped[0], theirs, upper))
            elif name.endswith("masked_fraction"):          # deviation: zeroed weights are rejection (PR 3984)
                assert config["rollout_is_mode"] == "mask" and name not in metrics
                assert same(metrics[name.replace("rollout_is", f"rollout_rs_{criterion}")], theirs), (name, config)
            elif other and name.endswith("fraction_low"):
                pass_lower = aggregate_log_ratio(train - rollout, mask, config["rollout_is_level"])
                if "seq" in name:                           # deviation: a bound that no weight of ours uses
                    share = ((rho.sum(-1) / mask.sum(-1)) < lower).double().mean()
                elif config["rollout_is_level"] == "sequence":
                    share = (pass_lower[:, 0] < math.log(lower)).double().mean()
                else:
                    share = ((pass_lower < math.log(lower)) & mask.bool()).sum() / mask.sum()
                assert same(share.item(), theirs), (name, config)
            else:
                raw = name.replace("rollout_is_", "rollout_is_raw_")
                assert same(metrics.get(raw, metrics.get(name)), theirs), (name, config)


def without(block, *keys, **changes):
    return {key: value for key, value in block.items() if key not in keys} | changes


def test_what_is_left_out_has_verls_default_in_its_figures_too():
    """verl 0.6.0 vetoes at 1e-4 unless told otherwise; 0.6.1 rejects outside [1/2, 2], whatever the weights' cap is."""
    vetoed = 0
    for train, rollout, mask, _, config, out in cases("verl-0.6.0"):
        if config["rollout_is_veto_threshold"] == 1e-4:
            assert_product(ours(train, rollout, mask, without(config, "rollout_is_veto_threshold"))[0], mask, out)
            vetoed += out["metrics"]["mismatch/rollout_is_veto_fraction"] > 0
    rejected = 0
    for train, rollout, mask, _, config, out in cases("verl-0.6.1"):
        if config["rollout_rs_threshold"] == 2.0:
            block = without(config, "rollout_rs_threshold", "rollout_rs_threshold_lower", rollout_is_threshold=5.0)
            assert_product(ours(train, rollout, mask, block)[0], mask, out)
            rejected += out["metrics"]["rollout_corr/rollout_rs_masked_fraction"] > 0
    assert vetoed and rejected                              # of batches in which there is something to reject


@pytest.mark.parametrize("level", K1)
def test_verl_0_6_0s_mask_is_weights_and_rejection_as_in_its_migration_guide(level):
    """PR 3984's example 2, and the two losses: `fixed` divides as 0.6.0 does, `kept` as 0.6.1."""
    upper = {"token": 2.0, "sequence": 5.0, "geometric": 1.01}[level]
    block = {"rollout_is_level": level, "rollout_is_mode": "mask", "rollout_is_threshold": upper,
             "rollout_is_threshold_lower": 0.8, "rollout_is_veto_threshold": None}
    config = from_dialect(block)
    assert config == Config(level, upper, rollout_rs={K1[level]: (0.8, upper)})
    if level != "geometric":                                # a level that 0.6.1's weights do not have
        assert config == from_dialect({"rollout_is": level, "rollout_is_threshold": upper, "rollout_rs": level,
                                       "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": 0.8})
    rejected = 0
    for batch in PEERS:
        train, rollout, mask, values = (f64(batch[k]) for k in ("train_log_prob", "rollout_log_prob", "mask", "values"))
        weights, kept, metrics = correct(train, rollout, mask, config)
        zeroed = importance_weights((train - rollout) * mask, mask, level, (0.8, upper))    # 0.6.0's own
        theirs = {"fixed": (values * zeroed).sum() / mask.sum(), "kept": (values * zeroed).sum() / kept.sum().clamp(min=1)}
        for denominator, counted in (("fixed", mask), ("kept", kept)):
            loss = aggregate_loss(values * weights, kept, "token-mean", denominator_mask=counted)
            torch.testing.assert_close(loss, theirs[denominator], rtol=1e-9, atol=1e-12)
        share = 1 - kept.sum() / mask.sum()
        torch.testing.assert_close(metrics["rollout_corr/rollout_rs_masked_fraction"].double(), share)
        rejected += bool(share)
    assert rejected


def test_skyrl_is_reproduced():
    for train, rollout, mask, _, config, out in cases("skyrl-0.3.0"):
        product, metrics = ours(train, rollout, mask, config, names.skyrl)
        assert_product(product, mask, out)
        padded = exp_ratio(train - rollout) * mask
        for name, theirs in out["metrics"].items():
            if name == "is_ratio_min":                      # deviation: their minimum is over padding too
                assert same(padded.min().item(), theirs)
            elif name == "is_ratio_std":                    # deviation: so is their deviation; one token is NaN
                theirs = math.nan if theirs is None else theirs
                assert metrics[name] == 0 if mask.numel() == 1 else same(padded.std().item(), theirs)
            elif name.startswith("geo_") and not same(metrics[name], theirs):
                # deviation: their second mask looks at what the first one left
                left = mask * correct(train, rollout, mask, from_dialect(
                    {k: v for k, v in config.items() if k.startswith("outlier")})).mask
                assert left.sum() < mask.sum()
                assert same(ours(train, rollout, left, config, names.skyrl)[1][name] * left.any(-1).double().mean().item(), theirs)
            else:
                assert same(metrics[name], theirs), (name, config)


def test_verl_kl_and_aggregation_are_reproduced():
    for train, rollout, mask, _, config, out in cases("verl-0.9.1-kl"):
        log_prob = train.clone().requires_grad_()
        value = kl_estimate(log_prob, rollout, config["estimator"])
        grad, = torch.autograd.grad((value * mask).sum(), log_prob)
        theirs, their_grad = f64(out["value"]), f64(out["grad"])
        if config["estimator"].startswith("k3"):            # deviation: verl's k3 is cut at 10
            cut = value.detach() > 10
            assert (theirs[cut] == 10).all()
            if config["estimator"] == "k3":
                assert (their_grad[cut & mask.bool()] == 0).all()
                grad = torch.where(cut, 0.0, grad)
            value = value.clamp(max=10)
        torch.testing.assert_close(value.detach(), theirs, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(grad, their_grad * mask, rtol=1e-6, atol=1e-9)
    for _, _, mask, values, config, out in cases("verl-0.9.1-agg"):
        assert same(aggregate_loss(values, mask, config["mode"]).item(), out["value"]), config


def test_all_cases_are_looked_at():
    tested = {"verl-0.9.1", "verl-0.6.1", "verl-0.6.0", "skyrl-0.3.0", "verl-0.9.1-kl", "verl-0.9.1-agg"}
    assert {case["peer"] for batch in PEERS for case in batch["cases"]} == tested
    assert sum(len(batch["cases"]) for batch in PEERS) == 816


# ------------------------------------------------------------------ properties of any batch

POSITIVE = st.floats(0.01, 100)
PAIR = st.tuples(POSITIVE, POSITIVE).map(lambda p: (min(p), max(p)))
OPEN = st.one_of(PAIR, PAIR.map(lambda p: (None, p[1])), PAIR.map(lambda p: (p[0], None)))


@st.composite
def configs(draw):
    criteria = draw(st.lists(st.sampled_from([*CRITERIA]), max_size=4, unique=True))
    bounds = {name: draw(OPEN if name.endswith("k1") else st.floats(1e-3, 10)) for name in criteria}
    return Config(draw(st.sampled_from([None, "token", "sequence", "geometric"])),
                  draw(st.one_of(POSITIVE, OPEN)), draw(st.booleans()), bounds)


@st.composite
def batches(draw, scale=st.sampled_from([1e-3, 0.3, 3.0, 40.0])):
    rows, length, seed = draw(st.integers(1, 6)), draw(st.integers(1, 8)), draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64)
    train = rollout + draw(scale) * torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < draw(st.sampled_from([0.4, 0.8, 1.0]))
    return train, rollout, mask, torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, length)


def assert_equal(a, b, **tolerance):
    assert (a.weights is None) == (b.weights is None)
    if a.weights is not None:
        torch.testing.assert_close(a.weights, b.weights, **tolerance)
    assert torch.equal(a.mask, b.mask)
    x, y = to_host(a.metrics), to_host(b.metrics)
    assert x.keys() == y.keys()
    for name in x:
        # a standard deviation is the root of a cancelling difference: 1e-8 where it is 0
        assert x[name] == pytest.approx(y[name], rel=1e-6, abs=1e-6 * max(1, abs(x[name])) if "std" in name else 1e-9), name


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_a_batch_of_nothing_gives_nothing(shape):
    x = torch.zeros(shape)
    for criteria in ({}, {"token_k1": (0.5, 2.0), "seq_max_k3": 0.1}):
        for level in ("token", "sequence", "geometric"):
            result = correct(x, x, x, Config(level, 2.0, True, criteria))
            assert result.weights.shape == result.mask.shape == shape
            assert all(math.isfinite(v) for v in to_host(result.metrics).values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_what_is_not_finite_is_within_no_bound(criterion, value):
    """eq:rejection: a token is kept while its statistic is ≤ the bound, and NaN is ≤ nothing. The metrics say so."""
    if criterion in ("opsm", "token_tv_outward") and value == math.inf:
        return                                  # A < 0 and π_old above π_rollout: both keep such a token, rightly
    rollout, wide = torch.full((2, 3), -1.0), (0.5, 2.0) if criterion.endswith("k1") else 0.1
    train = rollout.clone()
    train[0, 1] += value
    result = correct(train, rollout, torch.ones(2, 3), Config(rollout_rs={criterion: wide}), -torch.ones(2, 3))
    assert not result.mask[0, 1] and result.mask[1].all()
    assert any("not finite" in sentence for sentence in diagnose(result.metrics))


def test_an_impossible_token_is_rejected_by_its_probability():
    """eq:total-variation: μ = 0 and π = 0.9 is |π − μ| = 0.9, though log ρ is ∞ and log μ −∞."""
    train, rollout = torch.tensor([[0.9, math.exp(-1)]]).log(), torch.tensor([[-math.inf, -1.0]])
    for name in ("token_tv", "token_tv_outward"):
        config = Config("token", math.inf, rollout_rs={name: 0.3}, bypass_mode=True, loss_type="reinforce")
        assert correct(train, rollout, torch.ones(1, 2), config, torch.ones(1, 2)).mask.tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"])
def test_bounds_on_rho_act_however_far_from_1_they_are(name):
    """eq:rejection: nothing is exponentiated, so a bound of e^−23 or e^23 is one like any other."""
    apart = torch.tensor([[-30.0], [-22.0], [0.0], [22.0], [30.0]], dtype=torch.float64)
    kept = correct(apart, torch.zeros_like(apart), torch.ones_like(apart), Config(rollout_rs={name: (1e-10, 1e10)}))
    assert kept.mask.flatten().tolist() == [0, 1, 1, 1, 0]
    veto = correct(torch.tensor([[-31.0, -1.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2),
                   Config(rollout_rs={"seq_max_k1": (1e-10, None)}))
    assert veto.mask.sum() == 0 and veto.metrics["rollout_corr/rollout_is_veto_fraction"] == 1


def test_small_divergences_are_not_rejected_for_their_rounding():
    """e^x − 1 − x of a tiny x is rounded to below 0, which is not outside of [0, bound]."""
    train = 1e-6 * torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    criteria = {f"{level}_k3": 0.01 for level in ("token", "seq_sum", "seq_mean", "seq_max")}
    assert correct(train, torch.zeros_like(train), torch.ones(4, 100), Config(rollout_rs=criteria)).mask.all()


@given(batches(), configs(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_padding_never_matters(batch, config, garbage):
    train, rollout, mask, advantages = batch
    clean = correct(train, rollout, mask, config, advantages)
    dirty = correct(torch.where(mask, train, garbage), torch.where(mask, rollout, -garbage), mask, config,
                    torch.where(mask, advantages, garbage))
    assert_equal(clean, dirty, rtol=0, atol=0)
    if clean.weights is not None:
        assert (clean.weights[~mask] == 0).all() and not clean.weights.requires_grad
    assert not (clean.mask & ~mask).any()
    assert all(math.isfinite(v) for v in to_host(clean.metrics).values())


@given(batches(), configs(), st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result(batch, config, random):
    order = list(range(len(batch[0])))
    random.shuffle(order)
    one = correct(*batch[:3], config, batch[3])
    other = correct(*(x[order] for x in batch[:3]), config, batch[3][order])
    assert_equal(one.rows(order), other, rtol=1e-9, atol=1e-12)


@given(batches(), configs(), st.integers(0, 6))
def test_splitting_and_merging_is_exact(batch, config, at):
    whole = correct(*batch[:3], config, batch[3])
    parts = [correct(*(x[s] for x in batch[:3]), config, batch[3][s])
             for s in (slice(0, at), slice(at, None)) if len(batch[0][s])]
    merged, expected = to_host(merge(parts)), to_host(whole.metrics)
    for name in expected:
        tolerance = 1e-6 * max(1, abs(expected[name])) if "std" in name else 1e-9
        assert merged[name] == pytest.approx(expected[name], rel=1e-6, abs=tolerance), name
    assert torch.equal(torch.cat([p.mask for p in parts]), whole.mask)
    if whole.weights is not None:                           # normalised by the parts' means, then by all's
        factor = "rollout_corr/rollout_is_batch_norm_factor"
        used = [mean if (mean := to_host(p.metrics).get(factor, 0)) > 1e-8 else 1 for p in (*parts, whole)]
        weights = torch.cat([p.weights * mean for p, mean in zip(parts, used)]) / used[-1]
        torch.testing.assert_close(weights, whole.weights, rtol=1e-6, atol=1e-12)


@given(batches(), configs())
def test_an_empty_row_changes_nothing(batch, config):
    train, rollout, mask, advantages = (torch.cat([x, torch.zeros_like(x[:1])]) for x in batch)
    with_row = correct(train, rollout, mask, config, advantages)
    assert_equal(with_row.rows(slice(0, -1)), correct(*batch[:3], config, batch[3]), rtol=1e-12, atol=0)


@given(batches(), configs())
def test_criteria_are_anded_in_any_order_each_on_the_original_mask(batch, config):
    together = correct(*batch[:3], config, batch[3]).mask
    backwards = replace(config, rollout_rs=dict(reversed(config.rollout_rs.items())))
    assert torch.equal(correct(*batch[:3], backwards, batch[3]).mask, together)
    alone = batch[2].clone()
    for name, bound in config.rollout_rs.items():
        alone &= correct(*batch[:3], Config(rollout_rs={name: bound}), batch[3]).mask
    assert torch.equal(alone, together)


@given(batches(), configs(), st.floats(1, 10))
def test_loosening_a_bound_never_rejects_more(batch, config, factor):
    def loosen(bound):
        if not isinstance(bound, tuple):
            return bound * factor
        return tuple(None if end is None else end * f for end, f in zip(bound, (1 / factor, factor)))
    loose = replace(config, rollout_rs={name: loosen(bound) for name, bound in config.rollout_rs.items()})
    tight_mask, loose_mask = (correct(*batch[:3], c, batch[3]).mask for c in (config, loose))
    assert not (tight_mask & ~loose_mask).any()


@given(batches(), configs())
def test_weights_never_change_the_mask_nor_the_mask_the_weights(batch, config):
    both = correct(*batch[:3], config, batch[3])
    assert torch.equal(both.mask, correct(*batch[:3], replace(config, rollout_is=None), batch[3]).mask)
    alone = correct(*batch[:3], replace(config, rollout_rs={}), batch[3]).weights
    assert both.weights is None if alone is None else torch.equal(both.weights, alone)


@given(batches(), POSITIVE)
def test_at_one_token_all_levels_are_one(batch, cap):
    train, rollout, mask, _ = (x[:, :1] for x in batch)
    token, *others = (correct(train, rollout, mask, Config(level, cap)).weights
                      for level in ("token", "sequence", "geometric"))
    for other in others:
        torch.testing.assert_close(token, other, rtol=1e-12, atol=0)


@given(batches(scale=st.sampled_from([1e-3, 0.3])), st.sampled_from(["token", "sequence", "geometric"]))
def test_no_cap_is_plain_importance_sampling(batch, level):
    train, rollout, mask, _ = batch
    log_rho = aggregate_log_ratio(train - rollout, mask, level)
    weights = correct(train, rollout, mask, Config(level, math.inf)).weights
    torch.testing.assert_close(weights, torch.where(mask, log_rho.exp(), 0.0), rtol=1e-12, atol=0)


@given(batches(), POSITIVE, PAIR, st.sampled_from(["token", "sequence", "geometric"]))
def test_truncation_bounds_and_zeroing_selects(batch, cap, pair, level):
    rho = correct(*batch[:3], Config(level, math.inf)).weights
    assert torch.equal(correct(*batch[:3], Config(level, cap)).weights, rho.clamp(max=cap))
    zeroed = correct(*batch[:3], Config(level, pair)).weights
    inside = (rho > pair[0] * (1 + 1e-9)) & (rho < pair[1] * (1 - 1e-9))
    outside = (rho < pair[0] * (1 - 1e-9)) | (rho > pair[1] * (1 + 1e-9))
    assert torch.equal(zeroed[inside], rho[inside]) and not zeroed[outside].any()


@given(batches(), st.sampled_from(["token", "sequence", "geometric"]))
def test_batch_normalised_weights_have_mean_one_at_their_own_level(batch, level):
    weights = correct(*batch[:3], Config(level, 5.0, True)).weights
    mask = batch[2]
    if not mask.any():
        return
    own = weights[mask] if level == "token" else weights.amax(-1)[mask.any(-1)]
    if own.max() <= 2 * math.exp(-SAFETY_BOUND):            # nothing but floors: left alone
        return
    assert own.mean().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4, -1e4])
def test_half_and_single_precision_stay_finite(dtype, size):
    train = (torch.tensor([[-1.0, 0.5, 1.0], [1.0, 1.0, 1.0]]) * size).to(dtype)
    mask = torch.ones(2, 3)
    criteria = {name: (0.5, 2.0) if name.endswith("k1") else 0.1 for name in CRITERIA}
    for level in ("token", "sequence", "geometric"):
        for threshold in (2.0, (0.5, 2.0), math.inf):
            for normalize in (False, True):
                result = correct(train, torch.zeros_like(train), mask,
                                 Config(level, threshold, normalize, criteria), torch.ones(2, 3))
                assert result.weights.dtype == torch.float32 and result.weights.isfinite().all()
                assert all(math.isfinite(v) for v in to_host(result.metrics).values())
    limited = perplexity(train.float(), mask).mean().item()                     # at most e^80 each: four roundings of 80
    assert to_host(result.metrics)["rollout_corr/training_ppl"] == pytest.approx(limited, rel=2 * gamma(80 * 4 + 4))


# -------------------------------------------------------------------- single facts, by hand

LOG2 = math.log(2)
RHO = f64([[2.0, 0.5, 1.0], [4.0, 1.0, 1.0]])       # Πρ = 1 and 4; geometric means 1 and 4^(1/3)


def mask_of(**criteria):
    return correct(RHO.log(), torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3), Config(rollout_rs=criteria),
                   f64([[-1.0] * 3, [1.0] * 3])).mask.tolist()


@pytest.mark.parametrize("criteria, kept", [
    ({"token_k1": [0.5, 2.0]}, [[1, 1, 1], [0, 1, 1]]),             # bounds met exactly keep
    ({"token_k1": [0.6, 2.0]}, [[1, 0, 1], [0, 1, 1]]),             # asymmetric: on ρ, not on 1/ρ
    ({"token_k1": [0.5, 1.9]}, [[0, 1, 1], [0, 1, 1]]),
    ({"token_k1": [None, 2.0]}, [[1, 1, 1], [0, 1, 1]]),
    ({"token_k1": [1.0, None]}, [[1, 0, 1], [1, 1, 1]]),
    ({"token_k2": LOG2**2 / 2}, [[1, 1, 1], [0, 1, 1]]),
    ({"token_k3": 2 - 1 - LOG2}, [[1, 1, 1], [0, 1, 1]]),
    ({"seq_sum_k1": [1.0, 3.9]}, [[1] * 3, [0] * 3]),
    ({"seq_sum_k1": [1.1, 4.0]}, [[0] * 3, [1] * 3]),
    ({"seq_mean_k1": [0.9, 1.5]}, [[1] * 3, [0] * 3]),              # 4^(1/3) = 1.587…
    ({"seq_mean_k1": [0.9, 1.6]}, [[1] * 3, [1] * 3]),
    ({"seq_max_k1": [0.6, None]}, [[0] * 3, [1] * 3]),              # the veto: one bad token is enough
    ({"seq_max_k1": [None, 3.0]}, [[1] * 3, [0] * 3]),
    ({"seq_sum_k2": LOG2**2 * 1.01}, [[1] * 3, [0] * 3]),           # 2·(log 2)²/2 against 4·(log 2)²/2
    ({"seq_mean_k2": LOG2**2 / 3 * 0.99}, [[0] * 3, [0] * 3]),
    ({"seq_max_k2": LOG2**2 / 2}, [[1] * 3, [0] * 3]),
    ({"seq_max_k3": 2 - 1 - LOG2}, [[1] * 3, [0] * 3]),
    ({"seq_sum_k3": 0.5}, [[1] * 3, [0] * 3]),                      # 0.307 + 0.193 = 0.5 against 1.614
    ({"seq_mean_k3": 0.17}, [[1] * 3, [0] * 3]),
    ({"opsm": 1e-9}, [[1] * 3, [1] * 3]),                           # mean −log ρ is 0 and < 0
    ({"token_k1": [0.6, 5.0], "seq_sum_k1": [None, 3.0]}, [[1, 0, 1], [0] * 3]),
])
def test_each_criterion_on_numbers_one_can_check(criteria, kept):
    assert mask_of(**criteria) == kept


def test_opsm_rejects_only_negative_advantages_of_drifted_sequences():
    """eq:opsm"""
    log_ratio = f64([[-0.3, -0.1], [-0.3, -0.1], [0.3, 0.1]])       # mean −log ρ: 0.2, 0.2, −0.2
    advantages = f64([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])
    args = (log_ratio, torch.zeros_like(log_ratio), torch.ones(3, 2))
    assert correct(*args, Config(rollout_rs={"opsm": 0.19}), advantages).mask.tolist() == [[0, 1], [1, 1], [1, 1]]
    assert correct(*args, Config(rollout_rs={"opsm": 0.21}), advantages).mask.all()
    with pytest.raises(ValueError, match="opsm needs the advantages"):
        correct(*args, Config(rollout_rs={"opsm": 0.19}))


def test_everything_rejected_is_counted_and_finite():
    result = correct(RHO.log(), RHO.log() * 0, torch.ones(2, 3), Config("token", (9.0, 10.0), True, {"token_k1": [9.0, None]}))
    metrics = to_host(result.metrics)
    assert metrics["rollout_corr/all_rejected"] == 1 and metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert not result.weights.any() and not result.mask.any()
    assert all(math.isfinite(v) for v in metrics.values())
    assert to_host(correct(RHO.log(), RHO.log() * 0, torch.ones(2, 3), Config()).metrics)["rollout_corr/all_rejected"] == 0


def test_metrics_agree_with_the_estimators_of_the_same_name():
    train, rollout = torch.randn(5, 7).double(), torch.randn(5, 7).double()
    mask = torch.rand(5, 7) < 0.7
    mask[0] = True
    metrics = {k.removeprefix("rollout_corr/"): v for k, v in to_host(offpolicy_metrics(train, rollout, mask)).items()}
    rows = mask.any(-1)
    assert metrics["chi2_token"] == pytest.approx(chi_square(train - rollout, mask).item())
    total = torch.where(mask, train - rollout, 0.0).sum(-1)
    assert metrics["chi2_seq"] == pytest.approx(chi_square(total, rows).item())
    assert metrics["training_ppl"] == pytest.approx(perplexity(train, mask)[rows].mean().item())
    ratio = perplexity(train, mask) / perplexity(rollout, mask)
    assert metrics["ppl_ratio"] == pytest.approx(ratio[rows].mean().item())
    k3 = kl_estimate(rollout, train, "k3")
    assert metrics["k3_kl"] == pytest.approx(k3[mask].mean().item())
    raw = to_host(correct(train, rollout, mask, Config("token", 1.5)).metrics)
    assert raw["rollout_corr/rollout_is_raw_eff_sample_size"] == pytest.approx(
        effective_sample_size((train - rollout).exp(), mask).item())
    assert raw["rollout_corr/rollout_is_raw_eff_sample_size"] < raw["rollout_corr/rollout_is_eff_sample_size"]


def test_an_open_end_is_never_crossed():
    metrics = to_host(correct(RHO.log(), RHO.log() * 0, torch.ones(2, 3), Config("token", (None, 1.5))).metrics)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == metrics["rollout_corr/rollout_is_seq_fraction_low"] == 0
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.5      # row means 7/6 and 2
    metrics = to_host(correct(RHO.log(), RHO.log() * 0, torch.ones(2, 3), Config("token", (1.2, None))).metrics)
    assert metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0
    assert metrics["rollout_corr/rollout_is_seq_fraction_low"] == 0.5


def test_the_gradient_never_flows_through_a_weight_nor_a_metric():
    """eq:detached: whichever log-prob has a graph."""
    with_graph, without = RHO.log().requires_grad_(), RHO.log() * 0
    for train, rollout in ((with_graph, without), (without, with_graph)):
        result = correct(train, rollout, torch.ones(2, 3), Config("sequence", math.inf, True, {"seq_mean_k3": 1.0}))
        assert not any(x.requires_grad for x in (result.weights, result.mask, *result.metrics.values()))


def test_a_configuration_is_frozen():
    with pytest.raises(AttributeError):
        Config().rollout_is = "token"  # pyright: ignore[reportAttributeAccessIssue]


def test_inputs_that_do_not_fit_say_so():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="one shape"):
        correct(x, x[:, :2], x, Config())
    with pytest.raises(ValueError, match="rollout_log_prob is missing"):
        correct(x, None, x, Config())


# ---------------------------------------------------------------- configuration and dialects

@pytest.mark.parametrize("fields, words", [
    ({"rollout_is": "tokens"}, "rollout_is.*did you mean 'token'"),
    ({"rollout_is_threshold": -1}, "rollout_is_threshold.*positive"),
    ({"rollout_is_threshold": True}, "rollout_is_threshold"),
    ({"rollout_is_threshold": math.nan}, "rollout_is_threshold"),
    ({"rollout_is_threshold": [2.0, 0.5]}, "lo ≤ hi"),
    ({"rollout_is_threshold": [None, None]}, "at least one bound"),
    ({"rollout_is_batch_normalize": "yes"}, "rollout_is_batch_normalize.*true or false"),
    ({"rollout_rs": "token_k1"}, "rollout_rs must be a mapping"),
    ({"rollout_rs": {"seq_mean_k4": 1.0}}, "did you mean 'seq_mean_k"),
    ({"rollout_rs": {"token_k1": 2.0}}, "rollout_rs.token_k1.*pair"),
    ({"rollout_rs": {"token_k3": [0.1, 0.2]}}, "rollout_rs.token_k3.*number"),
    ({"loss_type": "reinforce"}, "bypass_mode"),
    ({"loss_type": "ppo"}, "loss_type.*ppo_clip"),
    ({"bypass_mode": 1}, "bypass_mode"),
])
def test_a_wrong_value_is_one_sentence(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        Config(**fields)
    assert "\n" not in str(error.value)


def test_presets_by_todays_and_historical_names():
    today = ("decoupled_token_is decoupled_seq_is decoupled_seq_is_rs decoupled_token_icepop decoupled_geo_rs "
             "decoupled_geo_rs_seq_tis decoupled_geo_rs_token_tis decoupled_k3_rs decoupled_k3_rs_seq_tis "
             "decoupled_k3_rs_token_tis bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs bypass_pg_is "
             "bypass_pg_token_icepop bypass_pg_geo_rs bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis disabled")
    historical = ("token_is token_tis seq_is seq_is_rs seq_mis geo_rs geo_mis ppo_is_bypass pure_is pg_is pg_rs")
    for name in (today + " " + historical).split():
        config = PRESETS[name]()
        assert config.bypass_mode == name.startswith(("bypass", "pure", "pg", "ppo"))
        assert (config.loss_type == "reinforce") == ("pg" in name or "pure" in name)
    assert set(HISTORICAL.values()) <= set(PRESETS)
    assert PRESETS["geo_mis"]().rollout_rs == {"seq_mean_k1": (0.999, 1.001), "seq_max_k1": (1e-4, None)}
    assert PRESETS["pg_rs"]().rollout_rs == PRESETS["geo_rs"]().rollout_rs
    assert Config.decoupled_token_icepop().rollout_is_threshold == (0.5, 5.0)
    assert Config.decoupled_k3_rs_seq_tis() == Config("sequence", 2.0, rollout_rs={"seq_mean_k3": 0.01})
    assert Config.bypass_pg_geo_rs_token_tis() == Config("token", 2.0, False, {"seq_mean_k1": (0.999, 1.001)}, True, "reinforce")


@pytest.mark.parametrize("block, expected", [
    ({}, Config()),
    ({"preset": "seq_mis"}, Config.decoupled_seq_is_rs()),
    ({"preset": "decoupled_seq_is", "rollout_is_threshold": 5}, Config("sequence", 5.0)),
    ({"rollout_is": "geometric", "rollout_rs": {"seq_max_k1": [1e-4, None]}},
     Config("geometric", rollout_rs={"seq_max_k1": (1e-4, None)})),
    ({"tis_imp_ratio_cap": 2.0}, Config("token", 2.0)),
    ({"tis_imp_ratio_cap": -1}, Config()),
    ({"tis_imp_ratio_cap": 0}, Config()),
    ({"tis_imp_ratio_cap": None}, Config()),
    ({"rollout_rs": "token_k2, token_k3", "rollout_rs_threshold": 0.25}, Config(rollout_rs={"token_k2": 0.25, "token_k3": 0.25})),
    ({"use_tis": True, "tis_imp_ratio_cap": 3.0}, Config("token", 3.0)),
    ({"use_tis": False, "tis_imp_ratio_cap": -1.0}, Config()),
    ({"rollout_is": True, "rollout_is_level": "sequence", "rollout_is_mode": "mask", "rollout_is_threshold": 2.0},
     Config("sequence", 2.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)} | VETO)),         # PR 3984's guide, example 2
    ({"algorithm": {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_level": "token", "rollout_is_mode": "truncate"},
      "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}}}, Config("token", 2.0, rollout_rs=VETO)),  # quick start
    ({"rollout_is": True, "rollout_is_threshold": 5.0, "rollout_is_threshold_lower": 0.8, "rollout_is_level": "token",
      "rollout_is_mode": "clip"}, Config("token", 5.0, rollout_rs={"token_k1": (0.8, 5.0)} | VETO)),             # example 5
    ({"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_veto_threshold": None}, Config("token", 2.0)),
    ({"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_veto_threshold": 1e-6},
     Config("token", 2.0, rollout_rs={"seq_max_k1": (1e-6, None)})),
    ({"rollout_is": False, "rollout_is_level": "token", "rollout_is_threshold": 2.0}, Config()),
    ({"rollout_is_level": "token", "rollout_is_threshold": None, "rollout_is_veto_threshold": 1e-4}, Config()),
    ({"rollout_is_level": "token", "rollout_is_mode": "clip", "rollout_is_threshold": 2.0, "rollout_is_veto_threshold": "1e-4"},
     Config("token", 2.0, rollout_rs={"token_k1": (0.5, 2.0)} | VETO)),               # its document: zero outside both
    ({"rollout_is_mode": "mask", "rollout_is_level": "geometric", "rollout_is_threshold": 1.25},
     Config("geometric", 1.25, rollout_rs={"seq_mean_k1": (0.8, 1.25)} | VETO)),
    ({"algorithm": {"rollout_is_level": "token", "rollout_is_threshold": 2.0}}, Config()),     # rollout_is: false by default
    ({"algorithm": {"rollout_is_level": "token", "rollout_is_threshold": 2.0, "rollout_is": True}},
     Config("token", 2.0, rollout_rs=VETO)),
    ({"rollout_rs": "token"}, Config(rollout_rs={"token_k1": (0.5, 2.0)})),                    # PR 3984
    ({"rollout_is": "token", "rollout_is_threshold": 4.0, "rollout_rs": "sequence"},
     Config("token", 4.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),                   # 2.0, whatever the weights' is
    ({"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": "geometric", "rollout_rs_threshold_lower": 0.9},
     Config("token", 5.0, rollout_rs={"seq_mean_k1": (0.9, 2.0)})),
    ({"rollout_is": "token", "rollout_rs": None, "rollout_rs_threshold": None}, Config("token", 2.0)),
    ({"behav_imp_weight_cap": 2.0}, Config("token", 2.0)), ({"imp_ratio_cap": 3}, Config("token", 3.0)),
    ({"imp_ratio_cap": -1}, Config()),
    ({"algorithm": {"rollout_correction": {"rollout_is": None, "rollout_rs": "geometric", "rollout_rs_threshold": 1.25,
                                           "rollout_token_veto_threshold": 1e-4}},
      "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}}},
     Config(rollout_rs={"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)})),
    ({"rollout_is": "token", "bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True},
     Config("token", 2.0, bypass_mode=True, loss_type="reinforce")),
    ({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "bypass_mode": True}},
     Config("token", (0.5, 5.0), bypass_mode=True)),
    ({"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.01"},
     Config(rollout_rs={"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01})),
    ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.25}, Config(rollout_rs={"seq_mean_k1": (0.8, 1.25)})),
    ({"off_policy_correction": {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric"}},
     Config("sequence", 5.0, rollout_rs={"seq_mean_k1": (0.99, 1.01)})),
    ({"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100,
      "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
     Config(rollout_rs={"seq_max_k1": (1e-4, 100.0), "token_k1": (0.5, 2.0)})),
])
def test_dialects_as_they_stand_in_their_documents(block, expected):
    assert from_dialect(block) == expected


def test_verls_bounds_on_one_over_rho_are_inverted_and_it_is_said():
    with pytest.warns(UserWarning, match=r"1/ρ.*\[0.714286, 1.66667\]"):
        config = from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"})
    assert config.rollout_rs["token_k1"] == pytest.approx((1 / 1.4, 1 / 0.6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")                      # a symmetric pair is the same on both sides
        from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})


@pytest.mark.parametrize("block, words", [
    ({"presets": "seq_is"}, "presets"), ({"preset": "seq_iss"}, "preset.*did you mean 'seq_is"),
    ({"rollout_is_threshhold": 2.0}, "rollout_is_threshhold.*did you mean 'rollout_is_threshold'"),
    ({"rollout_rs": "token_k1"}, "rollout_rs_threshold is missing"),
    ({"rollout_rs": "token", "rollout_rs_threshold": None}, "rollout_rs is 'token', but rollout_rs_threshold is null"),
    ({"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": "sequence", "rollout_rs_threshold": None},
     "rollout_rs_threshold is null: it must be a bound, such as 2.0"),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": None}, "rollout_rs_threshold is null"),
    ({"rollout_is_threshold": 2.0, "rollout_is_veto_threshold": 0}, "rollout_is_veto_threshold must be a positive number"),
    ({"rollout_is_mode": "mask", "rollout_is_threshold": 0.5, "rollout_is_threshold_lower": 0.8}, "rollout_is_threshold_lower must have lo ≤ hi"),
    ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1}, "rollout_rs.*token_k9"),
    ({"rollout_rs": "token_k2,token_k3,seq_sum_k2", "rollout_rs_threshold": "1,2"}, "rollout_rs_threshold needs one bound or 3"),
    ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "rollout_rs_threshold"),
    ({"rollout_is": "token", "loss_type": "reinforce"}, "loss_type"),
    ({"rollout_is": "token", "use_policy_gradient": True}, "use_policy_gradient needs bypass_mode"),
    ({"tis_imp_ratio_cap": 2.0, "calculate_log_probs": False}, "calculate_log_probs is false"),
    ({"tis_imp_ratio_cap": 2.0, "rollout_is": "token"}, "rollout_is.*another dialect"),
    ({"imp_ratio_cap": 2.0, "behav_imp_weight_cap": 2.0}, "imp_ratio_cap and behav_imp_weight_cap are one setting"),
    ({"use_tis": True}, "tis_imp_ratio_cap"), ({"tis_ratio_type": "geo"}, "tis_ratio_type"),
    ({"sequence_mask_metric": "mean"}, "sequence_mask_metric"),
    ({"token_mask_is_threshold_low": 0.5}, "token_mask_is_threshold_high"),
    ({"rollout_correction": 3}, "mapping"), ([], "mapping"), ({3: 4}, "3"),
    ({"rollout_is": "token", "algorithm": {"rollout_is": "token"}}, "rollout_is.*twice"),
])
def test_contradictions_are_one_sentence_that_names_the_key(block, words):
    with pytest.raises(ValueError, match=words) as error:
        from_dialect(block)
    assert "\n" not in str(error.value)


KEYS = st.sampled_from(["preset", "rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold",
                        "rollout_is_threshold_lower", "rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower",
                        "rollout_token_veto_threshold", "rollout_is_veto_threshold", "rollout_is_batch_normalize",
                        "bypass_mode", "loss_type", "use_policy_gradient", "tis_imp_ratio_cap", "use_tis",
                        "tis_ratio_type", "sequence_mask_metric", "geo_mask_low", "outlier_token_is_threshold_low",
                        "rollout_correction", "algorithm", "calculate_log_probs", "nonsense", "loss", "type", "eps",
                        "ratio_low", "dppo_mask_high", "kl_tau", "score_centering"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["token", "sequence", "geometric", "mask", "truncate", "product", "token_k1,seq_mean_k3", "0.5_2.0,0.01",
                       "0.5_2.0", "seq_is", "reinforce", "ipo", "icepop", 2.0, 1e-4, "1e400", "1_2_3", "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.sampled_from([*CRITERIA]), inner, max_size=3), max_leaves=4)


@settings(max_examples=1500)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_mapping_is_a_valid_configuration_or_a_valueerror(block):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = from_dialect(block)
        except ValueError as error:
            names = [*_keys(block), "correction"]
            assert "\n" not in str(error).rstrip() and any(str(name) in str(error) for name in names), str(error)
            return
    assert isinstance(config, Config) and replace(config) == config     # valid: it survives validation
    x = torch.zeros(1, 2)
    correct(x, x, x + 1, config, x)


def _keys(block):
    for key, value in block.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)


def test_a_correction_cannot_be_changed_by_whom_it_is_given_to():
    done = correct(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), Config())
    with pytest.raises(AttributeError):
        done.mask = torch.zeros(1, 2)  # pyright: ignore[reportAttributeAccessIssue]


def test_one_constant_limits_every_ratio():
    far = torch.tensor([[1000.0, -1000.0]])
    weights = correct(far, torch.zeros(1, 2), torch.ones(1, 2), Config("token", math.inf)).weights
    torch.testing.assert_close(weights, torch.tensor([[SAFETY_BOUND, -SAFETY_BOUND]]).exp(), rtol=2 * gamma(2), atol=0)


def test_presets_have_the_documents_bounds():
    """Every number of a preset, written out once more: a default that slips changes training silently."""
    narrow, wide, icepop = {"seq_mean_k1": (0.999, 1.001)}, {"seq_sum_k1": (0.5, 2.0)}, (0.5, 5.0)
    k3, veto = {"seq_mean_k3": 0.01}, {"seq_max_k1": (1e-4, None)}
    expected = {
        "decoupled_token_is": ("token", 2.0, {}), "decoupled_seq_is": ("sequence", 2.0, {}),
        "decoupled_seq_is_rs": ("sequence", 2.0, wide), "decoupled_token_icepop": ("token", icepop, {}),
        "decoupled_geo_rs": (None, 2.0, narrow), "decoupled_geo_rs_seq_tis": ("sequence", 2.0, narrow),
        "decoupled_geo_rs_token_tis": ("token", 2.0, narrow), "decoupled_k3_rs": (None, 2.0, k3),
        "decoupled_k3_rs_seq_tis": ("sequence", 2.0, k3), "decoupled_k3_rs_token_tis": ("token", 2.0, k3),
        "bypass_ppo_clip": (None, 2.0, {}), "bypass_ppo_clip_geo_rs": (None, 2.0, narrow),
        "bypass_ppo_clip_k3_rs": (None, 2.0, k3), "bypass_pg_is": ("sequence", 2.0, {}),
        "bypass_pg_token_icepop": ("token", icepop, {}), "bypass_pg_geo_rs": (None, 2.0, narrow),
        "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, narrow),
        "bypass_pg_geo_rs_token_tis": ("token", 2.0, narrow), "disabled": (None, 2.0, {}),
        "geo_rs": (None, 2.0, narrow | veto), "pg_rs": (None, 2.0, narrow | veto)}
    found = {name: make() for name, make in PRESETS.items() if name not in HISTORICAL}
    assert {name: (c.rollout_is, c.rollout_is_threshold, c.rollout_rs)
            for name, c in found.items()} == expected
    assert {name for name, c in found.items() if c.bypass_mode} == {
        name for name in expected if name.startswith("bypass") or name == "pg_rs"}


def test_bounds_belong_to_the_interval():
    """ρ exactly at a bound is kept, on both sides: in the weights and in every k1 criterion."""
    log_rho, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3)
    zeros = torch.zeros_like(log_rho)
    for bounds in ((1.0, 2.0), (0.5, 1.0)):
        for level in ("token", "sequence", "geometric"):
            assert importance_weights(log_rho, mask, level, bounds).eq(1).all()
        for name in ("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"):
            made = correct(log_rho, zeros, mask, RolloutCorrectionConfig(rollout_rs={name: bounds}))
            assert made.mask.all() and made.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0
            assert all(v == 0 for k, v in made.metrics.items() if "fraction_high" in k or "fraction_low" in k)


@pytest.mark.parametrize("made, expected", [
    (Config.token_is(threshold=3.0), Config("token", 3.0)),
    (Config.token_is(), Config.decoupled_token_is()),
    (Config.seq_is_rs(is_threshold=3.0, rs_threshold=2.0), Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),
    (Config.seq_is_rs(3.0, (0.25, 4.0)), Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.25, 4.0)})),
    (Config.seq_mis(threshold=3.0), Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),
    (Config.geo_rs(rs_threshold=1.001, rs_threshold_lower=0.999, veto_threshold=1e-5),
     Config(rollout_rs={"seq_mean_k1": (0.999, 1.001), "seq_max_k1": (1e-5, None)})),
    (Config.geo_rs(veto_threshold=None), Config(rollout_rs={"seq_mean_k1": (0.999, 1.001)})),
    (Config.decoupled_geo_rs(1.25), Config(rollout_rs={"seq_mean_k1": (0.8, 1.25)})),
    (Config.decoupled_geo_rs(rs_threshold=(0.999, 1.002)), Config(rollout_rs={"seq_mean_k1": (0.999, 1.002)})),
    (Config.decoupled_geo_rs(1.25, veto_threshold=1e-4),
     Config(rollout_rs={"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)})),
    (Config.decoupled_k3_rs_seq_tis(3.0, 0.1), Config("sequence", 3.0, rollout_rs={"seq_mean_k3": 0.1})),
    (Config.decoupled_token_icepop(4.0), Config("token", (0.5, 4.0))),
    (Config.decoupled_token_icepop(4.0, 0.25), Config("token", (0.25, 4.0))),
    (Config.decoupled_token_icepop(threshold_lower=0.25), Config("token", (0.25, 5.0))),
    (Config.bypass_pg_token_icepop([0.1, 9]), Config("token", (0.1, 9.0), bypass_mode=True, loss_type="reinforce")),
    (Config.ppo_is_bypass(threshold=3.0), Config(None, 3.0, bypass_mode=True)),
    (Config.pure_is(threshold=3.0), Config("sequence", 3.0, bypass_mode=True, loss_type="reinforce")),
    (Config.pg_rs(rs_threshold=1.25, veto_threshold=1e-4), Config(
        None, 2.0, False, {"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)}, True, "reinforce")),
])
def test_presets_take_the_arguments_of_verls_documents(made, expected):
    """Today's names and those of the migration guide; a single bound u of ρ is [1/u, u]."""
    assert made == expected


@pytest.mark.parametrize("call, words", [
    (lambda: Config.decoupled_token_is(rs_threshold=2.0), "decoupled_token_is.*'rs_threshold'"),
    (lambda: Config.geo_rs(rs_treshold=2.0), "geo_rs.*'rs_treshold'"),
    (lambda: Config.decoupled_geo_rs(-1), "rs_threshold.*positive"),
    (lambda: Config.decoupled_geo_rs("0.999_1.002"), "rs_threshold.*positive number, not '0.999_1.002'"),
])
def test_a_presets_wrong_argument_is_one_sentence(call, words):
    """An unknown one is Python's own TypeError; "lo_hi" is verl's form, which adapters/dialects.py reads."""
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_preset_is_a_def_and_an_older_name_the_same_method():
    """What `grep` finds and a type checker knows; the order is that of the tables."""
    for name, preset in PRESETS.items():
        assert (preset.__doc__ and preset.__func__ is getattr(Config, HISTORICAL.get(name, name)).__func__) or name == "seq_mis"
        assert PRESETS[name]() == PRESETS[HISTORICAL.get(name, name)]()
    assert [name for name in PRESETS if name not in HISTORICAL][:3] == ["decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs"]
    assert set(HISTORICAL) == {"token_is", "token_tis", "seq_is", "seq_is_rs", "seq_mis", "geo_mis", "ppo_is_bypass", "pure_is",
                               "pg_is", "pure_rs"}


@pytest.mark.parametrize("loss_type", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_weights_that_would_count_twice_are_not_called_applied_and_it_is_said(loss_type):
    """eq:double-count: bypass mode's ratio is the weight; ρ is measured, and nothing is called applied."""
    with pytest.warns(UserWarning, match=f"rollout_is=token is not applied.*{loss_type}.*eq:double-count"):
        config = Config("token", 1.5, True, bypass_mode=True, loss_type=loss_type)
    result = correct(RHO.log(), RHO.log() * 0, torch.ones(2, 3), config)
    named = [name for name in result.metrics if "rollout_is_" in name and "_is_raw_" not in name]
    assert set(named) == {"rollout_corr/rollout_is_catastrophic_token_fraction", "rollout_corr/rollout_is_veto_fraction"}
    assert result.metrics["rollout_corr/rollout_is_raw_max"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config("token", bypass_mode=True, loss_type="reinforce").applies_weights
        assert not Config(bypass_mode=True).applies_weights
