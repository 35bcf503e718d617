"""Turns and tools: what chapter 17 calls exact is exact, and holes in a mask count nowhere.

What is exact is read from the chapter's tables, and enumerated on models that the tables lack.
"""

import itertools
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from three_policies.kl import kl_estimate, kl_penalty, kl_ratio
from three_policies.losses import LossConfig, kl_loss, policy_loss
from three_policies.metrics import to_host
from three_policies.oracle import J, close, exact_gradient, expectation, token_kl, turns
from three_policies.presets import PRESETS
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import MODES, batch, config_of, every_aggregation
from three_policies.tests.support.tolerances import NO_SPREAD
from three_policies.training.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]

CHAPTER = (ROOT / "math" / "17-turns-and-tools.md").read_text()
SEEDS = range(1000, 1004)                               # no table has these
writer = cache(turns.writer)


# ----------------------------------------------------------------------- what the tables call exact

def table(name):
    """Return practice → its cells, of a generated table."""
    [text] = re.findall(rf"<!-- begin: {name} -->\n(.*?)\n<!-- end", CHAPTER, re.DOTALL)
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in text.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


STUDIES = [("turns-tools", turns.tool_practices, turns.agent, (0,)),
           ("turns-spelling", turns.spelling_practices, lambda seed: writer(seed, -2.4), (0,)),
           ("turns-spelling", turns.spelling_practices, lambda seed: writer(seed, 1.0), (3,))]


@certifies("float64")
@pytest.mark.parametrize("name, practices, model, column", STUDIES)
def test_what_is_called_exact_is_and_nothing_else_is(name, practices, model, column):
    """eq:trajectory, eq:context: the bias is below 1e-12 just where the chapter has a bold 0."""
    said = table(name)
    for seed in SEEDS:
        x = model(seed)
        found = practices(x)
        assert [*found] == [*said]
        for practice, cells in said.items():
            bias, _, mean_rho = turns.sizes(x, found[practice])
            assert (bias < 1e-12) == (cells[column[0]] == "**0**"), (practice, seed, bias)
            assert bias < 1e-12 or bias > 1e-6
            if cells[column[0] + 2] == "**1**":
                assert abs(mean_rho - 1) < 1e-12, (practice, seed, mean_rho)


# --------------------------------------------------------------------------------- the statements

def mean(x, weights, mask=None, sampler=None):
    """Return E of the gradient, each token weighted, where `draws` (or `sampler`) acts."""
    each = turns.trained(x.lp, x.A, x.own if mask is None else mask, x.g, weights)
    return expectation(x.draws if sampler is None else sampler, each)


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_tools_probability_cancels(seed):
    """eq:trajectory: the ratio of two trajectories is that of the model's tokens; so is ∇log."""
    x = turns.agent(seed)
    ratio = x.acts.probs() / x.draws.probs()
    log = (x.pi.log_probs() - x.mu.log_probs())
    assert close(ratio, torch.where(x.own, log, 0.0).sum(-1).exp())
    of_model = (x.g * x.own[..., None]).sum(1)
    for i in range(0, len(x.lp), 7):
        assert close(exact_gradient(x.pi, x.acts.probs()[i].log()), of_model[i])
    assert close(mean(x, turns.rho(x.lp, x.draws.log_probs(), x.own)), x.target)


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_counted_tool_token_teaches_to_predict_the_tool(seed):
    """eq:tool-mask: with ρ = 1 it adds E[A Σ ∇log π(o)]; where A is 1 that is −∇KL(P‖π)."""
    x = turns.agent(seed)
    w = turns.rho(x.lp, x.draws.log_probs(), x.own)[:, :1]
    extra = mean(x, w * x.mask, x.mask) - x.target
    assert close(extra, expectation(x.acts, x.A * (x.g * x.written[..., None]).sum(1)))
    ones = turns.trained(x.lp, 0 * x.A + 1, x.written, x.g, x.written.double())
    visits = copy_with_mask(x.acts, x.written)
    assert close(expectation(x.acts, ones), -exact_gradient(x.pi, token_kl(x.acts, x.pi, visits)))


