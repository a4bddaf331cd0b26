"""Numbers as people write them in a recipe: 1e9, 500M, 1.5B, 20GB."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

SUFFIXED = re.compile(r"(\d+(?:\.\d+)?) ?(k|K|M|G|B|T|kB|KB|MB|GB|TB)")
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def whole_number(value: object) -> object:
    """1e9 is a whole number too, though Python reads it as a float; and so are 500M, 1.5B (a billion) and 20GB."""
    if isinstance(value, str) and (match := SUFFIXED.fullmatch(value)):
        value = round(float(match[1]) * SUFFIXES[match[2][0].upper()], 3)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def steps_or_share(value: float) -> float:
    """A number from 1 on counts steps, so it is whole."""
    if value >= 1 and not value.is_integer():
        raise ValueError("expected a whole number of steps, or a share of the run below 1")
    return int(value) if value >= 1 else value


Positive = Annotated[int, Field(gt=0), BeforeValidator(whole_number)]
StepsOrShare = Annotated[float, Field(gt=0), BeforeValidator(whole_number), AfterValidator(steps_or_share)]
Share = Annotated[float, Field(gt=0, lt=1)]
