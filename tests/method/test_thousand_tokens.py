"""oracle/prices.py counts what enumeration lists: each class against all responses, at T = 10."""

import itertools
import math

import pytest
import torch

from three_policies.correction import correct
from three_policies.oracle import f64, prices
from three_policies.presets import RolloutCorrectionConfig as Config


def listed(counted):
    """Return log π, log μ, scores and rewards of every response, [2^T, T] and [2^T]."""
    T = counted.up + counted.down
    tokens = f64(list(itertools.product((0.0, 1.0), repeat=T)))
    pi = f64([counted.likely] * counted.up + [1 - counted.likely] * counted.down)
    log_probs = [torch.where(tokens == 1, p.log(), (1 - p).log()) for p in (pi, 1 - pi)]
    right = (tokens.sum(1) >= round(pi.sum().item())).double()
    return *log_probs, tokens - pi, right


@pytest.mark.parametrize("aligned", [0.2, 1.0])
@pytest.mark.parametrize("k3", [1e-3, 0.1])
def test_counts_say_what_all_responses_say(k3, aligned):
    """Mean and standard deviation of five estimators, by the core's weights, to 1e-12 of ∇J."""
    counted = prices.Counted(10, k3, aligned)
    pi, mu, scores, right = listed(counted)
    chance = mu.sum(1).exp()
    ratio = (pi - mu).sum(1).exp()
    torch.testing.assert_close((chance * (pi - mu).exp().T).sum(1), torch.ones(10).double())
    J, wanted = (chance * ratio * right).sum(), (chance * ratio * right * scores.sum(1)).sum()

    configs = {"no weights": Config.disabled(), "token weights": Config.decoupled_token_is()}
    for name, cap in prices.COLUMNS.items():
        config = configs.get(name) or Config.decoupled_seq_is(cap)
        weights = correct(pi, mu, torch.ones_like(pi), config).weights
        weights = torch.ones_like(pi) if weights is None else weights
        baseline = J if name.startswith("sequence") else (chance * right).sum()
        each = (right - baseline) * (weights * scores).sum(1) / wanted
        mean = (chance * each).sum()
        std = ((chance * each**2).sum() - mean**2).sqrt()
        torch.testing.assert_close(f64([*counted.estimate(name)]), torch.stack([mean, std]),
                                   rtol=0, atol=1e-12)


@pytest.mark.parametrize("k3", [1e-4, 1e-3, 5e-3])
def test_a_thousand_tokens_have_the_k3_and_the_ess_of_the_formulas(k3):
    """eq:chi2: E_μ[Πρ²] = (1 + χ²)^T; k3 is a·tanh(a/2), and Σ over classes is 1."""
    counted = prices.Counted(1000, k3, 0.03)
    a, p = counted.a, counted.likely
    assert a * math.tanh(a / 2) == pytest.approx(k3, rel=1e-12)
    second = p * math.exp(-2 * a) + (1 - p) * math.exp(2 * a)
    moments = [counted.expectation(counted.ratio**n).item() for n in (0, 1, 2)]
    assert moments == pytest.approx([1, 1, second**1000], rel=1e-9)
    assert -counted.expectation(counted.ratio.log()).item() == pytest.approx(1000 * k3, rel=1e-9)


def test_sequence_weights_are_exact_and_the_others_lose_with_alignment():
    for k3 in (1e-4, 1e-3):
        chance, worst = (prices.Counted(1000, k3, aligned) for aligned in (1000**-0.5, 1.0))
        assert worst.estimate("sequence, exact").mean == pytest.approx(1, abs=1e-9)
        assert abs(chance.estimate("no weights").mean - 1) < 2e-3
        assert worst.estimate("no weights").mean < 0.92
