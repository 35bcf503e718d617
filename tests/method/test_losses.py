"""losses.py: `policy_loss` is weights × terms over what is kept, in every mode.

Its expected gradient is tested in test_expected_gradients.py and test_expected_gradients.py.
"""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from three_policies.correction import Correction, correct
from three_policies.doctor import diagnose
from three_policies.kl import kl_penalty
from three_policies.losses import AGGREGATIONS, LossConfig, count, kl_loss, loss_means, policy_loss
from three_policies.oracle import close
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.surrogates import (cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss,
                                       sapo_loss)
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (LOSS_TYPES, MODES, batch, by_loops, config_of,
                                                   every_aggregation, every_denominator, every_mode)
from three_policies.tests.support.tolerances import gamma


# --------------------------------------------------------------------------- the whole is its parts

@certifies("float64")
@every_mode
@every_denominator
@every_aggregation
def test_policy_loss_is_its_parts(mode, denominator, how):
    """eq:correction, eq:decoupled-ppo, eq:bypass: `policy_loss` is loss × weight of the kept."""
    config = config_of(mode, "token", 1.2, False, {"token_k1": (0.5, 1.5)})
    lp, old, mu, advantages, mask = batch(3)
    anchor, train = (mu, lp) if config.bypass_mode else (old, old)
    rho, ratio = (train - mu).detach().exp(), (lp - anchor).detach().exp()
    kept = mask & (rho >= 0.5) & (rho <= 1.5)
    clip = {"clip_low": 0.1, "clip_high": 0.3}
    terms = {"reinforce": lambda: reinforce_loss(lp, advantages),
             "ppo_clip": lambda: ppo_clip_loss(lp, anchor, advantages, **clip, dual_clip=1.2),
             "gspo": lambda: gspo_loss(lp, anchor, advantages, mask, **clip, dual_clip=1.2),
             "cispo": lambda: cispo_loss(lp, anchor, advantages, **clip),
             "sapo": lambda: sapo_loss(lp, anchor, advantages)}[config.loss_type]()
    if config.loss_type == "reinforce" or not config.bypass_mode:
        terms = terms * rho.clamp(max=1.2)
    counted = mask if denominator == "fixed" else kept
    loss, metrics = policy_loss(lp, old, mu, advantages, mask, config,
                                LossConfig(**clip, dual_clip=1.2, aggregation=how,
                                           denominator=denominator, horizon=9))
    assert close(loss, by_loops(terms, kept, how, counted, 9))
    level = "geometric" if config.loss_type == "gspo" else "token"
    s = aggregate_log_ratio(ratio.log(), mask, level).exp()
    held = torch.where(advantages > 0, s > 1.3, (s < 0.9) | (s > 1.2))  # 1.2: the dual clip
    held = {"cispo": (ratio > 1.3) | (ratio < 0.9), "sapo": torch.zeros_like(mask),
            "reinforce": torch.zeros_like(mask)}.get(config.loss_type, held)
    by_hand = {"ratio": ratio, "approx_kl": -ratio.log(), "clip_fraction": held.double()}
    for name, values in by_hand.items():            # over what is kept, whatever is counted
        assert close(metrics[f"loss/{name}"], by_loops(values, kept, "token-mean", kept, None))
    assert close(metrics["loss/policy"], loss) and not metrics["loss/policy"].requires_grad
    assert (metrics["loss/clip_fraction"] > 0) == held[kept].any() and "rollout_corr/kl" in metrics


def test_default_options_of_policy_loss():
    """eq:ppo-clip, eq:aggregation: by default clip 0.2, no dual clip, token-mean, fixed counts."""
    lp, old, mu, advantages, mask = batch(5)
    config = Config(rollout_rs={"token_k1": (0.5, 1.5)})
    inputs = lp, old, mu, advantages, mask, config
    explicit = policy_loss(*inputs, how=LossConfig(
        clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="token-mean",
        denominator="fixed"))[0]
    assert close(policy_loss(*inputs)[0], explicit)
    assert not close(policy_loss(*inputs, how=LossConfig(denominator="kept"))[0], explicit)


