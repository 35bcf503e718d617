"""Find the causes of a mismatch from log μ and log π of sampled tokens.

Tokens were drawn from p. μ is what the sampler recorded of them, π what the trainer computed, and
ρ = π/μ. Each cause follows a law, and this file decides which law names which cause. Laws compete
in one unit, the share of the gap that each leaves. The best one's effect is taken out of the data,
and the rest is looked at again. Where a law is an identity, the data give its standard error.
The main numbers that were set by hand are LIMITS; doctor/rates.txt says how far signals lie
from them, and how often all of it is right.
Derivation: math/16-what-is-wrong.md.

    print(*find_causes(Tokens.of(adapters.dumps.read("dump.jsonl"))), sep="\n")
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOOR = 0.01            # logits: a smaller gap needs no explanation, unless other tokens agree
RECORD = 1e-4           # share left by a wrong record, whose law is not about sizes
TEN_NATS = math.exp(-10)            # a likelihood ratio that is not chance
SURE = 1.0              # standard errors by which a mean must be nearer to one law than to another
LOWEST = -40.0          # stands for any lower log π
NEVER = LOWEST - 1      # stands for log π = −∞
ROUNDING = 1e-4         # of E[ρ]: float32 alone may move it by so much

# Limits that were set by hand, on the dumps of the split `written` and of earlier judged splits.
# doctor/rates.txt says how far from its limit each value lies, with and without the cause.
LIMITS = {
    "eos": 3.5, "tool": 1.0, "retokenised": 3.2, "stale": 1.5, "padding": 4.0,
    "padding, growing": 1.6, "window": 3.0, "in-flight": 3.0,   # the gap in a part over that of all
                                                                # other tokens
    "eos, left": 1.03, "retokenised, left": 1.43, "padding, left": 1.05, "window, left": 1.11,
    "in-flight, left": 1.11,            # 1 over the share left
    "shift": 4.0,                       # the mean gap over that to the neighbour's log-prob
    "penalty": 10.0,                    # standard errors of seen tokens less new ones
    "E[ρ]": 5.0,                        # standard errors from 1
    "cut": 0.6, "raw": 1.2,             # −E[d]/Var[d] and E[d]/Var[d]: a small honest gap has ½, −½
    "tail": 8.0,                        # standard errors of E[−log μ] below the entropy
    "division": 1 / 0.35,               # 1 over the spread of gap over entropy
    "slope": 1 / 0.7,                   # the gap over the residual of a line
    "slope of pairs": 10.0, "softcap": 5.5,     # nats of a line, and of a bend more
    "calibration": 3.7,                 # standard errors of E[−log π] from the entropy
    "numerics": 1.0,                    # the gap over the largest that two kernels may have
    "flips": 12.0,                      # |e| of one token in 33 over that of the median
    "scatter": 0.3,                     # of a token drawn again, over the gap
    "rare scatter": 1.65,               # its mean over its median
    "context": 0.4, "context, nats": 10.0,      # how fast the gap fades, and how surely
    "step": 5.5}                        # nats of a step more than those of any smooth change


def beyond(name: str, value: float) -> bool:
    """Say whether a value is beyond the limit of that name."""
    return value > LIMITS[name]


class Tokens(NamedTuple):
    """Hold the tokens that count as columns, [N] each, in the order of the dump."""

    mu: Tensor                          # log μ
    pi: Tensor                          # log π
    row: Tensor                         # index of the response
    t: Tensor                           # position in the response
    start: Tensor                       # length of the prompt, −1 where it is not known
    ids: Tensor
    last: Tensor                        # bool: the end token, where it ends a response
    prefix: Tensor                      # equal where prompt and all earlier tokens are equal
    seen: Tensor                        # bool: it occurs earlier in the response
    known: Tensor                       # bool: it occurs in the prompt
    version: Tensor                     # of the weights that drew it
    entropy: Tensor                     # of π, NaN where not known
    over: Tensor = torch.zeros(0, 2)    # [N, 2]: how far log μ and log π were above 0; or nothing

    @classmethod
    def of(cls, responses: Sequence[Any]) -> "Tokens":
        """Make the columns from responses as doctor/dumps.py reads them."""
        rows: list[tuple[Any, ...]] = []
        numbers: dict[int, int] = {}
        over: list[tuple[float, float]] = []
        longest = max((len(r.token_ids) for r in responses), default=0)
        ends = Counter(r.token_ids[-1] for r in responses if 0 < len(r.token_ids) < longest)
        end = max(ends, key=lambda v: (ends[v], -v), default=None)
        for i, r in enumerate(responses):
            prompt = () if r.prompt_ids is None else tuple(r.prompt_ids)
            prefix, start = hash((i, "?") if r.prompt_ids is None else prompt), len(prompt)
            before, known = set[int](), set(prompt)
            for t, v in enumerate(r.token_ids):
                if r.mask[t]:
                    over.append((max(0.0, r.rollout_log_probs[t]), max(0.0, r.train_log_probs[t])))
                    rows.append((
                        min(0.0, r.rollout_log_probs[t]),
                        NEVER if r.train_log_probs[t] == -math.inf else
                        min(0.0, max(LOWEST, r.train_log_probs[t])), i, t,
                        -1 if r.prompt_ids is None else start, v,
                        v == end and t == len(r.token_ids) - 1,
                        numbers.setdefault(prefix, len(numbers)), v in before, v in known,
                        r.versions[t] if r.versions else 0,
                        r.entropy[t] if r.entropy else math.nan))
                before.add(v)
                prefix = hash((prefix, v))
        kinds = [torch.float64] * 2 + [torch.long] * 4 + [torch.bool, torch.long] + [
            torch.bool] * 2 + [torch.long, torch.float64]
        columns = zip(*rows) if rows else [()] * len(kinds)
        return cls(*(torch.tensor(x, dtype=kind) for x, kind in zip(columns, kinds)),
                   over=torch.tensor(over, dtype=torch.float64).reshape(-1, 2))

    def d(self) -> Tensor:
        """Return log ρ: [N]."""
        return self.pi - self.mu

    def e(self) -> Tensor:
        """Return the gap in log-odds: [N]."""
        return log_odds(self.pi) - log_odds(self.mu)

    def unsure(self) -> Tensor:
        """Mark tokens of which a side is not sure, or all tokens if those are few: [N] bool.

        Where both sides are sure, the log-probs do not show the logits.
        """
        some = (self.mu < -0.01) | (self.pi < -0.01)
        return some if some.sum() > 20 else torch.ones_like(some)

    def take(self, keep: Tensor) -> "Tokens":
        """Return the tokens that a mask or an index selects."""
        *columns, over = self
        return Tokens(*(x[keep] for x in columns), over=over[keep] if len(over) else over)


class Finding(NamedTuple):
    """Hold a cause, the share of the gap it leaves, the evidence, and the dump without it."""

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


def log_odds(x: Tensor) -> Tensor:
    """Return log p/(1 − p) of log p: in this unit a logit's error has one size.  (eq:log-odds)"""
    return x - (1.001 - x.exp()).log()              # 0.001 more: near p = 1 rounding would decide


