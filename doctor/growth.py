"""Fit what the gap of a run grows with: the distance between both sides' weights, and rivals.

The size of the gap at a step is v: k3 per token, or what a log has instead. For a small step δ of
the weights KL(π_θ‖π_θ+δ) = ½ δᵀFδ + O(|δ|³), so v is a floor, which the engine's arithmetic leaves,
plus a part that grows with the squared distance between the weights of both sides:

    v(t) = a (1 + r · x(t)),   x(t) = (D(t) − D(e(t)))²

D(t) is the sum of the learning rates before step t, and e(t) the step whose weights the engine has.
Each hypothesis is an e(t). All are fitted to log v and compared in nats of a Laplace distribution,
as the causes of a dump are (eq:gap-left). Derivation: math/8-what-is-wrong.md.
"""

# pyright: reportUnknownMemberType=false
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from three_policies.doctor.logs import Lag, Log, Row

NOISE = 0.03            # log v of a batch is not known better
MOST = 40               # rows that count as independent, however often a log is written
FITTED = 240            # most rows that are fitted
CHOICE = 3.0            # nats that a number costs which was chosen by looking
LEAST = 1e-9            # v of float32's own rounding
SOON = 8                # steps: a rise that ends before may be that of a fixed delay
RATES = torch.logspace(-1, 11, 49, dtype=torch.float64)     # of r, where x is at most 1
POWERS = torch.linspace(-4, 4, 49, dtype=torch.float64)


class Law(NamedTuple):
    """A hypothesis about what v grows with, and how well it fits."""

    verdict: str                        # of the run, if it is true
    words: str                          # what v follows
    cost: float                         # nats, for what was chosen by looking
    left: float = 1.0                   # mean |residual| over that of a constant
    rows: int = 0
    growth: float = 1.0                 # v at the last step over v at the first, as fitted

    @property
    def nats(self) -> float:
        """Return the nats that it saves, less its cost."""
        return -min(self.rows, MOST) * math.log(self.left) - self.cost


