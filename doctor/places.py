"""Which tokens have the gap: a part of them, those that occurred before, or ever fewer with time.

A part is dirty if all tokens outside it are clean. `over_time` tells a gap that fades along the
response, as one of the context does, from one that falls at a token, where the weights changed.
Limits are those of laws.py. Derivation: math/8-what-is-wrong.md.

    print(*places(Tokens.of(dumps.read("dump.jsonl"))), sep="\n")
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from three_policies.doctor.laws import FEW_ROWS, LIMITS, RECORD, Finding, beyond
from three_policies.doctor.tokens import (FLOOR, Tokens, floor, gap_left, log_odds, numerics,
                                          own_sizes, scatter, share_of, size_of)

TEN_NATS = math.exp(-10)            # a likelihood ratio that is not chance
SPREAD = 8              # tokens: the first t + 8 doubles over so many, and over fewer hardly varies
Part = tuple[str, str, str, Tensor, Tensor]         # as `parts_of` yields it


# ------------------------------------------------- some tokens are dirty, the others clean

def places(x: Tokens, easier: float = 1.0) -> list[Finding]:
    """Return the best part of each kind, if all tokens outside it are clean."""
    found: dict[str, Finding] = {}
    some = x.unsure()
    e = x.e()[some]
    least, rows = floor(e), len(x.row.unique())
    lengths = len(x.start.unique())                         # any of them may be the clean one

    for cause, limit, where, part, drop in parts_of(x):
        dirty = part[some]
        if dirty.sum() < 2 or (~dirty).sum() < 10:
            continue
        size, rest = size_of(e[dirty]), size_of(e[~dirty])
        chosen = len(x.row[part].unique())
        cost = {"retokenised": 4 * chosen, "in-flight": 3, "padding": math.log(lengths),
                "context": log_choices(rows, chosen)}.get(cause, 0)
        sizes = [dirty, ~dirty]
        if cause == "stale":                                # each version is as far off as it is
            sizes = [x.version[some] == v for v in x.version.unique()]
            cost = 0.5 * (len(sizes) - 2)
        share = gap_left(e, *sizes, least=least) * math.exp(cost / len(e))      # nats: a choice

        if cause not in ("tool", "retokenised"):            # one bad token is not enough
            size = min(size, 1.5 * e[dirty].abs().median().item())
        if cause == "first-token":                          # alone: not what fades from there on
            rest = max(rest, size_of(e[(x.t[some] > 0) & (x.t[some] < 4)]))
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


def parts_of(x: Tokens) -> Iterator[Part]:
    """Yield (cause, name in LIMITS, where, dirty tokens, tokens to drop)."""
    yield "eos", "eos", "of end tokens", x.last, x.last
    yield "first-token", "first-token", "of the first tokens alone", x.t == 0, x.t == 0
    yield from _whole_rows(x)
    yield from _written_by_a_tool(x)
    yield from _retokenised(x)
    old = x.version < x.version.max()
    yield "stale", "stale", "of tokens of older versions", old, old
    yield from _padded(x)
    yield from _from_a_place_on(x)


def log_choices(n: int, k: int) -> float:
    """Return the nats of a choice of k of n, log C(n, k)."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _whole_rows(x: Tokens) -> Iterator[Part]:
    """Yield the rows whose gap is large, if it begins at their first token.

    They are the k rows of the largest mean gap, where k saves most nats. One row may be a hard one,
    so its gap must be more than two kernels leave anywhere.
    """
    number, row = x.row.unique_consecutive(return_inverse=True)
    e, n = x.e().abs() + floor(x.e()), row.bincount()
    mean = torch.zeros(len(n), dtype=e.dtype).index_add(0, row, e) / n
    at = mean.argsort(descending=True)
    if len(at) < 4 or (x.version != x.version[0]).any():
        return

    total, count = (mean * n)[at].cumsum(0), n[at].cumsum(0).double()
    nats = (count * (total / count).log() + (count[-1] - count) * (
        (total[-1] - total) / (count[-1] - count)).log())[:-1]
    k = int((nats + torch.tensor([log_choices(len(at), j) for j in range(1, len(at))])).argmin())
    dirty = torch.isin(row, at[:k + 1])
    early, large = e[dirty & (x.t < (3 if k else 8))], mean[at[0]] > numerics(x)
    plain = not by_length(x, dirty) if k else large         # of one row no length tells anything
    if plain and len(early) and early.median() > e[dirty].median() / 3 and of_rows(x, row, dirty):
        which = ", ".join(str(n + 1) for n in sorted(number[at[:k + 1]].tolist()))
        yield ("context", "rows", f"of {k + 1} whole responses of {len(at)}, from their first token"
               f" on, as after another prompt{f' (number {which})' * (k < 3)},", dirty, dirty)