def copy_with_mask(policy, mask):
    """Return a policy whose probabilities are the given one's, and whose mask is another."""
    other = turns.with_logits(policy, policy.logits.detach())
    probs = policy.probs().detach()
    other.mask, other.probs = mask, lambda: probs
    return other


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_stands_at_the_tools_tokens_multiplies_the_weight(seed):
    """eq:tool-ratio: E_μ[ρ Π(π/m) f] = E_π[Π(π/m) f], for any number m at the tool's tokens."""
    x = turns.agent(seed)
    junk = torch.rand(x.lp.shape, generator=torch.Generator().manual_seed(seed)).double()
    for log_m in (0 * x.lp, x.mu.log_probs().detach(), x.draws.log_probs().detach(), junk):
        recorded = torch.where(x.written, log_m, x.draws.log_probs().detach())
        w = turns.rho(x.lp, recorded, x.mask)[:, :1]
        factor = torch.where(x.written, x.lp - log_m, 0.0).sum(-1, keepdim=True).exp()
        assert close(mean(x, w * x.own), mean(x, factor * x.own, sampler=x.acts))
        assert close(expectation(x.draws, w), expectation(x.acts, factor))
    known = turns.rho(x.lp, x.draws.log_probs(), x.mask)[:, :1]            # m = P: π plays the tool
    assert close(expectation(x.draws, known), [1.0])
    assert close(mean(x, known * x.own), mean(x, x.own.double(), sampler=x.pi))


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_length_that_counts_the_tool(seed):
    """eq:tool-length: a mean shrinks by |M|/(|M|+o); a geometric ρ is its own power of that."""
    x = turns.agent(seed)
    share = x.own.double().sum(-1, keepdim=True) / x.mask.sum(-1, keepdim=True)
    counted, right = (turns.trained(x.lp, x.A, m, x.g, x.own.double(), "seq-mean-token-mean")
                      for m in (x.mask, x.own))
    assert close(counted, share * right)
    rho = [turns.rho(x.acts.log_probs(), x.draws.log_probs(), m, "geometric")[:, :1]
           for m in (x.mask, x.own)]
    assert close(rho[0], rho[1] ** share)


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_k1_at_the_tools_tokens_is_a_difference_of_two_kls(seed):
    """eq:tool-kl: E_P[log π/π_ref] = KL(P‖π_ref) − KL(P‖π), which may be negative."""
    x = turns.agent(seed)
    visits, ref = copy_with_mask(x.acts, x.written), x.pi.perturbed(seed + 200, 0.5)
    k1 = expectation(x.acts, (kl_estimate(x.lp, ref.log_probs(), "k1") * x.written).sum(-1))
    assert close(k1, token_kl(x.acts, ref, visits) - token_kl(x.acts, x.pi, visits))


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_context_encoded_again_is_another_sampler_or_another_agent(seed):
    """eq:context: any map c of what μ reads and d of what π reads; the target is that of d."""
    x = writer(seed, 1.0)
    same, shuffled = torch.arange(len(x.again)), torch.arange(len(x.again)).flip(0)
    for c, d in itertools.product((same, x.again, shuffled), (same, x.again)):
        sampler, agent = (turns.with_logits(p, p.logits[at]) for p, at in ((x.mu, c), (x.pi, d)))
        R = x.R - J(agent, x.R).detach()
        lp = agent.log_probs()
        w = turns.rho(lp.detach(), sampler.log_probs().detach(), x.mask)
        loss = expectation(sampler, (w * R * lp).sum(-1))
        assert close(exact_gradient(x.pi, loss), exact_gradient(x.pi, J(agent, x.R)))


