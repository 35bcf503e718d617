"""Exact tests for a study of few paired seeds need no library beyond the requirements.

sign_flip([0.2, 0.1, 0.3])                # p = 2/8: no other signs give as large a sum but −all
holm({"a": 0.01, "b": 0.04})              # adjusted p-values
mcnemar([1, 1, 0], [0, 0, 0])             # p of a paired yes or no
"""

import itertools
from math import comb


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