def of_rows(x: Tokens, row: Tensor, dirty: Tensor) -> bool:
    """True if rows explain the gap better than prompts do, and what is outside does not scatter.

    Prompts differ in the size of their gap, whatever the cause. So sizes of P prompts compete with
    those of k rows of n and of all others, at three nats a size and log C(n, k) of the choice.
    """
    first = torch.cat([row.new_ones(1), row.diff()]).bool()
    _, prompt = x.prefix[first].unique(return_inverse=True)         # of each row
    e, n, prompts = x.e().abs() + floor(x.e()), int(first.sum()), int(prompt.max()) + 1
    chosen = log_choices(n, int((first & dirty).sum()))
    return own_sizes(e, dirty.long()) + chosen < own_sizes(e, prompt[row]) + 3 * (prompts - 2) and (
        scatter(x.take(~dirty))[0] <= LIMITS["scatter, nats"])


def by_length(x: Tokens, dirty: Tensor) -> bool:
    """True if the prompt's length tells which tokens are dirty: those after the shorter ones."""
    lengths = x.start.unique().tolist()
    return len(lengths) > 1 and max(
        share_of(dirty == (x.start < length)) for length in lengths[1:]) > 0.95


def _written_by_a_tool(x: Tokens) -> Iterator[Part]:
    """Yield tokens that nobody sampled: log μ is 0, log π is not, and most stand side by side."""
    zero = (x.mu > -1e-7) & (x.pi < -1) & ~x.last & (x.t > 0)
    beside = (zero[1:] & zero[:-1] & (x.row[1:] == x.row[:-1])).sum()
    if beside >= max(2, 0.4 * zero.sum()) and size_of(x.pi[zero]) > 1.5:
        yield "tool", "tool", "where log μ = 0 and log π < −1", zero, zero


def _retokenised(x: Tokens) -> Iterator[Part]:
    """Yield what follows the first wild gap of some responses, where log π is far below log μ."""
    some, dirty = x.unsure(), torch.zeros_like(x.last)
    y = x.take(some)
    dirty[some] = wild = from_where_wild(y)
    rows, first = y.row[wild].unique(), wild.clone()
    first[1:] &= ~wild[:-1] | (y.row[1:] != y.row[:-1])
    whole = torch.isin(x.row, rows)
    if 0 < len(rows) <= FEW_ROWS * len(x.row.unique()) and y.d()[first].median() < -3:
        yield ("retokenised", "retokenised", f"of {len(rows)} responses, each from some token on",
               dirty, whole)


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


def _padded(x: Tokens) -> Iterator[Part]:
    """Yield what follows prompts shorter than the longest, and see if it grows with the padding."""
    if not x.start.max() > x.start.min() >= 0:
        return
    some = x.unsure()
    y = x.take(some)
    short, each = x.start < x.start.max(), y.start.unique()
    sizes = [size_of(y.e()[y.start == length]) for length in each]
    ranks = torch.tensor([(-each).tolist(), sizes]).argsort().argsort().double()
    grows = len(each) > 5 and torch.corrcoef(ranks)[0, 1] > 0.85
    clean = x.e()[some & ~short].abs()
    if grows or (len(clean) and clean.median() < numerics(x)):
        yield ("padding", "padding, growing" if grows else "padding",
               "after prompts shorter than the longest", short, short)


def _from_a_place_on(x: Tokens) -> Iterator[Part]:
    """Yield what is beyond each position, or on either side of each token."""
    if x.start.min() >= 0:
        position = x.start + x.t
        for at in _inner(position):
            yield "window", "window", f"from position {at} on", position >= at, position >= at
    for at in _inner(x.t):
        yield "in-flight", "in-flight", f"from token {at} on", x.t >= at, x.t >= at
        yield "in-flight", "in-flight", f"before token {at}", x.t < at, x.t < at