@pytest.mark.parametrize("advantage, ratio, left", [
    (0.5, 1.3, 1), (0.5, 1.27, 0), (0.5, 0.7, 0), (-0.5, 0.79, 1), (-0.5, 0.81, 0), (-0.5, 1.4, 0),
    (0.0, 1.4, 0), (0.0, 0.7, 0)])
def test_clip_fraction_counts_the_sides_without_gradient(advantage, ratio, left):
    """eq:ppo-clip: it counts r > 1.28 for A > 0, r < 1 − 0.2 for A < 0, and nothing for A = 0."""
    one = torch.ones(1, 1).double()
    _, metrics = policy_loss(math.log(ratio) * one, 0 * one, 0 * one, advantage * one, one,
                             Config(), LossConfig(clip_low=0.2, clip_high=0.28))
    assert metrics["loss/clip_fraction"] == left


@pytest.mark.parametrize("options, clips", [({}, True), ({"clip_low": 1, "clip_high": 1e9}, False)])
def test_bypass_mode_says_what_its_clip_does_to_mismatch_before_any_update(options, clips):
    """eq:bypass: while π_θ has not moved, PPO's clip around μ holds only μ's error.

    In decoupled mode it holds nothing.
    """
    lp, _, mu, advantages, mask = batch(6)
    inputs = lp, lp.detach(), mu, advantages, mask
    metrics = policy_loss(*inputs, Config.bypass_ppo_clip(), LossConfig(**options))[1]
    warned = [x for x in diagnose(metrics) if x.startswith("loss/bypass_clip_fraction")]
    assert metrics["loss/bypass_clip_fraction"] == metrics["loss/clip_fraction"]
    advised = any("bypass_mode false" in x for x in warned)
    assert (metrics["loss/clip_fraction"] > 0) == clips == advised
    on_time = policy_loss(lp, None, lp.detach(), advantages, mask, Config.bypass_ppo_clip(),
                          LossConfig(**options))[1]
    assert on_time["loss/bypass_clip_fraction"] == 0 and diagnose(on_time) == []
    for config in (Config.decoupled_token_is(), Config.bypass_pg_is()):
        metrics = policy_loss(*inputs, config, LossConfig(**options))[1]
        assert "loss/bypass_clip_fraction" not in metrics


def test_at_the_edge_of_the_interval_nothing_is_clipped():
    """eq:ppo-clip: r = 1 with a range of [1, 1] has not left it, for either sign of A."""
    one = torch.ones(1, 1)
    for advantage in (one, -one):
        _, metrics = policy_loss(0 * one, 0 * one, 0 * one, advantage, one, Config(),
                                 LossConfig(clip_low=0, clip_high=0))
        assert metrics["loss/clip_fraction"] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_mask_may_have_any_dtype(dtype):
    """eq:aggregation: a mask of 0 and 1 in any dtype is the same mask."""
    lp, old, mu, advantages, mask = batch(6)
    config = Config("token", rollout_rs={"token_k1": (0.5, 1.5)})
    for how in ("fixed", "kept"):
        expected, loss = (policy_loss(lp, old, mu, advantages, m, config,
                                      LossConfig(denominator=how))[0]
                          for m in (mask, mask.to(dtype)))
        assert close(loss, expected)
    assert close(kl_loss(lp, old, mask.to(dtype)), kl_loss(lp, old, mask))


def test_no_gradient_through_old_or_rollout_or_advantages():
    """eq:detached: π_old, μ and A are constants of the step, even when they come with a graph."""
    for mode in MODES:
        config = config_of(mode, "token", 1.5)
        lp, old, mu, advantages, mask = batch(7)
        old.requires_grad_()
        mu.requires_grad_()
        advantages = advantages.clone().requires_grad_()
        loss = policy_loss(lp, old, mu, advantages, mask, config)[0]
        constants = old, mu, advantages
        assert all(g is None for g in torch.autograd.grad(loss, constants, allow_unused=True))


