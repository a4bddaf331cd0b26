import inspect
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from cpt.recipe.schema import Checkpoints, LossGuard, Optimizer
from cpt.recipe.written_numbers import Positive, Share
from cpt.reference.types_in_words import default_in_words, type_in_words


class Kind(Enum):
    ONE = "one"
    TWO = "two"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (str, "text"),
        (bool | None, "true or false, or null"),
        (Positive | None, "whole number above 0, or null"),
        (Share, "number above 0 and below 1"),
        (Annotated[float, Field(ge=0, le=1)], "number from 0 to 1"),
        (Literal["wrap", "stop"], "one of `wrap`, `stop`"),
        (Literal["new_rows"] | None, "`new_rows`, or null"),
        (Kind, "one of `one`, `two`"),
        (list[str], "list of texts"),
        (Sequence[Literal["email", "card"]], "list of `email`, `card`"),
        (list[Optimizer], "list of `{name: ..., its options}`"),
        (list[Checkpoints], "list of sections"),
        (dict[str, Any], "mapping of names to values"),
        (Mapping[Literal["rate", "seed"], float], "mapping with the keys `rate`, `seed`"),
        (dict[str, Annotated[float, Field(ge=0)]], "mapping of names to values, each a number from 0"),
        (Any, "any value"),
    ],
)
def test_a_type_is_said_as_yaml_is_written(annotation, words):
    assert type_in_words(annotation) == words


@pytest.mark.parametrize(
    ("default", "words"),
    [
        (inspect.Parameter.empty, "needed"),
        (None, "default `null`"),
        (True, "default `true`"),
        (3, "default `3`"),
        (29500, "default `29500`"),
        (sys.executable, "by default the Python that runs cpt"),
        (268_435_456, "default `268_435_456`"),
        (1e-8, "default `1e-8`"),
        (0.1, "default `0.1`"),
        ("", 'default `""`'),
        ("auto", "default `auto`"),
        (Path("runs"), "default `runs`"),
        ((0.9, 0.95), "default `[0.9, 0.95]`"),
        (LossGuard(), "by default as its keys say"),
        (LossGuard.model_validate({"name": "robust", "sigmas": 5}), 'default `{"sigmas": 5}`'),
    ],
)
def test_a_default_is_said_as_yaml_is_written(default, words):
    assert default_in_words(default) == words
