"""losses.py aggregates the terms of tokens into one number, and micro-batches into the whole."""


import pytest
import torch

from three_policies.correction import correct
from three_policies.losses import (AGGREGATIONS, Counts, LossConfig, aggregate_loss, count,
                                   loss_means, policy_loss, width_without_holes)
from three_policies.oracle import close
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import (batch, by_loops, config_of, every_aggregation,
                                                   every_denominator, every_mode)

GRID = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
VALUES = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)


@certifies("float64")
@every_aggregation
@pytest.mark.parametrize("mask, counted", [
    (GRID, None), (KEPT, None), (KEPT, GRID), (KEPT.bool(), GRID.double())])
@pytest.mark.parametrize("horizon", [None, 10])
def test_aggregation_against_loops(how, mask, counted, horizon):
    """eq:aggregation: mask says what is summed, denominator_mask what counts; empty rows add 0."""
    loss = aggregate_loss(VALUES, mask, how, denominator_mask=counted, horizon=horizon)
    assert close(loss, by_loops(VALUES, mask, how, mask if counted is None else counted, horizon))


@certifies("float64")
@pytest.mark.parametrize("how, weights", [
    ("token-mean", [1 / 7, 1 / 7, 1 / 7]), ("token-sum", [1, 1, 1]),
    ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
    ("seq-mean-token-mean", [1 / 12, 1 / 6, 1 / 3]),
    ("seq-mean-token-sum-norm", [1 / 12, 1 / 12, 1 / 12])])
def test_what_each_aggregation_weighs(how, weights):
    """eq:aggregation: a token's weight depends on its sequence's length, here 4, 2 and 1."""
    values = VALUES.clone().requires_grad_()
    gradient = torch.autograd.grad(aggregate_loss(values, GRID, how), values)[0]
    assert close(gradient[:3, 0], weights) and (gradient[GRID == 0] == 0).all()


def test_counts():
    """eq:aggregation: `counts` has tokens and non-empty sequences, also as plain numbers."""
    assert count(GRID) == Counts(torch.tensor(7.0), torch.tensor(3.0))
    assert all(n.dtype == torch.float32 and n.ndim == 0 for n in count(GRID))
    for how in AGGREGATIONS:
        assert close(aggregate_loss(VALUES, GRID, how, counts=Counts(14, 6)),
                     by_loops(VALUES, GRID, how, GRID, None) / (1 if how == "token-sum" else 2))


@pytest.mark.parametrize("mask, width", [
    ([[1, 1, 1]], 3), ([[1, 0, 0], [1, 1, 0]], 3),              # room that the sampler had counts
    ([[1, 0, 1, 0], [1, 0, 0, 0]], 3), ([[1, 0, 1], [0, 1, 1]], 3),     # a hole in all rows or not
    ([[0, 1]], 1), ([[0, 0, 1, 0]], 2), ([[0, 0, 1], [0, 1, 0]], 2),    # before the first token
    ([[0, 0]], 2), ([[]], 1)])
def test_width_without_holes(mask, width):
    """eq:tool-length: columns that no row uses, before the last token, are of prompts and tools."""
    assert width_without_holes(torch.tensor(mask, dtype=torch.bool)) == width


@every_mode
@every_aggregation
def test_prompts_in_front_of_the_responses_change_nothing(mode, how):
    """eq:tool-length: a caller may give whole rows, prompts padded on the left, or responses."""
    config, (*given, mask) = config_of(mode, "sequence", 1.5, True, {"seq_mean_k2": 0.2}), batch()
    wide = [torch.nn.functional.pad(x, (4, 0), value=junk)
            for x, junk in zip((*given, mask), (-1.0, -2.0, 0.0, 3.0, 0))]
    slopes, losses = [], []
    for log_prob, *others in ((*given, mask), wide):
        log_prob = log_prob.detach().requires_grad_()
        losses.append(policy_loss(log_prob, *others, config, LossConfig(aggregation=how))[0])
        slopes.append(torch.autograd.grad(losses[-1], log_prob)[0])
    assert close(*losses) and close(slopes[0], slopes[1][:, 4:]) and not slopes[1][:, :4].any()


SPLITS = ([[0, 1, 2, 3, 4, 5]], [[0], [1, 2, 3], [4, 5]], [[5, 0], [3], [1, 4], [2]])


@certifies("float64")
@every_mode
@every_denominator
@every_aggregation
def test_micro_batches_add_up_to_the_full_batch(mode, denominator, how):
    """eq:aggregation: with `counts`, any split's losses, metrics, gradients sum to the whole's."""
    config = config_of(mode, "token", 1.5, True, {"token_k1": (0.5, 1.8), "seq_mean_k2": 0.2})
    lp, old, mu, advantages, mask = batch()
    correction = correct(lp if config.bypass_mode else old, mu, mask, config)
    assert 0 < correction.mask.sum() < mask.sum()
    how = LossConfig(aggregation=how, denominator=denominator, horizon=7, dual_clip=3.0)
    loss, metrics = policy_loss(lp, old, mu, advantages, mask, config, how, correction=correction)
    gradient = torch.autograd.grad(loss, lp)[0]
    assert gradient.abs().max() > 0.01 and not any("rollout_corr" in name for name in metrics)
    counts = count(mask if denominator == "fixed" else correction.mask)
    for split in SPLITS:
        parts = [policy_loss(lp[i], old[i], mu[i], advantages[i], mask[i], config, how,
                             counts=counts, correction=correction.rows(i))
                 for i in map(torch.tensor, split)]
        assert close(sum(part for part, _ in parts), loss)
        assert close(torch.autograd.grad(sum(part for part, _ in parts), lp)[0], gradient)
        summed = loss_means({key: sum(m[key] for _, m in parts)
                             for key in (*metrics, "loss/kept_tokens")})
        assert all(close(summed[key], metrics[key]) for key in metrics)


@every_mode
def test_means_beside_a_summed_loss(mode):
    """eq:aggregation: with `counts` all are summands; `loss_means` divides all but the loss."""
    lp, old, mu, advantages, mask = batch(10)
    how = LossConfig(clip_low=0.1, clip_high=0.1)
    inputs = lp, old, mu, advantages, mask, config_of(mode, "token", 1.5)
    plain = policy_loss(*inputs, how)[1]
    counts = Counts(*(4 * n for n in count(mask)))
    loss, summands = policy_loss(*inputs, how, counts=counts)
    metrics = loss_means(summands)
    assert close(metrics["loss/policy"], loss)
    of_bypass = {"loss/bypass_clip_fraction"} & set(plain)
    for name in ("loss/ratio", "loss/approx_kl", "loss/clip_fraction", *of_bypass):
        assert close(metrics[name], plain[name]) and close(summands[name], plain[name] * mask.sum())
