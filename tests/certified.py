"""Mark the tests that carry a statement of the book, and list them; appendix E is that list.

    @certifies("rational")
    def test_x():
        \"""eq:tis: the statement, in one line, with the labels of what it is about.\"""

The statement is the docstring's first paragraph, so the page says no more than the test does.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
LABELS = re.compile(r"((?:eq:[a-z0-9-]+(?:, )?)+): (.*)", re.DOTALL)
ARITHMETICS = {
    "rational": "fractions: equal is equal, with no rounding and no tolerance",
    "sympy": "symbols: it holds for all numbers; the code's function is then evaluated at rational "
             "points and compared in float64 to 1e-12",
    "float64": "a sum over all responses of small policies in float64, compared to 1e-12",
    "Monte Carlo": "samples, with the chance that a right statement fails"}
Test = TypeVar("Test", bound=Callable)


def certifies(arithmetic: str) -> Callable[[Test], Test]:
    """Mark a test with the arithmetic in which it proves its statement; the test is unchanged.

    `arithmetic` begins with one of ARITHMETICS. Monte Carlo is followed by its confidence.
    """
    return lambda test: test


def statements() -> list[tuple[str, list[str], str, str, str]]:
    """Return (statement, labels, arithmetic, file, function) of each marked test, by parsing."""
    found = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "certifies":
                    first = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    labels = LABELS.fullmatch(first)
                    if labels is None:
                        raise ValueError(f"{path.name}::{node.name} is marked, and its docstring "
                                         "does not begin with eq:…: and a statement")
                    found.append((labels[2], labels[1].split(", "), ast.literal_eval(mark.args[0]),
                                  path.name, node.name))
    return found
