"""Run the notebooks of docs/notebooks from top to bottom and keep what they show: `make notebooks`."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
SECONDS_FOR_A_CELL = 600
NOISE = ("stderr",)  # progress bars and warnings of libraries, which differ from machine to machine
PAGES = sorted(FOLDER.glob("*.ipynb"))


def main() -> None:
    """Run all of them, or those that are named: `python -m benchmarks.notebooks training`."""
    wanted = sys.argv[1:] or [page.stem for page in PAGES]
    for name in wanted:
        page = FOLDER / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run_notebook(page, Path(folder)), page)
        print(page)


def run_notebook(page: Path, folder: Path) -> NotebookNode:
    """The notebook with what its cells showed, all of them run by this Python in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message has the cell and its traceback.
    """
    book = nbformat.read(page, as_version=4)
    environment = {name: value for name, value in os.environ.items() if name != "CPT_CACHE"}  # the notebook has its own
    client = NotebookClient(book, timeout=SECONDS_FOR_A_CELL, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = [kept(output) for output in cell.outputs if output.get("name") not in NOISE]
    return book


def kept(output: NotebookNode) -> NotebookNode:
    """Without this machine's paths."""
    if output.output_type == "stream":
        output.text = re.sub(r"/[^\s'\"]*/(?=(lib/python|site-packages))", ".../", output.text)
    return output


if __name__ == "__main__":
    main()
