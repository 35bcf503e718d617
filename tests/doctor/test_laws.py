"""The laws of the doctor hold for any policy, by enumeration; a dump shows which entropy it has.

Where log-probs were divided by τ after the softmax, `entropy` may be that of the undivided logits,
of the divided π, or of what was drawn. Dumps are of made-up logits, float64, and the test prints
how far each stands from the other law.
"""

import math
from pathlib import Path

import pytest
import torch

from three_policies import doctor
from three_policies.doctor import causes, laws, places, plants
from three_policies.doctor.dumps import response
from three_policies.doctor.sides import log_probs
from three_policies.doctor.tokens import (FLOOR, Tokens, evenness, gap_left, log_odds, numerics,
                                          own_sizes, pairs, scatter, size_of, z_of, z_of_rho)
from three_policies.estimators import sampling_log_probs
from three_policies.oracle import Policy, close, expectation, kl
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.planted import in_rows, model, planted, shifted, tokens


# ------------------------------------------------------------------------------- the laws

@certifies("float64")
def test_left_is_what_two_sizes_save():
    """eq:gap-left: two sizes leave a known share if a tenth of the tokens have all of the gap."""
    e = torch.cat([torch.ones(10), torch.zeros(90)]).double()
    floor, dirty = FLOOR, e > 0
    expected = (1 + floor) ** 0.1 * floor ** 0.9 / (0.1 + floor)
    assert gap_left(e, dirty, ~dirty) == pytest.approx(expected, rel=1e-12)
    assert gap_left(e, torch.ones_like(dirty)) == pytest.approx(1, rel=1e-12)


@certifies("float64")
def test_a_temperature_is_a_slope_of_differences_after_one_prefix():
    """eq:same-prefix: log π(v) − log π(w) is τ (log μ(v) − log μ(w)) for all of five tokens."""
    logits = torch.tensor([1.0, 0.3, -2, 0.7, 4], dtype=torch.float64)
    mu, pi = logits.log_softmax(-1), (0.7 * logits).log_softmax(-1)
    torch.testing.assert_close(pi - pi[0], 0.7 * (mu - mu[0]), rtol=1e-12, atol=1e-12)


@certifies("float64")
def test_dividing_after_the_softmax_leaves_an_entropy_of_renyi():
    """eq:unnormalised: log Σp^{1/τ} is (1 − 1/τ)·H_{1/τ}(p), with H_a = log Σp^a / (1 − a)."""
    p, tau = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64), 0.8
    mu = (p.log() / tau).log_softmax(-1)
    gap = p.log() / tau - mu
    renyi = (p ** (1 / tau)).sum().log() / (1 - 1 / tau)
    torch.testing.assert_close(gap, ((1 - 1 / tau) * renyi).expand(4), rtol=1e-12, atol=1e-12)


PI, MU = Policy(4, 3, seed=0), Policy(4, 3, seed=0).perturbed(seed=1, size=0.3)


def both(pi, mu):
    return (torch.where(PI.mask, policy.log_probs().detach(), 0.0) for policy in (pi, mu))


@certifies("float64")
def test_log_odds_hold_the_whole_error_of_a_logit():
    """eq:log-odds: logit p(v) is z_v − log Σ_{w≠v} e^{z_w}, but for 1e-3 that keeps it finite."""
    z = PI.logits.detach()
    others = z[:, None, :].masked_fill(torch.eye(4, dtype=torch.bool), -math.inf).logsumexp(-1)
    p = z.softmax(-1)
    exact = p.log() - (math.exp(0) - p + 1e-3).log()
    assert close(log_odds(p.log()), exact)
    assert ((log_odds(p.log()) - (z - others)).abs() <= 1.001e-3 / (1 - p)).all()


@certifies("float64")
def test_the_sign_of_the_mean_tells_a_wrong_record():
    """eq:record-sign: E_p[log ρ] = KL(p‖μ) − KL(p‖π) is below 0 if p is μ, above 0 if p is π."""
    pi, mu = both(PI, MU)
    for drawn in (MU, PI, PI.perturbed(seed=5, size=0.5)):
        mean = expectation(drawn, (pi - mu).sum(-1))
        assert close(mean, kl(drawn, MU) - kl(drawn, PI))
    assert expectation(MU, (pi - mu).sum(-1)) < -1e-3 < 1e-3 < expectation(PI, (pi - mu).sum(-1))


