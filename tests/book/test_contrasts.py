"""The tests of significance of chapter 15 are exact: counted here in another way."""

import itertools
import random

import pytest

from three_policies.studies import contrasts


def test_sign_flips_by_hand_and_by_counting_in_another_way():
    assert contrasts.sign_flip([0.2, 0.1, 0.3]) == 2 / 8           # all of one sign: ± all
    assert contrasts.sign_flip([3.0, -1.0]) == 1                   # |2| ≤ |±3 ± 1|: all four
    assert contrasts.sign_flip([0.3] * 10) == 2 / 1024
    assert contrasts.sign_flip([0.1, 0.2, -0.2]) == 1              # 0.1, rounded in another order
    rng = random.Random(0)
    values = [rng.randrange(-9, 10) for _ in range(10)]
    ways = {0: 1}                                                  # sum → number of signs for it
    for v in values:
        steps = [(s + e * v, n) for s, n in ways.items() for e in (1, -1)]
        ways = {s: sum(n for t, n in steps if t == s) for s, _ in steps}
    beyond = sum(n for s, n in ways.items() if abs(s) >= abs(sum(values)))
    assert contrasts.sign_flip(list(map(float, values))) == beyond / 1024


def test_holm_on_the_worked_example():
    """0.01, 0.04, 0.03, 0.005 are sorted, multiplied by 4, 3, 2, 1, and never fall."""
    found = contrasts.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert contrasts.holm({"a": 0.01, "b": 0.4}, family=5) == pytest.approx({"a": 0.05, "b": 1.0})


def test_mcnemar_is_the_tails_of_a_fair_coin():
    for n in range(13):
        for more in range(n + 1):
            one, other = ([True] * more + [False] * (n - more) + [True],
                          [False] * more + [True] * (n - more) + [True])
            as_far = sum(abs(sum(x) - n / 2) >= abs(more - n / 2)
                         for x in itertools.product((0, 1), repeat=n))
            assert contrasts.mcnemar(one, other) == pytest.approx(as_far / 2 ** n)
    assert contrasts.mcnemar([True] * 10, [False] * 10) == 2 / 1024
