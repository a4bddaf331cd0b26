"""docs/reference is generated, and it is current."""

import pytest

from docs.make_reference import FOLDER, pages


@pytest.fixture(scope="module")
def written():
    return pages()


@pytest.mark.parametrize("name", ["recipe.md", "commands.md"])
def test_the_reference_is_current(written, name):
    assert (FOLDER / name).read_text() == written[name], "run `python -m docs.make_reference`"


def test_each_key_has_its_type_default_and_meaning(written):
    keys = [part.split("\n\n") for part in written["recipe.md"].split("\n### ")[1:]]
    assert len(keys) > 80 and all(len(told.partition(". ")[2]) > 5 for _, told, *_ in keys)
    assert (
        "### `data.disk_bytes`\n\ninteger > 0 (bytes) or null, default `null`, change `from_step`. "
        in written["recipe.md"]
    )


def test_a_builtin_shows_its_options(written):
    assert "  - `eps`: float, default `1e-08`." in written["recipe.md"]
