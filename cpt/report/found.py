"""Look into the content of files that may be incomplete, of another version, or rubbish: what is not of the kind asked
for is not there."""

import math
from collections.abc import Mapping
from typing import Any


def at(content: object, *keys: str) -> object:
    """What stands under these keys, one inside the other; None where the way ends before."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def mapping(content: object, *keys: str) -> dict[str, Any]:
    """A mapping, empty where there is none."""
    found = at(content, *keys)
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def mappings(content: object, *keys: str) -> list[dict[str, Any]]:
    """The mappings of a list."""
    found = at(content, *keys)
    return [mapping(one) for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def text(content: object, *keys: str) -> str:
    """A text, empty where there is none."""
    found = at(content, *keys)
    return found if isinstance(found, str) else ""


def texts(content: object, *keys: str) -> list[str]:
    """The texts of a list."""
    found = at(content, *keys)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def number(content: object, *keys: str) -> float | None:
    """A finite number."""
    found = at(content, *keys)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    try:
        value = float(found)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def numbers(content: object, *keys: str) -> dict[str, float]:
    """The finite numbers of a mapping, by name."""
    return {
        name: value for name, one in mapping(content, *keys).items() if (value := number({"": one}, "")) is not None
    }
