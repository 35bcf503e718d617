"""tiny.py is the core on one page: its weights, losses and gradients are the core's to 1e-12."""

import pytest
import torch

from three_policies import tiny
from three_policies.correction import importance_weights
from three_policies.kl import kl_estimate
from three_policies.losses import LossConfig, policy_loss
from three_policies.presets import RolloutCorrectionConfig as Config

CONFIGS = {"none": Config.disabled(), "token": Config.decoupled_token_is(tiny.CAP),
           "sequence": Config.decoupled_seq_is(tiny.CAP), "bypass": Config.bypass_ppo_clip()}
MASK = torch.ones(27, tiny.T)


def tables(seed):
    """Return the tables of π_θ, π_old and μ, far enough apart for the clip and the cap to act."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(13, tiny.V, generator=g, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("correction", tiny.CORRECTIONS)
def test_its_loss_and_gradient_are_those_of_the_core(correction, seed):
    """eq:decoupled-ppo, eq:bypass."""
    current, old, sampler = tables(seed)
    current.requires_grad_()
    log_prob, old, mu = (tiny.log_probs(x, tiny.RESPONSES) for x in (current, old, sampler))
    advantages = torch.randn(27, 1, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours = tiny.loss_of(log_prob, old, mu, advantages, correction).mean()
    core, metrics = policy_loss(log_prob, old, mu, advantages, MASK, CONFIGS[correction],
                                LossConfig(aggregation="seq-mean-token-sum"))
    assert 0.2 < metrics["loss/clip_fraction"] < 0.8
    torch.testing.assert_close(ours, core, rtol=0, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, current, retain_graph=True)[0]
                                 for x in (ours, core)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_its_weights_are_those_of_the_core(level):
    """eq:tis"""
    _, old, mu = (tiny.log_probs(x, tiny.RESPONSES) for x in tables(0))
    ours = tiny.importance_weights(old, mu, level)
    assert (ours == tiny.CAP).any() and (ours < 1).any()
    torch.testing.assert_close(ours, importance_weights(old - mu, MASK, level, tiny.CAP),
                               rtol=0, atol=1e-12)


def test_its_k3_is_the_expectation_of_the_core():
    """eq:kl-estimators"""
    error = tables(1)[0] / 2
    mu, pi = (tiny.log_probs(x, tiny.RESPONSES) for x in (error, torch.zeros_like(error)))
    expected = (mu.sum(1).exp()[:, None] * kl_estimate(mu, pi, "k3")).sum() / tiny.T
    assert tiny.k3(error) == pytest.approx(expected.item(), abs=1e-12)


def test_what_it_prints_is_what_the_method_says():
    """The capless sequence weight has no bias; the others have, and it grows with the mismatch."""
    small, large = (size * torch.randn(13, tiny.V, generator=torch.Generator().manual_seed(0),
                                       dtype=torch.float64) for size in (0.1, 0.7))
    assert tiny.bias("sequence", small) < 1e-12              # no product of ρ reaches the cap
    for correction in ("none", "token", "bypass"):
        assert 0.05 < tiny.bias(correction, small) < tiny.bias(correction, large)
