"""correction.py has these properties for any batch and configuration, and some facts by hand."""

import collections
import math
import warnings
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from three_policies.correction import batch_normalize, correct, importance_weights
from three_policies.estimators import effective_sample_size, perplexity
from three_policies.kl import kl_estimate
from three_policies.losses import aggregate_loss, kl_loss
from three_policies.metrics import merge, offpolicy_metrics, to_host
from three_policies.oracle import close
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import SAFETY_BOUND, aggregate_log_ratio, exp_ratio
from three_policies.rejection import CRITERIA, rejection_mask
from three_policies.tests.support.examples import RATIOS, bound_of, chi_square_of
from three_policies.tests.support.tolerances import gamma


# -------------------------------------------------------------------------- properties of any batch

POSITIVE = st.floats(0.01, 100)
PAIR = st.tuples(POSITIVE, POSITIVE).map(lambda p: (min(p), max(p)))
OPEN = st.one_of(PAIR, PAIR.map(lambda p: (None, p[1])), PAIR.map(lambda p: (p[0], None)))


@st.composite
def configs(draw):
    criteria = draw(st.lists(st.sampled_from([*CRITERIA]), max_size=4, unique=True))
    bounds = {name: draw(bound_of(name, OPEN, st.floats(1e-3, 10))) for name in criteria}
    return Config(draw(st.sampled_from([None, "token", "sequence", "geometric"])),
                  draw(st.one_of(POSITIVE, OPEN)), draw(st.booleans()), bounds)


@st.composite
def batches(draw, scale=st.sampled_from([1e-3, 0.3, 3.0, 40.0])):
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64)
    train = rollout + draw(scale) * torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < draw(st.sampled_from([0.4, 0.8, 1.0]))
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, length)
    return train, rollout, mask, advantages


def assert_equal(a, b, **tolerance):
    assert (a.weights is None) == (b.weights is None)
    if a.weights is not None:
        torch.testing.assert_close(a.weights, b.weights, **tolerance)
    assert torch.equal(a.mask, b.mask)
    x, y = to_host(a.metrics), to_host(b.metrics)
    assert x.keys() == y.keys()
    for name in x:
        # a standard deviation is the root of a cancelling difference: 1e-8 where it is 0
        tolerance = 1e-6 * max(1, abs(x[name])) if "std" in name else 1e-9
        assert x[name] == pytest.approx(y[name], rel=1e-6, abs=tolerance), name


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_a_batch_of_nothing_gives_nothing(shape):
    x = torch.zeros(shape)
    for criteria in ({}, {"token_k1": (0.5, 2.0), "seq_max_k3": 0.1}):
        for level in ("token", "sequence", "geometric"):
            result = correct(x, x, x, Config(level, 2.0, True, criteria))
            assert result.weights.shape == result.mask.shape == shape
            assert all(math.isfinite(v) for v in to_host(result.metrics).values())


