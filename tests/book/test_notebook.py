"""math/notebook.ipynb is book/notebook.py, executed; it fits on slides; its exact cells repeat.

Nothing is trained here: CI runs the whole notebook with `python book/run_notebook.py --check`.
"""

import contextlib
import copy
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("notebook_required")

ROOT = Path(__file__).resolve().parents[2]
LINES, COLUMNS = {"markdown": 8, "code": 15}, 90           # what fits on a slide


@pytest.fixture(scope="module")
def source():
    from three_policies.book.run_notebook import convert
    return convert()


@pytest.fixture(scope="module")
def committed():
    import nbformat
    return nbformat.read(ROOT / "math" / "notebook.ipynb", as_version=4)


def exact(notebook, kind):
    """Return the cells of a kind that are tagged exact."""
    return [cell for cell in notebook.cells
            if cell.cell_type == kind and "exact" in cell.metadata.get("tags", [])]


def printed(cell):
    return "".join(output.text for output in cell.outputs)


def test_the_notebook_is_its_source(source, committed):
    made, kept = ([(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]
                  for notebook in (source, committed))
    assert made == kept, "made of another source: python book/run_notebook.py"


def test_every_cell_fits_on_a_slide(source):
    for cell in source.cells:
        lines = cell.source.splitlines()
        filled = [line for line in lines if line]
        assert len(filled) <= LINES[cell.cell_type], f"{len(filled)} lines: {lines[0]}"
        assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)


def test_it_ran_whole_and_says_nothing_of_the_machine(committed):
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert set(committed.metadata) == {"kernelspec"}
    text = (ROOT / "math" / "notebook.ipynb").read_text()
    assert len(text) < 300_000
    assert not re.search(r'"[^"]*(?:/home/|/tmp/|/root/|/work/|site-packages)', text)


def test_exact_numbers_of_the_prose_were_printed(committed):
    shown = set(re.findall(r"\d+\.\d+", "".join(map(printed, exact(committed, "code")))))
    stated = re.findall(r"\d+\.\d+", "\n".join(c.source for c in exact(committed, "markdown")))
    assert len(stated) > 5 and set(stated) <= shown


def test_exact_cells_repeat(source, committed, tmp_path, monkeypatch):
    """Alone, in order, and in this process they print what the committed notebook has."""
    monkeypatch.chdir(ROOT / "math")
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names = {}
    for cell, old in zip(exact(source, "code"), exact(committed, "code"), strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(cell.source, cell.id, "exec"), names)
        assert said.getvalue() == printed(old), cell.source.splitlines()[0]


def test_a_difference_is_named(source, committed):
    """An exact cell's text counts, of another cell the presence of an output, and every source."""
    from three_policies.book.run_notebook import differences
    assert differences(committed, committed) == []
    fewer = copy.deepcopy(source)
    fewer.cells.pop()
    assert "is not made of" in differences(fewer, committed)[0]
    for tagged, text, count in ((True, "!", 1), (False, "!", 0), (False, None, 1)):
        other = copy.deepcopy(committed)
        cell = next(cell for cell in other.cells if cell.cell_type == "code" and cell.outputs
                    and ("exact" in cell.metadata.get("tags", [])) == tagged)
        if text is None:
            cell.outputs.clear()
        else:
            cell.outputs[0].text += text
        found = differences(other, committed)
        assert len(found) == count
        assert all(repr(cell.source.splitlines()[0]) in sentence for sentence in found)
