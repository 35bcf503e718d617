"""estimators.py computes the distribution that was really sampled from."""

import itertools
import math

import pytest
import torch

from three_policies.estimators import sampling_log_probs
from three_policies.oracle import close, f64
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.tolerances import gamma


def slow_sampling(logits, temperature, top_k, top_p, min_p):
    """Sort the tokens by probability, keep the allowed ones, and renormalise, all by lists."""
    q = torch.softmax(f64(logits) / temperature, -1).tolist()
    likely = (v for v in range(len(q)) if q[v] >= min_p * max(q))
    order = sorted(likely, key=lambda v: -q[v])[:top_k or None]
    total, running, kept = sum(q[v] for v in order), 0.0, []
    for v in order:
        kept.append(v)
        running += q[v] / total
        if running >= top_p:
            break
    mass = sum(q[v] for v in kept)
    return [math.log(q[v] / mass) if v in kept else -math.inf for v in range(len(q))], mass


@certifies("float64")
@pytest.mark.parametrize("temperature, top_k, top_p, min_p", list(itertools.product(
    (0.5, 1.0, 3.0), (0, 1, 3, 99), (0.3, 0.8, 1.0), (0.0, 0.05, 0.25, 0.6))))
def test_sampling_distribution_against_lists(temperature, top_k, top_p, min_p):
    """eq:sampling: lists give the same log μ and surviving mass in every combination; Σμ = 1."""
    rows = [[0.1, 2.0, -1.0, 1.2, 0.7], [3.0, -2.0, 0.0, -0.1, 0.4]]
    log_mu, mass = sampling_log_probs(f64(rows), temperature, top_k, top_p, min_p)
    for row, got, kept in zip(rows, log_mu, mass):
        expected, expected_mass = slow_sampling(row, temperature, top_k, top_p, min_p)
        assert close(got.exp(), f64(expected).exp()) and close(kept, expected_mass)
        assert close(got.exp().sum(), 1.0)
        assert (got == -math.inf).tolist() == [x == -math.inf for x in expected]


def test_sampling_with_everything_kept_is_the_softmax():
    """eq:sampling: the defaults are log_softmax with mass 1; the temperature divides the logits."""
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).double()
    log_mu, mass = sampling_log_probs(logits)
    assert close(log_mu, logits.log_softmax(-1)) and close(mass, torch.ones(4))
    assert close(sampling_log_probs(logits, 2.0)[0], (logits / 2).log_softmax(-1))


