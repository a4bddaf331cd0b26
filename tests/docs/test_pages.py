"""The commands and recipes of the documentation are right; the commands of the tutorials run."""

import pytest
from documented import PAGES, TUTORIALS, blocks_of, complaints, run_page
from prepared import prepare


def slow_or_long(page):
    is_long = page.stem == "four_a100" or page.parent.name == "howto"
    return pytest.param(page, marks=pytest.mark.long if is_long else pytest.mark.slow, id=str(page))


@pytest.mark.heavy
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=str)
def test_the_commands_and_recipes_of_a_page_are_right(page, tmp_path, monkeypatch):
    prepare(page.with_stem("no_page"), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "\n".join(complaints(page, tmp_path)) == ""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [slow_or_long(page) for page in TUTORIALS if any(block.is_run for block in blocks_of(page))]
)
def test_the_commands_of_a_tutorial_run(page, tmp_path):
    prepare(page, tmp_path)
    run_page(page, tmp_path)
