"""Judge the declared contrasts of a study of few paired seeds, by exact tests.

judge(family, found, seeds)               # every contrast of a family, with its adjusted p
sign_flip([0.2, 0.1, 0.3])                # p = 2/8: no other signs give as large a sum but −all
holm({"a": 0.01, "b": 0.04})              # adjusted p-values
mcnemar([1, 1, 0], [0, 0, 0])             # p of a paired yes or no
"""

import itertools
import statistics
from math import comb
from typing import Any, NamedTuple

Rows = dict[Any, dict[str, str]]                     # a line of results.csv by seed
CORRECTIONS = ["decoupled_token_is", "decoupled_seq_is", "bypass_ppo_clip"]


class Contrast(NamedTuple):
    """A Contrast is one arm minus another in a regime, seed by seed."""

    regime: str
    arm: str
    other: str | None            # what `best` stands for; None before one of these has been run
    rows: list[Rows]             # of those arms that have been run, over the seeds that both have
    p: float | None = None       # None where a seed is missing
    adjusted: float | None = None

    @property
    def separable(self) -> bool:
        return self.adjusted is not None and self.adjusted <= 0.05

    def difference(self, endpoint: str = "area") -> tuple[float, float]:
        return paired(self.rows[0], self.rows[1], endpoint)


def judge(family: list[dict[str, Any]], found: dict[str, dict[str, Rows]], seeds: list[int],
          endpoint: str = "area") -> list[Contrast]:
    """Test each contrast that has all seeds, by sign flips, adjusted over the whole family.

    family: blocks of a declaration, of regimes and contrasts. found: rows by regime and arm.
    """
    contrasts = []
    for regime, one, other in [(regime, *pair) for block in family for regime in block["regimes"]
                               for pair in block["contrasts"]]:
        arms = found.get(regime, {})
        other = best_arm(arms, endpoint) if other == "best" else other
        there = [arms[arm] for arm in (one, other) if arm in arms]
        shared = sorted(set(seeds).intersection(*there)) if len(there) == 2 else []
        contrasts.append(Contrast(regime, one, other, [{seed: rows[seed] for seed in shared}
                                                       for rows in there]))

    p = {i: sign_flip(differences(x.rows[0], x.rows[1], endpoint))
         for i, x in enumerate(contrasts) if x.rows and len(x.rows[0]) == len(seeds)}
    adjusted = holm(p, family=len(contrasts))
    return [x._replace(p=p.get(i), adjusted=adjusted.get(i)) for i, x in enumerate(contrasts)]


def best_arm(arms: dict[str, Rows], endpoint: str) -> str | None:
    """Return the corrected arm with the best mean; None before one has been run."""
    return max((arm for arm in CORRECTIONS if arm in arms), default=None, key=lambda arm: (
        statistics.mean(float(row[endpoint]) for row in arms[arm].values())))


def differences(one: Rows, other: Rows, endpoint: str) -> list[float]:
    return [float(one[seed][endpoint]) - float(other[seed][endpoint])
            for seed in sorted(set(one) & set(other))]


def paired(one: Rows, other: Rows, endpoint: str = "final_accuracy") -> tuple[float, float]:
    """Return the mean difference over common seeds, and the half-width of its 95 % interval."""
    found = differences(one, other, endpoint)
    student = STUDENT[min(len(found), 20) - 2]
    return statistics.mean(found), student * statistics.stdev(found) / len(found) ** 0.5


# STUDENT has the 0.975 quantile of t with 1, 2, … 19 degrees of freedom.
STUDENT = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
           2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]


def sign_flip(differences: list[float]) -> float:
    """Return the two-sided p of a mean of 0: the share of all 2^n signs with as large a |sum|.

    It is exact where, by the hypothesis, a difference is as likely as its negative (Fisher 1935).
    """
    seen = abs(sum(differences)) - 1e-12             # equal to rounding counts as equal
    flips = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
    return sum(x >= seen for x in sums) / len(sums)


def holm(p_values: dict, family: int | None = None) -> dict:
    """Adjust each p for `family` hypotheses (default: these), step by step from the smallest.

    Hypotheses of the family that are missing have no verdict yet: they count as p = 1. The chance
    of a false rejection stays below the level that the adjusted p is compared with (Holm 1979).
    """
    left, highest, adjusted = family or len(p_values), 0.0, {}
    for name in sorted(p_values, key=p_values.__getitem__):
        highest = max(highest, min(1.0, left * p_values[name]))
        adjusted[name], left = highest, left - 1
    return adjusted


def mcnemar(one: list[bool], other: list[bool]) -> float:
    """Return the two-sided exact p that two paired events are equally likely.

    Among the pairs that differ, either event is then a fair coin's result.
    """
    more = sum(a and not b for a, b in zip(one, other, strict=True))
    less = sum(b and not a for a, b in zip(one, other, strict=True))
    n = more + less
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(more, less) + 1)) / 2 ** n)