def test_logits_of_half_precision_are_widened_first():
    """eq:sampling: a softmax in bfloat16 would be off by up to 0.02."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, wide = (sampling_log_probs(x, 0.7, 10, 0.9) for x in (logits, logits.float()))
    for ours, right in zip(found, wide):
        assert ours.dtype == torch.float32 and ours.equal(right)


def test_top_p_stops_as_soon_as_the_mass_is_reached():
    """eq:sampling: top-p keeps the fewest tokens that reach mass p; met exactly, no further one."""
    quarters, logits = torch.zeros(4).double(), f64([0.5, 0.25, 0.125, 0.125]).log()
    for p, n in ((0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)):
        assert (sampling_log_probs(logits, top_p=p)[0] > -math.inf).sum() == n
    for p, n in ((0.25, 1), (0.5, 2), (0.75, 3)):
        log_mu, mass = sampling_log_probs(quarters, top_p=p)
        assert (log_mu > -math.inf).sum() == n
        assert close(mass, p) and close(log_mu.max(), -math.log(n))


def test_min_p_cuts_before_top_p_and_after_the_temperature():
    """eq:sampling: top-p asks for a share of what min-p left, at the temperature, by hand."""
    logits = f64([0.5, 0.3, 0.15, 0.05]).log()
    for settings, n in (
            ({"min_p": 0.2}, 3), ({"top_p": 0.82}, 3), ({"min_p": 0.2, "top_p": 0.82}, 2),
            ({"min_p": 0.2, "temperature": 0.5}, 2), ({"min_p": 0.2, "temperature": 2.0}, 4),
            ({"min_p": 0.2, "top_k": 2}, 2), ({"min_p": 0.7, "top_k": 2}, 1)):
        log_mu, mass = sampling_log_probs(logits, **settings)
        assert (log_mu > -math.inf).tolist() == [True] * n + [False] * (4 - n), settings
        q = (logits / settings.get("temperature", 1.0)).softmax(-1)[:n]
        assert close(mass, q.sum()) and close(log_mu[:n].exp(), q / q.sum())


def test_what_ties_with_min_p_of_the_likeliest_is_kept():
    """eq:sampling: min-p is ≥ and not >, so min-p 1 keeps the likeliest token and all its ties."""
    log_mu, _ = sampling_log_probs(f64([0.0, math.log(0.5), math.log(0.5) - 1e-9]), min_p=0.5)
    assert (log_mu > -math.inf).tolist() == [True, True, False]
    log_mu, _ = sampling_log_probs(f64([1.0, 2.0, 2.0, 0.0]), min_p=1.0)
    assert close(log_mu.exp(), f64([0.0, 0.5, 0.5, 0.0]))
    assert close(sampling_log_probs(torch.zeros(5000).double(), min_p=1.0)[1], 1.0)


def test_without_top_p_no_token_is_dropped():
    """eq:sampling: at top_p = 1 a token of tiny mass keeps its log-prob, in float32 too."""
    logits = torch.tensor([0.0, -30.0])
    log_mu, mass = sampling_log_probs(logits)
    assert close(log_mu, logits.log_softmax(-1)) and mass == 1


@certifies("float64")
def test_scoring_with_the_raw_softmax_is_off_by_the_mass():
    """eq:sampling: log q − log μ = log(mass) on every kept token."""
    logits = f64([[2.0, 1.0, 0.0, -1.0]])
    log_mu, mass = sampling_log_probs(logits, 1.0, 2, 1.0)
    assert close((logits.log_softmax(-1) - log_mu)[log_mu > -math.inf], mass.log().expand(2))


@pytest.mark.parametrize("bad", [
    {"temperature": 0}, {"temperature": -1.0}, {"temperature": math.nan},
    {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan},
    {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan}])
def test_sampling_errors_name_the_setting(bad):
    """eq:sampling: an error is one sentence with the setting's name and value."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        sampling_log_probs(torch.zeros(3), **bad)


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {}])
def test_a_nan_remains_one_and_no_mass_is_above_1(cut):
    """eq:sampling: −∞ would say that the token is never sampled."""
    for bad in (math.nan, math.inf):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            logits = torch.tensor([[0, bad, 1], [0, 1, 2]], dtype=dtype)
            log_mu, mass = sampling_log_probs(logits, **cut)
            assert log_mu[0].isnan().all() and mass[0].isnan()
            assert mass.dtype == log_mu.dtype and mass[1] <= 1
            assert close(log_mu[1].double().exp().sum(), f64(1), gamma(16))
    logits = torch.randn(30, 32_000, generator=torch.Generator().manual_seed(0))
    assert sampling_log_probs(logits, min_p=1e-30)[1].max() <= 1     # its sum of float32 is above 1


def test_ties_with_the_kth_token_are_kept():
    """eq:sampling: ties with the kth token are kept, since a rank cannot tell them apart."""
    log_mu, mass = sampling_log_probs(f64([1.0, 2.0, 1.0, 0.0]), top_k=2)
    q = f64([1.0, 2.0, 1.0, 0.0]).softmax(-1)
    assert close(mass, q[:3].sum()) and close(log_mu[:3], (q[:3] / q[:3].sum()).log())
    assert log_mu[3] == -math.inf
    assert close(sampling_log_probs(f64([1.0, 2.0]), top_k=5)[1], 1.0)
