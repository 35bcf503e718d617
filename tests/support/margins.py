"""How far a verdict of the doctor stands from the limits that decide it.

Another processor rounds otherwise, and a model that is made on the spot then gives a dump that is
slightly another one: values move by a hundredth, or by a fifth if another token is sampled, so that
the rest of a row differs. A test asserts the margin, and not the verdict alone.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from three_policies.doctor import laws

CLEAR = 1.25            # a factor; in each draw of perturbed.py a verdict is as clear


def watched(examine: Callable[[], Any]) -> tuple[Any, dict[str, list[float]]]:
    """Return what `examine` does, and the values over their limits that were held against them."""
    with laws.watched() as held:
        found = examine()

    ratios: dict[str, list[float]] = {}
    for name, value in held:
        if value > 0:                                   # not NaN either: too few tokens
            ratios.setdefault(name, []).append(value / laws.LIMITS[name])
    return found, ratios


def stands_clear(examine: Callable[[], Any], verdict: Callable[[Any], Any]) -> Any:
    """Return what `examine` does, and assert the verdict on it with any one limit moved by CLEAR.

    Only a limit that some value came so near to is moved. The nearest are printed, whether they
    decide or not: pytest -rP shows that, or a failure.
    """
    def distance(ratio: float) -> float:
        return abs(math.log(ratio))
    found, ratios = watched(examine)
    nearest = {name: min(values, key=distance) for name, values in ratios.items()}
    said, order = verdict(found), sorted(nearest, key=lambda name: distance(nearest[name]))
    near = [name for name in order if 1 / CLEAR <= nearest[name] <= CLEAR]
    print(f"{said}: {len(near)} of {len(order)} values are within a factor of {CLEAR} of their "
          f"limits. The nearest, over their limits: "
          f"{', '.join(f'{name} {nearest[name]:.2f}' for name in order[:4])}")
    for name in near:
        by = 1.001 * CLEAR if nearest[name] > 1 else 0.999 / CLEAR
        with patch.dict(laws.LIMITS, {name: by * laws.LIMITS[name]}):
            moved = verdict(examine())
        assert moved == said, f"`{name}` × {by:.2f} changes {said} to {moved}"
    return found


def stays_below(examine: Callable[[], Any]) -> Any:
    """Return what `examine` does, and assert that each value is below its limit by CLEAR."""
    found, ratios = watched(examine)
    highest = {name: max(values) for name, values in ratios.items()}
    order = sorted(highest, key=highest.__getitem__, reverse=True)
    said = ", ".join(f"{name} {highest[name]:.2f}" for name in order[:4])
    print(f"the highest values over their limits: {said}")
    assert highest[order[0]] < 1 / CLEAR, said
    return found
