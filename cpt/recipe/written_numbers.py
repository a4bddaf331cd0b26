"""Numbers as people write them in a recipe: 1e9, 500M, 1.5B, 20GB."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

SUFFIXED = re.compile(r"(\d+(?:\.\d+)?) ?(k|K|M|G|B|T|kB|KB|MB|GB|TB)")
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def whole_number(value: object) -> object:
    """1e9 is a whole number too, though Python reads it as a float; and so are 500M, 1.5B (a billion) and 20GB."""
    if isinstance(value, str) and (match := SUFFIXED.fullmatch(value)):
        value = round(float(match[1]) * SUFFIXES[match[2][0].upper()], 3)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, Field(gt=0), BeforeValidator(whole_number)]
Share = Annotated[float, Field(gt=0, lt=1)]
