"""Numbers as people write them in a recipe, each with the units that it may have: 20M tokens, 16GB, 4096."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?) ?([a-zA-Z]+)")
THOUSANDS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SIZES = {
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
UNITS: dict[str, dict[str, int]] = {"tokens": THOUSANDS, "bytes": SIZES}
"""`unit` in a field's JSON schema -> what may follow the number."""
LONGEST_ROW = 2**24


def whole_number(value: object) -> object:
    """1e9 is a whole number too, though Python reads it as a float."""
    if isinstance(value, str) and WITH_UNIT.fullmatch(value):
        raise ValueError("expected a whole number without a unit")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number_of_tokens(value: object) -> object:
    """500M, and 1.5B for a billion and a half."""
    return in_units(value, THOUSANDS, "a number of tokens such as 20M or 1.5B")


def number_of_bytes(value: object) -> object:
    """20GB, in powers of ten as disks are sold, or 16GiB, in powers of two."""
    return in_units(value, SIZES, "a size such as 20GB or 16GiB")


def in_units(value: object, units: dict[str, int], expected: str) -> object:
    """The number that a text with a unit means.

    Raises:
        ValueError: the unit is another, or the number is not whole.
    """
    if isinstance(value, str) and (match := WITH_UNIT.fullmatch(value)):
        number = Decimal(match[1]) * units.get(match[2], 0)
        if number == 0 or number != int(number):
            raise ValueError(f"expected {expected}")
        return int(number)
    return whole_number(value)


def steps_or_share(value: float) -> float:
    """A number from 1 on counts steps, so it is whole."""
    if value >= 1 and not value.is_integer():
        raise ValueError("expected a whole number of steps, or a share of the run below 1")
    return int(value) if value >= 1 else value


Positive = Annotated[int, Field(gt=0), BeforeValidator(whole_number)]
StepsOrShare = Annotated[float, Field(gt=0, le=1e12), BeforeValidator(whole_number), AfterValidator(steps_or_share)]
Tokens = Annotated[
    int, Field(gt=0, le=10**16, json_schema_extra={"unit": "tokens"}), BeforeValidator(number_of_tokens)
]
Bytes = Annotated[int, Field(gt=0, le=2**60, json_schema_extra={"unit": "bytes"}), BeforeValidator(number_of_bytes)]
Length = Annotated[int, Field(gt=0, le=LONGEST_ROW), BeforeValidator(whole_number)]
Share = Annotated[float, Field(gt=0, lt=1)]
Weight = Annotated[float, Field(ge=0, le=1e15)]
Times = Annotated[float, Field(gt=0, le=1e6)]
LearningRate = Annotated[float, Field(gt=0, le=1)]

OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {
        "embedding_learning_rate": LearningRate,
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
        **dict.fromkeys(("skips", "rollbacks"), Annotated[int, Field(ge=0), BeforeValidator(whole_number)]),
    },
}
"""Section -> bounds of the options that its built-ins take; the schema does not list them."""
OF_ANY_FUNCTION: dict[str, Any] = {
    "_tokens": Annotated[int, Field(ge=0), BeforeValidator(number_of_tokens)],
    "_bytes": Annotated[int, Field(ge=0), BeforeValidator(number_of_bytes)],
}
"""Ending of an option's name -> what it holds."""
