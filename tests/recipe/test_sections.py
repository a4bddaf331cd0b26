"""What the schema says of a location."""

from typing import Annotated, Any

import pytest

from cpt.recipe.schema import Data, Model, Recipe, Source
from cpt.recipe.sections import (
    all_keys,
    annotation_at,
    child_annotation,
    is_free_mapping,
    item_in,
    keys_of,
    section_in,
    without_none,
)


def test_keys_are_those_that_users_write():
    assert "import" in keys_of(Model) and "import_" not in keys_of(Model)


@pytest.mark.parametrize("annotation", [int, int | None, Annotated[int, 1], Annotated[int, 1] | None])
def test_none_and_annotations_are_taken_off(annotation):
    assert without_none(annotation) is int


def test_sections_lists_and_free_mappings_are_told_apart():
    assert section_in(Model | None) is Model and section_in(dict[str, Any]) is None
    assert item_in(list[Source] | None) is Source and item_in(Source) is None
    assert is_free_mapping(dict[str, Any] | None) and not is_free_mapping(Model)


def test_a_location_leads_to_its_annotation():
    assert section_in(annotation_at(("data", "sources", 3))) is Source
    assert annotation_at(("training", "bf16")) is None
    assert annotation_at(("model", "hashes", "model.safetensors")) is str
    assert child_annotation(Data, "nothing") is None


def test_every_key_is_found_with_its_way():
    keys = set(all_keys())
    assert {
        ("seed",),
        ("data", "sources", 0, "weight"),
        ("evaluation", "perplexity", 0, "path"),
        ("model", "import"),
    } <= keys
    assert {key for key in keys if len(key) == 1} == {(name,) for name in Recipe.model_fields}
