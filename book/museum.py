"""Read the exhibits of test_museum*.py for the book: what was wrong, what is right, how far off.

The wrong and the right line are the source of what an exhibit returns, and of the names in it that
are its own. The error is computed.
"""

import ast
import importlib
import inspect
import math
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# What a reader guesses: the error as a share of the largest right number.
SIZES = (("under 20 %", 0.2), ("20 to 50 %", 0.5), ("50 to 100 %", 1.0),
         ("over 100 %, or no number", math.inf))


class Exhibit(NamedTuple):
    """One exhibit."""

    name: str
    where: str                 # who shipped it, with an address
    equation: str
    says: str
    shared: str                # source: of both, of the wrong value, of the right one
    wrong: str
    right: str
    error: float               # largest difference over the largest right number; NaN: a crash

    @property
    def answer(self) -> int:
        """Return which of SIZES is right."""
        return next((i for i, (_, top) in enumerate(SIZES) if self.error <= top), len(SIZES) - 1)


def returned(function) -> list[str]:
    """Return the source that wrong and right share, of the wrong value, and of the right one."""
    source = textwrap.dedent(inspect.getsource(function))
    parsed: Any = ast.parse(source).body[0]
    body = parsed.body

    def code(node) -> str:
        whole = isinstance(node, ast.stmt)             # its first line is indented as the others
        return textwrap.dedent(ast.get_source_segment(source, node, padded=whole) or "")

    values = body[-1].value
    if not isinstance(values, ast.Tuple):              # one expression makes all three
        return ["\n".join(map(code, body[1:])), "", ""]

    def made_by(line) -> set[str]:
        """Return the names that a line makes or changes."""
        stores = [x for x in ast.walk(line) if isinstance(getattr(x, "ctx", None), ast.Store)]
        return ({x.id for x in stores if isinstance(x, ast.Name)}
                | {x.value.id for x in stores if isinstance(x, ast.Subscript | ast.Attribute)
                   and isinstance(x.value, ast.Name)}
                | {x.name for x in ast.walk(line) if isinstance(x, ast.FunctionDef)})

    def needed_by(value) -> list[str]:
        """Return the lines that make a value, the last without a name if it is one."""
        names = {x.id for x in ast.walk(value) if isinstance(x, ast.Name)}
        alone = isinstance(value, ast.Name)
        lines = [] if alone else [code(value)]
        for line in reversed(body[1:-1]):
            if made_by(line) & names:
                lines.insert(0, code(line))
                names |= {x.id for x in ast.walk(line) if isinstance(x, ast.Name)}
        return lines

    wrong, right = map(needed_by, values.elts[:2])
    shared = [line for line in wrong if line in right]
    return ["\n".join(shared), *("\n".join(line for line in lines if line not in shared)
                                 for lines in (wrong, right))]


@cache
def exhibits() -> list[Exhibit]:
    """Return all exhibits, in the museum's order."""
    for path in sorted(ROOT.glob("tests/method/test_museum*.py")):
        importlib.import_module(f"three_policies.tests.method.{path.stem}")    # each files its own
    from three_policies.tests.support.exhibits import EXHIBITS, values
    found = []
    for name, (function, where, equation) in EXHIBITS.items():
        wrong, _, exact = values(name)
        gap, largest = (wrong - exact).abs().max(), exact.abs().max()
        error = round((gap / largest).item(), 9)        # of a right number of 0: inf, or NaN
        says = " ".join((function.__doc__ or "").split())
        shared, wrong_code, right_code = returned(function)
        found.append(Exhibit(name, where, equation, says, shared, wrong_code, right_code, error))
    return found