def _mean(x: Tensor) -> float:
    return x.abs().mean().item() if len(x) else 0.0


def _share(x: Tensor) -> float:
    return x.double().mean().item() if len(x) else 0.0


def _z(x: Tensor) -> float:
    """Return Σx/√Σx²: standard normal if each x has mean 0 given what was drawn before it."""
    return (x.sum() / x.square().sum().sqrt().clamp(min=1e-12)).item()


def _z_of_rho(d: Tensor) -> float:
    """Return how many standard errors E[ρ] is from 1, or 0 if rounding or luck may be all.

    On a policy that is nearly sure ρ hardly varies until a rare token is drawn. The standard error
    is then tiny, and rounding that has one sign would be many of it.
    """
    x = d.expm1()
    return 0.0 if x.mean().abs() <= ROUNDING or undrawn(x, 1.0) else _z(x)


def undrawn(x: Tensor, size: float) -> bool:
    """Say whether tokens that were not drawn may explain the mean of x, whose expectation is 0.

    Then x is `one_sided`. What is not drawn in n tokens has a mass of at most 5/n (but for a chance
    of e⁻⁵). It makes up a mean of at most `size` times that, if no |x| among it is above `size`:
    for x = ρ − 1 and size 1, if π has at most twice μ's mass there.
    """
    return one_sided(x) and bool(x.mean().abs() <= 5 * size / max(1, len(x)))


def one_sided(x: Tensor) -> bool:
    """Say whether fewer than ten x are on the other side of 0 than their mean."""
    return bool((x * x.mean() < 0).sum() < 10)


def floor(e: Tensor) -> float:
    """Return the gap that needs no explanation: less than FLOOR if a quarter of tokens agree."""
    return min(FLOOR, max(FLOOR / 100, e.abs().quantile(0.25).item())) if len(e) else FLOOR


def gap_left(e: Tensor, *parts: Tensor, least: float = FLOOR) -> float:
    """Return the share of a gap that remains if each part has its own size.  (eq:gap-left)

        Π (mean|e| of the part)^{n of the part / n} / mean|e|

    A Laplace distribution describes n numbers in n log mean|e| nats, up to a constant. So the share
    is exp(−nats saved per token), and causes of any kind can be compared by it.
    """
    nats = sum(len(x) * math.log(_mean(x) + least) for x in (e[part] for part in parts))
    return math.exp(nats / max(1, len(e))) / (_mean(e) + least)


def numerics(x: Tokens) -> float:
    """Return the largest mean gap, in logits, that two kernels with the same weights may have.

    The formula is set by hand. Larger logits round more coarsely, and a dump shows their size by
    their spread. In a healthy mixture of experts a few tokens have most of the mean gap, so
    `texture` decides by the median. Below the limit, int8 weights look the same as two kernels.
    """
    return 0.012 + 0.015 * min(3.0, log_odds(x.mu).std().item()) ** 3


