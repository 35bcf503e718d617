"""Ratios at their extremes: every clamp's slope on either side, and tokens π_θ cannot draw.

A clamp is safe if both sides have the slope of what it stands for, or if the far side has none on
purpose. Where it multiplies something that is not clamped at the same place, the product rule
leaves half of a gradient, which may have the wrong sign. Exact slopes are computed by mpmath to 30
digits, from the formula without the clamp.

log π_θ = −∞ is a number in every loss, or infinite; never a NaN. π_θ may ban what μ has drawn: a
mask of the vocabulary, an overflow of 16 bits. r and ρ are then 0, or 1 where π_old bans the token
as well. 0 · ∞ and ∞ − ∞ must not spoil the other tokens.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import pytest
import torch
from torch import Tensor

from three_policies.centering import centering_loss
from three_policies.correction import Correction, batch_normalize, correct, importance_weights
from three_policies.estimators import effective_sample_size, perplexity, sampling_log_probs
from three_policies.kl import kl_estimate, kl_ratio
from three_policies.losses import kl_loss, policy_loss
from three_policies.oracle import close, f64
from three_policies.presets import RolloutCorrectionConfig as Config, RolloutCorrectionConfig
from three_policies.ratios import exp_ratio, ratio_less_one
from three_policies.rejection import Evidence, probability_moved, rejection_mask
from three_policies.surrogates import LOSSES, cispo_loss, gspo_loss, ppo_clip_loss, sapo_loss
from three_policies.tests.support.examples import batch, config_of, every_mode, reinforce
from three_policies.tests.support.tolerances import gamma

EXACT: Any = None                       # the slope of the formula
ZERO = 0.0                              # none, on purpose


class Row(NamedTuple):
    """A Row is a function of one number x [1, 1], the slope of its formula, and where to look.

    `at` maps x to EXACT or ZERO. Beside the slope's own rounding, `apart` is how many ε it may be
    off, if it is formed as a difference from 1, and `cancels` how many ε^{1/2} of itself.
    """

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Any], Any]
    at: dict[float, Any]
    apart: float = 0.0
    cancels: float = 0.0


def one(value: float, x: Tensor) -> Tensor:
    return torch.full_like(x, value)


def mask(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


# --------------------------------------------------------------------------- estimators

NEAR, FAR = 19.875, 20.125              # on either side of SAFETY_BOUND, exact in any dtype
ESTIMATORS = {
    "exp_ratio": Row(exp_ratio, mpmath.exp,
                     {NEAR: EXACT, FAR: ZERO, -NEAR: EXACT, -FAR: ZERO}),
    "ratio_less_one": Row(ratio_less_one, mpmath.exp,
                          {NEAR: EXACT, FAR: ZERO, -NEAR: EXACT, -FAR: ZERO}, apart=1),
    "perplexity": Row(lambda x: perplexity(x, mask(x)), lambda x: -mpmath.exp(-x),
                      {79.875: EXACT, 80.125: ZERO, -79.875: EXACT, -80.125: ZERO}),
    # Constant below −20: a slope of the clamped size would be e^20 wherever ℓ is.
    "k3 without a ratio": Row(lambda x: kl_estimate(x, 0 * x, "k3"), lambda x: 1 - mpmath.exp(-x),
                              {-NEAR: EXACT, -FAR: ZERO, NEAR: EXACT, FAR: EXACT, 90.0: EXACT}),
    "k3+": Row(lambda x: kl_estimate(x, 0 * x, "k3+"), lambda x: x,
               {-NEAR: EXACT, -FAR: EXACT, NEAR: EXACT, FAR: EXACT}),
    # w = (x, 1): (x + 1)² / 2(x² + 1). The clamp keeps 0/0 finite.
    "effective_sample_size": Row(
        lambda x: effective_sample_size(torch.cat([x, one(1, x)]), one(1, torch.cat([x, x]))),
        lambda x: (x + 1) * (1 - x) / (x * x + 1) ** 2, {0.0: EXACT, 0.5: EXACT}),
    "effective_sample_size of nothing": Row(
        lambda x: effective_sample_size(x, mask(x)), lambda x: 0, {0.0: ZERO}),
    # The mass of the likelier of two tokens. Only rounding brings a mass above 1.
    "sampling_log_probs": Row(
        lambda x: sampling_log_probs(torch.cat([x, 0 * x], -1), top_k=1)[1],
        lambda x: mpmath.exp(-x) / (1 + mpmath.exp(-x)) ** 2, {0.5: EXACT, 8.0: EXACT}, apart=2)}


# --------------------------------------------------------------------------- surrogates

def surrogate(loss: Callable[..., Tensor], advantage: float, **numbers: float) -> Any:
    return lambda x: loss(x, 0 * x, one(advantage, x), **numbers)


def gspo(advantage: float) -> Any:
    return lambda x: gspo_loss(x, 0 * x, one(advantage, x), mask(x), 0.2, 0.2)


def gate(advantage: float, tau: float) -> Any:
    """Return the slope of −A·(4/τ)σ(τ(r − 1)) in log r."""
    def slope(x: Any) -> Any:
        r = mpmath.exp(x)
        away = mpmath.exp(-abs(tau * (r - 1)))
        return -advantage * 4 * r * away / (1 + away) ** 2
    return slope


# log 0.8 = −0.2231 and log 1.2 = 0.1823 are PPO's ends, log 3 = 1.0986 is the dual clip's.
ABOVE, INSIDE_ABOVE, BELOW, INSIDE_BELOW = 0.1875, 0.125, -0.25, -0.21875
UP = {INSIDE_ABOVE: EXACT, ABOVE: ZERO, FAR: ZERO, INSIDE_BELOW: EXACT, BELOW: EXACT,
      -NEAR: EXACT, -FAR: ZERO}
DOWN = {INSIDE_ABOVE: EXACT, ABOVE: EXACT, NEAR: EXACT, FAR: ZERO, INSIDE_BELOW: EXACT,
        BELOW: ZERO, -FAR: ZERO}
SURROGATES = {
    "ppo_clip, A > 0": Row(surrogate(ppo_clip_loss, 2), lambda x: -2 * mpmath.exp(x), UP),
    "ppo_clip, A < 0": Row(surrogate(ppo_clip_loss, -2), lambda x: 2 * mpmath.exp(x), DOWN),
    "dual clip": Row(surrogate(ppo_clip_loss, -2, dual_clip=3), lambda x: 2 * mpmath.exp(x),
                     {ABOVE: EXACT, 1.0625: EXACT, 1.125: ZERO, FAR: ZERO, BELOW: ZERO}),
    "gspo, A > 0": Row(gspo(2), lambda x: -2 * mpmath.exp(x), UP),
    "gspo, A < 0": Row(gspo(-2), lambda x: 2 * mpmath.exp(x), DOWN),
    # The clamped r is a weight: the slope is its own on either side.
    "cispo": Row(surrogate(cispo_loss, 2),
                 lambda x: -2 * min(max(mpmath.exp(x), mpmath.mpf("0.8")), mpmath.mpf("1.2")),
                 dict.fromkeys((INSIDE_ABOVE, ABOVE, NEAR, FAR, INSIDE_BELOW, BELOW, -FAR), EXACT)),
    # The gate is flat long before r is clamped; below, its slope is r's own, next to nothing.
    "sapo, A > 0": Row(surrogate(sapo_loss, 2), gate(2, 1.0), {
        -1.0: EXACT, 0.0: EXACT, 1.0: EXACT, NEAR: ZERO, FAR: ZERO, -NEAR: EXACT, -FAR: ZERO}),
    "sapo, A < 0": Row(surrogate(sapo_loss, -2), gate(-2, 1.05), {
        -1.0: EXACT, 0.0: EXACT, 1.0: EXACT, NEAR: ZERO, FAR: ZERO, -NEAR: EXACT, -FAR: ZERO}),
    "sapo, A = 0": Row(surrogate(sapo_loss, 0), lambda x: 0, {-1.0: ZERO, 1.0: ZERO})}


# --------------------------------------------------------------------------- the KL and its ratio

def kl_of(kind: str, level: str, mu: float, ref: float) -> Row:
    """Return ρ·k of one token: ρ is clamped above e^20 in value, and its slope is ρ's own."""
    def function(x: Tensor) -> Tensor:
        ratio = kl_ratio(x, one(mu, x), mask(x), kind, level)
        return kl_loss(x, one(ref, x), mask(x), kind, ratio=ratio)

    def slope(x: Any) -> Any:
        rho = mpmath.exp(min(x - mu, 20))
        return rho * (x - ref + (kind == "k1"))
    # ℓ beyond −20 with ρ near 1, and with a stale sample; ρ beyond e^20 and below e^−20.
    at = {mu + x: EXACT for x in (-60.0, -FAR, -NEAR, -0.5, 0.0, 0.5, NEAR, FAR, 40.0)}
    return Row(function, slope, at, cancels=4.0 * (kind == "k3"))