@every_mode
@every_denominator
@every_aggregation
def test_everything_rejected_is_a_zero_loss_with_its_graph(mode, denominator, how):
    """eq:rejection, eq:aggregation: the gradient is 0, the metrics are finite and count it."""
    config = config_of(mode, "token", (1e6, 1e7), False, {"token_k1": (1e6, None)})
    lp, old, mu, advantages, mask = batch(1)
    for valid in (mask, torch.zeros_like(mask)):
        loss, metrics = policy_loss(lp, old, mu, advantages, valid, config,
                                    LossConfig(aggregation=how, denominator=denominator))
        assert loss == 0 and (torch.autograd.grad(loss, lp)[0] == 0).all()
        assert all(torch.as_tensor(m).isfinite() for m in metrics.values())
        assert metrics["rollout_corr/all_rejected"] == valid.any()


@every_mode
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_padding_reaches_neither_loss_nor_gradient(mode, junk):
    """eq:ratio: NaN or ±inf in any input's padding changes nothing, at any level or aggregation."""
    for how, level in zip(AGGREGATIONS, ("token", "sequence", "geometric", None)):
        config = config_of(mode, level, 1.5, True, {"seq_mean_k3": 0.1, "token_k1": (0.5, None)})
        out = []
        for padding in (0.0, junk):
            lp, old, mu, advantages, mask = batch(2, junk=padding)
            loss, metrics = policy_loss(lp, old, mu, advantages, mask, config,
                                        LossConfig(aggregation=how))
            figures = torch.stack([torch.as_tensor(m).double() for m in metrics.values()])
            out.append((loss.detach(), torch.autograd.grad(loss, lp)[0], figures))
        assert all(close(clean, dirty) for clean, dirty in zip(*out))
        assert out[0][1].abs().max() > 1e-3 and (out[1][1][~mask] == 0).all()


@every_mode
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_a_rejected_nan_has_no_gradient(mode, level):
    """eq:rejection: a token that is rejected for its NaN leaves all gradients as if it had none."""
    config, out = config_of(mode, level, 1.5, False, {"seq_max_k1": (0.1, None)}), []
    for there in (math.log(0.05), math.nan):        # either is rejected with its whole sequence
        lp, old, mu, advantages, mask = batch(2)
        train = (lp if config.bypass_mode else old).detach()
        mu[0, 0] = train[0, 0] - there
        loss = policy_loss(lp, old, mu, advantages, mask, config)[0]
        out.append((loss.detach(), torch.autograd.grad(loss, lp)[0]))
    assert mask[0, 0] and all(close(clean, dirty) for clean, dirty in zip(*out))
    assert out[1][1].abs().max() > 1e-3 and not out[1][1][0].any()


# --------------------------------------------------------------- the loss's own numbers and metrics

@pytest.mark.parametrize("denominator", ["fixed", "kept"])
def test_metrics_of_the_loss_are_not_diluted_by_rejection(denominator):
    """eq:aggregation: with half rejected and π_θ = π_old the mean r is 1, however it is divided."""
    x = torch.zeros(2, 2)
    _, metrics = policy_loss(x, x, torch.tensor([[0.0, 9.0], [0.0, 9.0]]), x + 1, x + 1,
                             Config(rollout_rs={"token_k1": (0.5, 2.0)}),
                             LossConfig(denominator=denominator))
    assert metrics["loss/ratio"] == 1


