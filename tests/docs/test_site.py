"""What is generated for the site is current, the site builds, and its notebooks run."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from benchmarks.notebooks import PAGES, run_notebook
from cpt.cli import COMMANDS
from cpt.recipe.keys import all_keys
from cpt.recipe.tree import dotted
from docs.make_reference import pages

ROOT = Path(__file__).parents[2]


def test_the_reference_has_every_key_and_every_command():
    reference = pages()
    headings = [
        line.strip("# `") for line in reference["recipe.md"].splitlines() if line[:1] == "#"
    ]
    keys = {dotted(key).replace("[0]", "[]") for key in all_keys()}
    assert len(headings) == len({*headings})
    missing = keys - {*headings}
    # what a section with a name takes is listed under its key
    assert all(key.endswith(".name") for key in missing), missing
    for name in COMMANDS:
        assert f"`cpt {name}" in reference["commands.md"], name


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