PLACES = {"ρ = 1 where ℓ = −20": (-22.0, -2.0), "ρ = 1 where ℓ = −19": (-21.0, -2.0),
          "stale": (-1.0, -1.0), "μ below π": (-25.0, -5.0), "μ far below": (-45.0, -30.0)}
KL = {f"{kind}, {level}, {place}": kl_of(kind, level, mu, ref)
      for kind in ("k1", "k2", "k3", "k1+", "k3+", "abs+") for level in ("token", "prefix")
      for place, (mu, ref) in PLACES.items()}


# --------------------------------------------------------------------------- detached and lumps

REINFORCE = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", score_centering=True)


def center(x: Tensor) -> Tensor:
    """Center A = 1 with one candidate of log π = x and μ = 0.75, and no weight: a lump of 1/4."""
    return centering_loss(x[..., None], one(math.log(0.75), x)[..., None], one(1, x), mask(x),
                          REINFORCE)


def moved(x: Tensor) -> Tensor:
    return probability_moved(Evidence(x, mask(x), None, one(-1, x)))


def without_graph(decide: Callable[[Tensor], Tensor]) -> Row:
    """Return a decision: it has a value and no slope, on either side of anything."""
    return Row(lambda x: decide(x).float(), lambda x: 0, dict.fromkeys((0.5, 1.0, FAR, -FAR), ZERO))


