"""Chapter 16's statements hold to 1e-12, by a route of its own: processes walked token by token.

A walk follows each prefix, asks which version draws the next token, and adds up the log-probs that
an engine would record. Nothing here knows oracle/versions.py's formulas.
"""

import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from three_policies.oracle import J, Policy, close, exact_gradient, grad_J, scores
from three_policies.oracle.versions import (SWITCH, Recurrent, correlated, counts, crossing,
                                            delayed, kept, mixture, model, off, overlong, rescored,
                                            restarted, selected, shortest, survivors)
from three_policies.tests.support.certified import certifies

CHAPTER = (Path(__file__).resolve().parents[2] / "math" / "16-versions.md").read_text()
PI, START, END, R = model(Policy, seed=0)
OLD, LONG = torch.arange(PI.T) < SWITCH, PI.mask[:, SWITCH]
RESPONSES = [tuple(y[m].tolist()) for y, m in zip(PI.tokens, PI.mask, strict=True)]
ROWS = {y[:t]: PI.states[i, t].item() for i, y in enumerate(RESPONSES) for t in range(len(y))}


def table(policy):
    """Return prefix → log-probs of the next token, of a tabular policy."""
    values = policy.step_log_probs().tolist()
    return {prefix: values[row] for prefix, row in ROWS.items()}


def walk(version, prefix=(), log_mu=0.0):
    """Yield every response and its recorded log μ(y); `version` maps a prefix to log-probs."""
    for token, log_prob in enumerate(version(prefix)[prefix]):
        longer, total = (*prefix, token), log_mu + log_prob
        if token and len(longer) < PI.T:
            yield from walk(version, longer, total)
        else:
            yield longer, total


FIRST, LAST, TRAINED = table(START), table(END), table(PI)
LOG_PI = dict(walk(lambda prefix: TRAINED))


def by_clock(prefix):
    return FIRST if len(prefix) < SWITCH else LAST


def by_token(prefix):
    """Switch as soon as a 3 has been drawn."""
    return LAST if 3 in prefix else FIRST


def counted(runs):
    """Return how often each response counts, [B], from runs of it: y, its chance, its log μ."""
    total = defaultdict(float)
    for y, chance, log_mu in runs:
        total[y] += chance * math.exp(LOG_PI[y] - log_mu)
    return torch.tensor([total[y] for y in RESPONSES], dtype=torch.float64)


def chances(version):
    """Return the runs of a process that draws every response once."""
    return [(y, math.exp(log_mu), log_mu) for y, log_mu in walk(version)]


def sums(*policies):
    return (policy.log_probs().detach().sum(-1) for policy in policies)


PROBS = PI.probs().detach()
LP, START_LP, END_LP = sums(PI, START, END)
RECORD = torch.where(OLD, START.log_probs(), END.log_probs()).detach().sum(-1)


# -------------------------------------------------------------------------------- what is recorded

@certifies("float64")
@pytest.mark.parametrize("version", [by_clock, by_token, lambda prefix: FIRST])
def test_the_record_is_the_behaviour_policy(version):
    """eq:recorded: whatever the tokens so far decide, μ adds up to 1, and E_μ[ρ f] = E_π[f]."""
    runs = chances(version)
    assert sum(chance for _, chance, _ in runs) == pytest.approx(1, abs=1e-12)
    assert close(counted(runs), PROBS)


def test_a_version_that_is_stamped_at_the_end_is_no_record():
    """A label of a finished response looks ahead: its scores are not what was drawn."""
    stamped = dict(walk(lambda prefix: FIRST)), dict(walk(lambda prefix: LAST))
    runs = [(y, chance, stamped[len(y) > SWITCH][y]) for y, chance, _ in chances(by_clock)]
    assert not close(counted(runs), PROBS, 1e-3)


