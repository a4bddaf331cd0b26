"""Every command of the documentation exists, and those that a CPU can run are run: see README.md in this folder."""

from pathlib import Path

import pytest
from documented.blocks import read_blocks
from documented.forks import programs_of_forks
from documented.pages import PREPARED_BY, ROOT, make_folder, pages, preparation_name, preparation_of
from documented.reading import complaints_about
from documented.running import run_blocks

PAGES = {preparation_name(page): page for page in pages()}


def running() -> list:
    """Pages with something to run; those that take their time are not of the default suite."""
    found = []
    for name, page in PAGES.items():
        if "```" in (ROOT / page).read_text():
            suite = preparation_of(page).suite
            found.append(pytest.param(name, marks=[getattr(pytest.mark, suite)] if suite else []))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read(name, tmp_path):
    make_folder(tmp_path / "page")
    assert "\n".join(complaints_about(ROOT / PAGES[name], tmp_path / "page")) == ""


@pytest.fixture(scope="session")
def programs() -> Path | None:
    return programs_of_forks()


@pytest.mark.timeout(1800)  # a page may wait for many programs, on a machine that does other work
@pytest.mark.parametrize("name", running())
def test_a_page_does_what_it_says(name, tmp_path, request):
    preparation = preparation_of(PAGES[name])
    blocks = read_blocks(ROOT / PAGES[name])
    if any(block.is_run for block in blocks):
        make_folder(tmp_path / "page")
        preparation.prepare(tmp_path / "page")
        run_blocks(blocks, tmp_path / "page", preparation.ports, request.getfixturevalue("programs"))


def test_two_pages_share_no_name():
    assert len(PAGES) == len(pages())


def test_what_is_prepared_is_for_a_page():
    assert {file.stem for file in PREPARED_BY.glob("*.py")} <= PAGES.keys()
