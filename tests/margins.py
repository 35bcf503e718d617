"""How far a verdict of the doctor stands from the limits that decide it.

Another processor rounds otherwise, and a model that is made on the spot then gives a dump that is
slightly another one. So a test asserts the margin: what a processor moves is far smaller.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import causes

CLEAR = 1.25            # values move by up to 1.006 with the weights' last bits (perturbed.py)


def stands_clear(examine: Callable[[], Any], verdict: Callable[[Any], Any]) -> Any:
    """Return what `examine` does, and assert the verdict on it with any one limit moved by CLEAR.

    Only a limit that some value came so near to is moved. The nearest are printed, whether they
    decide or not: pytest -rP shows that, or a failure.
    """
    ratios: dict[str, float] = {}

    def listen(name: str, value: float) -> bool:
        ratio = value / causes.LIMITS[name]
        if ratio > 0 and abs(math.log(ratio)) < abs(math.log(ratios.get(name, math.inf))):
            ratios[name] = ratio
        return value > causes.LIMITS[name]
    with patch.object(causes, "beyond", listen):
        found = examine()
    said, order = verdict(found), sorted(ratios, key=lambda name: abs(math.log(ratios[name])))
    near = [name for name in order if 1 / CLEAR <= ratios[name] <= CLEAR]
    nearest = ", ".join(f"{name} {ratios[name]:.2f}" for name in order[:4])
    print(f"{said}: {len(near)} of {len(ratios)} values are within a factor of {CLEAR} of their "
          f"limits. The nearest, over their limits: {nearest}")
    for name in near:
        by = 1.001 * CLEAR if ratios[name] > 1 else 0.999 / CLEAR
        with patch.dict(causes.LIMITS, {name: by * causes.LIMITS[name]}):
            moved = verdict(examine())
        assert moved == said, f"`{name}` × {by:.2f} changes {said} to {moved}"
    return found