@given(batches(), configs(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_padding_never_matters(batch, config, garbage):
    train, rollout, mask, advantages = batch
    clean = correct(train, rollout, mask, config, advantages)
    dirty = correct(torch.where(mask, train, garbage), torch.where(mask, rollout, -garbage), mask,
                    config, torch.where(mask, advantages, garbage))
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


OF_PARTS = configs().filter(lambda c: all(CRITERIA[x].of != "batch" for x in c.rollout_rs))


@given(batches(), OF_PARTS, st.integers(0, 6))
def test_splitting_and_merging_is_exact(batch, config, at):
    whole = correct(*batch[:3], config, batch[3])
    parts = [correct(*(x[s] for x in batch[:3]), config, batch[3][s])
             for s in (slice(0, at), slice(at, None)) if len(batch[0][s])]
    merged, expected = to_host(merge(parts)), to_host(whole.metrics)
    for name in expected:
        tolerance = 1e-6 * max(1, abs(expected[name])) if "std" in name else 1e-9
        assert merged[name] == pytest.approx(expected[name], rel=1e-6, abs=tolerance), name
    assert torch.equal(torch.cat([p.mask for p in parts]), whole.mask)
    if whole.weights is not None:  # normalised by the parts' means, then by all's
        factor = "rollout_corr/rollout_is_batch_norm_factor"
        used = [mean if (mean := to_host(p.metrics).get(factor, 0)) > 1e-8 else 1
                for p in (*parts, whole)]
        weights = torch.cat([p.weights * mean for p, mean in zip(parts, used)]) / used[-1]
        torch.testing.assert_close(weights, whole.weights, rtol=1e-6, atol=1e-12)


@given(batches(), configs())
def test_an_empty_row_changes_nothing(batch, config):
    train, rollout, mask, advantages = (torch.cat([x, torch.zeros_like(x[:1])]) for x in batch)
    with_row = correct(train, rollout, mask, config, advantages)
    without_it = correct(*batch[:3], config, batch[3])
    assert_equal(with_row.rows(slice(0, -1)), without_it, rtol=1e-12, atol=0)


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
        return tuple(None if end is None else end * f
                     for end, f in zip(bound, (1 / factor, factor)))
    loose = replace(config, rollout_rs={name: loosen(bound)
                                        for name, bound in config.rollout_rs.items()})
    tight_mask, loose_mask = (correct(*batch[:3], c, batch[3]).mask for c in (config, loose))
    assert not (tight_mask & ~loose_mask).any()


@given(batches(), configs())
def test_weights_never_change_the_mask_nor_the_mask_the_weights(batch, config):
    both = correct(*batch[:3], config, batch[3])
    unweighted = correct(*batch[:3], replace(config, rollout_is=None), batch[3])
    assert torch.equal(both.mask, unweighted.mask)
    alone = correct(*batch[:3], replace(config, rollout_rs={}), batch[3]).weights
    assert both.weights is None if alone is None else torch.equal(both.weights, alone)


@given(batches(), POSITIVE)
def test_at_one_token_all_levels_are_one(batch, cap):
    train, rollout, mask, _ = (x[:, :1] for x in batch)
    token, *others = (correct(train, rollout, mask, Config(level, cap)).weights
                      for level in ("token", "sequence", "geometric"))
    for other in others:
        torch.testing.assert_close(token, other, rtol=1e-12, atol=0)


@given(batches(scale=st.sampled_from([1e-3, 0.3])),
       st.sampled_from(["token", "sequence", "geometric"]))
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


def test_weights_made_elsewhere_are_divided_by_their_mean_over_tokens_alone():
    """eq:self-normalised: what stands on padding is not read."""
    weights, mask = torch.tensor([[2.0, 9.0], [4.0, 4.0]]), torch.tensor([[1, 0], [1, 1]])
    for level, mean in (("token", 10 / 3), ("sequence", 3.0)):
        assert close(batch_normalize(weights, mask, level),
                     torch.tensor([[2.0, 0.0], [4.0, 4.0]]) / mean)
    with pytest.raises(ValueError, match="level cannot be 'tokens'; did you mean 'token'"):
        batch_normalize(weights, mask, "tokens")
    with pytest.raises(ValueError, match="weights .2, 1. and response_mask .2, 2. must have"):
        batch_normalize(weights[:, :1], mask, "sequence")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_nan_leaves_the_mean_weight_of_the_others(level):
    """eq:self-normalised: the NaN is still seen, and the rest is divided as if it were padding."""
    log_rho = torch.full((3, 2), 0.5)
    log_rho[0, 0] = math.nan
    config = Config(level, 5.0, True)
    weights = correct(log_rho, torch.zeros(3, 2), torch.ones(3, 2), config).weights
    assert weights[0, 0].isnan() and close(weights[1:], torch.ones(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4, -1e4])
def test_half_and_single_precision_stay_finite(dtype, size):
    train = (torch.tensor([[-1.0, 0.5, 1.0], [1.0, 1.0, 1.0]]) * size).to(dtype)
    mask = torch.ones(2, 3)
    criteria = {name: bound_of(name, (0.5, 2.0), 0.1) for name in CRITERIA}
    for level in ("token", "sequence", "geometric"):
        for threshold in (2.0, (0.5, 2.0), math.inf):
            for normalize in (False, True):
                result = correct(train, torch.zeros_like(train), mask,
                                 Config(level, threshold, normalize, criteria), torch.ones(2, 3))
                assert result.weights.dtype == torch.float32 and result.weights.isfinite().all()
                assert all(math.isfinite(v) for v in to_host(result.metrics).values())
    limited = perplexity(train.float(), mask).mean().item()             # at most e^80 each
    of_80, found = gamma(80 * 4 + 4), to_host(result.metrics)           # four roundings of 80
    assert found["rollout_corr/training_ppl"] == pytest.approx(limited, rel=2 * of_80)


# ---------------------------------------------------------------------------- single facts, by hand

def test_everything_rejected_is_counted_and_finite():
    result = correct(RATIOS.log(), RATIOS.log() * 0, torch.ones(2, 3),
                     Config("token", (9.0, 10.0), True, {"token_k1": [9.0, None]}))
    metrics = to_host(result.metrics)
    assert metrics["rollout_corr/all_rejected"] == 1
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert not result.weights.any() and not result.mask.any()
    assert all(math.isfinite(v) for v in metrics.values())
    unrejected = correct(RATIOS.log(), RATIOS.log() * 0, torch.ones(2, 3), Config())
    assert to_host(unrejected.metrics)["rollout_corr/all_rejected"] == 0


def test_metrics_agree_with_the_estimators_of_the_same_name():
    train, rollout = torch.randn(5, 7).double(), torch.randn(5, 7).double()
    mask = torch.rand(5, 7) < 0.7
    mask[0] = True
    metrics = {k.removeprefix("rollout_corr/"): v
               for k, v in to_host(offpolicy_metrics(train, rollout, mask)).items()}
    rows = mask.any(-1)
    assert metrics["chi2_token"] == pytest.approx(chi_square_of(train - rollout, mask).item())
    total = torch.where(mask, train - rollout, 0.0).sum(-1)
    assert metrics["chi2_seq"] == pytest.approx(chi_square_of(total, rows).item())
    assert metrics["training_ppl"] == pytest.approx(perplexity(train, mask)[rows].mean().item())
    ratio = perplexity(train, mask) / perplexity(rollout, mask)
    assert metrics["ppl_ratio"] == pytest.approx(ratio[rows].mean().item())
    k3 = kl_estimate(rollout, train, "k3")
    assert metrics["k3_kl"] == pytest.approx(k3[mask].mean().item())
    raw = to_host(correct(train, rollout, mask, Config("token", 1.5)).metrics)
    assert raw["rollout_corr/rollout_is_raw_eff_sample_size"] == pytest.approx(
        effective_sample_size((train - rollout).exp(), mask).item())
    assert (raw["rollout_corr/rollout_is_raw_eff_sample_size"]
            < raw["rollout_corr/rollout_is_eff_sample_size"])


def test_an_open_end_is_never_crossed():
    metrics = to_host(correct(RATIOS.log(), RATIOS.log() * 0, torch.ones(2, 3),
                              Config("token", (None, 1.5))).metrics)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0
    assert metrics["rollout_corr/rollout_is_seq_fraction_low"] == 0
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.5      # row means 7/6 and 2
    metrics = to_host(correct(RATIOS.log(), RATIOS.log() * 0, torch.ones(2, 3),
                              Config("token", (1.2, None))).metrics)
    assert metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0
    assert metrics["rollout_corr/rollout_is_seq_fraction_low"] == 0.5


def test_the_gradient_never_flows_through_a_weight_nor_a_metric():
    """eq:detached: no weight and no metric has a graph, whichever log-prob has one."""
    with_graph, without = RATIOS.log().requires_grad_(), RATIOS.log() * 0
    for train, rollout in ((with_graph, without), (without, with_graph)):
        result = correct(train, rollout, torch.ones(2, 3),
                         Config("sequence", math.inf, True, {"seq_mean_k3": 1.0}))
        found = result.weights, result.mask, *result.metrics.values()
        assert not any(x.requires_grad for x in found)


def test_one_constant_limits_every_ratio():
    far = torch.tensor([[1000.0, -1000.0]])
    weights = correct(far, torch.zeros(1, 2), torch.ones(1, 2), Config("token", math.inf)).weights
    torch.testing.assert_close(weights, torch.tensor([[SAFETY_BOUND, -SAFETY_BOUND]]).exp(),
                               rtol=2 * gamma(2), atol=0)


def test_bounds_belong_to_the_interval():
    """A ρ exactly at a bound is kept on both sides, in the weights and in every k1 criterion."""
    log_rho, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3)
    zeros = torch.zeros_like(log_rho)
    for bounds in ((1.0, 2.0), (0.5, 1.0)):
        for level in ("token", "sequence", "geometric"):
            assert importance_weights(log_rho, mask, level, bounds).eq(1).all()
        for name in ("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"):
            made = correct(log_rho, zeros, mask, Config(rollout_rs={name: bounds}))
            assert made.mask.all() and made.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0
            assert all(v == 0 for k, v in made.metrics.items()
                       if "fraction_high" in k or "fraction_low" in k)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_weights_that_would_count_twice_are_not_called_applied_and_it_is_said(loss_type):
    """eq:double-count: bypass mode's ratio is the weight: ρ is measured, and not called applied."""
    with pytest.warns(UserWarning,
                      match=f"rollout_is=token is not applied.*{loss_type}.*eq:double-count"):
        config = Config("token", 1.5, True, bypass_mode=True, loss_type=loss_type)
    result = correct(RATIOS.log(), RATIOS.log() * 0, torch.ones(2, 3), config)
    named = [name for name in result.metrics if "rollout_is_" in name and "_is_raw_" not in name]
    assert set(named) == {"rollout_corr/rollout_is_catastrophic_token_fraction",
                          "rollout_corr/rollout_is_veto_fraction",
                          "rollout_corr/rollout_is_per_sequence"}
    assert result.metrics["rollout_corr/rollout_is_raw_max"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config("token", bypass_mode=True, loss_type="reinforce").applies_weights
        assert not Config(bypass_mode=True).applies_weights


# ----------------------------------------------------- what cannot be changed, and what is an error

def test_a_configuration_is_frozen():
    with pytest.raises(AttributeError):
        Config().rollout_is = "token"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_correction_cannot_be_changed_by_whom_it_is_given_to():
    done = correct(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), Config())
    with pytest.raises(AttributeError):
        done.mask = torch.zeros(1, 2)  # pyright: ignore[reportAttributeAccessIssue]


def test_inputs_that_do_not_fit_say_so():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="one shape"):
        correct(x, x[:, :2], x, Config())
    with pytest.raises(ValueError, match="rollout_log_prob is missing"):
        correct(x, None, x, Config())
    for other in (x[0], x[None]):
        with pytest.raises(ValueError, match=r"the shape \[B, T\]"):
            correct(other, other, other, Config())
    for call in (lambda: offpolicy_metrics(x, x[:1], x), lambda: kl_loss(x, x[:1], x),
                 lambda: kl_loss(x, x, x[:, :1]), lambda: effective_sample_size(x, x[:, :1]),
                 lambda: importance_weights(x, x[:, :1], "sequence", 2.0),
                 lambda: aggregate_loss(x, x[:, :1], "token-mean"),
                 lambda: rejection_mask(x, x[:1], {"token_k2": 1.0})):
        with pytest.raises(ValueError, match="one shape"):
            call()