def _inner(places: Tensor) -> list[int]:
    """Return at most 60 places where a change may begin, without the first three and last two."""
    inner = places.unique()[3:-2]
    return inner[::1 + len(inner) // 60].tolist()


def decode(x: Tokens) -> Finding | None:
    """Test whether the first token alone is right, and the gap is everywhere from the second on.

    The prompt's pass gives the first token, and steps that read what it kept give the others. Any
    law that acts on each token moves the first one, too. R first tokens of another size refute all
    of these by R log(gap of the others/gap of the first) nats; equal ids count once. A stale prefix
    cache leaves a part of the log-odds: it is not named so.
    """
    some, e = x.unsure(), x.e().abs()
    first, early, later = (e[some & part] for part in (
        x.t == 0, (x.t > 0) & (x.t < 3), x.t > 0))
    if min(len(first), len(early)) < 3:
        return None

    right = size_of(first) + floor(e)
    wrong = min(size for part in (early, later)         # one bad token is not enough
                for size in (size_of(part), 1.5 * part.median().item()))
    nats = len(x.ids[some & (x.t == 0)].unique()) * math.log(max(1.0, wrong / right))
    if not (beyond("decode", wrong / right) and nats > 10
            and beyond("decode, spread", wrong / max(1.0, log_odds(x.mu).std().item()))):
        return None
    return Finding("decode", RECORD / 2, f"the first tokens differ by {size_of(first):.3f} logits "
                   f"({len(first)} tokens), all later ones by {size_of(later):.3f}, from the "
                   "second on")


# ---------------------------------------------------------------------- tokens that were seen

def penalty(x: Tokens, easier: float = 1.0) -> Finding | None:
    """Test for a penalty on μ: it lowers tokens that occurred before, and raises all others.

    A negative penalty does the opposite.

    Tokens that occurred before are likelier than others, and most causes treat likely tokens
    otherwise. So tokens are compared at equal log-odds of π, in eight parts. Where an id occurs
    both before and anew, the difference must be there as well, and three ids of four must agree on
    its sign: a penalty acts on all ids in one direction.
    """
    best: Finding | None = None
    some, e = x.unsure(), x.e()
    wide, size = (e.abs().quantile(0.98).item(), size_of(e[some])) if len(e) else (0.0, 0.0)
    e, part = e.clamp(-wide, wide), log_odds(x.pi).argsort().argsort() * 8 // max(1, len(e))

    for what, old in (("the response", x.seen), ("prompt or response", x.seen | x.known)):
        difference, z = _seen_less_new(e[some], old[some], part[some])
        sign = 1 if z > 0 else -1
        if math.isnan(z) or sign * e[old].mean() <= 0 or sign * e[~old].mean() >= 0:
            continue

        difference, z = sign * difference, sign * z
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


def _seen_less_new(e: Tensor, old: Tensor, part: Tensor) -> tuple[float, float]:
    """Return by how much seen tokens exceed new ones of the same part, and in standard errors.

    Each part's difference of means has the standard error of two samples with one variance. Both
    are NaN if no part has five of each.
    """
    total, weight = 0.0, 0.0
    for k in range(8):
        before, new = e[old & (part == k)], e[~old & (part == k)]
        if min(len(before), len(new)) >= 5:
            shared = 1 / (1 / len(before) + 1 / len(new))
            spread = torch.cat([before - before.mean(), new - new.mean()]).var().item()
            total += shared / (spread + FLOOR ** 2) * (before.mean() - new.mean()).item()
            weight += shared / (spread + FLOOR ** 2)
    return (total / weight, total / math.sqrt(weight)) if weight else (math.nan, math.nan)


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
            1.0 if many.sum() < 5 else share_of(apart[many] > 0))


# --------------------------------------------------------------- how the gap runs along responses

