"""Make math/notebook.ipynb of book/notebook.py: run every cell, and keep what came out.

    python book/run_notebook.py            # writes math/notebook.ipynb, in five minutes
    python book/run_notebook.py --check    # runs it, and compares; writes nothing

A cell tagged `exact` prints the same on every processor. Training rounds differently elsewhere, so
of the other cells only the presence of their outputs is compared.
"""

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

SOURCE = Path(__file__).with_name("notebook.py")
MADE = SOURCE.parent.parent / "math/notebook.ipynb"


def convert() -> nbformat.NotebookNode:
    """Return the source's cells without outputs, numbered where Jupyter has random names."""
    notebook = jupytext.read(SOURCE)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run all cells in a new kernel; keep what they print and show, neither times nor versions."""
    kernel = notebook.metadata["kernelspec"]
    NotebookClient(notebook, timeout=1800, record_timing=False, coalesce_streams=True,
                   resources={"metadata": {"path": str(MADE.parent)}}).execute()
    notebook.metadata = {"kernelspec": kernel}
    return notebook


def differences(made: nbformat.NotebookNode, committed: nbformat.NotebookNode) -> list[str]:
    """Return a sentence for each cell with another output, or for another source."""
    if [cell.source for cell in made.cells] != [cell.source for cell in committed.cells]:
        return ["math/notebook.ipynb is not made of book/notebook.py: python book/run_notebook.py"]
    found = []
    for new, old in zip(made.cells, committed.cells):
        ours, theirs = new.get("outputs", []), old.get("outputs", [])
        if "exact" not in new.metadata.get("tags", []):
            ours, theirs = ([x.output_type for x in part] for part in (ours, theirs))
        if ours != theirs:
            found.append(f"the cell that begins {new.source.splitlines()[0]!r} has another output")
    return found


if __name__ == "__main__":
    began, notebook = time.perf_counter(), execute(convert())
    found = differences(notebook, nbformat.read(MADE, 4)) if "--check" in sys.argv else []
    if "--check" not in sys.argv:
        nbformat.write(notebook, MADE)
    print(*found, f"{len(notebook.cells)} cells in {time.perf_counter() - began:.0f} s", sep="\n")
    sys.exit(bool(found))
