"""Which entropy a dump's column has: three may be meant, and the doctor tells a division by each.

Where log-probs were divided by τ after the softmax, `entropy` may be that of the undivided logits,
of the divided π, or of what was drawn. Laws are enumerated; dumps are of made-up logits, float64,
and the test prints how far each stands from the other law.
"""

import math

import pytest
import torch

from three_policies import doctor
from three_policies.doctor import causes, laws, plants
from three_policies.doctor.dumps import response
from three_policies.doctor.sides import log_probs
from three_policies.doctor.tokens import z_of
from three_policies.estimators import sampling_log_probs
from three_policies.oracle import Policy, close
from three_policies.tests.doctor.test_causes import model, tokens
from three_policies.tests.support.certified import certifies

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
    """Return the tokens of a dump, one drawn in each state."""
    y = torch.multinomial(drawn.exp(), 1, generator=torch.Generator().manual_seed(1))
    return tokens(*(x.gather(-1, y)[:, 0] for x in (log_mu, log_pi)), entropy=h)


@pytest.mark.parametrize("kind", ["many", "one"])
@pytest.mark.parametrize("tau", [0.7, 0.85])
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
