"""Any row of rejection.CRITERIA and surrogates.LOSSES has these properties, a new one included."""

import math
from contextlib import nullcontext
from dataclasses import fields
from functools import cache

import pytest
import torch

from three_policies.checks import interval
from three_policies.correction import correct
from three_policies.losses import LossConfig, policy_loss
from three_policies.metrics import merge, to_host
from three_policies.oracle import close
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.rejection import CRITERIA, rejection_mask
from three_policies.surrogates import LOSSES, clipped_tokens
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import MASK, OLD, PI, A, batch
from three_policies.tests.support.tolerances import NO_SPREAD

every_criterion = pytest.mark.parametrize("name", CRITERIA)
LP, OLD_LP, MU_LP = (pi.log_probs().detach() for pi in (PI, OLD, PI.perturbed(1, 0.8)))
DOWN = -torch.ones_like(LP)                             # A < 0


def bound(name, reach=2.0):                             # in the form that the row reads
    return (1 / reach, reach) if CRITERIA[name].read is interval else 0.1 * (reach - 1) or 1e-10


def kept_by(name, train, rollout, mask=MASK, advantages=None, reach=2.0):
    advantages = judged(name) if advantages is None else advantages
    return correct(train, rollout, mask, Config(rollout_rs={name: bound(name, reach)}), advantages)


@cache
def judged(name) -> torch.Tensor:
    """Return A of the sign for which the criterion rejects: one may spare tokens with A < 0."""
    return next(a for a in (DOWN, -DOWN)
                if not kept_by(name, LP, MU_LP, advantages=a, reach=1.0).mask.equal(MASK))


@cache
def middle(name) -> float:
    """Return a reach at which the criterion keeps some tokens and rejects some."""
    return next(reach for reach in (2.0, 1.2, 4.0, 8.0, 50.0)
                if 0 < kept_by(name, LP, MU_LP, reach=reach).mask.sum() < MASK.sum())


@every_criterion
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_padding_is_not_kept_and_does_not_matter(name, junk):
    """eq:rejection: the mask and the metrics are the same, whatever stands on padding."""
    clean, dirty = (kept_by(name, *(torch.where(MASK, x, padding) for x in (LP, MU_LP)), MASK,
                            torch.where(MASK, judged(name), padding), middle(name))
                    for padding in (0.0, junk))
    assert torch.equal(clean.mask, dirty.mask) and not (dirty.grounds.kept & ~MASK).any()
    assert 0 < clean.mask.sum() < MASK.sum() and to_host(clean.metrics) == to_host(dirty.metrics)


@every_criterion
def test_a_log_ratio_that_is_not_a_number_is_rejected(name):
    """eq:rejection: NaN is within no bound; where sequences are judged, its sequence goes, too."""
    long, train = int(MASK.all(-1).nonzero()[0]), LP.clone()
    train[long, 0], others = math.nan, torch.arange(len(LP)) != long
    for advantages in (DOWN, 0 * DOWN, -DOWN):
        kept = kept_by(name, train, LP, MASK, advantages, reach=1e6).mask
        assert not kept[long, :None if CRITERIA[name].of == "sequence" else 1].any()
        assert torch.equal(kept[others], MASK[others])


@every_criterion
def test_a_statistic_has_the_shape_of_what_is_judged(name):
    verdict = kept_by(name, LP, MU_LP).grounds.verdicts[name][2]
    assert (verdict.statistic.shape[-1] == 1) == (CRITERIA[name].of == "sequence")


@pytest.mark.parametrize("name", [name for name, row in CRITERIA.items() if row.read is interval])
def test_an_open_end_rejects_nothing_on_its_side(name):
    """eq:rejection: [lo, null] and [null, hi] reject together what [lo, hi] rejects."""
    hi = middle(name)
    lo = 1 / hi
    pair, low, high = (correct(LP, MU_LP, MASK, Config(rollout_rs={name: ends}), judged(name)).mask
                       for ends in ((lo, hi), (lo, None), (None, hi)))
    assert torch.equal(pair, low & high) and torch.equal(
        MASK, correct(LP, MU_LP, MASK, Config(rollout_rs={name: (1e-9, None)})).mask)


@every_criterion
def test_identical_policies_are_never_rejected(name):
    """eq:rejection: ρ = 1 is within any bound around it, whatever the sign of A."""
    for advantages, reach in ((DOWN, 2.0), (DOWN, 1.0), (-DOWN, 1.0)):
        assert torch.equal(kept_by(name, LP, LP, MASK, advantages, reach).mask, MASK)


@every_criterion
def test_a_wider_bound_never_keeps_less(name):
    masks = torch.stack([kept_by(name, LP, MU_LP, reach=x).mask for x in (1, 1.1, 1.5, 2, 4, 1e4)])
    assert not (masks[:-1] & ~masks[1:]).any()
    assert masks[0].sum() < MASK.sum() == masks[-1].sum()