OTHERS = {
    # log(1 − π) has the slope −π/(1 − π); a rest below 8ε is rounding, and has none.
    "centering, a large rest": Row(center, lambda x: 0.75 - 0.25 * mpmath.exp(x) / (
        1 - mpmath.exp(x)), {-0.5: EXACT, -0.125: EXACT}),
    # π = e^{log μ + log ρ} is at most 1.
    "probability_moved": Row(moved, lambda x: mpmath.exp(x - 1), {0.875: EXACT, 1.125: ZERO}),
    "importance_weights": without_graph(lambda x: importance_weights(x, mask(x), "token", 2.0)),
    "batch_normalize": without_graph(lambda x: batch_normalize(
        correct(x, 0 * x, mask(x), RolloutCorrectionConfig("token")).weights, mask(x), "token")),
    "rejection": without_graph(lambda x: rejection_mask(x, mask(x), {
        "token_k3": 0.1, "seq_mean_k1": (0.5, 2.0), "second_moment": 0.1}))}

TABLE = ESTIMATORS | SURROGATES | KL | OTHERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TABLE)
def test_either_side_has_the_exact_slope_or_none_on_purpose(name, dtype):
    """eq:ratio, eq:ppo-clip, eq:dual-clip, eq:cispo, eq:sapo, eq:gspo, eq:kl-ratio, …

    Other roundings than the last are those of a handful of products and of an exponential.
    """
    row = TABLE[name]
    for at, slope in row.at.items():
        x = torch.tensor([[at]], dtype=dtype, requires_grad=True)
        value = row.function(x).sum()
        assert value.isfinite(), (name, at)
        found = (torch.autograd.grad(value, x)[0] if value.requires_grad else 0 * x).item()
        if slope is ZERO:
            assert found == 0, (name, at, found)
            continue
        with mpmath.workdps(30):
            exact = float(row.slope(mpmath.mpf(at)))
        eps = torch.finfo(dtype).eps
        near = pytest.approx(exact, rel=gamma(40, dtype) + row.cancels * eps ** 0.5,
                             abs=row.apart * eps)
        assert found == near, (name, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rest_has_its_slope_down_to_a_few_roundings(dtype):
    """eq:score-centering: 1 − π is exact to ε; a rest below 8ε is rounding, and moves nothing."""
    eps = torch.finfo(dtype).eps
    for rest, known in ((2 ** 12, True), (64, True), (16, True), (4, False), (1, False)):
        x = torch.tensor([[-rest * eps]], dtype=dtype, requires_grad=True)
        found = torch.autograd.grad(center(x).sum(), x)[0].item()
        with mpmath.workdps(60):
            exact = float(0.75 - 0.25 / mpmath.expm1(rest * mpmath.mpf(eps)))
        expected = exact if known else 0.75
        # π is rounded by ε/2 at most, and then 1 − π is exact.
        assert found == pytest.approx(expected, rel=1 / rest if known else gamma(8, dtype))


# ------------------------------------------------------------------- no clamp is left out

WITHOUT_A_GRADIENT = {                  # counts, a dtype's limits, decisions, penalties
    "sequence_log_ratio", "grpo_advantages", "rloo_advantages", "reinforce_advantages",
    "chi_square", "aggregate_loss", "width_without_holes", "loss_means", "ratio_within",
    "divergence", "binary_kl", "token_binary_kl", "batch_normalize", "kl_penalty"}
IN_THE_TABLE = {
    "exp_ratio", "ratio_less_one", "kl_estimate", "kish", "perplexity", "sampling_log_probs",
    "ppo_clip_loss", "cispo_loss", "kl_ratio", "_ratio_times_k3", "centering_loss",
    "sampled_log_probs", "importance_weights"}


def test_no_clamp_of_the_core_is_left_out():
    """A function that clamps for the first time has a gradient to be looked at, or has none."""
    found = set[str]()
    for file in ("ratios", "kl", "estimators", "surrogates", "losses", "centering", "rejection",
                 "correction"):
        for function in ast.walk(ast.parse(Path(f"{file}.py").read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found |= {function.name for node in ast.walk(function)
                          if isinstance(node, ast.Attribute)
                          and node.attr in ("clamp", "clip", "maximum", "minimum", "nan_to_num")}
    assert found == WITHOUT_A_GRADIENT | IN_THE_TABLE


NEVER, NEXT_TO_NEVER = -math.inf, -1e5


def outcome(loss_type, of_first, old=None, advantage=None, weight=None, **options):
    """Return loss and gradient where the first row's first token has log π_θ = `of_first`."""
    log_prob, anchor, mu, advantages, mask = batch(3)
    log_prob = log_prob.detach().clone()
    log_prob[0, 0] = of_first
    if old is not None:
        anchor[0, 0] = old
    if advantage is not None:
        advantages[0, 0] = advantage
    correction = None
    if weight is not None:
        weights = torch.ones_like(mu)
        weights[0, 0] = weight
        correction = Correction(weights, mask)
    options["bypass_mode"] = loss_type == "reinforce" or options.get("bypass_mode", False)
    log_prob.requires_grad_()
    loss, _ = policy_loss(log_prob, anchor, mu, advantages, mask,
                          Config(loss_type=loss_type, **options), correction=correction)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


HAS_A_RATIO = [name for name in LOSSES if name not in ("reinforce", "cispo")]


@pytest.mark.filterwarnings("ignore:rollout_is")
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("loss_type", HAS_A_RATIO)
def test_a_ratio_of_0_is_the_limit_of_a_small_one(loss_type, advantage, level, bypass):
    """eq:ppo-clip, eq:gspo, eq:sapo: loss and gradient are those of log π_θ = −10⁵."""
    never, nearly = (outcome(loss_type, x, advantage=advantage, rollout_is=level,
                             bypass_mode=bypass) for x in (NEVER, NEXT_TO_NEVER))
    assert all(close(*pair) and pair[0].isfinite().all() for pair in zip(never, nearly))
    assert never[1].abs().max() > 1e-3


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("of_zero", ["weight", "advantage"])
def test_nothing_times_infinity_is_nothing(loss_type, of_zero):
    """eq:reinforce, eq:cispo: with weight or advantage 0 a token adds 0, whatever log π_θ is."""
    never, plain = (outcome(loss_type, x, **{of_zero: 0.0}) for x in (NEVER, -1.0))
    assert never[0].isfinite() and never[1].isfinite().all() and never[1][0, 0] == 0
    if loss_type != "gspo":                                       # whose r̄ is the sequence's
        assert close(never[0], plain[0]) and close(never[1], plain[1])


@pytest.mark.parametrize("loss_type", ["reinforce", "cispo"])
def test_a_log_prob_that_is_taught_is_infinite_and_no_nan(loss_type):
    """eq:reinforce: −A log π_θ is ∞ for A > 0; its gradient is finite, and all others' as well."""
    loss, gradient = outcome(loss_type, NEVER, advantage=1.0)
    assert loss == math.inf and gradient.isfinite().all() and gradient[0, 0] < 0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_what_both_policies_ban_has_a_ratio_of_1(loss_type):
    """eq:ppo-clip: π_θ = π_old = 0 in a first update; other tokens have their own gradients."""
    found = [outcome(loss_type, x, old=x, advantage=0.5) for x in (NEVER, -1.0)]
    if loss_type == "reinforce":
        return                                                   # it looks at no π_old
    assert found[0][0].isfinite() and found[0][1].isfinite().all()
    others = torch.ones_like(found[0][1], dtype=torch.bool)
    others[0, 0] = False
    assert close(found[0][1][others], found[1][1][others])


@every_mode
def test_a_nan_is_no_impossible_token(mode):
    """A NaN stays one in the loss: it is not taken for a ratio of 0."""
    log_prob, old, mu, advantages, mask = batch(3)
    log_prob = log_prob.detach().clone()
    log_prob[0, 0] = math.nan
    assert policy_loss(log_prob, old, mu, advantages, mask, config_of(mode, None, 2.0))[0].isnan()


def test_a_banned_candidate_has_no_value_where_nothing_is_centered():
    """eq:score-centering: A = 0 makes 0 · −∞ of a candidate with log π = −∞."""
    log_mu = f64([[[0.5, 0.25]]]).log()
    config = replace(reinforce("token", 2.0), score_centering=True)
    log_prob = f64([[[-0.5, NEVER]]]).requires_grad_()
    loss = centering_loss(log_prob, log_mu, f64([[0.0]]), torch.ones(1, 1), config)
    assert loss.item() == 0
    assert torch.autograd.grad(loss.sum(), log_prob)[0].tolist() == [[[0, 0]]]
