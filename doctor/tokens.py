"""The tokens of a dump as columns, and how a gap between two of them is measured.

Tokens were drawn from p. μ is what the sampler recorded of them, π what the trainer computed, and
ρ = π/μ. This file decides the unit of a gap, the log-odds, where a logit's error has one size, and
which tokens can be compared: those that were drawn after the same prefix.
Derivation: math/8-what-is-wrong.md.

    x = Tokens.of(dumps.read("dump.jsonl"))
    print(x.e().abs().mean(), numerics(x))          # the gap, and what two kernels may leave of it
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
LOWEST = -40.0          # stands for any lower log π
NEVER = LOWEST - 1      # stands for log π = −∞
ROUNDING = 1e-4         # of E[ρ]: float32 alone may move it by so much
DTYPES = (torch.float64, torch.float64, *[torch.long] * 4, torch.bool, torch.long, torch.bool,
          torch.bool, torch.long, torch.float64)         # of the columns of `Tokens`, but `over`


class Tokens(NamedTuple):
    """The tokens that count as columns, [N] each, in the order of the dump."""

    mu: Tensor                          # log μ
    pi: Tensor                          # log π
    row: Tensor                         # number of the response in the dump, from 0
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
    def of(cls, responses: Sequence[Any], places: Sequence[int] | None = None) -> "Tokens":
        """Make the columns from responses as doctor/dumps.py reads them.

        places: where each stands in the dump, from 0; None: no other stands between them.
        """
        rows: list[tuple[Any, ...]] = []
        over: list[tuple[float, float]] = []
        numbers: dict[int, int] = {}                    # of the prefixes
        end = end_token(responses)

        for i, r in enumerate(responses):
            start = -1 if r.prompt_ids is None else len(r.prompt_ids)
            for t, (v, prefix, seen, known) in enumerate(with_history(i, r)):
                if not r.mask[t]:
                    continue
                mu, pi = r.rollout_log_probs[t], r.train_log_probs[t]
                over.append((max(0.0, mu), max(0.0, pi)))
                rows.append((
                    min(0.0, mu), NEVER if pi == -math.inf else min(0.0, max(LOWEST, pi)),
                    places[i] if places else i, t, start, v, v == end and t == len(r.token_ids) - 1,
                    numbers.setdefault(prefix, len(numbers)), seen, known,
                    r.versions[t] if r.versions else 0, r.entropy[t] if r.entropy else math.nan))

        columns = zip(*rows) if rows else [()] * len(DTYPES)
        return cls(*(torch.tensor(x, dtype=dtype) for x, dtype in zip(columns, DTYPES)),
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


def end_token(responses: Sequence[Any]) -> int | None:
    """Return the id that ends most of the responses that were not cut: the longest ones were."""
    longest = max((len(r.token_ids) for r in responses), default=0)
    ends = Counter(r.token_ids[-1] for r in responses if 0 < len(r.token_ids) < longest)
    return max(ends, key=lambda v: (ends[v], -v), default=None)


def with_history(i: int, r: Any) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield each token of response i, its prefix's hash, and if it was in response and prompt."""
    prompt = () if r.prompt_ids is None else tuple(r.prompt_ids)
    prefix = hash((i, "?") if r.prompt_ids is None else prompt)
    before, known = set[int](), set(prompt)

    for v in r.token_ids:
        yield v, prefix, v in before, v in known
        before.add(v)
        prefix = hash((prefix, v))


def sorted_rows(x: Tokens) -> Tokens:
    """Return the tokens with the responses in an order that they have by their content alone.

    A dump's own order would decide which draws are compared, and in which order numbers add up.
    """
    columns = (x.t, x.ids, x.mu, x.pi, x.version, x.entropy.nan_to_num(-1))
    content, row = [*zip(*(column.tolist() for column in columns))], x.row.tolist()
    rows = [[*places] for _, places in groupby(range(len(row)), row.__getitem__)]
    rows.sort(key=lambda places: [content[n] for n in places])
    return x.take(torch.tensor([n for places in rows for n in places], dtype=torch.long))


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


# --------------------------------------------------------------------------------- measuring

def log_odds(x: Tensor) -> Tensor:
    """Return log p/(1 − p) of log p: in this unit a logit's error has one size.  (eq:log-odds)"""
    return x - (1.001 - x.exp()).log()              # 0.001 more: near p = 1 rounding would decide


def size_of(x: Tensor) -> float:
    """Return the mean of |x|, or 0 of nothing."""
    return x.abs().mean().item() if len(x) else 0.0


def share_of(x: Tensor) -> float:
    """Return the share of x that is true, or 0 of nothing."""
    return x.double().mean().item() if len(x) else 0.0


def z_of(x: Tensor) -> float:
    """Return Σx/√Σx²: standard normal if each x has mean 0 given what was drawn before it."""
    return (x.sum() / x.square().sum().sqrt().clamp(min=1e-12)).item()


