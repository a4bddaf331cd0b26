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
OF_THIS_MACHINE = re.compile(
    r"  \d[\w .]* to go|  [\d,]+ tokens/s|  host [\d.]+ GiB"
)  # in the lines of a run
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
    environment = {
        name: value for name, value in os.environ.items() if name != "CPT_CACHE"
    }  # the notebook has its own
    client = NotebookClient(
        book,
        timeout=SECONDS_FOR_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = joined(
                [kept(output) for output in cell.outputs if output.get("name") not in NOISE]
            )
    return book


def kept(output: NotebookNode) -> NotebookNode:
    """Without this machine's paths and speed; what rich prints, and shows notebooks as HTML, as the text that it
    is."""
    if output.output_type == "display_data" and set(output.data) == {"text/html", "text/plain"}:
        output = nbformat.v4.new_output("stream", name="stdout", text=output.data["text/plain"])
    if output.output_type == "stream":
        output.text = re.sub(r"/[^\s'\"]*/(?=(lib/python|site-packages))", ".../", output.text)
        output.text = OF_THIS_MACHINE.sub("", output.text)
    return output


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """What was printed bit by bit as one text."""
    whole: list[NotebookNode] = []
    for output in outputs:
        if whole and whole[-1].output_type == output.output_type == "stream":
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


if __name__ == "__main__":
    main()
