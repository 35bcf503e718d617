"""Presets have verl's names, bounds and arguments; peers' recorded figures are reproduced.

`peers.json.gz` holds what verl 0.6.0, 0.6.1, 0.9.1 and SkyRL 0.3.0 return, as published, on twelve
random batches in float64. Each figure is reproduced to 1e-6, or it is one of the deviations below,
and then the test asserts what theirs is instead.
"""

import gzip
import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from three_policies.correction import correct, importance_weights
from three_policies.estimators import effective_sample_size
from three_policies.interop import names
from three_policies.interop.dialects import from_dialect
from three_policies.kl import kl_estimate
from three_policies.losses import aggregate_loss
from three_policies.metrics import to_host
from three_policies.oracle import f64
from three_policies.presets import HISTORICAL, PRESETS, RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio, exp_ratio
from three_policies.tests.support.launching import ROOT


def test_presets_by_todays_and_historical_names():
    for name, make in PRESETS.items():
        config = make()
        assert config.bypass_mode == name.startswith(("bypass", "pure", "pg", "ppo"))
        assert (config.loss_type == "reinforce") == ("pg" in name or "pure" in name)
    assert set(HISTORICAL.values()) <= set(PRESETS)
    assert {*("token_is token_tis seq_is seq_is_rs seq_mis geo_mis ppo_is_bypass pure_is pg_is "
              "pure_rs").split()} <= set(PRESETS)
    assert PRESETS["geo_mis"]().rollout_rs == {"seq_mean_k1": (0.999, 1.001),
                                               "seq_max_k1": (1e-4, None)}
    assert PRESETS["pg_rs"]().rollout_rs == PRESETS["geo_rs"]().rollout_rs
    assert Config.decoupled_token_icepop().rollout_is_threshold == (0.5, 5.0)
    assert Config.decoupled_k3_rs_seq_tis() == Config(
        "sequence", 2.0, rollout_rs={"seq_mean_k3": 0.01})
    assert Config.bypass_pg_geo_rs_token_tis() == Config(
        "token", 2.0, False, {"seq_mean_k1": (0.999, 1.001)}, True, "reinforce")


def test_presets_have_the_documents_bounds():
    """Each number equals its second copy here: a default that slips changes training silently."""
    narrow, wide, icepop = {"seq_mean_k1": (0.999, 1.001)}, {"seq_sum_k1": (0.5, 2.0)}, (0.5, 5.0)
    k3, veto = {"seq_mean_k3": 0.01}, {"seq_max_k1": (1e-4, None)}
    expected = {
        "decoupled_token_is": ("token", 2.0, {}), "decoupled_seq_is": ("sequence", 2.0, {}),
        "decoupled_seq_is_rs": ("sequence", 2.0, wide),
        "decoupled_token_icepop": ("token", icepop, {}),
        "decoupled_geo_rs": (None, 2.0, narrow),
        "decoupled_geo_rs_seq_tis": ("sequence", 2.0, narrow),
        "decoupled_geo_rs_token_tis": ("token", 2.0, narrow), "decoupled_k3_rs": (None, 2.0, k3),
        "decoupled_k3_rs_seq_tis": ("sequence", 2.0, k3),
        "decoupled_k3_rs_token_tis": ("token", 2.0, k3),
        "bypass_ppo_clip": (None, 2.0, {}), "bypass_ppo_clip_geo_rs": (None, 2.0, narrow),
        "bypass_ppo_clip_k3_rs": (None, 2.0, k3), "bypass_pg_is": ("sequence", 2.0, {}),
        "bypass_pg_token_icepop": ("token", icepop, {}), "bypass_pg_geo_rs": (None, 2.0, narrow),
        "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, narrow),
        "bypass_pg_geo_rs_token_tis": ("token", 2.0, narrow), "disabled": (None, 2.0, {}),
        "geo_rs": (None, 2.0, narrow | veto), "pg_rs": (None, 2.0, narrow | veto),
        "seq_mis": ("sequence", 2.0, {"seq_sum_k1": (None, 2.0)}),
        "ppo_is_bypass": ("token", 2.0, {})}
    found = {name: make() for name, make in PRESETS.items() if name not in HISTORICAL}
    assert {name: (c.rollout_is, c.rollout_is_threshold, c.rollout_rs)
            for name, c in found.items()} == expected
    assert {name for name, c in found.items() if c.bypass_mode} == {
        name for name in expected if name.startswith("bypass") or name in (
            "pg_rs", "ppo_is_bypass")}
    assert [name for name, c in found.items() if c.metrics_only] == ["ppo_is_bypass"]


