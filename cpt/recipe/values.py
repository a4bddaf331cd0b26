"""Read and write values: as YAML, with units (20M tokens, 16GB), and described for error messages."""

import json
import math
import re
from collections.abc import Collection
from contextlib import suppress
from decimal import Decimal
from functools import partial
from types import NoneType
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from cpt.plugins import IN_WORDS
from cpt.recipe.tree import resolve_scalar


def expected(kinds: Collection[type], got: object) -> str:
    """`expected a whole number, got the text "abc"`, with a remedy if it is obvious."""
    named = set(kinds)
    if float in kinds:
        named.discard(int)  # "a number" includes whole numbers
    if named != {NoneType}:
        named.discard(NoneType)
    names = [name for kind, name in IN_WORDS.items() if kind in named]
    return f"expected {' or '.join(names)}, got {in_words(got)}{remedy_for(got, set(kinds))}"


def remedy_for(got: object, kinds: set[type]) -> str:
    if bool in kinds and str(got).lower() in {"yes", "no", "on", "off", "y", "n", "true", "false"}:
        return ": write true or false"
    if str in kinds and kinds <= {str, NoneType} and isinstance(got, bool | int | float):
        return ": put quotes around it"
    if isinstance(got, str) and kinds & {int, float}:
        with suppress(ValueError):
            if type(resolve_scalar(got)) in (int, float):
                return ": write it without quotes"
    return ""


def in_words(value: object) -> str:
    if isinstance(value, str):
        return f"the text {json.dumps(shortened(value), ensure_ascii=False)}"
    if isinstance(value, dict):
        if value:
            return f"keys and values ({shortened(', '.join(map(str, value)))})"
        return "an empty section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    return in_yaml(value)


def in_yaml(value: object) -> str:
    """Format a value as one line of YAML, with 1e-5 instead of 1e-05."""
    if isinstance(value, float) and math.isfinite(value):
        mantissa, e, exponent = repr(value).partition("e")
        if e:
            return f"{mantissa}e{int(exponent)}"
        return mantissa
    if isinstance(value, float):
        if math.isnan(value):
            return ".nan"
        if value > 0:
            return ".inf"
        return "-.inf"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {in_yaml(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(in_yaml(child) for child in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def shortened(text: str) -> str:
    if len(text) <= 60:
        return text
    return text[:57] + "..."


WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?) ?([a-zA-Z]+)")
THOUSANDS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SIZES = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS: dict[str, dict[str, int]] = {"tokens": THOUSANDS, "bytes": SIZES}
"""`unit` in a field's JSON schema -> allowed suffixes of the number."""
LONGEST_ROW = 2**24


def whole_number(value: object) -> object:
    """Accept 1e9, which Python reads as a float."""
    if isinstance(value, str) and WITH_UNIT.fullmatch(value):
        raise ValueError("expected a whole number without a unit")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def in_units(value: object, units: dict[str, int], expected: str) -> object:
    match = WITH_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return whole_number(value)
    number = Decimal(match[1]) * units.get(match[2], 0)
    if number == 0 or number != int(number):
        raise ValueError(f"expected {expected}")
    return int(number)


def steps_or_share(value: float) -> float:
    """A number of 1 or more counts steps, so it must be whole."""
    if value >= 1 and not value.is_integer():
        raise ValueError("expected a whole number of steps, or a share of the run below 1")
    if value >= 1:
        return int(value)
    return value


Positive = Annotated[int, Field(gt=0), BeforeValidator(whole_number)]
StepsOrShare = Annotated[
    float, Field(gt=0, le=1e12), BeforeValidator(whole_number), AfterValidator(steps_or_share)
]
IN_TOKENS = BeforeValidator(
    partial(in_units, units=THOUSANDS, expected="a number of tokens such as 20M or 1.5B")
)
IN_BYTES = BeforeValidator(partial(in_units, units=SIZES, expected="a size such as 20GB or 16GiB"))
Tokens = Annotated[int, Field(gt=0, le=10**16, json_schema_extra={"unit": "tokens"}), IN_TOKENS]
Bytes = Annotated[int, Field(gt=0, le=2**60, json_schema_extra={"unit": "bytes"}), IN_BYTES]
Length = Annotated[int, Field(gt=0, le=LONGEST_ROW), BeforeValidator(whole_number)]
Share = Annotated[float, Field(gt=0, lt=1)]
Weight = Annotated[float, Field(ge=0, le=1e15)]
Times = Annotated[float, Field(gt=0, le=1e6)]
LearningRate = Annotated[float, Field(gt=0, le=1)]

OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {
        "weight_decay": Annotated[float, Field(ge=0, le=10)],
        "momentum": Annotated[float, Field(ge=0, lt=1)],
        "betas": list[Annotated[float, Field(ge=0, lt=1)]],
        "eps": Annotated[float, Field(gt=0, le=1)],
    },
    "schedule": {
        "warmup_share": Annotated[float, Field(ge=0, lt=1)],
        **dict.fromkeys(("floor", "start", "constant"), Annotated[float, Field(ge=0, le=1)]),
    },
    "keep": dict.fromkeys(("last", "every"), Positive),
    "loss_guard": {
        "sigmas": Annotated[float, Field(gt=0, le=1000)],
        "window": Annotated[int, Field(ge=5), BeforeValidator(whole_number)],
        **dict.fromkeys(
            ("skips", "rollbacks"), Annotated[int, Field(ge=0), BeforeValidator(whole_number)]
        ),
    },
}
"""Section -> bounds of the options of its built-in components, which the schema does not list."""
OF_ANY_FUNCTION: dict[str, Any] = {
    "_tokens": Annotated[int, Field(ge=0), IN_TOKENS],
    "_bytes": Annotated[int, Field(ge=0), IN_BYTES],
    "embedding_learning_rate": LearningRate,
}
"""Ending of an option's name -> kind of its value."""


TAGS = {type(None): "null", bool: "bool", int: "int", float: "float"}


def write_yaml(values: Any) -> str:
    return yaml.dump(values, Dumper=Writer, sort_keys=False, allow_unicode=True, width=120)


class Writer(yaml.SafeDumper):
    """Quotes text that other readers (YAML 1.1: `no`) or this one (`1e-4`) would read as another type; writes no
    anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)
        if kind is yaml.ScalarNode and implicit[0] and tag == self.DEFAULT_SCALAR_TAG:
            try:
                return f"tag:yaml.org,2002:{TAGS.get(type(resolve_scalar(value)), 'str')}"
            except ValueError:
                return "tag:yaml.org,2002:int"
        return tag


Writer.add_representer(
    float, lambda writer, value: writer.represent_scalar("tag:yaml.org,2002:float", in_yaml(value))
)
