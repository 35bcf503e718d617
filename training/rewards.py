"""Score responses by a function of the user's own, or by the last number that they name.

`task.reward=FILE.py:FUNCTION` is a function (question, answer, response) → float. It is the one
place where a run executes code that it is given. So the run says at its start which function that
is, and what it returns for the first question.
"""

import importlib.util
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from three_policies.checks import UserError, nearest
from three_policies.training.answers import is_right

Score = Callable[[str, str, str], float]           # question, answer, response

NUMBER = re.compile(r"[-\u2212]?(?:\d[\d,]*\.?\d*|\.\d+)")


def last_number(response: str) -> str:
    """Return the last number of a response, "42" of "So it is 42.", or nothing.

    This is the field's `flexible-extract`; answers.py is its `strict-match`.
    """
    found = NUMBER.findall(response)
    return found[-1].rstrip(".,") if found else ""


def by_last_number(question: str, answer: str, response: str) -> float:
    return float(is_right(last_number(response), answer))


def own_reward(named: str) -> Score:
    """Return the function of task.reward=FILE.py:FUNCTION, whose errors are one sentence."""
    file, _, name = named.rpartition(":")
    path, setting = Path(file), f"task.reward={named}"
    if not (file.endswith(".py") and name):
        raise UserError(f"{setting} must be FILE.py:FUNCTION, such as reward.py:score")
    if not path.is_file():
        raise UserError(f"{setting}: {file} is not a file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None           # of a name that ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{setting}: {file} raises {type(error).__name__}: {error}") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UserError(f"{setting}: {file} has no function {name}{nearest(name, known)}")

    def score(question: str, answer: str, response: str) -> float:
        try:
            returned: Any = function(question, answer, response)
            found = float(returned)
        except Exception as error:
            raise UserError(f"{setting} raises {type(error).__name__}: {error} (the question is "
                            f"{question[:60]!r}, the response {response[:60]!r})") from None
        if not math.isfinite(found):
            raise UserError(f"{setting} returns {found} for the question {question[:60]!r} and the "
                            f"response {response[:60]!r}; a reward is a finite number")
        return found

    return score


def try_out(named: str, score: Callable[[Any, str], float], first: Any, count: int, limit: float
            ) -> list[str]:
    """Call a user's function twice before anything is loaded, and return what a run says of it.

    It is refused if a step's `count` responses would take longer than `limit` seconds.
    """
    began = time.perf_counter()
    right, empty = score(first, first.answer), score(first, "")
    seconds = (time.perf_counter() - began) / 2
    if seconds * count > limit:
        raise UserError(f"task.reward={named} takes {seconds:.2g} s a response, and a step has "
                        f"{count}: that is more than rollout.timeout={limit:g} seconds")
    return [f"task.reward={named} gives {right:g} for the first question's answer and {empty:g} "
            "for an empty response" + ": it cannot tell them apart" * (right == empty)]
