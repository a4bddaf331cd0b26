import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cpt.errors import CptError
from cpt.recipe.schema import HeldOut, Recipe
from cpt.recipe.section import Component
from cpt.recipe.sections import all_keys, annotation_at, item_in, section_in
from cpt.reference.recipe_page import EXAMPLES, key_of, keys_below, recipe_page, section_text

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipe.md"


@pytest.fixture(scope="module")
def page():
    return recipe_page()


@pytest.fixture(scope="module")
def headings(page):
    return re.findall(r"^###? `([^`]+)`$", page, re.MULTILINE)


def test_the_page_in_docs_is_the_one_that_the_schema_gives(page):
    assert PAGE.read_text() == page, "python -m cpt.reference"


def heading_of(location):
    """`data.sources[].path`; the keys of held-out sets are a source's, and those of what is chosen by name stand with
    the names."""
    parents = [annotation_at(location[:length]) for length in range(1, len(location))]
    items = [section_in(parent) or section_in(item_in(parent)) for parent in parents]
    chosen_below_the_top = [item for item in items[1:] if item is not None and issubclass(item, Component)]
    if chosen_below_the_top or HeldOut in items:
        return None
    return "".join("[]" if step == 0 else f".{step}" for step in location).removeprefix(".")


def test_every_key_of_the_schema_has_its_heading(headings):
    wanted = {heading for location in all_keys() if (heading := heading_of(location))}
    assert len(wanted) > 90
    assert wanted - set(headings) == set()


def test_no_heading_stands_there_twice(headings):
    anchors = [re.sub(r"[^\w-]", "", heading) for heading in headings]
    assert sorted(anchors) == sorted(set(anchors))


def test_a_key_without_description_is_refused():
    with pytest.raises(CptError, match=r"`data.new_key` has no description. Write a docstring"):
        key_of("data.new_key", FieldInfo(annotation=int, default=3))


def test_a_new_key_shows_its_type_default_and_meaning():
    class Section(BaseModel):
        share: float | None = FieldInfo(default=0.5, gt=0, lt=1, description="How much\nof it.")

    assert list(keys_below("part", Section)) == [
        "### `part.share`\n\nNumber above 0 and below 1, or null; default `0.5`.\n\nHow much of it.\n"
    ]


@pytest.mark.parametrize(
    "line",
    [
        (
            "- `rewarm_cosine`: For a base whose schedule had ended: rise from where it ended to the peak, then half a"
            " cosine down"
        ),
        (
            "  - `start`: number; default `0.0`. The base's last learning rate as a share of this run's peak; 0 begins"
            " at nothing."
        ),
        "- `layer_decay`: number, or null; default `null`. A layer's rate as a share of that of the layer above it.",
        "One of `best_fit`, `concatenate`, `sliding_window`, `none`, `token_budget`; default `best_fit`.",
        "| `kto` | `prompt`, `completion`, `label` | `trl.KTOConfig` |",
        "| `max_steps` | `budget.tokens` (in tokens: steps x tokens of a step) |",
        "Built in: those of [`data.filters`](#datafilters).",
    ],
)
def test_names_options_and_choices_are_there(page, line):
    assert f"\n{line}" in page


@pytest.mark.parametrize("section", EXAMPLES)
def test_an_example_is_that_section_of_a_recipe_that_ships(page, section):
    shown = re.search(
        rf"^In \[{re.escape(EXAMPLES[section])}\]\([^)]*\):\n\n```yaml\n({section}:.*?)\n```$",
        page,
        re.MULTILINE | re.DOTALL,
    )
    assert shown is not None and shown[1].splitlines()[0].startswith(f"{section}:")


def test_a_section_ends_where_the_next_one_begins():
    text = "model: {path: a}\ndata:\n  # why\n  sources:\n\n    - b\nbudget: {tokens: 1}\n"
    assert section_text(text, "data") == "data:\n  # why\n  sources:\n\n    - b"
    assert section_text(text, "model") == "model: {path: a}"
    with pytest.raises(CptError):
        section_text(text, "schedule")


def test_all_sections_of_a_recipe_are_on_the_page(headings):
    assert set(Recipe.model_fields) - set(headings) == set()