def test_half_precision_is_widened_before_the_ratio():
    """eq:gspo: bfloat16 cannot tell e^{2⁻⁷} from 1.0078125; the gradient is of its type again."""
    lp = torch.tensor([[-2.0, -1.9921875]]).bfloat16().requires_grad_()
    old = torch.tensor([[-2.0, -2.0]]).bfloat16()
    one = torch.ones(1, 2)
    loss, metrics = policy_loss(lp, old, old, one.bfloat16(), one, Config(loss_type="gspo"))
    assert loss.dtype == torch.float32
    exact, five = (1 + math.exp(2 ** -7)) / 2, gamma(5)            # e^x, two sums, a quotient
    assert metrics["loss/ratio"].item() == pytest.approx(exact, rel=five)
    assert torch.autograd.grad(loss, lp)[0].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("options, words", [
    ({"aggregation": "token-means"},
     "aggregation cannot be 'token-means'; did you mean 'token-mean'?"),
    ({"denominator": "all"}, "denominator cannot be 'all'; allowed: fixed, kept"),
    ({"dual_clip": 1.0}, "dual_clip must be above 1, not 1.0"),
    ({"clip_low": -0.1}, "clip_low must be at least 0, not -0.1"),
    ({"clip_high": -1}, "clip_high must be at least 0, not -1"),
    ({"tau_positive": 0}, "tau_positive must be above 0, not 0"),
    ({"tau_negative": -1.0}, "tau_negative must be above 0, not -1.0"),
    ({"horizon": 0}, "horizon must be at least 1, not 0"),
    ({"horizon": 0.5}, "horizon must be at least 1, not 0.5")])
def test_a_wrong_option_is_one_sentence(options, words):
    """eq:aggregation: an error has the option's name, its value, and the nearest allowed word."""
    with pytest.raises(ValueError, match=re.escape(words)):
        LossConfig(**options)


@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_shape_is_an_error(wrong):
    """eq:correction: all are [B, T]; only advantages may be a [B, 1] that broadcasts."""
    tensors = list(batch())
    tensors[wrong] = tensors[wrong][:, :2 if wrong == 3 else 1]
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(*tensors, Config())


@pytest.mark.parametrize("rows", [1, 2])
def test_the_correction_of_other_rows_is_an_error(rows):
    """eq:correction: of one row the weights of a whole batch would be added up, by broadcasting."""
    lp, old, mu, advantages, mask = batch()
    config = Config("token")
    whole = correct(old, mu, mask, config)
    part = [x[:rows] for x in (lp, old, mu, advantages, mask)]
    with pytest.raises(ValueError, match=r"take correction.rows\(index\)"):
        policy_loss(*part, config, correction=whole)
    own, given = (policy_loss(*part, config, correction=x)[0]
                  for x in (None, whole.rows(slice(rows))))
    assert torch.equal(own, given)


@pytest.mark.parametrize("missing", ["log_prob", "rollout_log_prob", "advantages"])
@pytest.mark.parametrize("config", [Config("token"), Config(rollout_rs={"token_k3": 1.0}),
                                    Config(bypass_mode=True)],
                         ids=["weights", "rejection", "bypass"])
def test_a_missing_tensor_is_an_error_that_names_it(missing, config):
    """eq:correction: old_log_prob alone may be missing where something is corrected."""
    names = "log_prob", "old_log_prob", "rollout_log_prob", "advantages"
    *tensors, mask = [None if name == missing else x for name, x in zip((*names, "mask"), batch())]
    with pytest.raises(ValueError, match=f"^{missing} is missing"):
        policy_loss(*tensors, mask, config)


# ------------------------------------------------------------------ what other trainers do not have

def same(one, other, lp):
    """Return whether two results of policy_loss have the same loss, gradient and metrics."""
    gradients = [torch.autograd.grad(loss, lp, retain_graph=True)[0] for loss, _ in (one, other)]
    return (close(one[0], other[0]) and close(*gradients) and one[1].keys() == other[1].keys()
            and all(close(one[1][name], other[1][name]) for name in one[1]))


