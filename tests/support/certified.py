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
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
LABEL = r"eq:[a-z0-9]+(?:-[a-z0-9]+)*"
STATED = re.compile(rf"({LABEL}(?:, {LABEL})*): (.*)", re.DOTALL)
DEFINED = re.compile(rf"^\*\*\(({LABEL})\)\*\*$", re.MULTILINE)
# From the strongest; a test's mark begins with one of them.
ARITHMETICS = ("rational", "sympy", "float64", "Monte Carlo")
Test = TypeVar("Test", bound=Callable)


def certifies(arithmetic: str) -> Callable[[Test], Test]:
    """Mark a test with the arithmetic in which it proves its statement; the test is unchanged.

    `arithmetic` is one of ARITHMETICS; after "Monte Carlo: " stands the confidence.
    """
    return lambda test: test


class Statement(NamedTuple):
    """A statement of the book, with the test that proves it."""

    text: str
    labels: list[str]
    arithmetic: str
    file: str
    test: str


def statements() -> list[Statement]:
    """Return the statement of every marked test, read from the files without running them."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                marks = [mark.args[0] for mark in node.decorator_list
                         if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "certifies"]
                first = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                stated = STATED.fullmatch(first)
                if marks and stated is None:
                    raise SystemExit(f"{path.name}::{node.name} is marked, so its docstring must "
                                     "begin with labels and a statement")
                file = str(path.relative_to(ROOT / "tests"))
                found += [Statement(stated[2], stated[1].split(", "), ast.literal_eval(mark),
                                    file, node.name) for mark in marks if stated]
    return found


def defined() -> dict[str, str]:
    """Return label → chapter of every equation, in the book's order."""
    chapters = sorted((ROOT / "math").glob("[0-9]*.md"), key=lambda x: int(x.name.split("-")[0]))
    return {label: path.name for path in chapters for label in DEFINED.findall(path.read_text())}


def table() -> tuple[list[str], list[list[str]]]:
    """Return header and rows of appendix E, in the order of the equations."""
    chapters, order = defined(), {kind: i for i, kind in enumerate(ARITHMETICS)}
    place = {label: i for i, label in enumerate(chapters)}
    rows = sorted(statements(), key=lambda x: (
        place[x.labels[0]], order[x.arithmetic.split(":")[0]], x.file, x.test))
    return ["statement", "equation", "arithmetic", "test"], [
        [row.text, ", ".join(f"[{label}]({chapters[label]})" for label in row.labels),
         row.arithmetic, f"[`{Path(row.file).name}::{row.test}`](../tests/{row.file})"]
        for row in rows]
