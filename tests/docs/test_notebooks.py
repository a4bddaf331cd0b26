"""The notebooks of docs/notebooks: they are sound, they were kept as they ran, and they run."""

import ast

import nbformat
import pytest

from benchmarks.notebooks import PAGES, run_notebook

EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def cells(book, kind):
    return [cell for cell in book.cells if cell.cell_type == kind]


@EVERY
def test_a_notebook_is_valid_and_its_code_is_python(page):
    book = nbformat.read(page, as_version=4)
    nbformat.validate(book)
    assert book.cells[0].source.startswith("# ") and len({cell.id for cell in book.cells}) == len(book.cells)
    for cell in cells(book, "code"):
        ast.parse(cell.source)


@EVERY
def test_a_notebook_was_kept_as_it_ran_from_top_to_bottom_without_an_error(page):
    code = cells(nbformat.read(page, as_version=4), "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert page.stat().st_size < 500_000


@pytest.mark.slow
@EVERY
def test_a_notebook_runs(page, tmp_path):
    before = cells(nbformat.read(page, as_version=4), "code")
    ran = cells(run_notebook(page, tmp_path), "code")  # raises where a cell fails
    kinds = [[{output.output_type for output in cell.outputs} for cell in code] for code in (before, ran)]
    assert kinds[0] == kinds[1]  # what is shown is committed: `make notebooks` keeps it