@every_mode
def test_without_old_log_prob_it_is_this_one(mode):
    """eq:ppo-clip: without π_old r = 1, and ρ is from π_θ; bypass mode does not read π_old."""
    lp, old, mu, advantages, mask = batch(6)
    config = config_of(mode, "token", 1.2, False, {"token_k1": (0.5, 1.5)})
    missing = policy_loss(lp, None, mu, advantages, mask, config)
    given = policy_loss(lp, old if config.bypass_mode else lp.detach(), mu, advantages, mask,
                        config)
    assert same(missing, given, lp)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_and_mask_made_elsewhere_need_no_rollout_log_prob(loss_type):
    """eq:decoupled-ppo: the loss sees μ through the correction alone."""
    lp, old, mu, advantages, mask = batch(7)
    config = Config("token", 1.2, rollout_rs={"token_k1": (0.5, 1.5)}, loss_type=loss_type)
    weights, kept, _ = correct(old, mu, mask, config)
    assert Correction(weights, kept).metrics == {} and kept.sum() < mask.sum()
    given = policy_loss(lp, old, None, advantages, mask, config,
                        correction=Correction(weights, kept))
    computed = policy_loss(lp, old, mu, advantages, mask, config)
    computed = computed[0], {name: x for name, x in computed[1].items() if name in given[1]}
    assert same(given, computed, lp) and len(given[1]) == 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_metrics_of_a_batch_twice_are_those_of_it_once(loss_type):
    """eq:aggregation: a sum over kept tokens that nothing divides would be twice as large."""
    given, config = batch(9), Config("token", 1.2, loss_type=loss_type)

    def metrics(lp, old, mu, advantages, mask):
        _, sums = policy_loss(lp, old, mu, advantages, mask, config, counts=count(mask))
        return {name: x for name, x in loss_means(sums).items() if name.startswith("loss/")}
    once, twice = metrics(*given), metrics(*(x.repeat(2, 1) for x in given))
    assert len(once) >= 4 and all(close(once[name], twice[name]) for name in once)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_rollout_log_prob_nothing_is_corrected(loss_type):
    """eq:ppo-clip: without rollout_log_prob the loss is the same, and no distance is measured."""
    lp, old, mu, advantages, mask = batch(8)
    missing = policy_loss(lp, old, None, advantages, mask, Config(loss_type=loss_type))
    given = policy_loss(lp, old, mu, advantages, mask, Config(loss_type=loss_type))
    assert "rollout_corr/kl" in given[1]
    assert same(missing, (given[0], {name: given[1][name] for name in missing[1]}), lp)


@every_mode
@pytest.mark.parametrize("shape", ["[B]", "[B, 1]"])
def test_one_advantage_for_a_sequence(mode, shape):
    """eq:policy-gradient: the advantage of an outcome is that of all its tokens."""
    lp, old, mu, advantages, mask = batch(9)
    one = advantages[:, 0] if shape == "[B]" else advantages[:, :1]
    config = config_of(mode, "sequence", 1.2, False, {"opsm": 0.01})
    whole = policy_loss(lp, old, mu, advantages[:, :1].expand_as(mask), mask, config)
    assert same(policy_loss(lp, old, mu, one, mask, config), whole, lp)


def test_an_advantage_for_each_time_step_is_no_advantage_of_sequences():
    """eq:policy-gradient: [T] is refused, for PyTorch would broadcast it over the wrong axis."""
    lp, old, mu, advantages, mask = batch(9)
    assert lp.shape[0] != lp.shape[1]
    with pytest.raises(ValueError, match=r"advantages \(5,\) and response_mask \(6, 5\)"):
        policy_loss(lp, old, mu, advantages[0], mask, Config())


