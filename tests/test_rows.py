"""What holds for any row of rejection.CRITERIA and surrogates.LOSSES, a new one included."""

import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from examples import MASK, OLD, PI, A, batch
from oracle import close

from correction import RolloutCorrectionConfig as Config
from correction import correct
from estimators import aggregate_log_ratio
from losses import LossConfig, policy_loss
from metrics import merge, to_host
from rejection import CRITERIA, interval, rejection_mask
from surrogates import LOSSES, clipped_weights

every_criterion = pytest.mark.parametrize("name", CRITERIA)
every_loss = pytest.mark.parametrize("name", LOSSES)
LP, OLD_LP, MU_LP = (pi.log_probs().detach() for pi in (PI, OLD, PI.perturbed(1, 0.8)))
DOWN = -torch.ones_like(LP)                             # A < 0: no criterion spares a token for it


def bound_of(name, reach=2.0):
    """Return a bound in the form that the row reads; with a reach of 1 only ρ = 1 is within it."""
    return (1 / reach, reach) if CRITERIA[name].read is interval else 0.1 * (reach - 1) or 1e-10


def kept_by(name, train, rollout, mask=MASK, advantages=DOWN, reach=2.0):
    return correct(train, rollout, mask, Config(rollout_rs={name: bound_of(name, reach)}), advantages)


@every_criterion
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_padding_is_not_kept_and_does_not_matter(name, junk):
    """eq:rejection: whatever stands on padding, the mask and the metrics are the same."""
    clean, dirty = (kept_by(name, *(torch.where(MASK, x, padding) for x in (LP, MU_LP)), MASK,
                            torch.where(MASK, DOWN, padding)) for padding in (0.0, junk))
    assert torch.equal(clean.mask, dirty.mask) and not (dirty.mask & ~MASK).any()
    assert 0 < clean.mask.sum() < MASK.sum() and to_host(clean.metrics) == to_host(dirty.metrics)


@every_criterion
def test_a_log_ratio_that_is_not_a_number_is_rejected(name):
    """eq:rejection: NaN is within no bound, and takes its sequence with it where that is judged."""
    train = torch.where(torch.arange(LP.numel()).view(LP.shape) == 0, math.nan, LP)
    kept = kept_by(name, train, LP, reach=1e6).mask
    assert not kept[0, :None if CRITERIA[name].of == "sequence" else 1].any()
    assert torch.equal(kept[1:], MASK[1:])


@every_criterion
def test_identical_policies_are_never_rejected(name):
    """eq:rejection: ρ = 1 is within any bound around it, whatever the sign of A."""
    for advantages, reach in ((DOWN, 2.0), (DOWN, 1.0), (-DOWN, 1.0)):
        assert torch.equal(kept_by(name, LP, LP, MASK, advantages, reach).mask, MASK)


@every_criterion
def test_a_wider_bound_never_keeps_less(name):
    masks = [kept_by(name, LP, MU_LP, reach=x).mask for x in (1.0, 1.1, 1.5, 2.0, 4.0, 1e4)]
    assert not any((tight & ~wide).any() for tight, wide in pairwise(masks))
    assert masks[0].sum() < MASK.sum() == masks[-1].sum()


@pytest.mark.parametrize("name, tensor", [(x, y) for x, row in CRITERIA.items() for y in row.needs])
def test_a_tensor_that_is_needed_and_not_given_is_an_error_that_names_both(name, tensor):
    given = {"advantages": DOWN, "rollout_log_prob": MU_LP, tensor: None}
    with pytest.raises(ValueError, match=rf"rollout_rs\.{name} needs .*{tensor}"):
        rejection_mask(LP - MU_LP, MASK, {name: bound_of(name)}, **given)


@pytest.mark.parametrize("name", [name for name, row in CRITERIA.items() if row.of != "batch"])
def test_micro_batches_merge_to_the_metrics_of_the_whole(name):
    """eq:merge: a standard deviation of 0 is the root of a cancelling difference, up to 1e-7."""
    parts = [kept_by(name, LP[i], MU_LP[i], MASK[i], DOWN[i])
             for i in (slice(0, 1), slice(1, 5), slice(5, None))]
    whole = to_host(kept_by(name, LP, MU_LP).metrics)
    assert to_host(merge(parts)) == pytest.approx(whole, rel=1e-9, abs=1e-7)


def slopes(row, old, numbers):
    """Return the slopes of a row's terms in log π_θ, at π_θ = PI: [B, T]."""
    leaf = LP.clone().requires_grad_()
    given = {"old_log_prob": old, "advantages": A, "response_mask": MASK}
    terms = row.function(leaf, *(given[name] for name in row.takes), **numbers)
    return torch.autograd.grad(terms[MASK].sum(), leaf)[0]


@every_loss
def test_the_first_gradient_is_that_of_reinforce(name):
    """eq:reinforce: at π_θ = π_old the slope in log π_θ is −A, with one A for a sequence."""
    assert close(slopes(LOSSES[name], LP, LOSSES[name].own), -A * MASK)


@every_loss
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_padding_reaches_neither_loss_nor_gradient(name, junk):
    """eq:ratio: whatever stands on padding, in decoupled mode where the row has it, and in bypass."""
    for bypass in {True, LOSSES[name].level is None}:
        (*clean, mask), (*dirty, _) = batch(), batch(junk=junk)
        one, other = (policy_loss(*given, mask, Config(bypass_mode=bypass, loss_type=name))[0]
                      for given in (clean, dirty))
        gradient, = torch.autograd.grad(other, dirty[0])
        assert one == other and torch.equal(torch.autograd.grad(one, clean[0])[0], gradient)
        assert gradient.abs().max() > 1e-3 and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("dual_clip", [None, 1.2])
@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.holds])
def test_what_a_clip_holds_has_no_gradient_and_all_else_has_one(name, dual_clip):
    """eq:ppo-clip, eq:dual-clip, eq:cispo: a token whose weight is clipped keeps its gradient."""
    row = LOSSES[name]
    numbers = {**row.own, **({"dual_clip": dual_clip} if "dual_clip" in row.own else {})}
    held = MASK & row.holds(aggregate_log_ratio(LP - OLD_LP, MASK, row.level).exp(), A, **numbers)
    still = torch.zeros_like(held) if row.holds is clipped_weights else held
    assert 0 < held.sum() < MASK.sum() and torch.equal((slopes(row, OLD_LP, numbers) == 0) & MASK, still)


@every_loss
def test_its_own_numbers_can_be_set(name):
    assert set(LOSSES[name].own) <= {field.name for field in fields(LossConfig)}


@pytest.mark.parametrize("name", [*CRITERIA, *LOSSES])
def test_each_row_is_in_the_help(name):
    pytest.importorskip("omegaconf", reason="the trainer's settings need OmegaConf")
    from plumbing.settings import help_text
    said = CRITERIA[name].statistic if name in CRITERIA else LOSSES[name].meaning
    assert f"\n  {name}: {said}" in help_text()
