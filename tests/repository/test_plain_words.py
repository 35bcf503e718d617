"""The prose is plain as far as a test can tell.

No test can find a sentence that a reader has to decode. These find a docstring that begins with a
preposition, and words for which the field has a term.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted(path for place in ("*.py", "[a-z]*/*.py", "tests/*/*.py") for path in ROOT.glob(place)
              if path.parent.name not in ("runs", "build"))
TEXTS = sorted(path for place in (".", "interop", "math") for path in ROOT.glob(f"{place}/*.md"))
NO_VERB = ("Of", "With", "Without", "For", "In", "From", "By", "To", "At", "On", "Under", "Between")
# What it is called in the field: processed, reaches, any, stale (weights, rollouts, samples).
RIDDLES = re.compile(
    r"worked off|\b[Ww]hoever\b|\b(?:comes?|came) to (?:\*\*)?[\d+−]|\bsteps? late\b"
    r"|\blate (?:μ|weights|rollouts|samples)\b|\bthe (?:larger|smaller|full) rate\b")


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "name", "the file"), ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_sentence(path):
    wrong = [name for name, text in docstrings(path) if text.split(" ")[0] in NO_VERB]
    assert not wrong, f"begin with a verb or a subject: {wrong}"


@pytest.mark.parametrize("path", [p for p in CODE if p != Path(__file__)] + TEXTS,
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_no_riddles(path):
    found = [(text.count("\n", 0, m.start()) + 1, m[0]) for text in [path.read_text()]
             for m in RIDDLES.finditer(text)]
    assert not found


def test_a_docstring_without_a_verb_is_found(tmp_path):
    (tmp_path / "x.py").write_text('def f():\n    """Of x over all tokens."""\n')
    with pytest.raises(AssertionError, match="begin with a verb"):
        test_docstrings_begin_with_a_sentence(tmp_path / "x.py")