@pytest.mark.parametrize("made, expected", [
    (Config.token_is(threshold=3.0), Config("token", 3.0)),
    (Config.token_is(), Config.decoupled_token_is()),
    (Config.seq_is_rs(is_threshold=3.0, rs_threshold=2.0),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),
    (Config.seq_is_rs(3.0, (0.25, 4.0)),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.25, 4.0)})),
    (Config.seq_is_rs(3.0, rs_threshold=4.0, rs_threshold_lower=0.5),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.5, 4.0)})),
    (Config.seq_mis(threshold=3.0),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (None, 3.0)})),
    (Config.geo_rs(rs_threshold=1.001, rs_threshold_lower=0.999, veto_threshold=1e-5),
     Config(rollout_rs={"seq_mean_k1": (0.999, 1.001), "seq_max_k1": (1e-5, None)})),
    (Config.geo_rs(veto_threshold=None), Config(rollout_rs={"seq_mean_k1": (0.999, 1.001)})),
    (Config.decoupled_geo_rs(1.25), Config(rollout_rs={"seq_mean_k1": (0.8, 1.25)})),
    (Config.decoupled_geo_rs(rs_threshold=(0.999, 1.002)),
     Config(rollout_rs={"seq_mean_k1": (0.999, 1.002)})),
    (Config.decoupled_geo_rs(1.25, veto_threshold=1e-4),
     Config(rollout_rs={"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)})),
    (Config.decoupled_k3_rs_seq_tis(3.0, 0.1),
     Config("sequence", 3.0, rollout_rs={"seq_mean_k3": 0.1})),
    (Config.decoupled_token_icepop(4.0), Config("token", (0.5, 4.0))),
    (Config.decoupled_token_icepop(4.0, 0.25), Config("token", (0.25, 4.0))),
    (Config.decoupled_token_icepop(threshold_lower=0.25), Config("token", (0.25, 5.0))),
    (Config.bypass_pg_token_icepop([0.1, 9]),
     Config("token", (0.1, 9.0), bypass_mode=True, loss_type="reinforce")),
    (Config.ppo_is_bypass(threshold=3.0),
     Config("token", 3.0, bypass_mode=True, metrics_only=True)),
    (Config.pure_is(threshold=3.0),
     Config("sequence", 3.0, bypass_mode=True, loss_type="reinforce")),
    (Config.pg_rs(rs_threshold=1.25, veto_threshold=1e-4), Config(
        None, 2.0, False, {"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)}, True,
        "reinforce")),
])
def test_presets_take_the_arguments_of_verls_documents(made, expected):
    """Today's names and the migration guide's are taken; a single bound u of ρ is [1/u, u]."""
    assert made == expected


@pytest.mark.parametrize("call, words", [
    (lambda: Config.decoupled_token_is(rs_threshold=2.0), "decoupled_token_is.*'rs_threshold'"),
    (lambda: Config.geo_rs(rs_treshold=2.0), "geo_rs.*'rs_treshold'"),
    (lambda: Config.decoupled_geo_rs(-1), "rs_threshold.*positive"),
    (lambda: Config.decoupled_geo_rs("0.999_1.002"),
     "rs_threshold.*positive number, not '0.999_1.002'"),
    (lambda: Config.bypass_pg_geo_rs((0.9, 1.1), 0.5), "leave rs_threshold_lower out"),
])
def test_a_presets_wrong_argument_is_one_sentence(call, words):
    """An unknown argument is Python's TypeError; only interop/dialects.py reads "lo_hi"."""
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_preset_is_a_def_and_an_older_name_the_same_method():
    """`grep` finds each preset, a type checker knows it, and their order is that of the tables."""
    for name, preset in PRESETS.items():
        method = getattr(Config, HISTORICAL.get(name, name))
        assert preset.__doc__ and preset.__func__ is method.__func__
        assert PRESETS[name]() == PRESETS[HISTORICAL.get(name, name)]()
    today = [name for name in PRESETS if name not in HISTORICAL]
    assert today[:3] == ["decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs"]
    assert set(HISTORICAL) == {"token_is", "token_tis", "seq_is", "seq_is_rs", "geo_mis", "pure_is",
                               "pg_is", "pure_rs"}


def test_each_preset_has_a_file_of_its_own():
    """Files of `configs/presets/` are of today's names, as the appendix of settings says."""
    files = {path.stem for path in (ROOT / "configs/presets").glob("*.yaml")}
    assert {name for name in PRESETS if name not in HISTORICAL} - {
        "geo_rs", "pg_rs", "seq_mis", "ppo_is_bypass"} == files


K1 = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
RECORDED = Path(__file__).parents[1] / "support/peers.json.gz"
PEERS = json.loads(gzip.decompress(RECORDED.read_bytes()))


def tensors(batch):
    """Return log π_train, log π_rollout, the mask and the values to aggregate, [B, T] each."""
    return (f64(batch[k]) for k in ("train_log_prob", "rollout_log_prob", "mask", "values"))


def cases(peer):
    """Yield the tensors, the configuration and the recorded output of each case of a peer."""
    for batch in PEERS:
        train, rollout, mask, values = tensors(batch)
        for case in batch["cases"]:
            if case["peer"] == peer:
                yield train, rollout, mask, values, case["config"], case["out"]


def same(ours, theirs):
    """Compare to 1e-6, relative; the 2e-8 beside it is verl's 1e-8 in every denominator."""
    return abs(ours - theirs) <= 1e-6 * max(abs(ours), abs(theirs)) + 2e-8


def same_std(ours, theirs, size):
    """Compare before the root: theirs is √(E[w²] − mean²), with 1e-8 in both denominators."""
    return abs(ours**2 - theirs**2) <= 1e-6 * theirs**2 + 2e-8 * (1 + size**2)


def ours(train, rollout, mask, config, named=names.verl):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                     # that k1 bounds are inverted
        result = correct(train, rollout, mask, from_dialect(config))
    metrics = {name.removeprefix("rollout_corr/"): v
               for name, v in named(to_host(result.metrics)).items()}
    weights = torch.ones_like(mask) if result.weights is None else result.weights
    return weights * result.mask, metrics


def assert_product(product, mask, out):
    """Compare weights × mask: 0.6.0 rejects by weights, SkyRL leaves weights on padding."""
    theirs = torch.ones_like(mask) if out.get("weights") is None else f64(out["weights"])
    theirs = theirs * (mask if out.get("mask") is None else f64(out["mask"])) * mask
    torch.testing.assert_close(product, theirs, rtol=1e-6, atol=1e-12)


def spread(values, mask):
    """Return the standard deviation (n below it) and the ESS over valid entries."""
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
                assert same_std(metrics[name], theirs,
                                metrics[name.removesuffix("_std") + "_mean"]), (name, config)
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
                # deviation: theirs are of ρ clamped into its bounds, which hides degeneracy
                level = config[prefix]
                upper = config[f"{prefix}_threshold"]
                lower = (1 / upper if prefix == "rollout_is"
                         else config["rollout_rs_threshold_lower"])
                rho = exp_ratio(aggregate_log_ratio(train - rollout, mask, level)) * mask
                clamped = spread(rho.clamp(lower, upper), mask)
                assert (same(clamped[1], theirs) if name.endswith("size")
                        else same_std(clamped[0], theirs, upper))
                honest = metrics[name.replace("rollout_is", "rollout_is_raw")]
                assert honest == pytest.approx(spread(rho, mask)[name.endswith("size")], rel=1e-6,
                                               abs=1e-9)
            elif name.endswith("masked_fraction"):          # deviation: theirs leaves the veto out
                criterion = K1[config["rollout_rs"]]
                assert metrics[name] == metrics[name.replace("rs", f"rs_{criterion}")]
                assert same(metrics[name], theirs)
            else:
                assert same(metrics[name], theirs), (name, config)


def test_verl_0_6_0_is_reproduced_with_raw_weights_under_raw_names():
    for train, rollout, mask, _, config, out in cases("verl-0.6.0"):
        product, metrics = ours(train, rollout, mask, config, names.verl_06)
        assert_product(product, mask, out)
        upper, lower = config["rollout_is_threshold"], config["rollout_is_threshold_lower"]
        lower = 1 / upper if lower is None else lower
        criterion = K1[config["rollout_is_level"]]
        log_rho = aggregate_log_ratio(train - rollout, mask, config["rollout_is_level"])
        rho = exp_ratio(log_rho) * mask
        for name, theirs in out["metrics"].items():
            name = name.removeprefix("mismatch/").removeprefix("mismatch_")
            if name[-3:] in ("p25", "p50", "p75", "p95", "p99"):
                assert name not in metrics              # deviation: percentiles cannot be merged
            elif name in ("rollout_is_std", "rollout_is_eff_sample_size"):
                clamped = spread(rho.clamp(lower, upper), mask)     # deviation, as in 0.6.1
                assert (same(clamped[1], theirs) if name.endswith("size")
                        else same_std(clamped[0], theirs, upper))
            elif name.endswith("masked_fraction"):      # deviation: zero weights reject (PR 3984)
                assert config["rollout_is_mode"] == "mask" and name not in metrics
                assert same(metrics[name.replace("rollout_is", f"rollout_rs_{criterion}")],
                            theirs), (name, config)
            else:
                assert same(metrics[name], theirs), (name, config)


def without(block, *keys, **changes):
    return {key: value for key, value in block.items() if key not in keys} | changes


def test_what_is_left_out_has_verls_default_in_its_figures_too():
    """verl 0.6.0 vetoes at 1e-4 unless told otherwise; 0.6.1 rejects outside [1/2, 2].

    That interval does not depend on the cap of the weights.
    """
    vetoed = 0
    for train, rollout, mask, _, config, out in cases("verl-0.6.0"):
        if config["rollout_is_veto_threshold"] == 1e-4:
            assert_product(ours(train, rollout, mask,
                                without(config, "rollout_is_veto_threshold"))[0], mask, out)
            vetoed += out["metrics"]["mismatch/rollout_is_veto_fraction"] > 0
    rejected = 0
    for train, rollout, mask, _, config, out in cases("verl-0.6.1"):
        if config["rollout_rs_threshold"] == 2.0:
            block = without(config, "rollout_rs_threshold", "rollout_rs_threshold_lower",
                            rollout_is_threshold=5.0)
            assert_product(ours(train, rollout, mask, block)[0], mask, out)
            rejected += out["metrics"]["rollout_corr/rollout_rs_masked_fraction"] > 0
    assert vetoed and rejected          # there are batches in which there is something to reject


@pytest.mark.parametrize("level", K1)
def test_verl_0_6_0s_mask_is_weights_and_rejection_as_in_its_migration_guide(level):
    """PR 3984's example 2 has two losses: `fixed` divides as 0.6.0 does, `kept` as 0.6.1."""
    upper = {"token": 2.0, "sequence": 5.0, "geometric": 1.01}[level]
    block = {"rollout_is_level": level, "rollout_is_mode": "mask", "rollout_is_threshold": upper,
             "rollout_is_threshold_lower": 0.8, "rollout_is_veto_threshold": None}
    config = from_dialect(block)
    assert config == Config(level, upper, rollout_rs={K1[level]: (0.8, upper)})
    if level != "geometric":                                # which 0.6.1's weights do not have
        assert config == from_dialect({
            "rollout_is": level, "rollout_is_threshold": upper, "rollout_rs": level,
            "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": 0.8})
    rejected = 0
    for batch in PEERS:
        train, rollout, mask, values = tensors(batch)
        weights, kept, metrics = correct(train, rollout, mask, config)
        log_rho = (train - rollout) * mask
        zeroed = importance_weights(log_rho, mask, level, (0.8, upper))         # 0.6.0's own
        theirs = {"fixed": (values * zeroed).sum() / mask.sum(),
                  "kept": (values * zeroed).sum() / kept.sum().clamp(min=1)}
        for denominator, counted in (("fixed", mask), ("kept", kept)):
            loss = aggregate_loss(values * weights, kept, "token-mean", denominator_mask=counted)
            torch.testing.assert_close(loss, theirs[denominator], rtol=1e-9, atol=1e-12)
        share = 1 - kept.sum() / mask.sum()
        found = metrics["rollout_corr/rollout_rs_masked_fraction"].double()
        torch.testing.assert_close(found, share)
        rejected += bool(share)
    assert rejected


def test_skyrl_is_reproduced():
    for train, rollout, mask, _, config, out in cases("skyrl-0.3.0"):
        product, metrics = ours(train, rollout, mask, config, names.skyrl)
        assert_product(product, mask, out)
        padded = exp_ratio(train - rollout) * mask
        for name, theirs in out["metrics"].items():
            if name == "is_ratio_min":          # deviation: their minimum is over padding too
                assert same(padded.min().item(), theirs)
            elif name == "is_ratio_std":        # deviation: so is this; of one token it is NaN
                theirs = math.nan if theirs is None else theirs
                alone = mask.numel() == 1
                assert metrics[name] == 0 if alone else same(padded.std().item(), theirs)
            elif name.startswith("geo_") and not same(metrics[name], theirs):
                # deviation: their second mask looks at what the first one left
                left = mask * correct(train, rollout, mask, from_dialect(
                    {k: v for k, v in config.items() if k.startswith("outlier")})).mask
                assert left.sum() < mask.sum()
                assert same(ours(train, rollout, left, config, names.skyrl)[1][name]
                            * left.any(-1).double().mean().item(), theirs)
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
    tested = {"verl-0.9.1", "verl-0.6.1", "verl-0.6.0", "skyrl-0.3.0", "verl-0.9.1-kl",
              "verl-0.9.1-agg"}
    assert {case["peer"] for batch in PEERS for case in batch["cases"]} == tested
    assert sum(len(batch["cases"]) for batch in PEERS) == 816


def named(function, **metrics):
    """Return what a function of interop/names.py adds to metrics or puts in their place."""
    ours = {f"rollout_corr/rollout_{name}": x for name, x in metrics.items()}
    return {name.removeprefix("rollout_corr/rollout_"): x for name, x in function(ours).items()}


@pytest.mark.parametrize("level, theirs", [
    ("token", ["tis_token_clip_high_ratio"]), ("sequence", ["tis_seq_clip_high_ratio"]),
    ("prefix", []), ("geometric", [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread, length", [(0.5, 3), (0.02, 500), (3.0, 40)])
def test_skyrl_has_no_weights_of_prefixes_and_means(spread, length, dtype, level, theirs):
    log_rho = spread * torch.randn(16, length, generator=torch.Generator().manual_seed(0))
    log_rho, mask = log_rho.to(dtype), torch.ones(16, length)
    found = names.skyrl(correct(log_rho, 0 * log_rho, mask, Config(level, 1.5)).metrics)
    assert [name.removeprefix("rollout_corr/") for name in found if "tis_" in name] == theirs


def test_of_several_criteria_verl_06_has_the_first():
    found = named(names.verl_06, rs_token_k1_rho_mean=1.0, rs_token_k1_masked_fraction=0.1,
                  rs_token_k1_seq_masked_fraction=0.2, rs_seq_sum_k1_rho_mean=2.0,
                  rs_seq_sum_k1_masked_fraction=0.3, rs_masked_fraction=0.4,
                  rs_seq_masked_fraction=0.5)
    assert (found["rs_mean"], found["rs_masked_fraction"], found["rs_seq_masked_fraction"]) == (
        1.0, 0.1, 0.2)


def test_where_a_sequence_has_one_weight_verls_extremes_are_those_of_rho():
    extremes = dict(is_max=2.0, is_min=0.5, is_raw_max=9.0, is_raw_min=0.1)
    for one, expected in ((0.0, (2.0, 0.5)), (1.0, (9.0, 0.1))):
        found = named(names.verl, is_per_sequence=one, **extremes)
        assert (found["is_max"], found["is_min"]) == expected
