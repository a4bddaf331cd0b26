"""What is generated for the site is current, the site builds, and its notebooks run."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from benchmarks.notebooks import PAGES, run_notebook
from docs.make_reference import FOLDER, pages

ROOT = Path(__file__).parents[2]


def test_the_reference_is_current():
    changed = [name for name, text in pages().items() if (FOLDER / name).read_text() != text]
    assert changed == [], "run `python -m docs.make_reference`"


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path):
    options = [
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-b",
        "dummy",
        "-d",
        tmp_path / "doctrees",
    ]
    words = [sys.executable, "-m", "sphinx", "-c", "docs", *options, ".", tmp_path / "site"]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def kinds_of_outputs(book):
    return [
        {output.output_type for output in cell.outputs}
        for cell in book.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_and_shows_what_is_committed(page, tmp_path):
    ran = run_notebook(page, tmp_path)  # raises where a cell fails
    assert kinds_of_outputs(ran) == kinds_of_outputs(nbformat.read(page, as_version=4)), (
        "run `make notebooks`"
    )