class Series(NamedTuple):
    """The rows of a log that have a gap, as tensors [n]."""

    step: Tensor
    log_v: Tensor
    way: Tensor                         # D, the sum of learning rates before each step
    rate: Tensor                        # the learning rate; 1 where a log has none
    lag: Tensor                         # steps that the engine is behind; NaN if unknown
    others: dict[str, Tensor]           # log entropy and log length, where all rows have them

    @classmethod
    def of(cls, log: Log) -> "Series":
        """Take the rows with a gap; |log ρ| and differences of probabilities are squared."""
        size = log.size or "k3"
        steps, rates = _tensor(log.column("step")), _tensor(log.column("learning rate"))
        way, rate = _way(steps, rates)

        there = [i for i, row in enumerate(log.rows) if row.get(size, 0) > 0]
        if (n := len(there)) > FITTED:
            there = [there[i * n // FITTED] for i in range(FITTED)]
        rows = [log.rows[i] for i in there]
        v = _tensor([row[size] for row in rows]) ** (2 if size in ("abs", "prob") else 1)
        others = {name: _tensor([row.get(name, 0.0) for row in rows])
                  for name in ("entropy", "length")}
        others = {name: x.log() for name, x in others.items() if (x > 0).all()}
        return cls(steps[there], v.clamp(min=LEAST).log(), way[there], rate[there],
                   _tensor([*map(lag_of, rows)]), others)

    def way_at(self, step: Tensor) -> Tensor:
        """Return D at any steps: on a line between rows, and never below 0."""
        right = torch.searchsorted(self.step, step).clamp(1, len(self.step) - 1)
        share = (step - self.step[right - 1]) / (self.step[right] - self.step[right - 1])
        return self.way[right - 1].lerp(self.way[right], share).clamp(min=0)


def lag_of(row: Row) -> float:
    """Return how many steps the engine is behind, but for a constant; NaN if that is unknown."""
    return row.get("staleness", row["step"] - row.get("version", math.nan))


def _tensor(x: list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _way(steps: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return D at each step, and each step's learning rate.

    Steps that were not logged have rates between those of their neighbours, so that D does not
    depend on how often a log was written. Before the first row the rate is that row's.
    """
    known = ~rates.isnan()
    if not known.any():
        rates, known = torch.ones_like(steps), known.logical_not()
    rates = rates[known][(torch.searchsorted(steps[known], steps, right=True) - 1).clamp(min=0)]
    between = rates[:-1] + (steps.diff() - 1) * (rates[1:] + rates[:-1]) / 2
    before = rates[:1] * (steps[:1] - 1).clamp(min=0)
    return torch.cat([before, before + between.cumsum(0)]), rates


# ---------------------------------------------------------------------------- what v may grow with

def hypotheses(s: Series) -> Iterator[tuple[Law, Tensor]]:
    """Yield each hypothesis with its x(t), or with log x if v is a power of it.  (eq:trend)

    * The engine got no weights after step e: x = (D(t) − D(e))ᵖ. Steps in one direction add up,
      p = 2; those of a random walk have p = 1; 3/2 is between.
    * It is K steps behind: x = (D(t) − D(t − K))². It gets weights every K steps: e is the last of
      these. Or the log says how far behind it is.
    * It gets the trainer's weights rounded. Then a weight is off by its whole way, until the way
      is as long as the grid's spacing g, and from there by a part of g: x = D²/(D² + g²).
    * The gap has other reasons: v is a power of the entropy, or of the length.
    """
    way, step, span = s.way, s.step, float(s.step[-1] - s.step[0])
    starts = [(1.0, 0.0)] * bool(way[0] > 0) + [
        (float(step[i]), float(way[i])) for i in range(0, max(1, len(step) - 3),
                                                       max(1, len(step) // 24))]
    for i, (first, start) in enumerate(starts):
        law = Law("failed-sync", f"the distance from step {first:g}, without any sync after it",
                  CHOICE * (1 + bool(i)))
        yield from ((law, (way - start).clamp(min=0) ** power) for power in (1.0, 1.5, 2.0))

    if not s.lag.isnan().any():
        yield Law("stale", "the staleness that the log has", 0.0), (s.lag * s.rate) ** 2
    else:
        yield from delays(s, span)

    for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4):
        g = float(share * way[-1])
        grid, words = "below-grid", (f"the distance from step 1 until the learning rates add up to "
                                     f"{g:.2g}, and stays as it is then")
        if s.lag.isnan().any() and g < SOON * s.rate.mean():
            grid, words = "stale", "a rise that ends within a few steps, as that of a fixed delay"
        yield Law(grid, words, 2 * CHOICE), way ** 2 / (way ** 2 + g * g)
    for name, x in s.others.items():
        yield Law("follows", f"the {name}", CHOICE), x


def delays(s: Series, span: float) -> Iterator[tuple[Law, Tensor]]:
    """Yield fixed delays and intervals of syncs, of which the log must show two."""
    for behind in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        if behind < span / 2:
            yield (Law("stale", f"a delay of {behind} steps", CHOICE * (1 + (behind > 4))),
                   (s.way - s.way_at(s.step - behind)) ** 2)
    for every in (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 50, 64, 100):
        law = Law("stale", f"the distance from a sync every {every} steps", 2 * CHOICE)
        for phase in range(0, every, max(1, every // 8)) if every < span / 2 else ():
            synced = every * ((s.step - phase) / every).floor() + phase
            yield law, (s.way - s.way_at(synced)) ** 2


def fitted(s: Series) -> list[Law]:
    """Return the hypotheses, the one first that saves most nats.

    a is fitted by the median and r from RATES; where v is a power of x, the exponent from POWERS.
    """
    found, whole = list[Law](), float(_spread(s.log_v))
    every = hypotheses(s)
    while chunk := [*islice(every, 64)]:
        x = torch.stack([x for _, x in chunk])[:, None]                                  # [F, 1, n]
        powers = torch.tensor([law.verdict == "follows" for law, _ in chunk])[:, None, None]
        within = (x / x.amax(-1, keepdim=True).clamp(min=1e-300)).clamp(min=0)
        curves = torch.where(powers, POWERS[:, None] * x, (RATES[:, None] * within).log1p())
        spreads, best = _spread(s.log_v - curves).min(-1)                                    # [F]
        for (law, _), spread, curve in zip(chunk, spreads.tolist(), curves[range(len(x)), best]):
            found.append(law._replace(left=(spread + NOISE) / (whole + NOISE), rows=len(s.step),
                                      growth=math.exp(float(curve[-1] - curve[0]))))
    return sorted(found, key=lambda law: -law.nats)


def _spread(x: Tensor) -> Tensor:
    return (x - x.median(-1, keepdim=True).values).abs().mean(-1)


# ------------------------------------------------------------------- how rarely syncs may happen

def room(log: Log, lags: Sequence[Lag] = ()) -> str:
    """Say how far the weights may move between syncs until ESS/N is 0.5, from the log's own χ².

    For a step δ of an exponential family with log-partition A, 1 + χ² = exp(A(θ + 2δ) − 2A(θ + δ) +
    A(θ)), and ESS/N = 1/(1 + χ²). So log(N/ESS) is a second difference, k² δᵀFδ + O(k³) for a step
    of k δ: a distance F times today's leaves ESS/N = 0.5 for F = √(log 2 / log(N/ESS)).  (eq:room)
    The distance is the interval of syncs times the learning rate. A floor that no sync removes is
    taken off where the lags of several dumps show it.
    """
    name = next((x for x in ("chi2", "ess", "k3", "abs") if x in log.names), None)
    values = [row[name] for row in log.rows if name and name in row]
    if not name or not values:
        return ""
    late = sorted(values[-max(1, len(values) // 3):])
    x = late[len(late) // 2]
    lost = {"chi2": lambda: math.log1p(max(x, 0.0)), "ess": lambda: -math.log(max(x, 1e-9)),
            "k3": lambda: 2 * x, "abs": lambda: x * x}[name]()             # log(N/ESS)
    if lost < 1e-9:
        return ""
    floor = floor_of(lags)
    found = f"N/ESS is {math.exp(lost):.3g} per token"
    if floor is not None and 0 < floor < lost:
        found += f", {math.exp(floor):.3g} of it the engine's floor"
        lost -= floor
    share = math.sqrt(max(0.0, math.log(2) - (floor or 0.0)) / lost)
    behind = [row["staleness"] for row in log.rows if row.get("staleness", 0) > 0]
    steps = f", a delay of {behind[-1] * share:.3g} steps" if behind else ""
    return (f"{found}; as far as staleness makes it, ESS/N is 0.5 at {share:.3g} times today's "
            f"interval of syncs, or learning rate{steps}")


def floor_of(lags: Sequence[Lag]) -> float | None:
    """Return twice k3 of tokens without staleness: the line of k3 over lag², at lag 0."""
    if len(lags) < 2:
        return None
    n, x, y = zip(*((lag.tokens, lag.lag ** 2, lag.k3) for lag in lags))
    total = sum(n)
    mean_x, mean_y = (sum(map(lambda a, b: a * b, n, z)) / total for z in (x, y))
    slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(n, x, y)) / sum(
        w * (a - mean_x) ** 2 for w, a in zip(n, x))
    return 2 * max(0.0, mean_y - slope * mean_x)