@certifies("float64")
def test_a_temperature_is_a_slope_of_log_odds_but_for_an_entropy():
    """eq:temperature-slope: logit π(v) = τ logit μ(v) − (1 − τ) H_τ(μ without v)."""
    z, tau = PI.logits.detach(), 0.7
    pi, mu = z.log_softmax(-1), (z / tau).log_softmax(-1)
    rest = mu[:, None, :].expand(-1, 4, -1).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)
    renyi = (tau * rest.log_softmax(-1)).logsumexp(-1) / (1 - tau)
    odds = [x - (-x.exp()).log1p() for x in (pi, mu)]
    assert close(odds[0], tau * odds[1] - (1 - tau) * renyi)


@certifies("float64")
def test_surprisal_has_the_mean_entropy_where_pi_was_drawn():
    """eq:calibration: E[−log π − H(π)] is 0 in every state for samples of π, and not for others."""
    pi, mu = (policy.step_log_probs().detach() for policy in (PI, MU))
    excess = -pi + (pi.exp() * pi).sum(-1, keepdim=True)
    assert close((pi.exp() * excess).sum(-1), torch.zeros(len(pi)))
    assert ((mu.exp() * excess).sum(-1)).abs().max() > 0.05


def test_a_penalty_is_judged_at_equal_log_odds():
    """Likely tokens have occurred before more often: a temperature is no penalty."""
    g = torch.Generator().manual_seed(0)
    odds = 2 * torch.randn(2000, generator=g, dtype=torch.float64)
    seen = torch.rand(2000, generator=g, dtype=torch.float64) < odds.sigmoid()
    apart = torch.where(seen, 0.3, -0.2) + 0.1 * torch.randn(2000, generator=g)
    found = places.penalty(tokens(*shifted(odds, apart), seen=seen))
    assert found and found.cause == "penalty" and found.rest and not found.rest.seen.any()
    slope = 0.2 * odds
    assert slope[seen].mean() > 0.1 and slope[~seen].mean() < -0.1
    assert not places.penalty(tokens(*shifted(odds, slope), seen=seen))


@pytest.mark.parametrize("penalty, word", [(0.4, "gain"), (-0.4, "lose")])
def test_a_penalty_may_be_negative(penalty, word):
    """vLLM takes a presence penalty from −2 to 2: a negative one favours what occurred before."""
    g = torch.Generator().manual_seed(0)
    odds, noise = torch.randn(2, 2000, generator=g, dtype=torch.float64)
    seen = torch.rand(2000, generator=g) < 0.5
    apart = penalty * torch.where(seen, 0.6, -0.4) + 0.1 * noise
    found = places.penalty(tokens(*shifted(odds, apart), seen=seen))
    assert found and f"in the response {word} 0." in found.evidence
    assert found.rest and not found.rest.seen.any()


def test_a_penalty_is_of_occurrences_and_not_of_ids():
    """Ids that occur often have been seen more often: a bias towards them is no penalty."""
    g = torch.Generator().manual_seed(0)
    ids = torch.multinomial(1 / torch.arange(1.0, 101), 4000, True, generator=g)
    rows = ids.view(100, 40).tolist()
    seen = torch.tensor([v in row[:t] for row in rows for t, v in enumerate(row)])
    odds, noise = torch.randn(2, 4000, generator=g, dtype=torch.float64)
    for by, found in ((torch.where(ids < 10, 0.3, -0.2), False),
                      (torch.where(seen, 0.3, -0.2), True)):
        x = tokens(*shifted(odds, by + 0.1 * noise), seen=seen, ids=ids)
        assert bool(places.penalty(x)) == found


@pytest.mark.parametrize("agree, named", [(8, True), (5, False)])
def test_a_penalty_acts_on_most_ids_in_one_direction(agree, named):
    """A penalty is seen in eight of ten ids; where half of them lose, something else differs."""
    g = torch.Generator().manual_seed(0)
    odds, noise = torch.randn(2, 4000, generator=g, dtype=torch.float64)
    ids, seen = torch.arange(4000) % 10, torch.rand(4000, generator=g) < 0.5
    apart = torch.where(seen, 1, -1) * torch.where(ids < agree, 0.4, -0.1)
    found = places.penalty(tokens(*shifted(odds, apart + 0.05 * noise), seen=seen, ids=ids))
    assert bool(found) == named