@every_criterion
@pytest.mark.parametrize("tensor", ["advantages", "rollout_log_prob"])
def test_a_tensor_is_an_error_where_the_row_needs_it_and_it_is_not_given(name, tensor):
    needed = pytest.raises(ValueError, match=rf"rollout_rs\.{name} needs .*{tensor}")
    given = {"advantages": DOWN, "rollout_log_prob": MU_LP, tensor: None}
    with needed if tensor in CRITERIA[name].needs else nullcontext():
        rejection_mask(LP - MU_LP, MASK, {name: bound(name)}, **given)


@pytest.mark.parametrize("name", [name for name, row in CRITERIA.items() if row.of != "batch"])
def test_micro_batches_merge_to_the_metrics_of_the_whole(name):
    cut = zip(*(x.split([1, 6, 8]) for x in (LP, MU_LP, MASK, judged(name))), strict=True)
    merged, whole = merge([kept_by(name, *x) for x in cut]), kept_by(name, LP, MU_LP).metrics
    assert to_host(merged) == pytest.approx(to_host(whole), rel=1e-9, abs=NO_SPREAD)    # eq:merge


def slopes(row, old, numbers):                          # of its terms in log π_θ, at π_θ = PI
    leaf = LP.clone().requires_grad_()
    given = {"old_log_prob": old, "advantages": A, "response_mask": MASK}
    terms = row.function(leaf, *(given[name] for name in row.takes), **numbers)
    return torch.autograd.grad(terms[MASK].sum(), leaf)[0]


@certifies("float64")
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_gradient_is_that_of_reinforce(name):
    """eq:reinforce: at π_θ = π_old every loss has the slope −A in log π_θ, one A for a sequence."""
    assert close(slopes(LOSSES[name], LP, LOSSES[name].own), -A * MASK)


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_states_the_level_of_its_ratio(name):
    """eq:levels, eq:double-count: None has no ratio; at geometric one token moves the others."""
    row, moved = LOSSES[name], OLD_LP + 1e-4 * torch.tensor([1.0, 0.0, 0.0])
    given = {"old_log_prob": OLD_LP, "advantages": A, "response_mask": MASK}
    here, there = (row.function(x, *(given[t] for t in row.takes), **row.own)[MASK[:, 1], 1]
                   for x in (OLD_LP, moved))
    assert (row.level is None) == ("old_log_prob" not in row.takes)
    assert torch.equal(here, there) == (row.level != "geometric")


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.level])
def test_only_what_a_clip_holds_loses_its_gradient(name):
    old = LP + 2 * (OLD_LP - LP)
    near = MASK & (A != 0) & ((LP - old).exp() < 2)             # a smooth loss is flat far away
    stops = near & (slopes(LOSSES[name], old, LOSSES[name].own) == 0)
    assert LOSSES[name].holds or not stops.any()


@pytest.mark.parametrize("name", LOSSES)
def test_padding_reaches_neither_loss_nor_gradient(name):
    """eq:ratio: NaN on padding changes nothing; the row's own numbers are fields of LossConfig."""
    config = Config(bypass_mode=LOSSES[name].level is None, loss_type=name)
    (*clean, mask), (*dirty, _) = batch(), batch(junk=math.nan)
    one, other = (policy_loss(*given, mask, config, LossConfig(**LOSSES[name].own))[0]
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
    assert row.holds is not None and row.level is not None
    for reach in (1, 3, 9, 27):                             # a wide clip acts on distant policies
        old = LP + reach * (OLD_LP - LP)
        ratio = aggregate_log_ratio(LP - old, MASK, row.level).exp()
        held, stopped = MASK & row.holds(ratio, A, **numbers), slopes(row, old, numbers) == 0
        if held.any():
            break
    assert 0 < held.sum() < MASK.sum()
    keeps = row.holds is not clipped_tokens and not (MASK & stopped).any()
    assert torch.equal(MASK & stopped, held) or keeps


@pytest.mark.parametrize("name", LOSSES)
def test_each_number_of_a_loss_is_a_setting(name):
    """Help says that the settings loss.* replace a loss's own numbers."""
    pytest.importorskip("msgspec", reason="the trainer's settings need msgspec")
    from three_policies.training.settings import LossSettings
    assert set(LOSSES[name].own) <= {of.name for of in fields(LossSettings)}


@pytest.mark.parametrize("name", [*CRITERIA, *LOSSES])
def test_each_row_is_in_the_help(name):
    pytest.importorskip("msgspec", reason="the trainer's settings need msgspec")
    from three_policies.training.settings import help_text
    assert f"\n  {name}: {(CRITERIA | LOSSES)[name][0]}" in help_text()     # statistic, meaning