def fit_sizes(total: Tensor, count: Tensor, *columns: Tensor) -> tuple[float, list[float]]:
    """Fit log E|e| = a + Σ b·column to sums of |e| over so many tokens; return log L, (a, b …)."""
    nats, beta = fits(total, count, *columns)
    return nats.item(), beta.tolist()


def fits(total: Tensor, count: Tensor, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return log L and (a, b …) of P fits at once, [P] and [P, k]: a column is [n] or [P, n]."""
    matrix = torch.stack(torch.broadcast_tensors(torch.ones_like(total), *columns), -1)
    beta, ratio = matrix.new_zeros(*matrix.shape[:-2], matrix.shape[-1], 1), total   # [P, k, 1]
    beta[..., 0, 0] = (total.sum() / count.sum()).log()
    for _ in range(20):
        ratio = total * (-matrix @ beta).squeeze(-1).exp()                              # [P, n]
        weight = torch.maximum(ratio, count)[..., None] * matrix
        beta += torch.linalg.solve(weight.mT @ matrix + 1e-6 * torch.eye(beta.shape[-2]),
                                   matrix.mT @ (ratio - count)[..., None])
    return -((matrix @ beta).squeeze(-1) @ count + ratio.sum(-1)), beta.squeeze(-1)


def within(x: Tokens) -> float:
    """Return the nats that a fading as a power of t + 8 saves between prompts of one length."""
    e, late = x.e().abs() + FLOOR, (x.t + 8.0).double().log()
    _, length = x.start.unique(return_inverse=True)

    def nats(slope: float) -> float:
        return slope * late.sum().item() - own_sizes(e * (slope * late).exp(), length)
    return max(nats(k / 20) for k in range(61)) - nats(0)


def lacking(x: Tokens) -> tuple[float, float, float]:
    """Return by how many nats a gap is one of padding, not of context, and how it grows by length.

    The third is the share of the nats that a size of its own for each length would save: prompts
    differ in size by chance, and a line through a few of them saves some of that. Through two it
    saves all, which shows nothing, so the share is 0.

    Before token t there are start + t tokens. So a gap of context falls with both alike, or with t
    alone. Padding is what a prompt lacks to the longest, so it falls with the prompt's length, too,
    and faster:

        context    log E|e| = a + b log(start + t + 8), or a + b log(t + 8)
        padding    log E|e| = a + b log(t + 8) + c start, with c < 0
    """
    if x.start.min() < 0 or x.start.min() == x.start.max():
        return 0.0, 0.0, 0.0
    e, each = x.e().abs() + FLOOR, torch.ones_like(x.mu)
    start, age = (x.start - x.start.min()).double(), x.t.double() + 8
    nats, (_, slope, grows) = fit_sizes(e, each, age.log(), start)
    nats -= (context := max(fit_sizes(e, each, y.log())[0] for y in (age, age + x.start)))

    each, length = x.start.unique(return_inverse=True)
    fading = slope * age.log()
    own = -fading.sum().item() - own_sizes(e * (-fading).exp(), length) - len(e) - context
    return nats, grows, nats / max(own, FLOOR) if len(each) > 2 else 0.0


def over_time(x: Tokens) -> tuple[Finding | None, Finding | None]:
    """Test whether the gap fades from the first token on, or drops at one and fades after it.

        context    log E|e| = a + b L + c L², where L = log(t + 8)
        in-flight  log E|e| = a + j [t ≥ T] + b [t ≥ T] log((t + 8)/(T + 8)), or
                   log E|e| = a + b L + c L² + j [t ≥ T] with j < 0

    A gap fades if what differs is an ever smaller part of the context: smoothly, so c is small. A
    change of weights is a step. A Laplace distribution of each size is fitted, as in (eq:gap-left).
    Each prompt has a gap of its own size, and some responses end early, so the gap must fade as
    surely if prompts of each length have a size of their own. `lacking` tells padding from it.
    The second result is what explains the gap almost as well as the first, or a suggestion.
    """
    x = x.take(x.unsure() & (x.t > 0))      # the first token is recomputed after a prefix cache hit
    if len(x.t) < 20 or x.t.max() < SPREAD:
        return None, None
    e, count = x.e().abs(), x.t.bincount()
    rare = e.clamp(max=e.quantile(0.98))    # a few tokens must not make a step
    total, common = (x.t.bincount(size + FLOOR)[count > 0] for size in (e, rare))
    age, count = count.nonzero()[:, 0], count[count > 0].double()
    late = (age + 8.0).log()
    late -= late.mean()

    (flat, _), (fades, (_, slope)) = fit_sizes(total, count), fit_sizes(total, count, late)
    (even, _), (straight, _) = fit_sizes(common, count), fit_sizes(common, count, late)
    bends, (_, _, curve) = fit_sizes(common, count, late, late.square())
    best, at = _best_step(common, count, age, late, _inner(x.t))
    ages, ahead = fades - flat, best - max(even, bends)

    falling = Finding("in-flight", math.exp(-max(best - even, 0) / len(x.t)), f"at token {at} the "
                      f"gap falls: {ahead:.0f} nats better than any smooth change")
    fading = Finding("context", math.exp(-ages / len(x.t)), "from the first token on the gap falls "
                     f"as (t + 8)^{slope:.2f}: {ages:.0f} nats better than one size")
    bent = ahead > 0 and slope < -0.25 and curve < -0.4 and bends - straight > 6
    if bent or (beyond("step", ahead) and ahead > 0.1 * ages):
        return falling, fading if slope < 0 else None
    if beyond("context, nats", min(ages, within(x))) and beyond("context", -slope):
        return _padding_or_context(x, fading, falling if ahead > -math.inf else None)
    return None, falling if ahead > 1 else fading if ages > 3 and slope < -0.12 else None


def deeper(x: Tokens) -> Finding | None:
    """Test whether the gap grows with the position, in prompts of each length.

        depth      log E|e| = a + b log(s + t + 8), where s is the prompt's length, or 0; b > 0

    A rotary factor, a cache in 8 bits or positions in 16 err ever more with the position.
    """
    x = x.take(x.unsure() & (x.t > 0))
    if len(x.t) < 20:
        return None
    position, e = x.t + x.start.clamp(min=0), x.e().abs() + FLOOR
    each = torch.ones_like(e)
    (flat, _), (grows, (_, slope)) = (fit_sizes(e, each, *y) for y in (
        (), ((position + 8.0).double().log(),)))
    low, high = (position <= position.double().quantile(0.25),
                 position >= position.double().quantile(0.75))
    if not (beyond("depth", slope) and beyond("depth, nats", grows - flat)):
        return None
    return Finding("depth", 1.0, f"the gap grows with the position: {size_of(x.e()[low]):.3f} "
                   f"logits up to token {int(position[low].max())}, {size_of(x.e()[high]):.3f} from"
                   f" token {int(position[high].min())} on, {grows - flat:.0f} nats better than "
                   "one size")


def _best_step(total: Tensor, count: Tensor, age: Tensor, late: Tensor, places: list[int]
               ) -> tuple[float, int]:
    """Return log L of the likeliest step, −∞ if the gap falls nowhere, and the token it is at."""
    place = torch.tensor(places).view(-1, 1)                                            # [P, 1]
    after = (age >= place).double()
    since = ((age + 8) / (place + 8)).clamp(min=1).log()
    alone, of_step = fits(total, count, after, since)
    smooth, of_both = fits(total, count, late, late.square(), after)
    (_, jump, falls), step = of_step.unbind(-1), of_both[:, -1]

    nats = torch.maximum(
        alone.where((jump < 0.3) & (jump + falls * math.log(2) < -0.6), -math.inf),
        (smooth - 3).where(step < 0, -math.inf))
    return max(zip(nats.tolist(), places), default=(-math.inf, 0))


def _padding_or_context(x: Tokens, fading: Finding, falling: Finding | None
                        ) -> tuple[Finding, Finding | None]:
    """Return which of both a gap that fades is, and what else it may be."""
    nats, grows, share = lacking(x)
    padded = Finding("padding", fading.left, f"{fading.evidence}; and with the prompt's length by "
                     f"{1 - math.exp(grows):.1%} a token, {nats:.0f} nats better than with any "
                     "context")
    if grows < 0 and beyond("context, nats", nats) and beyond("padding, share", share):
        return padded, fading
    return fading, padded if grows < 0 and nats > 3 else falling