def test_each_token_is_in_one_pair():
    """eq:same-prefix: five tokens after one prefix are two pairs; one drawn again is no third."""
    x = tokens(*torch.zeros(2, 7), prefix=torch.tensor([0, 0, 0, 1, 0, 0, 0]),
               ids=torch.tensor([3, 4, 3, 9, 5, 6, 7]))
    i, j, k, m = pairs(x)
    assert [*zip(i.tolist(), j.tolist())] == [(1, 0), (5, 4)]
    assert [*zip(k.tolist(), m.tolist())] == [(2, 0)]


def test_surprisal_is_weighted_by_rho_since_mu_drew_the_tokens():
    """eq:calibration: a temperature of 0.97 on one side is no mistake of both."""
    g = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(200, 50, generator=g, dtype=torch.float64)
    mu, pi = z.log_softmax(-1), (z / 0.97).log_softmax(-1)
    drawn = torch.multinomial(mu.exp(), 100, True, generator=g)
    entropy = -(pi.exp() * pi).sum(-1, keepdim=True).expand(-1, 100).flatten()
    x = tokens(*(y.gather(1, drawn).flatten() for y in (mu, pi)), entropy=entropy)
    assert abs(z_of(-x.pi - entropy)) > 4 and not laws.calibration(x)
    assert laws.calibration(x._replace(mu=x.pi, entropy=entropy - 0.2))        # a mistake of both


def test_the_noise_of_two_kernels_grows_with_logits_up_to_a_spread_of_3():
    """Beyond that a larger gap needs an explanation, as rare as such logits are."""
    for spread, limit in ((1.0, 0.027), (2.0, 0.132), (2.7, 0.30725), (3.0, 0.417), (5.0, 0.417)):
        odds = torch.tensor([-1.0, 1.0]).double().repeat(50)
        odds *= spread / odds.std()
        x = tokens(torch.nn.functional.logsigmoid(odds), torch.zeros(100).double())
        assert numerics(x) == pytest.approx(limit, rel=0.05)


def test_every_limit_set_by_hand_is_held_against_the_judged_dumps():
    """doctor/rates.txt has a row for each limit, with the limit as it is."""
    table = (Path(__file__).resolve().parents[2] / "doctor/rates.txt").read_text()
    for name, limit in laws.LIMITS.items():
        assert table.count(f"\n| {name} | {limit:.3g} | ") == 1
    assert laws.beyond("eos", laws.LIMITS["eos"] + 1e-9)
    assert not laws.beyond("eos", laws.LIMITS["eos"])


def test_after_a_cut_surprisal_is_below_the_entropy_and_after_a_division_above_it():
    """eq:tail: E_μ[−log π] ≤ H(π) for top-k of every k; eq:unnormalised: not after a division."""
    z = PI.logits.detach()
    for k in (1, 2, 3):
        pi, mu = z.log_softmax(-1), sampling_log_probs(z, top_k=k)[0].exp()
        assert ((mu * -pi).sum(-1) < -(pi.exp() * pi).sum(-1)).all()
    for tau in (0.5, 0.8):
        pi, mu = z.log_softmax(-1) / tau, (z / tau).softmax(-1)
        assert ((mu * -pi).sum(-1) > -(pi.exp() * pi).sum(-1)).all()


def test_pairs_are_of_one_prefix():
    x = Tokens.of(planted("temperature", "Qwen2", "sampler"))
    i, j, k, m = pairs(x)
    assert len(i) > 20 and (x.prefix[i] == x.prefix[j]).all() and (x.ids[i] != x.ids[j]).all()
    assert (x.prefix[k] == x.prefix[m]).all() and (x.ids[k] == x.ids[m]).all()


@certifies("float64")
def test_own_sizes_are_the_nats_of_the_share_left():
    """eq:gap-left: the nats of parts less those of one size are n log of the share they leave."""
    g = torch.Generator().manual_seed(0)
    e, part = torch.rand(90, generator=g, dtype=torch.float64), torch.arange(90) % 3 * 2
    left = gap_left(e, *(part == k for k in (0, 2, 4)), least=0)
    one = own_sizes(e, torch.zeros_like(part))
    assert own_sizes(e, part) - one == pytest.approx(90 * math.log(left), rel=1e-12)


