"""The book in math/: it runs, its labels lead both ways, its links exist, its tables are what the code computes.

Reported by pytest for the book as a whole; a chapter alone: `python -m doctest math/7-kl.md`.
"""

import ast
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "math").glob("*.md"))
CORE = [ROOT / f"{name}.py" for name in ("estimators", "correction", "losses")]
LABEL = re.compile(r"eq:[a-z0-9]+(?:-[a-z0-9]+)*")
DEFINITION = re.compile(rf"^\*\*\(({LABEL.pattern})\)\*\*$", re.MULTILINE)


def defined():
    return [label for chapter in CHAPTERS for label in DEFINITION.findall(chapter.read_text())]


def cited(path):
    return set(LABEL.findall(path.read_text()))


def public_docstrings(path):
    """name → docstring of every public function and class at the top of a module."""
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }


def without_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_runs(chapter, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    failed, attempted = doctest.testfile(str(chapter), module_relative=False, encoding="utf-8")
    assert attempted > 0 and not failed, f"{failed} of {attempted} examples failed; see above"


def test_no_label_is_defined_twice_and_each_belongs_to_a_formula():
    labels = defined()
    assert sorted(labels) == sorted(set(labels))
    for chapter in CHAPTERS:
        text = chapter.read_text()
        formulas = re.findall(
            r"```math\n.*?\n```\n\*\*\((eq:[a-z0-9-]+)\)\*\*$", text, re.DOTALL | re.MULTILINE
        )
        assert formulas == DEFINITION.findall(text), (
            f"{chapter.name}: a label without a formula just above it"
        )


def test_every_public_function_cites_an_equation_that_exists():
    missing = [
        f"{path.name}: {name}"
        for path in CORE
        for name, text in public_docstrings(path).items()
        if not LABEL.findall(text)
    ]
    assert not missing, "without a label: " + ", ".join(missing)


def test_every_label_cited_anywhere_exists():
    places = [*CORE, ROOT / "trainer.py", ROOT / "README.md", *CHAPTERS, *(ROOT / "tests").glob("*.py")]
    unknown = {
        f"{path.name}: {label}"
        for path in places
        if path.exists() and path != Path(__file__).resolve()
        for label in cited(path) - set(defined())
    }
    assert not unknown, f"cited but not defined: {sorted(unknown)}"


def test_every_equation_is_cited_by_the_core_and_by_a_test():
    in_core = set().union(
        *(LABEL.findall(text) for path in CORE for text in public_docstrings(path).values())
    )
    in_tests = set().union(
        *(cited(path) for path in (ROOT / "tests").glob("test_*.py") if path.name != "test_math.py")
    )
    assert not set(defined()) - in_core, f"in no core docstring: {sorted(set(defined()) - in_core)}"
    assert not set(defined()) - in_tests, f"in no test: {sorted(set(defined()) - in_tests)}"


@pytest.mark.parametrize("document", [*CHAPTERS, *ROOT.glob("*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere_and_not_to_line_numbers(document):
    text = document.read_text()
    assert not re.search(r"#L\d+", text), "a link to a line number goes stale with the next commit"
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(text)):
        if not re.match(r"https?:|mailto:|#", target):
            assert (document.parent / target.split("#")[0]).exists(), f"{target} does not exist"


def test_chapters_are_complete_and_lead_from_one_to_the_next():
    assert [int(chapter.name.split("-")[0]) for chapter in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))
    for chapter, following in zip(CHAPTERS, CHAPTERS[1:], strict=False):
        assert f"]({following.name})" in chapter.read_text(), (
            f"{chapter.name} does not lead to {following.name}"
        )
    assert not (ROOT / "math" / "__init__.py").exists(), "a package named math would shadow Python's own"


def test_generated_tables_are_up_to_date():
    """`python math/tables.py` would change nothing; every figure in them is computed again here."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "math" / "tables.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, f"run `python math/tables.py`\n{found.stdout}{found.stderr}"


def test_every_figure_is_shown_and_small():
    documents = [*CHAPTERS, *ROOT.glob("*.md")]
    shown = {name for path in documents for name in re.findall(r"figures/([\w.-]+)\)", path.read_text())}
    figures = {path.name: path.stat().st_size for path in (ROOT / "math" / "figures").iterdir()}
    assert set(figures) <= shown and max(figures.values()) < 100_000
