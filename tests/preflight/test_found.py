import pytest
from tiny import write_recipe

from cpt.preflight.found import placed
from cpt.recipe.load import load_with_places


@pytest.mark.parametrize(
    ("message", "line"),
    [("`budget.tokens` is too small.", "tokens:"), ("say model.from_scratch", "from_scratch:"), ("`stage`", "stage:")],
)
def test_a_message_begins_with_the_line_of_the_key_that_it_names(message, line, tiny_recipe, tmp_path):
    file = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    _, root = load_with_places(file, ())
    number = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if line in text)
    assert placed(message, root) == f"{file}:{number}: {message}"
    assert placed("the disk is full", root) == "the disk is full"