@certifies("float64")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_text_is_counted_once_for_each_of_its_spellings(seed):
    """eq:respelled: E = Σ_z n(z) π(z) f(z), n spellings; as they get rare its bias stays.

    What grows is the second moment: it doubles when the share is halved.
    """
    second, share = [], []
    for rare in (-8.0, -8.0 - math.log(2)):                 # e^20 bounds a ratio: far from it
        x = writer(seed, rare)
        n = torch.bincount(x.z, minlength=len(x.z)).double()[:, None]
        assert n.max() == 2 and n.sum() == len(n)
        _, each, w = turns.spelling_practices(x)["response, log μ as it was drawn"]
        f = (x.A[..., None] * x.g).sum(1)
        found = expectation(x.mu, each)
        assert close(found, expectation(x.pi, n * f))
        assert close(expectation(x.mu, w), expectation(x.pi, n[:, 0]))
        bias = expectation(x.pi, (n - 1).clamp(min=0) * f)                  # as if none were rare
        assert close(found - x.target, bias, tolerance=2e-3) and bias.norm() > 0.1 * x.target.norm()
        second.append(expectation(x.mu, each.square().sum(-1)).item())
        share.append(expectation(x.mu, (~x.same[:, 0]).double()).item())
    assert share[0] < 1e-3 and abs(share[0] / share[1] - 2) < 1e-2
    assert abs(second[1] / second[0] - 2) < 0.1


# ---------------------------------------------------------------------------- holes in any mask

def spread(x, at, width, fill):
    """Put the columns of x [B, T] at places `at` of a wider tensor that is full of `fill`."""
    wide = torch.full((len(x), width), fill, dtype=x.dtype)
    wide[:, at] = x
    return wide


AT, WIDTH = [0, 1, 4, 5, 8], 9                          # two tools, of two tokens each


def holed(tensors, mask, fill):
    return [spread(x, AT, WIDTH, fill) for x in tensors], spread(mask, AT, WIDTH, False)


CONFIGS = {**{name: preset() for name, preset in PRESETS.items()},
           **{f"{mode}": config_of(mode, "prefix", 1.5, True, {
               "seq_mean_k2": 0.5, "token_k1": (0.4, 3)}) for mode in MODES}}


@every_aggregation
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:rollout_is")
def test_closing_the_holes_changes_nothing(name, how):
    """eq:tool-length: loss, gradient and metrics are those of the tokens alone."""
    *tensors, mask = batch(3)
    for denominator, fill in itertools.product(("fixed", "kept"), (0.0, torch.nan, -1e4)):
        results = []
        for (lp, old, mu, A), m in ((tensors, mask), holed(tensors, mask, fill)):
            lp = lp.detach().requires_grad_()
            loss, metrics = policy_loss(lp, old, mu, A, m, CONFIGS[name],
                                        LossConfig(aggregation=how, denominator=denominator))
            results.append((loss, torch.autograd.grad(loss, lp)[0], to_host(metrics)))
        (loss, slope, metrics), (wide_loss, wide_slope, wide_metrics) = results
        assert close(wide_loss, loss) and close(wide_slope, spread(slope, AT, WIDTH, 0.0))
        assert wide_metrics == pytest.approx(metrics, rel=1e-9, abs=NO_SPREAD, nan_ok=True)


@pytest.mark.parametrize("level", [None, "token", "prefix"])
@pytest.mark.parametrize("kind", ["k1", "k3+"])
def test_closing_the_holes_changes_no_kl(kind, level):
    """eq:tool-kl: neither as a loss nor in the reward, whose sum goes on behind a hole."""
    *tensors, mask = batch(3)
    narrow = [*tensors[:3], mask]
    (*filled, _), holes = holed(tensors, mask, torch.nan)
    wide = [*filled, holes]
    assert close(kl_penalty(*wide, kind, level),
                 spread(kl_penalty(*narrow, kind, level), AT, WIDTH, 0.0))
    ratios = [None if level is None else kl_ratio(lp, mu, m, kind, level)
              for lp, _, mu, m in (narrow, wide)]
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        losses = [kl_loss(lp, ref, m, kind, how, ratio=ratio)
                  for (lp, ref, _, m), ratio in zip((narrow, wide), ratios)]
        slopes = [torch.autograd.grad(x, tensors[0], retain_graph=True)[0] for x in losses]
        assert close(*losses) and close(*slopes)


def test_attention_has_no_holes():
    """eq:context: a tool's tokens are read, so the pass is as wide as what is read."""
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
    response = torch.tensor([[1, 0, 1, 1, 0], [1, 0, 0, 0, 0]])             # a hole
    shape = Shape.of(torch.ones(2, 7, dtype=torch.long), attention, 5, "cpu")
    assert shape.t == 4 > int(response.sum(-1).max()) and shape.p == 2