def test_log_ratios_of_16_bits_are_summed_in_32():
    """eq:levels: in bfloat16 a mean of 0.0015 would be a ratio of 1, and e^15 no float16."""
    x, mask = torch.full((1, 64), 0.0015).bfloat16(), torch.ones(1, 64)
    for level in ("geometric", "sequence", "prefix"):
        assert torch.equal(importance_weights(x, mask, level, math.inf),
                           importance_weights(x.float(), mask, level, math.inf))
    assert torch.equal(rejection_mask(x, mask, {"seq_mean_k1": (0.5, 1.001)}), mask < 0)
    assert exp_ratio(torch.tensor(15.0).half()) == exp_ratio(torch.tensor(15.0))


@pytest.mark.parametrize("config, whole", [
    (Config("token", rollout_rs={"token_k1": (0.5, 2.0), "seq_mean_k3": 0.1}), False),
    (Config("token", rollout_is_batch_normalize=True), True),
    (Config(rollout_rs={"token_k3": 0.1, "second_moment": 0.1}), True)])
def test_a_mean_weight_and_a_criterion_of_the_batch_look_at_whole_batches(config, whole):
    assert config.of_whole_batches == whole


def test_a_threshold_that_is_no_bound_is_refused():
    """A C of −1 would make every weight −1; weights and criteria read bounds as the config does."""
    x, mask = torch.zeros(1, 2), torch.ones(1, 2)
    assert Config("token", (0, 2.0)) == Config("token", (None, 2.0))            # ρ is above 0
    assert Config("token", Fraction(2)) == Config("token", 2.0)         # any real, as numpy's are
    for wrong in (-1.0, 0, None, "x", (2.0, 0.5), (None, None), (False, 2.0), (0, 0), (1.0,)):
        with pytest.raises(ValueError, match="threshold must"):
            importance_weights(x, mask, "token", wrong)
    for criteria, said in (
            ({"tokenk1": 1}, "did you mean 'token_k1'"), ({"token_k1": 2.0}, "a pair"),
            ({"token_k1": [2.0, 0.5]}, "lo ≤ hi"), ({"seq_mean_k3": -1}, "positive")):
        with pytest.raises(ValueError, match=said):
            rejection_mask(x, mask, criteria)


@pytest.mark.parametrize("threshold", [2, 2.0, torch.tensor(2.0)])
def test_a_number_of_any_kind_truncates_and_a_list_of_omegaconf_is_a_pair(threshold):
    """eq:tis, eq:mis: a number is whatever is no list."""
    log_rho, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    assert importance_weights(log_rho, mask, "token", threshold)[0, 0] == 2
    pair = collections.UserList([0.5, 2.0])                     # a sequence, neither list nor tuple
    assert importance_weights(log_rho, mask, "token", pair).tolist() == [[0, 0]]
    assert Config.decoupled_seq_is_rs(rs_threshold=pair) == Config.decoupled_seq_is_rs(
        rs_threshold=[0.5, 2.0])


def test_a_bound_beyond_float32_is_none():
    """eq:tis: a config may say 1e300 for "never"; a float32 tensor cannot be clamped by it."""
    log_rho = torch.tensor([[1.0, -3.0]])
    given = log_rho, torch.zeros(1, 2), torch.ones(1, 2)
    far = Config("token", 1e300, rollout_rs={"token_k3": 1e300})
    assert torch.equal(correct(*given, far).weights, log_rho.exp())
    assert correct(*given, far).mask.all() and far.rollout_is_threshold == math.inf


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