def test_a_kept_cache_is_recorded_exactly():
    """The tokens so far decide the cache; a fresh forward pass of each version differs."""
    pi, start, end, R = model(Recurrent, seed=1)
    cached, fresh = end.log_probs(start), torch.where(OLD, start.log_probs(), end.log_probs())
    assert close(cached.detach().sum(-1).exp().sum(), 1.0)
    assert close(cached[:, :SWITCH], start.log_probs()[:, :SWITCH])
    assert all(not close(cached[:, SWITCH], other.log_probs()[:, SWITCH], 1e-3)
               for other in (start, end))
    assert not close(cached, fresh, 1e-3) and close(start.log_probs(start), start.log_probs())
    practices = crossing(pi, start, end, R)
    assert close(practices["cache kept, recorded"].gradient(pi, R), grad_J(pi, R))


@certifies("float64")
def test_another_score_leaves_the_quotient():
    """eq:rescored: E_μ[π/μ' f] = E_π[μ/μ' f]; for the end version the old tokens' ratios."""
    ratio = ((START.log_probs() - END.log_probs()) * OLD).detach().sum(-1).exp()
    assert close(counts(LP, rescored(RECORD, END_LP)), PROBS * ratio)
    last = dict(walk(lambda prefix: LAST))
    runs = [(y, chance, last[y]) for y, chance, _ in chances(by_clock)]
    assert close(counts(LP, rescored(RECORD, END_LP)), counted(runs))
    practice = crossing(PI, START, END, R)["recomputed with the end version"]
    assert close(practice.count[:, 0], counted(runs))


@certifies("float64")
def test_a_mask_leaves_out_the_old_tokens_part():
    """eq:old-masked: E_μ[ρ Σ_new A g] = ∇J − E_π[Σ_old A g]."""
    advantage = (R - J(PI, R).detach())[..., None]
    old = torch.einsum("b,btp->p", PROBS, scores(PI) * advantage * (OLD & LONG[:, None])[..., None])
    found = crossing(PI, START, END, R)["old tokens masked, ρ of all"].gradient(PI, R)
    assert close(found, grad_J(PI, R) - old) and old.norm() > 0.1 * grad_J(PI, R).norm()


# --------------------------------------------------------------------------- what is too long

@certifies("float64")
def test_a_delay_is_exact_whatever_was_launched():
    """eq:delayed: launched by three samplers, with a delay for each response, E[ρ f] = E_π[f]."""
    launched, delay = [END_LP, RECORD, START_LP], PI.mask.sum(-1) % 3
    found = delayed(launched, delay)
    assert close(counts(LP, found), PROBS)
    assert all((chance > 0).equal(delay == j) for j, (chance, _) in enumerate(found))
    versions = [lambda prefix: LAST, by_clock, lambda prefix: FIRST]
    runs = [run for j, version in enumerate(versions) for run in chances(version)
            if len(run[0]) % 3 == j]
    assert close(counted(runs), PROBS)


@certifies("float64")
def test_a_restart_counts_short_responses_twice():
    """eq:restarted: E = E_π[(1[short] + P_μ(long)) f]; by the mixture it is exact."""
    first, again = chances(lambda prefix: FIRST), chances(lambda prefix: LAST)
    lost = sum(chance for y, chance, _ in first if len(y) > SWITCH)
    runs = [run for run in first if len(run[0]) <= SWITCH] + [
        (y, lost * chance, log_mu) for y, chance, log_mu in again]
    assert sum(chance for _, chance, _ in runs) == pytest.approx(1, abs=1e-12)
    found = restarted(START_LP, END_LP, LONG)
    assert close(counts(LP, found), counted(runs))
    assert close(counts(LP, found), PROBS * ((~LONG).double() + lost))
    assert close(counts(LP, mixture(found)), PROBS)


@certifies("float64")
@pytest.mark.parametrize("b", [-1.0, 0.0, 0.7])
def test_a_discarded_response_is_paid_the_baseline(b):
    """eq:discarded: E_μ[1[kept] ρ (R − b) ∇log π] = ∇E_π[q R + (1 − q) b]."""
    q = torch.where(LONG, 0.25, 1.0).double()
    count = counts(LP, kept(RECORD, q))
    found = exact_gradient(PI, (count[:, None] * (R - b) * PI.log_probs()).sum())
    assert close(found, exact_gradient(PI, PI.probs() @ (q * R[:, 0] + (1 - q) * b)))