def pairs(x: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return indices of two tokens drawn after one prefix, and of one token drawn there twice.

    No two pairs of the first kind share a draw, so their errors are independent. (eq:same-prefix)
    """
    first: dict[int, dict[int, int]] = {}
    other: list[tuple[int, int]] = []
    same: list[tuple[int, int]] = []
    for k, (prefix, token) in enumerate(zip(x.prefix.tolist(), x.ids.tolist())):
        group = first.setdefault(prefix, {})
        if token in group:
            same.append((k, group[token]))
        group.setdefault(token, k)
    for group in first.values():                    # each token once: pairs share no error
        places = [*group.values()]
        other += [(places[n + 1], places[n]) for n in range(0, len(places) - 1, 2)]
    (i, j), (k, m) = (torch.tensor(y).reshape(-1, 2).long().unbind(-1) for y in (other, same))
    return i, j, k, m


def _fit(y: Tensor, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """Fit least squares without the worst tenth; return coefficients and all residuals."""
    matrix, keep = torch.stack(columns, -1), torch.ones_like(y, dtype=torch.bool)
    beta, residual = y.new_zeros(len(columns)), y
    for _ in range(2):
        square = matrix[keep].T @ matrix[keep] + 1e-9 * torch.eye(len(columns), dtype=y.dtype)
        beta = torch.linalg.solve(square, matrix[keep].T @ y[keep])
        residual = y - matrix @ beta
        keep = residual.abs() <= residual.abs().quantile(0.9)
    return beta, residual


def _inner(places: Tensor) -> list[int]:
    """Return at most 60 places where a change may begin, without the first three and last two."""
    inner = places.unique()[3:-2]
    return inner[::1 + len(inner) // 60].tolist()


# --- where the gap is: some tokens are dirty, the others clean

def from_where_wild(x: Tokens) -> Tensor:
    """Mark, in some responses, the tokens from the first wild gap on: [N] bool."""
    e, n = x.e().abs() + floor(x.e()), int(x.row.max()) + 1
    clean = e.median()
    wild = torch.maximum(e.quantile(0.995) / 2, 4 * clean)
    nats = e / clean - e / wild - (wild / clean).log()          # saved if the token is wild
    before = nats.cumsum(0) - nats
    lowest = before.new_full((n,), math.inf).scatter_reduce(0, x.row, before, "amin")
    index = torch.arange(len(e))
    begins = index.new_full((n,), len(e)).scatter_reduce(
        0, x.row, torch.where(before == lowest[x.row], index, len(e)), "amin")
    begun = index >= begins[x.row]
    saved = nats.new_zeros(n).index_add(0, x.row, torch.where(begun, nats, 0.0))
    return (saved > 10)[x.row] & begun


def parts_of(x: Tokens) -> Iterator[tuple[str, str, str, Tensor, Tensor]]:
    """Yield (cause, name in LIMITS, where, dirty tokens, tokens to drop)."""
    yield "eos", "eos", "of end tokens", x.last, x.last
    zero = (x.mu > -1e-7) & (x.pi < -1) & ~x.last & (x.t > 0)
    beside = (zero[1:] & zero[:-1] & (x.row[1:] == x.row[:-1])).sum()
    if beside >= max(2, 0.4 * zero.sum()) and _mean(x.pi[zero]) > 1.5:
        yield "tool", "tool", "where log μ = 0 and log π < −1", zero, zero
    some, dirty = x.unsure(), torch.zeros_like(x.last)
    y = x.take(some)
    dirty[some] = wild = from_where_wild(y)
    rows, first = y.row[wild].unique(), wild.clone()
    first[1:] &= ~wild[:-1] | (y.row[1:] != y.row[:-1])
    whole = torch.isin(x.row, rows)
    if 0 < len(rows) <= 0.35 * len(x.row.unique()) and y.d()[first].median() < -3:
        yield ("retokenised", "retokenised", f"of {len(rows)} responses, each from some token on",
               dirty, whole)
    old = x.version < x.version.max()
    yield "stale", "stale", "of tokens of older versions", old, old
    if x.start.max() > x.start.min() >= 0:
        short, each = x.start < x.start.max(), x.start[some].unique()
        sizes = [_mean(y.e()[y.start == length]) for length in each]
        ranks = torch.tensor([(-each).tolist(), sizes]).argsort().argsort().double()
        grows = len(each) > 5 and torch.corrcoef(ranks)[0, 1] > 0.85        # with the padding
        yield ("padding", "padding, growing" if grows else "padding",
               "after prompts shorter than the longest", short, short)
    for cause, place, what in (("window", x.start + x.t, "position"), ("in-flight", x.t, "token")):
        if x.start.min() >= 0 or cause == "in-flight":
            for at in _inner(place):
                yield cause, cause, f"from {what} {at} on", place >= at, place >= at
                if cause == "in-flight":
                    yield cause, cause, f"before {what} {at}", place < at, place < at


def places(x: Tokens, easier: float = 1.0) -> list[Finding]:
    """Return the best part of each kind, if all tokens outside it are clean."""
    found: dict[str, Finding] = {}
    some = x.unsure()
    e = x.e()[some]
    least = floor(e)
    for cause, limit, where, part, drop in parts_of(x):
        dirty = part[some]
        if dirty.sum() < 3 or (~dirty).sum() < 10:
            continue
        size, rest = _mean(e[dirty]), _mean(e[~dirty])
        cost = {"retokenised": 4 * len(x.row[part].unique()), "in-flight": 3}.get(cause, 0)
        share = gap_left(e, dirty, ~dirty, least=least) * math.exp(cost / len(e))   # nats: a choice
        if cause not in ("tool", "retokenised"):            # one bad token is not enough
            size = min(size, 1.5 * e[dirty].abs().median().item())
        if size < 5 * least or not beyond(limit, easier * size / max(rest, 1e-9)):
            continue
        if cause == "tool" and share < 0.5:                 # by hand; else π is merely wrong there
            share = RECORD / 2
        if f"{cause}, left" in LIMITS and not beyond(f"{cause}, left", share ** -easier):
            continue
        best = found[cause].left if cause in found else 1.0
        if share < min(best, TEN_NATS ** (1 / len(e))):
            evidence = (f"mean gap {where} {size:.3f} logits ({int(dirty.sum())} tokens), of all "
                        f"others {rest:.3f}")
            blind = cause == "in-flight" and int(x.start.min()) < 0     # prompts are not known
            found[cause] = Finding(cause, share, evidence, x.take(~drop),
                                   other=Finding("window", 1.0, evidence) if blind else None)
    return list(found.values())


# --- what form the gap has

def grid(x: Tokens) -> Finding | None:
    """Test whether 99 % of a column's log-probs fit in 16 bits: then it was computed in 16 bits.

    Or whether some are above 0 by more than float32 rounds: then the logits were in 16 bits, and
    the log-sum that was subtracted was not of these rounded logits.  (eq:sixteen-bits)
    """
    for (name, column), over in zip((("log μ", x.mu), ("log π", x.pi)), x.over.unbind(-1)):
        if (above := over > ROUNDING).sum() >= 3:
            return Finding("bf16-log-softmax", 0.0, f"{name} is above 0 on {_share(above):.1%} of "
                           f"the tokens, by up to {over.max().item():.3f}, as no log-prob is: the "
                           "logits were in 16 bits", x, True)
        values = column[(column < -1e-4) & (column > LOWEST)].float()
        for kind in (torch.bfloat16, torch.float16):
            share = _share(values == values.to(kind).float())
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
    wrong = "μ" if _mean(x.mu[k] - x.mu[m]) > _mean(x.pi[k] - x.pi[m]) else "π"
    for name, here, there in (("next", i, i + 1), ("previous", i + 1, i)):
        gap, now = _mean(x.pi[there] - x.mu[here]), _mean(x.d()[here])
        if len(i) > 20 and beyond("shift", (now + FLOOR) / (gap + FLOOR)):
            rest = (x.take(there)._replace(mu=x.mu[here]) if wrong == "μ" else
                    x.take(here)._replace(pi=x.pi[there]))
            return Finding("shift", RECORD * gap / now, f"mean |log π − log μ| {now:.3f}, but "
                           f"{gap:.3f} to log π of the {name} token; log {wrong} is off", rest)
    return None


def penalty(x: Tokens, easier: float = 1.0) -> Finding | None:
    """Test for a penalty on μ: it lowers tokens that occurred before, and raises all others.

    A negative penalty does the opposite.

    Tokens that occurred before are likelier than others, and most causes treat likely tokens
    otherwise. So tokens are compared at equal log-odds of π, in eight parts. Each part's difference
    of means has the standard error of two samples with one variance. Where an id occurs both before
    and anew, the difference must be there as well, and three ids of four must agree on its sign: a
    penalty acts on all ids in one direction.
    """
    best: Finding | None = None
    some, e = x.unsure(), x.e()
    wide, size = (e.abs().quantile(0.98).item(), _mean(e[some])) if len(e) else (0.0, 0.0)
    e, part = e.clamp(-wide, wide), log_odds(x.pi).argsort().argsort() * 8 // max(1, len(e))
    for what, old in (("the response", x.seen), ("prompt or response", x.seen | x.known)):
        total, weight = 0.0, 0.0
        for k in range(8):
            before, new = e[some & old & (part == k)], e[some & ~old & (part == k)]
            if min(len(before), len(new)) >= 5:
                shared = 1 / (1 / len(before) + 1 / len(new))
                spread = torch.cat([before - before.mean(), new - new.mean()]).var().item()
                total += shared / (spread + FLOOR ** 2) * (before.mean() - new.mean()).item()
                weight += shared / (spread + FLOOR ** 2)
        sign = 1 if total > 0 else -1
        if not weight or sign * e[old].mean() <= 0 or sign * e[~old].mean() >= 0:
            continue
        difference, z = sign * total / weight, sign * total / math.sqrt(weight)
        half = sign * (e[some & old].median() - e[some & ~old].median()).item()
        large = difference > max(0.3 * size, numerics(x) / 2) and half > 0.3 * difference
        apart, agree = _of_each_id(x.ids[some], old[some], sign * e[some])
        if apart < 0.3 * difference or agree < 0.75:
            continue                                # ids that occur often differ, not occurrences
        if beyond("penalty", easier * z) and large and (best is None or 2 * RECORD / z < best.left):
            gain = "gain" if sign > 0 else "lose"
            best = Finding("penalty", 2 * RECORD / z, f"tokens that occurred in {what} {gain} "
                           f"{difference:.3f} logits over new ones of equal log-odds, {z:.0f} "
                           "standard errors", x.take(~old), True)
    return best


def _of_each_id(ids: Tensor, old: Tensor, e: Tensor) -> tuple[float, float]:
    """Return how much more e is at seen occurrences of an id than at new ones, and in how many ids.

    The mean is over ids, each with the weight of its two samples; it is ∞ if few have both. The
    second is a share, of ids with three of each kind; it is 1 if there are fewer than five.
    """
    _, which = ids.unique(return_inverse=True)
    n, total = (torch.zeros(2, len(ids), dtype=e.dtype).index_put((old.long(), which), y, True)
                for y in (torch.ones_like(e), e))                   # [new or seen, id]
    weight = n[0] * n[1] / n.sum(0).clamp(min=1)
    apart = total[1] / n[1].clamp(min=1) - total[0] / n[0].clamp(min=1)
    many = (n >= 3).all(0)
    return (math.inf if weight.sum() < 20 else ((weight * apart).sum() / weight.sum()).item(),
            1.0 if many.sum() < 5 else _share(apart[many] > 0))


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
    leaves log Σp^{1/τ} = (1 − 1/τ)·H_{1/τ}, where H is Rényi's entropy. A cut takes
    the least likely tokens, so that E[−log π] ≤ H(π). If it replays the cut, π is what was drawn,
    and E[−log π] = H(π). A division obeys one of `division`'s laws.
    """
    d, h = x.d(), x.entropy
    z, lean = _z_of_rho(d), (d.mean() / d.var().clamp(min=1e-12)).item()
    evidence = f"E[ρ] = {d.exp().mean().item():.4f}, {abs(z):.0f} standard errors from 1"
    tail = beyond("tail", _z(x.mu + h)) and beyond("E[ρ]", -z) and lean >= -0.8 and d.mean() > -3
    heavy = 2 * abs(z) < _z((-d).expm1())           # a few tokens decide E[ρ]
    leans = beyond("E[ρ]", abs(z)) and not heavy and z * lean >= 0 and (
        beyond("raw", lean) if z > 0 else beyond("cut", -lean))
    if not (tail or leans):
        return None
    surely, of = division(x)
    if tail and not surely > 0:
        return Finding("cut", 0.99, f"{evidence}; E[−log μ − H] = {(-x.mu - h).mean().item():+.3f},"
                       f" {-_z(-x.mu - h):.0f} standard errors below 0", x)
    left = RECORD if leans else 0.99
    sign = _share(d < 1e-5) if z < 0 else _share(d > -1e-5)
    evidence += f"; log ρ {'≤' if z < 0 else '≥'} 0 on {sign:.1%} of the tokens"
    i, j, _, _ = pairs(x)
    rest = x._replace(mu=(x.mu + d.median()).clamp(max=0)), _mean(d[i] - d[j]) < numerics(x)
    spread, own, excess = math.inf, 0.0, _z(-x.pi - h) * (1 if z < 0 else -1)
    if (some := h > 0.02).sum() > 80:               # eight parts of rising entropy: mean d / mean H
        a, b = (torch.stack([part.mean() for part in y[some][h[some].argsort()].chunk(8)])
                for y in (d, h))
        spread, own = (x.abs().log().std().item() for x in (a / b, a))
    kept = Finding("cut" if z < 0 else "raw", left, evidence, *rest)
    # Where the entropy is even, d is so, too, whatever the cause: the quotient must be more even.
    flat = beyond("division", 1 / max(spread, 1e-9))
    even = f"; as a multiple of the entropy it varies by {spread:.0%} only" * flat
    divided = Finding("temperature", left, f"{evidence}{even}; divided by τ after the softmax, "
                      f"with an entropy as of {of}", *rest)
    if (surely > 0 or excess > 5) if z < 0 else (surely > SURE and abs(excess) > 5):
        sure = surely > SURE or excess > 5 or spread <= 0.1
        return divided._replace(other=None if sure else kept)
    if z > 0 and flat and (excess > 5 or (spread < min(0.15, own / 2) and excess > -5)):
        return divided._replace(other=kept if excess < 5 and spread > 0.1 else None)
    unsure = surely > -2 * SURE if z < 0 else flat and excess > -5
    return kept._replace(other=divided if unsure else None)


def bend(x: Tokens, i: Tensor, j: Tensor, least: float) -> tuple[float, Tensor]:
    """Return the nats that a cubic saves over a line through the pairs, and its residuals.

    Either side may be the one with the softcap, so both are tried as the argument of the cubic.
    """
    found: list[tuple[float, Tensor]] = []
    for p, q in ((x.mu, x.pi), (x.pi, x.mu)):
        straight = _fit(q[i] - q[j], p[i] - p[j])[1]
        curved = _fit(q[i] - q[j], *(p[i] ** n - p[j] ** n for n in (1, 2, 3)))[1]
        most = straight.abs().quantile(0.9)             # a few tokens must not make a bend
        sizes = [_mean(y.clamp(-most, most)) + least / 4 for y in (straight, curved)]
        found.append((len(i) * math.log(sizes[0] / sizes[1]), curved))
    return max(found, key=lambda pair: pair[0])


def slope_of(x: Tokens, sure: bool = True) -> Finding | None:
    """Test whether the gap is a slope of the log-odds, and of differences after one prefix.

    (eq:temperature-slope, eq:same-prefix). Such a slope is a temperature:

        log π(v) − log π(w) = τ (log μ(v) − log μ(w))

    A softcap bends these differences into a cubic. A record without τ has E[log ρ] > 0.
    """
    d, e, odds, some = x.d(), x.e(), log_odds(x.mu), x.unsure()
    (slope, middle), _ = _fit(e[some], odds[some], torch.ones_like(e[some]))
    residual, least = e - slope * odds - middle, floor(e[some])
    left = (_mean(residual[some]) + least) / (_mean(e[some]) + least)
    evidence = f"log-odds of π are {1 + slope.item():.3f} × those of μ, {left:.0%} of the gap left"
    cause, other, enough = "temperature", "", _mean(residual) < numerics(x)
    fits = _mean(e) > numerics(x) and (beyond("slope", 1 / left) if sure else left < 0.95)
    i, j, _, _ = pairs(x)
    moved = (x.mu[i] != x.mu[j]) & (x.pi[i] != x.pi[j])
    i, j = i[moved], j[moved]
    if len(i) >= 8:                                     # the pairs decide alone
        a, b = x.mu[i] - x.mu[j], x.pi[i] - x.pi[j]
        (factor,), line = _fit(b, a)
        gain, bent = bend(x, i, j, least)
        gain += 3 * (not 0.4 < factor < 2.5)            # such a temperature is rare
        left = (_mean(line) + least) / (_mean(b - a) + least)
        fits = left < 0.9 and beyond("slope of pairs", -len(i) * math.log(left)) if sure else (
            left < 0.95)
        evidence += (f"; {len(i)} pairs of tokens after one prefix: Δ log π = {factor.item():.3f} "
                     f"· Δ log μ, {left:.0%} of the gap left")
        enough = min(_mean(line), _mean(bent)) < numerics(x)
        fits = fits and (enough or left < 0.7 or not sure)      # else weights explain more
        if fits and gain > 1.5:                         # two more numbers
            bends = beyond("softcap", gain)
            cause, other = ("softcap", cause) if bends else (cause, "softcap")
    if not fits:
        return None
    honest, wrong = abs(_z(d.expm1())), abs(_z((-d).expm1()))
    if cause == "temperature" and honest > wrong and d.mean() > 0:
        cause, evidence = "raw", f"{evidence}; E[log ρ] = {d.mean().item():+.4f}, above 0"
    if cause != "softcap" and max(honest, wrong) < 4:           # the data exclude neither
        other = other or ("raw" if cause == "temperature" else "temperature")
    mended = log_odds(x.pi) - residual
    mended = x._replace(mu=(torch.nn.functional.logsigmoid(mended) + math.log(1.001)).clamp(max=0))
    return Finding(cause, left, evidence, mended, enough,
                   Finding(other, 1.0, f"or this: {evidence}") if other else None)


def calibration(x: Tokens) -> Finding | None:
    """Test whether E[ρ(−log π − H)] is not 0, the only sign of a mistake that both sides make.

    (eq:calibration)
    """
    excess = (-x.pi - x.entropy) * x.d().clamp(max=20).exp()        # by ρ, since μ drew the tokens
    z = _z(excess)                      # NaN: no entropy; noise of π makes it a little larger
    if len(excess) < 100 or abs(excess.mean()) <= FLOOR or undrawn(excess, 20.0) or _mean(
            x.e()) > numerics(x) or not beyond("calibration", max(-z, z - 0.8)):
        return None
    return Finding("raw", 0.9, "both sides agree, but neither is what was drawn: E[ρ(−log π − H)] "
                   f"= {excess.mean().item():+.3f}, {abs(z):.1f} standard errors from 0")


def texture(x: Tokens, alone: bool = False) -> Finding | None:
    """Name a gap that is everywhere: by its randomness, its tail, how it fades, or not at all.

    Unless it is asked `alone`, a gap without a mark gets the likeliest other cause as its second.
    """
    limit, whole, z, lean = numerics(x), _mean(x.e()), _z_of_rho(x.d()), x.d().mean().item()
    x = x.take(x.unsure())
    e = x.e()
    size, middle, rare = _mean(e), e.abs().median().item(), e.abs().quantile(0.97).item()
    quiet = not beyond("numerics", min(whole, 1.3 * middle) / limit)    # in 16 bits a few flip
    evidence = f"mean gap {size:.3f} logits (two kernels: up to {limit:.3f})"
    _, _, k, m = pairs(x)
    again = (e[k] - e[m]).abs()
    scatter = _mean(again) / (_mean(e[k]) + _mean(e[m]) + FLOOR)
    random = len(k) >= 5 and beyond("scatter", scatter)
    drawn = (f"; drawn again after the same prefix ({len(k)} times), a token scatters by "
             f"{scatter:.0%}")
    few = random and beyond("rare scatter", _mean(again) / max(again.median().item(), 1e-9))
    if (beyond("flips", rare / (middle + floor(e))) or few) and rare > 0.2:
        return Finding("flips", 1.0, f"{evidence}; half of the tokens are below {middle:.3f}, one "
                       f"in 33 above {rare:.3f}" + drawn * random)
    if random and not quiet and beyond("numerics", _mean(again) / limit):
        return Finding("dropout", 1.0, evidence + drawn)
    clear, vague = over_time(x)
    if clear and (not quiet or clear.left < math.exp(-25 / len(e))):
        return clear._replace(left=1.0, other=vague)
    if quiet and beyond("E[ρ]", z) and lean > 0:            # (eq:record-sign)
        return Finding("raw", 1.0, f"E[ρ] is {z:.0f} standard errors above 1 and E[log ρ] = "
                       f"{lean:+.4f}: log μ is not of what was drawn, if only by another kernel's "
                       "noise")
    if quiet:
        return Finding("cut", 0.99, f"E[ρ] is {-z:.0f} standard errors below 1") if z < -5 else None
    weak = [] if alone else [f for f in (vague, slope_of(x, sure=False), *places(x, 2)) if f]
    return Finding("weights", 1.0, evidence, other=min(weak, key=lambda f: f.left, default=None))


def fit(total: Tensor, count: Tensor, *columns: Tensor) -> tuple[float, list[float]]:
    """Fit log E|e| = a + Σ b·column to sums of |e| over so many tokens; return log L, (a, b …)."""
    matrix = torch.stack([torch.ones_like(total), *columns], -1)
    beta, ratio = torch.zeros(len(columns) + 1, dtype=total.dtype), total
    beta[0] = (total.sum() / count.sum()).log()
    for _ in range(20):
        ratio = total * (-matrix @ beta).exp()
        weight = torch.maximum(ratio, count)[:, None] * matrix
        beta += torch.linalg.solve(weight.T @ matrix + 1e-6 * torch.eye(len(beta)),
                                   matrix.T @ (ratio - count))
    return -(count @ matrix @ beta + ratio.sum()).item(), beta.tolist()


def within(x: Tokens) -> float:
    """Return the nats that a fading as a power of t + 8 saves between prompts of one length."""
    e, late = x.e().abs() + FLOOR, (x.t + 8.0).double().log()
    _, length = x.start.unique(return_inverse=True)
    count = length.bincount().double()

    def nats(slope: float) -> float:
        total = torch.zeros_like(count).index_add(0, length, e * (slope * late).exp())
        return (slope * late.sum() - count @ (total / count).log()).item()
    return max(nats(k / 20) for k in range(61)) - nats(0)


def lacking(x: Tokens) -> tuple[float, float]:
    """Return by how many nats a gap is one of padding, not of context, and how it grows by length.

    Before token t there are start + t tokens. So a gap of context falls with both alike, or with t
    alone. Padding is what a prompt lacks to the longest, so it falls with the prompt's length, too,
    and faster:

        context    log E|e| = a + b log(start + t + 8), or a + b log(t + 8)
        padding    log E|e| = a + b log(t + 8) + c start, with c < 0
    """
    if x.start.min() < 0 or x.start.min() == x.start.max():
        return 0.0, 0.0
    e, each = x.e().abs() + FLOOR, torch.ones_like(x.mu)
    start, age = (x.start - x.start.min()).double(), x.t.double() + 8
    nats, (_, _, grows) = fit(e, each, age.log(), start)
    return nats - max(fit(e, each, y.log())[0] for y in (age, age + x.start)), grows


def over_time(x: Tokens) -> tuple[Finding | None, Finding | None]:
    """Test whether the gap fades from the first token on, or drops at one and fades after it.

        context    log E|e| = a + b L + c L², where L = log(t + 8)
        in-flight  log E|e| = a + j [t ≥ T] + b [t ≥ T] log((t + 8)/(T + 8)), or
                   log E|e| = a + b L + c L² + j [t ≥ T] with j < 0

    A gap fades if what differs is an ever smaller part of the context: smoothly, so c is small. A
    change of weights is a step. A Laplace distribution of each size is fitted, as in (eq:gap-left).
    Each prompt has a gap of its own size, and some responses end early, so the gap must fade as
    surely if prompts of each length have a size of their own. `lacking` tells padding from it.
    """
    x = x.take(x.unsure() & (x.t > 0))      # the first token is recomputed after a prefix cache hit
    if len(x.t) < 20:
        return None, None
    e, count = x.e().abs(), x.t.bincount()
    rare = e.clamp(max=e.quantile(0.98))    # a few tokens must not make a step
    total, common = (x.t.bincount(size + FLOOR)[count > 0] for size in (e, rare))
    age, count = count.nonzero()[:, 0], count[count > 0].double()
    late = (age + 8.0).log()
    late -= late.mean()

    (flat, _), (fades, (_, slope)) = fit(total, count), fit(total, count, late)
    (even, _), (bends, (_, _, curve)) = fit(common, count), fit(common, count, late, late.square())
    straight = fit(common, count, late)[0]
    best, at = -math.inf, 0
    for place in _inner(x.t):
        after = (age >= place).double()
        since = ((age + 8) / (place + 8)).clamp(min=1).log()
        nats, (_, jump, falls) = fit(common, count, after, since)
        more, (_, _, _, step) = fit(common, count, late, late.square(), after)
        nats = max(nats if jump < 0.3 and jump + falls * math.log(2) < -0.6 else -math.inf,
                   more - 3 if step < 0 else -math.inf)
        best, at = max((best, at), (nats, place))
    n, ages, ahead = len(x.t), fades - flat, best - max(even, bends)
    nats, grows = lacking(x)
    falling = Finding("in-flight", math.exp(-max(best - even, 0) / n), f"at token {at} the gap "
                      f"falls: {ahead:.0f} nats better than any smooth change")
    fading = Finding("context", math.exp(-ages / n), "from the first token on the gap falls as "
                     f"(t + 8)^{slope:.2f}: {ages:.0f} nats better than one size")
    if beyond("step", ahead) or (ahead > 0 and slope < -0.25 and curve < -0.4 and (
            bends - straight > 6)):
        return falling, fading if slope < 0 else None
    if beyond("context, nats", min(ages, within(x))) and beyond("context", -slope):
        padded = Finding("padding", fading.left, f"{fading.evidence}; and with the prompt's length "
                         f"by {1 - math.exp(grows):.1%} a token, {nats:.0f} nats better than with "
                         "any context")
        if grows < 0 and beyond("context, nats", nats):
            return padded, fading
        return fading, (padded if grows < 0 and nats > 3 else
                        falling if ahead > -math.inf else None)     # −∞: it falls nowhere
    return None, falling if ahead > 1 else fading if ages > 3 and slope < -0.12 else None


LAWS = (grid, shift, penalty, record, slope_of, calibration)
RECORDS = {"temperature", "softcap", "raw", "cut"}      # after one of these, another is its residue


def sorted_rows(x: Tokens) -> Tokens:
    """Return the tokens with the responses in an order that they have by their content alone.

    A dump's own order would decide which draws are compared, and in which order numbers add up.
    """
    columns = (x.t, x.ids, x.mu, x.pi, x.version, x.entropy.nan_to_num(-1))
    content, row = [*zip(*(column.tolist() for column in columns))], x.row.tolist()
    rows = [[*places] for _, places in groupby(range(len(row)), row.__getitem__)]
    rows.sort(key=lambda places: [content[n] for n in places])
    return x.take(torch.tensor([n for places in rows for n in places], dtype=torch.long))


def by_share(found: list[Finding]) -> list[Finding]:
    """Sort by the share left; where nine digits are equal, by the order of CAUSES, not rounding."""
    return sorted(found, key=lambda f: (float(f"{f.left:.9g}"), [*CAUSES].index(f.cause)))


def find_causes(x: Tokens) -> list[Finding]:
    """Return at most three causes: what explains most of the gap, then what explains the rest."""
    x = sorted_rows(x)
    never = barred(x)                   # its few −∞ would decide all others
    found = [never] if never else list[Finding]()
    x = never.rest if never and never.rest else x
    chosen = False          # end tokens are out: what was drawn chose the rest, whose E[ρ] is not 1
    while len(found) < 3 and len(x.t) > 20:
        named = {f.cause for f in found}
        named |= RECORDS if {f.cause for f in found if f is not never} & RECORDS else set()
        named |= RECORDS | {"in-flight", "window"} if "penalty" in named else set()
        parts = [f for f in places(x) if f.cause not in named]
        if any(f.cause == "in-flight" for f in parts):
            smooth = over_time(x)[0]            # a gap that fades has no first token
            if smooth and smooth.cause in ("context", "padding"):
                parts = [f for f in parts if f.cause != "in-flight"]
        laws = [f for law in LAWS if (f := law(x)) and f.cause not in named]
        place = min((f for f in parts if f.cause in ("window", "in-flight")),
                    key=lambda f: f.left, default=None)
        if place and "penalty" not in named | {f.cause for f in laws} and (
                weak := penalty(x, easier=2)):      # ever more tokens were seen: it looks like both
            laws.append(weak._replace(other=place))
        if chosen or any(f.rest and len(f.rest.t) > 20 and not record(f.rest) for f in parts):
            laws = [f for f in laws if f.left != RECORD]        # few tokens made π improper
        ranked = by_share(parts + laws)
        first = ranked[0] if ranked else None
        if first is None and not (found and found[-1].enough):
            first = texture(x)
            first = None if chosen and first and first.cause in RECORDS else first
        if first is None or first.cause in named:
            break
        near = [f for f in ranked[1:2] if RECORD < first.left > f.left ** 2]    # half of its nats
        found.append(first._replace(other=first.other or (near[0] if near else None)))
        if first.rest is None:
            break
        chosen = chosen or (first.cause == "eos" and not beyond("E[ρ]", abs(_z_of_rho(x.d()))))
        x = first.rest
    listed: dict[str, Finding] = {}
    for f in found:
        listed[f.cause] = f
        if f.other:
            listed.setdefault(f.other.cause, f.other._replace(left=1.0))
    return list(listed.values())[:3]


# ----------------------------------------------------------------------------- what to change

# Each cause, with what it is and what to change, in the words of this trainer and of others.
CAUSES = {
    "temperature": ("the two sides score at different temperatures",
                    "one temperature, before the softmax: rollout.temperature here, the actor's "
                    "temperature in verl, temperature in TRL, sampling_params in SkyRL"),
    "raw": ("log μ was recorded before the temperature or the cut",
            "ask the engine for processed log-probs: logprobs_mode=processed_logprobs in vLLM"),
    "cut": ("top-p, top-k or min-p do not cut the same from μ and from π",
            "top_p=1, top_k=-1 and min_p=0, or replay the kept ids; no weight repairs it, for what "
            "was cut is never sampled"),
    "shift": ("one column is off by one token",
              "log-probs of token t come from the logits of t − 1: check the slice, and whether "
              "the padding moved it"),
    "eos": ("the end token alone differs",
            "the same end token, counted by both: no label −100 on it, no min_tokens, no ban"),
    "tool": ("tokens that nobody sampled are counted",
             "mask what a tool or the environment wrote: response_mask here, in verl and in SkyRL, "
             "the completion mask in TRL"),
    "retokenised": ("some responses were decoded to text and tokenised again",
                    "hand the sampled token ids on, never the text"),
    "padding": ("rows that were padded on the left are scored wrongly",
                "pass attention_mask, and position_ids that begin at 0 after the padding"),
    "window": ("beyond one position a side sees less of the context",
               "one max_model_len, sliding_window and rope scaling on both sides"),
    "context": ("the two sides see different prompts, or one a stale prefix cache",
                "compare the prompt's ids (template, system prompt, BOS twice), and reset the "
                "prefix cache when weights change"),
    "in-flight": ("the weights changed while responses were being written",
                  "drain before an update, or record log μ token by token and correct by it: "
                  "without bias with sequence weights (correction.preset=decoupled_seq_is), more "
                  "quietly with token weights"),
    "penalty": ("the sampler penalises tokens that occurred before",
                "repetition_penalty=1, presence_penalty=0, frequency_penalty=0, and look into "
                "generation_config.json"),
    "softcap": ("one side leaves out the final logit softcap",
                "apply final_logit_softcapping on both sides: fused heads often forget it"),
    "dropout": ("the trainer applies dropout while it scores",
                "model.eval(), or dropout 0 and lora_dropout 0 in the config"),
    "flips": ("a mixture of experts routes some tokens differently",
              "replay the engine's routing (verl: router replay, SkyRL: r3), or compute the "
              "router in float32; token weights bound what is left"),
    "bf16-log-softmax": ("the log-softmax was computed in 16 bits",
                         "logits.float() before log_softmax"),
    "stale": ("older versions of the weights drew a part of the tokens",
              "fewer steps of delay: rollout.staleness here, the asynchronous level elsewhere; or "
              "token weights (correction.preset=decoupled_token_is)"),
    "weights": ("the weights differ: stale, rounded, partly synchronised, or another adapter",
                "sync all weights before a rollout, unrounded; three-policies doctor DUMP "
                "--model DIR tells which differ; until then token weights "
                "(correction.preset=decoupled_token_is)"),
    "below-grid": ("the update is below the engine's grid: rounding to 16 bits takes it away",
                   "train in the engine's precision, so that both sides hold one set of weights, "
                   "or run the engine in float32; else larger steps between two syncs, by train.lr "
                   "or more updates. Engines round to the nearest number, never stochastically, "
                   "so another sync of the same weights brings nothing"),
    "numerics": ("the noise of two kernels", "nothing"),
}
