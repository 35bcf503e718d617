"""The prose is plain as far as a test can tell.

No test can find a sentence that a reader has to decode. These find a docstring that begins with a
preposition, and words for which the field has a term.
"""

import ast
import re
import tokenize
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
# Identifiers that meant two things, or had two names (CONTRIBUTING.md, "Names"), and where each
# stays: the setting, peft's method, columns and keys that are formats, a page's own words.
RETIRED = {
    "adapter": (), "add_adapter": ("training/models.py",),
    "card": ("tests/book/",), "cards": (), "Card": (), "Shapes": (), "look_at": (), "looks_at": (),
    "looked": (), "looked_at": ("tests/book/",), "told": ("book/", "tests/"),
    "said": ("book/", "oracle/", "tests/"), "says": ("book/", "tests/"),
    "rollout_log_probs": ("doctor/", "tests/")}


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


def retired(path, name):
    """Return (line, identifier) of what a file, called `name` in the repository, has of RETIRED."""
    with path.open("rb") as file:
        return [(token.start[0], token.string) for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.NAME and token.string in RETIRED
                and not name.startswith(RETIRED[token.string])]


@pytest.mark.parametrize("name", [str(path.relative_to(ROOT)) for path in CODE])
def test_one_thing_has_one_name(name):
    assert not retired(ROOT / name, name)


def test_a_retired_name_is_found_in_code_alone(tmp_path):
    (tmp_path / "x.py").write_text('"""An adapter."""\n\nadapter = rollout.adapter  # said\n')
    assert retired(tmp_path / "x.py", "x.py") == [(3, "adapter"), (3, "adapter")]
    (tmp_path / "y.py").write_text("peft.add_adapter")
    assert retired(tmp_path / "y.py", "training/models.py") == []