def test_a_token_drawn_again_saves_nats_beyond_what_kernels_leave():
    """A draw saves s/l − 1 − log(s/l) nats if its scatter s is above √2 of two kernels' l."""
    odds = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat_interleave(20)
    for size in (0.01, 0.5):
        by = size * torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(20)
        x = tokens(*shifted(odds, by), prefix=torch.arange(40) // 2)
        nats, far, n = scatter(x)
        s = size_of(x.e()[1::2] - x.e()[::2]) / (math.sqrt(2) * numerics(x))
        assert n == 20 and far == pytest.approx(s * math.sqrt(2) * numerics(x), rel=1e-12)
        assert nats == pytest.approx(20 * (s - 1 - math.log(s)) if size > 0.1 else 0, rel=1e-12)


def twice(rows=60, length=20):
    """Return the columns of rows, two after each prompt, with other tokens at each place."""
    g = torch.Generator().manual_seed(0)
    n = torch.arange(rows * length)
    row, t = n // length, n % length
    mu = -2 * torch.rand(len(n), generator=g, dtype=torch.float64) - 0.2
    return mu, {"row": row, "t": t, "prefix": row // 2 * length + t, "ids": row % 2}


@pytest.mark.parametrize("named", ["cut", "raw"])
def test_a_mass_too_small_for_the_mean_of_rho_is_seen_where_log_rho_is_even(named):
    """eq:same-prefix: 24 tokens may miss a mass of 1/5, but both tokens after a prefix show it."""
    mu, of = twice(4, 6)
    mass = 0.02 + 0.01 * (of["prefix"] % 3)
    d = (-mass).log1p() if named == "cut" else -(-mass).log1p()
    x = tokens(mu, mu + d, **of)
    assert z_of_rho(x.d()) == 0 and abs(z_of(x.d().expm1())) < 5 and evenness(x) > 10
    assert [f.cause for f in causes.find_causes(x)][:1] == [named]
    apart = x._replace(pi=(mu + d * (2 * of["ids"])).clamp(max=0))      # of one of both alone
    assert evenness(apart) < 10 and not {f.cause for f in causes.find_causes(apart)} & {named}
    large = x._replace(pi=mu - 3 - 0.3 * of["ids"])         # even in its size, but not up to noise
    assert numerics(x) < 0.3 and evenness(large) == 0


def test_another_distribution_in_a_part_does_not_make_log_rho_even():
    """Log ρ is one number after each prefix from token 10 on: a record, and no other weights."""
    mu, of = twice()
    x = tokens(mu, mu + torch.where(of["t"] >= 10, 0.15, 0.0), **of)
    assert "in-flight" in [f.cause for f in places.places(x)]
    assert causes.find_causes(x)[0].cause == "raw"


@pytest.mark.parametrize("even, cause", [(True, "temperature"), (False, "cut")])
def test_where_means_do_not_decide_a_division_is_as_even_as_the_entropy(even, cause):
    g = torch.Generator().manual_seed(0)
    h, other = torch.rand(2, 800, generator=g, dtype=torch.float64) + 0.1
    mu = -torch.rand(800, generator=g, dtype=torch.float64) - 0.1
    d = -0.2 * (h if even else torch.where(h > 0.6, other ** 4, 0.01))
    x = tokens(mu, mu + d, entropy=h)
    kept = laws.Finding("cut", laws.RECORD, "", x)
    assert laws._kept_or_divided(x, -8.0, kept, 0.5, "μ").cause == cause
    assert laws._kept_or_divided(x, -8.0, kept, 1.5, "μ").cause == "temperature"


@pytest.mark.parametrize("rest, named", [(1.3, True), (1.0, False)])
def test_few_pairs_and_all_other_tokens_agree_on_a_slope(rest, named):
    """eq:same-prefix: pairs that save 5 to 10 nats decide if the line of all tokens fits, too."""
    g = torch.Generator().manual_seed(0)
    odds, by = torch.randn(2, 600, generator=g, dtype=torch.float64)
    pairs_of = torch.arange(600) < 24
    slope = torch.where(pairs_of, 1.3, rest)
    mu, pi = shifted(2 * odds, (slope - 1) * 2 * odds + by * torch.where(pairs_of, 0.4, 0.05))
    x = tokens(mu, pi, prefix=torch.where(pairs_of, torch.arange(600) // 2, torch.arange(600)),
               ids=torch.arange(600) % 2)
    with laws.watched() as held:
        found = laws.slope_of(x)
    nats = [value for name, value in held if name == "slope of pairs"]
    assert bool(found) == named and 5 < nats[0] / (1 + named) < 10


LOGITS = Policy(5, 3, seed=0).logits.detach()                               # [states, 5]


def entropy(log_prob):
    """Return −Σ π log π, where π need not add up to 1: [..., V] → [...]."""
    return -(log_prob.exp() * log_prob.clamp(min=-800)).sum(-1)


def mean(log_mu, x):
    """Return the mean under μ: [..., V] → [...]."""
    return torch.where(log_mu > -math.inf, log_mu.exp() * x, 0.0).sum(-1)


def excesses(log_mu, log_pi, tau, h):
    """Return the three means of `laws.division` in each state of entropy h: [3, states]."""
    omega, rho = (tau * log_pi - log_mu).exp(), (log_pi - log_mu).exp()
    h = h[:, None]
    return torch.stack([mean(log_mu, x) for x in (
        omega * (-tau * log_pi - h), -rho * log_pi - h, -log_mu - h)])


@certifies("float64")
@pytest.mark.parametrize("tau", [0.3, 0.7, 0.9, 1.2, 2.0])
def test_after_a_division_each_entropy_has_a_mean_of_0(tau):
    """eq:which-entropy: p's, the divided π's, and μ's. No other of the nine is 0 in every state."""
    log_p = LOGITS.log_softmax(-1)
    log_mu, log_pi = (LOGITS / tau).log_softmax(-1), log_p / tau
    assert close(mean(log_mu, (tau * log_pi - log_mu).exp()), torch.ones(len(LOGITS)))
    for i, of in enumerate((log_p, log_pi, log_mu)):
        found = excesses(log_mu, log_pi, tau, entropy(of))
        assert [bool(x.abs().max() < 1e-12) for x in found] == [n == i for n in range(3)]


@certifies("float64")
@pytest.mark.parametrize("cut", [dict(top_k=1), dict(top_k=2), dict(top_k=4), dict(top_p=0.6),
                                 dict(top_p=0.9), dict(min_p=0.3)])
def test_after_a_cut_all_three_are_below_0_by_the_mass_that_is_lost(cut):
    """eq:which-entropy: two are at most log Z, and one at most −(1 − Z) log 2, in every state.

    τ solves Σ p^τ = 1 over what is kept; where one token alone is kept, it is 0.
    """
    log_p = (2 * LOGITS).log_softmax(-1)
    log_mu, kept = sampling_log_probs(log_p, **cut)
    inside, some = log_mu > -math.inf, kept < 1 - 1e-9
    low, high = torch.zeros_like(kept), torch.ones_like(kept)
    for _ in range(60):
        middle = (low + high) / 2
        over = (torch.where(inside, (middle[:, None] * log_p).exp(), 0.0)).sum(-1) > 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    of_p, of_pi, of_mu = excesses(log_mu, log_p, low[:, None], entropy(log_p))
    assert some.any()
    half = (kept - 1) * math.log(2)
    for found, bound in ((of_p, kept.log()), (of_mu, kept.log()), (of_pi, half)):
        assert (found <= bound + 1e-12)[some].all()
        assert (found < (kept - 1) / 2)[some].all()         # nearer to −(1 − Z) than to 0


def test_surprisal_may_be_below_the_entropy_of_undivided_logits():
    """eq:which-entropy: at 1/τ = 1 the slope of surprisal less entropy is H(p) − Var(log p)."""
    p = torch.tensor([0.9, 0.1], dtype=torch.float64)
    h, s = entropy(p.log()), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    mu = (s * p.log()).softmax(-1)
    (slope,) = torch.autograd.grad((mu * -s * p.log()).sum() - h, s)
    spread = (p * (p.log() + h).square()).sum()
    assert close(slope, h - spread) and slope < 0
    mu = (p.log() / 0.7).softmax(-1)
    assert f"{(mu * -p.log() / 0.7).sum():.3f} {h:.3f}" == "0.281 0.325"


# ------------------------------------------------------------------------------ on dumps

def world(kind):
    """Return logits of 24 000 states: of many sizes, or with one token that is likely by far."""
    g = torch.Generator().manual_seed(0)
    if kind == "many":
        return 3 * torch.randn(24_000, 20, generator=g).double()
    z = 0.5 * torch.randn(24_000, 20, generator=g).double()
    likely = 0.5 + 0.45 * torch.rand(24_000, generator=g).double()
    z[:, 0] = z[:, 1:].logsumexp(-1) + likely.logit()
    return z


def dump(drawn, log_mu, log_pi, h):
    """Return the tokens of a dump, one drawn in each state, in responses of 24."""
    y = torch.multinomial(drawn.exp(), 1, generator=torch.Generator().manual_seed(1))
    return tokens(*(x.gather(-1, y)[:, 0] for x in (log_mu, log_pi)), entropy=h,
                  **in_rows(len(y), 24))


@pytest.mark.parametrize("kind", ["many", "one"])
@pytest.mark.parametrize("tau", [0.7, pytest.param(0.85, marks=pytest.mark.long)])
@pytest.mark.parametrize("of", range(3))
def test_a_division_is_no_cut_whatever_the_entropy_is_of(kind, tau, of):
    """eq:which-entropy: with that of the undivided logits, surprisal is below it in one world."""
    z = world(kind)
    log_p, log_mu = z.log_softmax(-1), (z / tau).log_softmax(-1)
    h = entropy((log_p, log_p / tau, log_mu)[of])
    x = dump(log_mu, log_mu, log_p / tau, h)
    surely, name = laws.division(x)
    print(f"{kind}, τ = {tau}: {surely:+.1f} standard errors, {name}; surprisal − entropy "
          f"{(-x.pi - h).mean():+.3f}")
    assert surely > 3 * laws.SURE
    if of == 0:             # of the two others either may fit, and the verdict is the same
        assert abs(float(name.split("= ")[1][:-1]) / tau - 1) < 0.03
        assert ((-x.pi - h).mean() < -0.1) == (kind == "one")           # which a cut has as well
    assert [f.cause for f in causes.find_causes(x)] == ["temperature"]


@pytest.mark.parametrize("kind", ["many", "one"])
@pytest.mark.parametrize("cut", [dict(top_k=2), dict(top_p=0.8), dict(min_p=0.1)])
def test_a_cut_is_no_division(kind, cut):
    z = world(kind)
    log_p, (log_mu, kept) = z.log_softmax(-1), sampling_log_probs(z, **cut)
    x = dump(log_mu, log_mu, log_p, entropy(log_p))
    surely, _ = laws.division(x)
    print(f"{kind}, {cut}: {surely:+.1f} standard errors, {kept.mean():.3f} kept")
    assert surely < -3 * laws.SURE
    assert [(f.cause, f.confidence) for f in causes.find_causes(x)] == [("cut", "certain")]


def test_a_division_by_more_than_1_is_no_raw_record():
    """Where a cut is replayed, π is what was drawn, and its surprisal has the mean of its entropy.

    Here it is ten standard errors from it, so no record of before a cut is named.
    """
    z = world("one")
    log_p, log_mu = z.log_softmax(-1), (z / 1.3).log_softmax(-1)
    x = dump(log_mu, log_mu, log_p / 1.3, entropy(log_p))
    assert abs(z_of(-x.pi - x.entropy)) > 10 and laws.division(x)[0] > 3 * laws.SURE
    assert [f.cause for f in causes.find_causes(x)] == ["temperature"]
    log_pi, _ = sampling_log_probs(z, top_p=0.8)
    raw = dump(log_pi, log_p, log_pi, entropy(log_pi))
    assert causes.find_causes(raw)[0].cause == "raw"


def test_a_dump_of_a_model_may_have_the_entropy_of_undivided_logits():
    """The trainer divides its log-probs; its entropies are of the logits as they are."""
    of = model("Llama")
    rows = plants.plant(of, "temperature", 3, 0.9, "after")
    prompts, drawn = [row["prompt_ids"] for row in rows], [row["token_ids"] for row in rows]
    with torch.no_grad():
        log_p = log_probs(of.side, prompts, drawn)
    h = [entropy(log_p[i, :len(y)]).clamp(min=0).tolist() for i, y in enumerate(drawn)]
    report = doctor.examine([response(i, row | {"entropy": h[i]}) for i, row in enumerate(rows)])
    surely, name = laws.division(report.examined)
    print(f"{surely:+.1f} standard errors, {name}")
    assert surely > 0 and report.causes[0].cause == "temperature", str(report)
    assert report.proper is False and "undivided logits" in report.causes[0].evidence