@every_mode
def test_a_missing_sampling_log_prob_is_not_hidden(mode):
    """eq:ratio: NaN is NaN in the metrics, and in a loss that it weights.

    A criterion rejects what is not a number.
    """
    lp, old, mu, advantages, mask = batch(11)
    gaps = mask & (torch.arange(5) % 2 == 0)
    assert 0 < gaps.sum() < mask.sum()
    for level in ("token", "sequence", "geometric"):
        config = config_of(mode, level, 1.3, False, {"seq_mean_k1": (0.5, 1.5)})
        holes, everything = torch.where(gaps, math.nan, mu), config_of(mode, level, 1.3, False, {})
        loss, _ = policy_loss(lp, old, holes, advantages, mask, everything)
        assert loss.isnan() or not config.applies_weights
        assert policy_loss(lp, old, holes, advantages, mask, config)[1]["rollout_corr/kl"].isnan()


def test_clips_and_temperatures_of_their_own():
    """eq:gspo, eq:sapo: GSPO's clip is a thousand times narrower; SAPO's two τ are options."""
    lp, old, mu, advantages, mask = batch(12)
    inputs = lp, old, mu, advantages, mask
    gspo, sapo = Config(loss_type="gspo"), Config(loss_type="sapo")
    narrow = policy_loss(*inputs, gspo, how=LossConfig(clip_low=3e-4, clip_high=4e-4))
    assert same(policy_loss(*inputs, gspo), narrow, lp)
    assert not close(narrow[0],
                     policy_loss(*inputs, gspo, how=LossConfig(clip_low=0.2, clip_high=0.2))[0])
    gate = sapo_loss(lp, old, advantages, 0.5, 2.0)
    loss = policy_loss(*inputs, sapo, how=LossConfig(tau_positive=0.5, tau_negative=2.0))[0]
    assert close(loss, by_loops(gate, mask, "token-mean", mask, None))


def test_weights_and_penalties_have_one_number_for_each_token():
    """One weight for each sequence, [B], would be taken along the tokens where B = T."""
    x, one = torch.zeros(2, 2), torch.ones(2, 2)
    assert policy_loss(x, None, None, one, one, Config("sequence"),
                       correction=Correction(torch.ones(2, 1), one))[0] == -1
    for weights in (torch.tensor([1.0, 0.0]), torch.ones(1, 2)):
        with pytest.raises(ValueError, match="correction.weights .* must have one shape"):
            policy_loss(x, None, None, one, one, Config("sequence"),
                        correction=Correction(weights, one))
        with pytest.raises(ValueError, match="weights .* must have one shape"):
            kl_penalty(x, x, x, one, level="token", weights=weights)
    with pytest.raises(ValueError, match="weights .1, 1. must have one shape"):
        kl_penalty(x, x, x, one, level="token", weights=torch.ones(1, 1))
    with pytest.raises(ValueError, match="ref_log_prob .2,.*response_mask .2, 2. must have"):
        kl_penalty(x, x[0], x, one)
    ref, twice = torch.full((2, 2), -1.0), torch.full((2, 1), 2.0)
    assert torch.equal(kl_penalty(x, ref, x, one, level="token", weights=twice),
                       kl_penalty(x, ref, x, one, level="token", weights=twice.expand(2, 2)))


ROOT = Path(__file__).resolve().parents[2]
CORE = """
from three_policies import correction, estimators, losses, metrics
from three_policies.interop import dialects
"""


def test_the_core_needs_nothing_of_the_trainers():
    """eq:correction: the core runs where nothing is installed but torch."""
    absent = "import sys; sys.modules.update(msgspec=None, yaml=None, transformers=None)"
    subprocess.run([sys.executable, "-c", f"{absent}\n{CORE}"], cwd=ROOT, check=True)


def test_a_packed_batch_is_refused():
    """One row for all responses has another shape than [B, T], also where A has one of [B]."""
    x = torch.full((7,), -1.0)
    with pytest.raises(ValueError, match=r"response_mask \(7,\)"):
        policy_loss(x, x, x, torch.ones(7), torch.ones(7), Config.disabled())