def z_of_rho(d: Tensor) -> float:
    """Return how many standard errors E[ρ] is from 1, or 0 if rounding or luck may be all.

    On a policy that is nearly sure ρ hardly varies until a rare token is drawn. The standard error
    is then tiny, and rounding that has one sign would be many of it.
    """
    x = d.expm1()
    return 0.0 if x.mean().abs() <= ROUNDING or undrawn(x, 1.0) else z_of(x)


def undrawn(x: Tensor, size: float) -> bool:
    """True if tokens that were not drawn may explain the mean of x, whose expectation is 0.

    Then x is `one_sided`. What is not drawn in n tokens has a mass of at most 5/n (but for a chance
    of e⁻⁵). It makes up a mean of at most `size` times that, if no |x| among it is above `size`:
    for x = ρ − 1 and size 1, if π has at most twice μ's mass there.
    """
    return one_sided(x) and bool(x.mean().abs() <= 5 * size / max(1, len(x)))


def one_sided(x: Tensor) -> bool:
    """True if fewer than ten x are on the other side of 0 than their mean."""
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
    nats = sum(len(x) * math.log(size_of(x) + least) for x in (e[part] for part in parts))
    return math.exp(nats / max(1, len(e))) / (size_of(e) + least)


def own_sizes(e: Tensor, part: Tensor) -> float:
    """Return the nats of gaps e > 0 if each part has its own size, but for a constant.

    (eq:gap-left). part: the number of each gap's part, [N].
    """
    count = part.bincount().double()
    total = torch.zeros_like(count).index_add(0, part, e)[count > 0]
    return (count[count > 0] * (total / count[count > 0]).log()).sum().item()


def scatter(x: Tokens) -> tuple[float, float, int]:
    """Return by how many nats tokens drawn again scatter more than kernels, how far, how many.

    After one prefix a token has one gap, but for noise: twice that of `numerics`' two kernels,
    so its √2. A Laplace distribution of the size s instead of the limit l saves s/l − 1 − log(s/l)
    a draw, if s > l.
    """
    _, _, k, m = pairs(x)
    e, limit = x.e(), math.sqrt(2) * numerics(x) if len(x.t) > 1 else 1.0
    size = size_of(e[k] - e[m])
    more = max(1.0, size / limit)
    return len(k) * (more - 1 - math.log(more)), size, len(k)


def off_median(e: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """Return how far draws of one token after one prefix are from their median, but the nearest.

    k, m: as `pairs` returns them. If a few draws are far off, most of these are near 0.
    """
    draws: dict[int, list[int]] = {}
    for again, first in zip(k.tolist(), m.tolist()):
        draws.setdefault(first, [first]).append(again)
    return torch.cat([e.new_zeros(0), *((e[y] - e[y].median()).abs().sort().values[1:]
                                        for y in draws.values())])


def evenness(x: Tokens) -> float:
    """Return by how many nats log ρ is one number after each prefix; 0 if it is not, up to noise.

    After a cut or another normaliser the log ρ of two tokens after one prefix are equal, while
    other causes move each token by itself.  (eq:same-prefix, eq:gap-left)
    """
    i, j, _, _ = pairs(x)
    d = x.d()
    apart, size = size_of(d[i] - d[j]), size_of(d[torch.cat([i, j])])
    if not len(i) or apart > numerics(x):
        return 0.0
    return max(0.0, len(i) * math.log((size + FLOOR) / (apart + FLOOR)))


def confident(x: Tokens) -> int:
    """Count tokens that μ gave one half or more, and π two nats less, under one set of weights.

    (eq:confident) No noise of kernels does that: see chapter 8.
    """
    one = x.version == x.version[:1].expand_as(x.version) if len(x.t) else x.last
    return int((one.all() & (x.mu >= math.log(0.5)) & (x.d() < -2)).sum())


def numerics(x: Tokens) -> float:
    """Return the largest mean gap, in logits, that two kernels with the same weights may have.

    The formula is set by hand. Larger logits round more coarsely, and a dump shows their size by
    their spread. In a healthy mixture of experts a few tokens have most of the mean gap, so
    `texture` decides by the median. Below the limit, int8 weights look the same as two kernels.
    """
    return 0.012 + 0.015 * min(3.0, log_odds(x.mu).std().item()) ** 3


def least_squares(y: Tensor, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a sum of columns without the worst tenth; return the factors and all residuals."""
    matrix, keep = torch.stack(columns, -1), torch.ones_like(y, dtype=torch.bool)
    beta, residual = y.new_zeros(len(columns)), y
    for _ in range(2):
        square = matrix[keep].T @ matrix[keep] + 1e-9 * torch.eye(len(columns), dtype=y.dtype)
        beta = torch.linalg.solve(square, matrix[keep].T @ y[keep])
        residual = y - matrix @ beta
        keep = residual.abs() <= residual.abs().quantile(0.9)
    return beta, residual
