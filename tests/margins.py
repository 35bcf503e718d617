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


def stands_clear(judge: Callable[[], Any]) -> Any:
    """Return what `judge` says, and assert that it says so with any one limit moved by CLEAR.

    Only a limit that some value came so near to is moved. The nearest is printed, whether it
    decides or not: pytest -rP shows that, or a failure.
    """
    ratios: dict[str, float] = {}

    def listen(name: str, value: float) -> bool:
        ratio = value / causes.LIMITS[name]
        if ratio > 0 and abs(math.log(ratio)) < abs(math.log(ratios.get(name, math.inf))):
            ratios[name] = ratio
        return value > causes.LIMITS[name]
    with patch.object(causes, "beyond", listen):
        verdict = judge()
    order = sorted(ratios, key=lambda name: abs(math.log(ratios[name])))
    near = [name for name in order if 1 / CLEAR <= ratios[name] <= CLEAR]
    print(f"{verdict}: of {len(ratios)} limits {len(near)} are within a factor of {CLEAR}; "
          f"values over limits: {', '.join(f'{name} {ratios[name]:.2f}' for name in order[:4])}")
    for name in near:
        beyond = 1.001 * CLEAR if ratios[name] > 1 else 0.999 / CLEAR
        with patch.dict(causes.LIMITS, {name: causes.LIMITS[name] * beyond}):
            assert judge() == verdict, f"`{name}` × {beyond:.2f} changes {verdict} to {judge()}"
    return verdict
