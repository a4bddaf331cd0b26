"""The schema's own promises: nothing is bent into shape, nothing changes, and it stays small."""

from types import NoneType, UnionType
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from cpt.recipe.keys import all_keys, annotation_at, item_in, section_in
from cpt.recipe.schema import Budget
from cpt.recipe.tree import dotted


@pytest.mark.parametrize(
    "values", [{"tokens": "3"}, {"tokens": True}, {"tokens": 1.5}, {"epochs": "1"}, {"tokens": 0}, {"nothing": 1}]
)
def test_values_are_not_bent_into_shape(values):
    with pytest.raises(ValidationError):
        Budget(**values)


def test_there_are_at_most_110_keys_of_our_own():
    """Each counted where it is declared: held-out sets are written with the keys of sources."""
    sections = {
        section_in(annotation_at(way[:-1])) or section_in(item_in(annotation_at(way[:-1]))) for way in all_keys()
    }
    bases = {base for section in sections for base in section.__mro__ if issubclass(base, BaseModel)}
    assert sum(name in base.__dict__.get("__annotations__", {}) for base in bases for name in base.model_fields) <= 110


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        *(("keep: 0", "checkpoints.keep"), ("keep: -1", "checkpoints.keep")),
        *(("keep: {last: 0}", "checkpoints.keep.last"), ("keep: {name: 3}", "checkpoints.keep.name")),
    ],
)
def test_a_wrong_value_of_a_key_of_several_types_has_one_message(mistakes, entry, key):
    (line,) = mistakes(f"checkpoints:\n  {entry}\n  every_steps: 1\n")
    assert line.startswith(f"r.yaml:6: `{key}`: ")


def takes_several_types(annotation: object) -> bool:
    return isinstance(annotation, UnionType) and len({*get_args(annotation)} - {NoneType}) > 1


@pytest.mark.parametrize("key", [key for key in all_keys() if takes_several_types(annotation_at(key))], ids=dotted)
@pytest.mark.parametrize("value", ["3.5", "[]"])
def test_no_key_of_several_types_shows_pydantics_names(mistakes, key, value):
    added = ["evaluation.perplexity=[{path: x}]"] if key[0] == "evaluation" else []
    lines = mistakes("", *added, f"{dotted(key)}={value}")
    assert all(f"`{dotted(key)}`: " in line for line in lines)
