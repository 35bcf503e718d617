"""The laws that causes of a mismatch follow: what form the gap has if it is one of these.

Each law takes the tokens and returns a finding or None. Laws compete in one unit, the share of the
gap that each leaves, and a finding may hold the dump without its effect. Where a law is an
identity, the data give its standard error. The main numbers that were set by hand are LIMITS;
doctor/rates.txt says how far signals lie from them.
Derivation: math/8-what-is-wrong.md.

    print(slope_of(Tokens.of(dumps.read("dump.jsonl"))))
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from three_policies.doctor.tokens import (FLOOR, LOWEST, NEVER, ROUNDING, Tokens, evenness, floor,
                                          least_squares, log_odds, numerics, pairs, share_of,
                                          size_of, undrawn, z_of, z_of_rho)

RECORD = 1e-4           # share left by a wrong record, whose law is not about sizes
SURE = 1.0              # standard errors by which a mean must be nearer to one law than to another

# Limits that were set by hand, on the dumps of the split `written` and of earlier judged splits.
# doctor/rates.txt says how far from its limit each value lies, with and without the cause.
LIMITS = {
    "eos": 18.0, "first-token": 10.0, "rows": 4.5, "tool": 1.0, "retokenised": 3.2,
    "stale": 1.5, "padding": 4.0, "padding, growing": 1.6, "window": 3.0,
    "in-flight": 3.0,                   # the gap in a part over that of all other tokens
    "eos, left": 1.03, "retokenised, left": 1.43, "padding, left": 1.05, "window, left": 1.11,
    "in-flight, left": 1.11,            # 1 over the share left
    "shift": 4.0,                       # the mean gap over that to the neighbour's log-prob
    "order": 0.17,                      # nats that another order saves, over those it leaves
    "penalty": 10.0,                    # standard errors of seen tokens less new ones
    "E[ρ]": 5.0,                        # standard errors from 1
    "even": 10.0,                       # nats of log ρ being one number after each prefix
    "cut": 0.6, "raw": 1.2,             # −E[d]/Var[d] and E[d]/Var[d]: a small honest gap has ½, −½
    "tail": 8.0,                        # standard errors of E[−log μ] below the entropy
    "division": 1 / 0.35,               # 1 over the spread of gap over entropy
    "slope": 1 / 0.7,                   # the gap over the residual of a line
    "slope, alone": 1 / 0.9,            # the same, of what a constant leaves of both
    "slope of pairs": 10.0, "softcap": 5.5,     # nats of a line, and of a bend more
    "calibration": 3.7,                 # standard errors of E[−log π] from the entropy
    "decode": 10.0, "decode, spread": 0.8,      # the gap over that of first tokens; over log-odds'
    "numerics": 1.0,                    # the gap over the largest that two kernels may have
    "loud": 0.005,                      # k3 without the rarest 3 %: an H100's 0.0045 is below it
    "flips": 12.0,                      # |e| of one token in 33 over that of the median
    "scatter": 0.3,                     # of a token drawn again, over the gap
    "rare scatter": 1.65,               # its mean over its median
    "scatter, nats": 10.0,              # beyond what two kernels leave of a token drawn again
    "context": 0.4, "context, nats": 10.0,      # how fast the gap fades, and how surely
    "depth": 0.3, "depth, nats": 10.0,  # how fast it grows with the position, and how surely
    "padding, share": 0.55,             # of what own sizes for each length save, by the length
    "step": 14.0}                       # nats of a step more than those of any smooth change
_watching: list[list[tuple[str, float]]] = []


def beyond(name: str, value: float) -> bool:
    """True if a value is beyond the limit of that name."""
    for held in _watching:
        held.append((name, value))
    return value > LIMITS[name]


@contextmanager
def watched() -> Generator[list[tuple[str, float]], None, None]:
    """Yield a list that collects each (name, value) that is held against a limit meanwhile."""
    _watching.append(held := [])
    try:
        yield held
    finally:
        _watching.pop()


class Finding(NamedTuple):
    """A cause, the share of the gap it leaves, its evidence, and the dump without its effect."""

    cause: str
    left: float
    evidence: str
    rest: Tokens | None = None
    enough: bool = False                # `texture` does not look at what this one leaves
    other: "Finding | None" = None      # what explains the gap almost as well

    @property
    def confidence(self) -> str:
        sure = self.left < 0.3 and self.other is None
        return "certain" if sure else "likely" if self.left < 1 else "suggested"


# ------------------------------------------------------------------------ numbers as recorded

def sixteen_bits(x: Tokens) -> Finding | None:
    """Test whether 99 % of a column's log-probs fit in 16 bits: then it was computed in 16 bits.

    Or whether some are above 0 by more than float32 rounds: then the logits were in 16 bits, and
    the log-sum that was subtracted was not of these rounded logits.  (eq:sixteen-bits)
    """
    for (name, column), over in zip((("log μ", x.mu), ("log π", x.pi)), x.over.unbind(-1)):
        if (above := over > ROUNDING).sum() >= 3:
            return Finding("bf16-log-softmax", 0.0, f"{name} is above 0 on {share_of(above):.1%} of"
                           f" the tokens, by up to {over.max().item():.3f}, as no log-prob is: the "
                           "logits were in 16 bits", x, True)

        values = column[(column < -1e-4) & (column > LOWEST)].float()
        for kind in (torch.bfloat16, torch.float16):
            share = share_of(values == values.to(kind).float())
            if len(values) >= 20 and share > 0.99 and x.d().any():
                return Finding("bf16-log-softmax", 0.0, f"{share:.1%} of {name} are numbers of "
                               f"{str(kind)[6:]}: by chance, one in thousands", x, True)
    return None


def barred(x: Tokens) -> Finding | None:
    """Test whether π gives no chance to tokens that were sampled: π was cut, and not as μ was.

    If that is so of one id alone, or at the end of responses alone, something bans that token.
    """
    never, ends = x.pi == NEVER, torch.ones_like(x.last)
    ends[:-1] = x.row[1:] != x.row[:-1]
    if not (never & ~ends).any() or (never.sum() > 1 and len(x.ids[never].unique()) == 1):
        return None
    return Finding("cut", 0.0 if never.sum() > 2 else 0.9, f"log π = −∞ on {int(never.sum())} of "
                   f"{len(never)} tokens that were sampled", x.take(~never))


def shift(x: Tokens) -> Finding | None:
    """Test whether log π of a token is log μ of its neighbour.

    After one prefix a token has one log-prob, so a right column does not scatter there. The column
    that scatters is the one that is off.
    """
    i = torch.arange(len(x.t) - 1)
    i = i[(x.row[1:] == x.row[:-1]) & (x.t[1:] == x.t[:-1] + 1) & ~x.last[1:]]
    _, _, k, m = pairs(x)
    wrong = "μ" if size_of(x.mu[k] - x.mu[m]) > size_of(x.pi[k] - x.pi[m]) else "π"

    for name, here, there in (("next", i, i + 1), ("previous", i + 1, i)):
        gap, now = size_of(x.pi[there] - x.mu[here]), size_of(x.d()[here])
        if len(i) > 20 and beyond("shift", (now + FLOOR) / (gap + FLOOR)):
            rest = (x.take(there)._replace(mu=x.mu[here]) if wrong == "μ" else
                    x.take(here)._replace(pi=x.pi[there]))
            return Finding("shift", RECORD * gap / now, f"mean |log π − log μ| {now:.3f}, but "
                           f"{gap:.3f} to log π of the {name} token; log {wrong} is off", rest)
    return None


SWITCH = 8.0            # nats of a jump at least; of T places, it is at one and to one: 2 log T
FEW_ROWS = 0.35         # of the responses: so many are tokenised again, and more in another order
SQUARE = 2 ** 22        # at most: T² of all responses whose order is tried, T at most its root


def order(x: Tokens) -> Finding | None:
    """Test whether blocks of log π stand in another order than those of log μ, in a response.

    If log π of token t is log μ of token s(t), then s grows by one a token but for some jumps. A
    Laplace distribution of scale b has |log π(t) − log μ(s)|/b nats, a jump costs SWITCH, and what
    any token would be as near to is no evidence. So the likeliest s is a shortest path. A shift is
    one jump a response.
    """
    mu, pi, there = grid(x)                                             # [R, T]
    now, n = size_of((pi - mu)[there]), int(there.sum())
    if n <= 20 or now < 0.1 * size_of(mu[there] - mu[there].median()) + FLOOR:
        return None

    left, jumps, moved, rows = min(shortest_path(mu, pi, there, b) for b in (0.02, 0.1))
    if rows <= FEW_ROWS or not 2.5 * jumps < moved or not beyond(
            "order", 1 / max(left, FLOOR) - 1):
        return None                                                     # or few tokens are wild
    return Finding("order", RECORD * left / 100, f"if blocks of log π change places, with "
                   f"{jumps / len(mu):.1f} jumps a response, {left:.0%} is left of what does not "
                   "fit", enough=True)


def grid(x: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return log μ, log π and which tokens are there, of the first responses: [R, T] each."""
    x = x.take(x.t < math.isqrt(SQUARE))
    _, row = x.row.unique_consecutive(return_inverse=True)
    width = int(x.t.max()) + 1 if len(x.t) else 0
    some = row < max(1, SQUARE // max(1, width) ** 2)
    shape = (int(row[some].max()) + 1 if some.any() else 0, width)
    place = (row[some], x.t[some])
    mu, pi, there = (torch.zeros(shape, dtype=kind).index_put(place, y[some]) for kind, y in (
        (x.mu.dtype, x.mu), (x.mu.dtype, x.pi), (torch.bool, torch.ones_like(x.last))))
    return mu, pi, there


def shortest_path(mu: Tensor, pi: Tensor, there: Tensor, b: float
                  ) -> tuple[float, int, int, float]:
    """Return the share of nats that the likeliest s leaves, its jumps, how many s ≠ t, in how many.

    The last is a share of the responses.

    b: the scale of what is left. A path begins at token 0, or jumps. A token costs at most −log q
    nats, where q is the share of all log μ that are within b of its log π.
    """
    known, places = mu[there].sort().values, torch.arange(mu.shape[1])
    near = torch.searchsorted(known, pi + b) - torch.searchsorted(known, pi - b)
    most = -(near.clamp(min=1) / len(known)).log()                      # [R, T]
    switch = max(SWITCH, 2 * math.log(len(places)))
    nats = torch.where(places == 0, 0.0, switch).expand_as(mu)      # of the best path to s
    jumps, apart = (nats > 0).double(), torch.zeros_like(mu)
    end = (there * (places + 1)).amax(1, keepdim=True)

    for t in range(mu.shape[1]):
        before = nats, jumps, apart
        if t:
            best = nats.argmin(1, keepdim=True)
            stay = [torch.cat([y[:, :1], y[:, :-1]], 1) for y in before]        # from s − 1
            stay[0][:, 0] = math.inf
            jump = [y.gather(1, best) + more for y, more in zip(before, (switch, 1, 0))]
            moved = jump[0] < stay[0]
            nats, jumps, apart = (torch.where(moved, x, y) for x, y in zip(jump, stay))

        cost = (pi[:, t, None] - mu).abs() / b
        cost = cost.minimum(most[:, t, None]) * there[:, t, None]
        nats = nats + torch.where(there, cost, math.inf)
        nats, jumps, apart = (torch.where(t < end, x, y) for x, y in zip(
            (nats, jumps, apart + (places != t)), before))

    best = nats.argmin(1, keepdim=True)
    total, count, moved = (y.gather(1, best) for y in (nats, jumps, apart))
    unmoved = ((pi - mu).abs() / b).minimum(most)[there].sum().item()
    return (total.sum().item() / max(unmoved, FLOOR), int(count.sum()), int(moved.sum()),
            share_of(moved > 0))


# ---------------------------------------------------------------- π is no distribution over μ's

def division(x: Tokens) -> tuple[float, str]:
    """Return how surely log π was divided by τ after the softmax, and what its `entropy` is of.

    If log π = log p/τ, the column `entropy` may be that of p, of π or of μ, and each has a mean of
    0:  (eq:which-entropy)

        p's     E_μ[ω(−τ log π − H)], where ω = π^τ/μ, and τ is what makes E_μ[ω] = 1
        π's     E_μ[ρ(−log π) − H], where H = −Σ π log π, and Σπ is not 1
        μ's     E_μ[−log μ − H]

    If μ was cut instead, all three are at most −log 2 · |E[ρ] − 1|. So the one that is nearest to 0
    decides: the result is by how many standard errors it is nearer to 0 than to half of |E[ρ] − 1|,
    below 0 if it is not. It is NaN without entropy.
    """
    rho, h, low, high = x.d().exp(), x.entropy, 0.1, 10.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (middle * x.pi - x.mu).exp().mean() > 1 else (low, middle)

    omega, half = (low * x.pi - x.mu).exp(), (rho.mean() - 1).abs() / 2
    found: list[tuple[float, str]] = []
    for of, excess in ((f"undivided logits (τ = {low:.3f})", omega * (-low * x.pi - h)),
                       ("the divided π", -rho * x.pi - h), ("the sampler", -x.mu - h)):
        error = excess.std() / math.sqrt(max(1, len(excess)))
        found.append((((half - excess.mean().abs()) / error.clamp(min=1e-12)).item(), of))
    return max(found)


def record(x: Tokens) -> Finding | None:
    """Test whether π is no distribution over what μ sampled, while log ρ has one sign.

    (eq:martingale, eq:record-sign, eq:unnormalised, eq:tail, eq:which-entropy)

    Then something was cut, or the record is wrong. If μ alone is cut, log ρ is the log of the mass
    kept; if the record leaves the cut out, log ρ is minus that. Dividing by τ after the softmax
    leaves log Σp^{1/τ} = (1 − 1/τ)·H_{1/τ}, where H is Rényi's entropy. All are one number after
    one prefix, which shows a mass that is too small for E[ρ]. A cut takes
    the least likely tokens, so that E[−log π] ≤ H(π). If it replays the cut, π is what was drawn,
    and E[−log π] = H(π). A division obeys one of `division`'s laws.
    """
    d, h, even = x.d(), x.entropy, beyond("even", evenness(x))
    z = z_of(d.expm1()) if even else z_of_rho(d)
    lean = (d.mean() / d.var().clamp(min=1e-12)).item()
    tail = beyond("tail", z_of(x.mu + h)) and beyond("E[ρ]", -z) and lean >= -0.8 and d.mean() > -3
    heavy = 2 * abs(z) < z_of((-d).expm1())           # a few tokens decide E[ρ]
    leans = (even or beyond("E[ρ]", abs(z))) and not heavy and z * lean >= 0 and (
        beyond("raw", lean) if z > 0 else beyond("cut", -lean))
    if not (tail or leans):
        return None

    evidence = f"E[ρ] = {d.exp().mean().item():.4f}, {abs(z):.0f} standard errors from 1"
    surely, of = division(x)
    if tail and not surely > 0:
        return Finding("cut", 0.99, f"{evidence}; E[−log μ − H] = {(-x.mu - h).mean().item():+.3f},"
                       f" {-z_of(-x.mu - h):.0f} standard errors below 0", x)

    sign = share_of(d < 1e-5) if z < 0 else share_of(d > -1e-5)
    evidence += f"; log ρ {'≤' if z < 0 else '≥'} 0 on {sign:.1%} of the tokens"
    i, j, _, _ = pairs(x)
    kept = Finding("cut" if z < 0 else "raw", RECORD if leans else 0.99, evidence,
                   x._replace(mu=(x.mu + d.median()).clamp(max=0)),
                   size_of(d[i] - d[j]) < numerics(x))
    return _kept_or_divided(x, z, kept, surely, of)


def _kept_or_divided(x: Tokens, z: float, kept: Finding, surely: float, of: str) -> Finding:
    """Return what made log ρ have one sign: a mass that was kept, or a division by τ.

    surely and of: as `division` returns them; where they do not decide, d must be as even as the
    entropy, and if π is above μ always. Where the entropy itself is even, d is so whatever the
    cause: the quotient must be more even.
    """
    spread, own = _spread_over_entropy(x.d(), x.entropy)
    excess = z_of(-x.pi - x.entropy) * (1 if z < 0 else -1)
    flat = beyond("division", 1 / max(spread, 1e-9))
    even = f"; as a multiple of the entropy it varies by {spread:.0%} only" * flat
    divided = kept._replace(cause="temperature", evidence=f"{kept.evidence}{even}; divided by τ "
                            f"after the softmax, with an entropy as of {of}")

    if (surely > SURE * (not flat) or excess > 5) if z < 0 else (
            surely > SURE and abs(excess) > 5):
        sure = surely > SURE or excess > 5 or spread <= 0.1
        return divided._replace(other=None if sure else kept)
    if z > 0 and flat and (excess > 5 or (spread < min(0.15, own / 2) and excess > -5)):
        return divided._replace(other=kept if excess < 5 and spread > 0.1 else None)
    unsure = surely > -2 * SURE if z < 0 else flat and excess > -5
    return kept._replace(other=divided if unsure else None)


def _spread_over_entropy(d: Tensor, h: Tensor) -> tuple[float, float]:
    """Return the spread of log |mean d / mean H| over eight parts of rising H, and of log |mean d|.

    They are ∞ and 0 without 80 tokens of some entropy.
    """
    if (some := h > 0.02).sum() <= 80:
        return math.inf, 0.0
    a, b = (torch.stack([part.mean() for part in y[some][h[some].argsort()].chunk(8)])
            for y in (d, h))
    spread, own = (x.abs().log().std().item() for x in (a / b, a))
    return spread, own


# -------------------------------------------------------------------------- slopes of log-odds

class Line(NamedTuple):
    """A Line is how well a slope describes the gap."""

    left: float                         # the share of the gap that it leaves
    fits: bool
    enough: bool                        # what it leaves is what two kernels may leave
    evidence: str
    bent: float = 0.0                   # nats that a bend saves, where a bend may be the better law


def slope_of(x: Tokens, sure: bool = True) -> Finding | None:
    """Test whether the gap is a slope of the log-odds, and of differences after one prefix.

    (eq:temperature-slope, eq:same-prefix). Such a slope is a temperature:

        log π(v) − log π(w) = τ (log μ(v) − log μ(w))

    A softcap bends these differences into a cubic. A record without τ has E[log ρ] > 0.
    """
    e, odds, some = x.e(), log_odds(x.mu), x.unsure()
    (slope, middle), _ = least_squares(e[some], odds[some], torch.ones_like(e[some]))
    residual, least = e - slope * odds - middle, floor(e[some])
    left = (size_of(residual[some]) + least) / (size_of(e[some]) + least)
    # A large gap has a mean: E[log ρ] = −KL. A constant explains that, whatever the cause.
    alone = (size_of(residual[some]) + least) / (size_of(e[some] - e[some].median()) + least)
    fits = size_of(e) > 0.3 * numerics(x) and (
        beyond("slope", 1 / left) and beyond("slope, alone", 1 / alone) if sure else left < 0.95)
    line = Line(left, fits, size_of(residual) < numerics(x), "log-odds of π are "
                f"{1 + slope.item():.3f} × those of μ, {left:.0%} of the gap left")

    i, j, _, _ = pairs(x)
    moved = (x.mu[i] != x.mu[j]) & (x.pi[i] != x.pi[j])
    if moved.sum() >= 8:                                # the pairs decide alone
        line = _line_of_pairs(x, i[moved], j[moved], least, sure, line)
    if not line.fits:
        return None

    cause, other, evidence = _named(x.d(), line)
    mended = log_odds(x.pi) - residual
    return Finding(cause, line.left, evidence,
                   x._replace(mu=(logsigmoid(mended) + math.log(1.001)).clamp(max=0)), line.enough,
                   Finding(other, 1.0, f"or this: {evidence}") if other else None)


def _line_of_pairs(x: Tokens, i: Tensor, j: Tensor, least: float, sure: bool, of: Line) -> Line:
    """Fit a line to the differences of pairs, and see whether they are bent.

    of: the line of all tokens. If that fits, pairs need to save half as many nats.
    """
    a, b = x.mu[i] - x.mu[j], x.pi[i] - x.pi[j]
    (factor,), rest = least_squares(b, a)
    gain, rest_of_bend = bend(x, i, j, least)
    gain += 3 * (not 0.4 < factor < 2.5)                # such a temperature is rare

    left = (size_of(rest) + least) / (size_of(b - a) + least)
    nats = -len(i) * math.log(left) * (1 + (of.fits and sure))
    fits = left < 0.9 and beyond("slope of pairs", nats) if sure else left < 0.95
    enough = min(size_of(rest), size_of(rest_of_bend)) < numerics(x)
    fits = fits and (enough or left < 0.7 or not sure)  # else weights explain more
    return Line(left, fits, enough, f"{of.evidence}; {len(i)} pairs of tokens after one prefix: "
                f"Δ log π = {factor.item():.3f} · Δ log μ, {left:.0%} of the gap left", gain)


def bend(x: Tokens, i: Tensor, j: Tensor, least: float) -> tuple[float, Tensor]:
    """Return the nats that a cubic saves over a line through the pairs, and its residuals.

    Either side may be the one with the softcap, so both are tried as the argument of the cubic.
    """
    found: list[tuple[float, Tensor]] = []
    for p, q in ((x.mu, x.pi), (x.pi, x.mu)):
        straight = least_squares(q[i] - q[j], p[i] - p[j])[1]
        curved = least_squares(q[i] - q[j], *(p[i] ** n - p[j] ** n for n in (1, 2, 3)))[1]
        most = straight.abs().quantile(0.9)             # a few tokens must not make a bend
        sizes = [size_of(y.clamp(-most, most)) + least / 4 for y in (straight, curved)]
        found.append((len(i) * math.log(sizes[0] / sizes[1]), curved))
    return max(found, key=lambda pair: pair[0])


def _named(d: Tensor, line: Line) -> tuple[str, str, str]:
    """Return the cause of a slope, another that the data do not exclude or "", and the evidence."""
    cause, other, evidence = "temperature", "", line.evidence
    if line.bent > 1.5:                                 # a bend has two more numbers
        bends = beyond("softcap", line.bent)
        cause, other = ("softcap", cause) if bends else (cause, "softcap")

    honest, wrong = abs(z_of(d.expm1())), abs(z_of((-d).expm1()))
    if cause == "temperature" and honest > wrong and d.mean() > 0:
        cause, evidence = "raw", f"{evidence}; E[log ρ] = {d.mean().item():+.4f}, above 0"
    if cause != "softcap" and max(honest, wrong) < 4:           # the data exclude neither
        other = other or ("raw" if cause == "temperature" else "temperature")
    return cause, other, evidence


def calibration(x: Tokens) -> Finding | None:
    """Test whether E[ρ(−log π − H)] is not 0, the only sign of a mistake that both sides make.

    (eq:calibration)
    """
    excess = (-x.pi - x.entropy) * x.d().clamp(max=20).exp()        # by ρ, since μ drew the tokens
    z = z_of(excess)                    # NaN: no entropy; noise of π makes it a little larger
    if len(excess) < 100 or abs(excess.mean()) <= FLOOR or undrawn(excess, 20.0) or size_of(
            x.e()) > numerics(x) or not beyond("calibration", max(-z, z - 0.8)):
        return None
    return Finding("raw", 0.9, "both sides agree, but neither is what was drawn: E[ρ(−log π − H)] "
                   f"= {excess.mean().item():+.3f}, {abs(z):.1f} standard errors from 0")


def is_broken(x: Tokens) -> bool:
    """True if E[ρ] is not 1."""
    return beyond("E[ρ]", abs(z_of_rho(x.d())))