@certifies("float64")
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_survivors_train_the_reward_given_that_it_is_kept(share):
    """eq:survivors: the survivors' mean as baseline gives ∇E_π[R | kept]."""
    q = torch.where(LONG, share, 1.0).double()
    found, p = survivors(PI, R, counts(LP, kept(START_LP, q))), PI.probs()
    given = p @ (q * R[:, 0]) / (p @ q)
    assert close(found.baseline, given) and close(found.gradient(PI, R), exact_gradient(PI, given))


@certifies("float64")
def test_the_chance_of_being_kept_repairs_what_could_be_kept():
    """eq:kept-weight: E_μ[1[kept] ρ/q f] = E_π[f] where q > 0."""
    q = 1 / PI.mask.sum(-1).double()
    assert close(counts(LP, kept(RECORD, q, repaired=True)), PROBS)
    assert not close(counts(LP, kept(RECORD, q)), PROBS, 1e-3)


@pytest.mark.parametrize("correlation, share", [(-0.6, 0.2), (0.0, 0.1), (0.6, 0.05)])
def test_the_longest_are_dropped_first_and_to_the_share(correlation, share):
    """Dropping nothing has no bias; the mean reward moves against the correlation."""
    bias, gradient = selected(3, correlation, share)
    keep, length = shortest(PI, share), PI.mask.sum(-1)
    assert close(PROBS @ keep, 1 - share) and (keep[length < PI.T] == 1).all()
    assert close(torch.tensor(selected(3, correlation, 0.0)), [0.0, 0.0])
    assert gradient > 0.01 and (abs(bias) < 0.02 if not correlation else bias * correlation < 0)


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.6])
def test_rewards_have_the_correlation_with_length_that_is_asked_for(correlation):
    found, length = correlated(PI, R, correlation)[:, 0], PI.mask.sum(-1).double()
    away = length - PROBS @ length
    assert close(PROBS @ found, 0.0) and close(PROBS @ found.square(), 1.0)
    assert close(PROBS @ (found * away) / (PROBS @ away.square()).sqrt(), correlation)


# -------------------------------------------------------------------------- what the chapter says

def called_exact():
    """Return the practices with a bold 0 in the column of shared weights, as the chapter says."""
    assert "Practices with a bold 0 in the tables below are exact" in CHAPTER
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+) \| (\S+) [^|]*\|", CHAPTER, re.MULTILINE)
    return {name for name, _, shared in rows if shared == "**0**"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Policy, Recurrent])
def test_what_the_chapter_calls_exact_is_and_nothing_else(kind, seed):
    """A practice is exact if every token of a response counts π(y), and only then unbiased."""
    pi, start, end, R = model(kind, seed)
    found = crossing(pi, start, end, R) | overlong(pi, start, end, R)
    wanted, p = grad_J(pi, R), pi.probs()[:, None] * pi.mask
    exact = called_exact() - ({"cache kept, recorded"} if kind is Policy else set())
    assert exact <= set(found) and len(called_exact()) == 6
    for name, practice in found.items():
        bias = off(practice.gradient(pi, R), wanted)
        assert (bias < 1e-12 if name in exact else bias > 0.005), (name, bias)
        assert close(practice.count, p) == (name in exact), name
        assert name not in exact or abs(practice.rho - 1) < 1e-12, name


def test_the_prose_has_the_tables_numbers():
    prose = " ".join(CHAPTER.split())
    for name, sentence in (("old tokens masked, ρ of all", "The bias is {} (tabular) and {} (sha"),
                           ("old tokens masked, ρ of the rest", "it grows to {} and {}."),
                           ("cache kept, recomputed by version", "leaves a bias of {1}.")):
        [row] = re.findall(rf"^\| {name} \| (\S+)[^|]*\| (\S+)", CHAPTER, re.MULTILINE)
        assert sentence.format(*row) in prose, (name, row)
    [reward] = re.findall(r"^\| −0\.6 \| E.*\| (\S+) ± [^|]*\| [^|]*\|$", CHAPTER, re.MULTILINE)
    [gradient] = re.findall(r"^\| 0 \| ∇J.*\| 0\.(\d+) ± [^|]*\| [^|]*\|$", CHAPTER, re.MULTILINE)
    assert f"the logged reward is off by {reward} standard" in prose
    assert f"the gradient is off by {gradient} %" in prose
