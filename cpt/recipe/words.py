"""Values and types in plain words: expected a whole number, got the text "abc"."""

import json
import math
from collections.abc import Iterable
from types import NoneType

from cpt.plugins import IN_WORDS
from cpt.recipe.yaml_lines import resolve_scalar

KINDS = {"null" if kind is NoneType else kind.__name__: words for kind, words in IN_WORDS.items()}


def kind_of(value: object) -> str:
    """One of KINDS, for a value as YAML gives it."""
    return "null" if value is None else type(value).__name__


def fits(value: object, kinds: Iterable[str]) -> bool:
    """True where a value is of one of these kinds, with no bending but 1e9 for a whole number and 1 for a number."""
    kind = kind_of(value)
    if kind == "float" and "int" in kinds and float(str(value)).is_integer():
        return True
    return kind in kinds or (kind == "int" and "float" in kinds)


def expected(kinds: Iterable[str], got: object) -> str:
    """`expected a whole number, got the text "abc"`, with what to write instead where that is plain."""
    wanted = [kind for kind in KINDS if kind in set(kinds)]
    if "int" in wanted and "float" in wanted:
        wanted.remove("int")
    shown = [KINDS[kind] for kind in wanted if kind != "null" or len(wanted) == 1]
    return f"expected {' or '.join(shown)}, got {in_words(got)}{remedy(wanted, got)}"


def remedy(wanted: list[str], got: object) -> str:
    """What to write instead, where it is plain."""
    if (
        "bool" in wanted
        and isinstance(got, str)
        and got.lower() in {"yes", "no", "on", "off", "y", "n", "true", "false"}
    ):
        return ": write true or false"
    if "str" in wanted and set(wanted) <= {"str", "null"} and isinstance(got, bool | int | float):
        return ": put quotes around it"
    if isinstance(got, str) and {"int", "float"} & set(wanted) and is_number(got):
        return ": write it without quotes"
    return ""


def is_number(text: str) -> bool:
    """True for what would be a number without its quotes."""
    try:
        value = resolve_scalar(text)
    except ValueError:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_words(value: object) -> str:
    """A value as a message shows it."""
    if isinstance(value, str):
        return f"the text {json.dumps(shortened(value), ensure_ascii=False)}"
    if isinstance(value, dict):
        return f"keys and values ({shortened(', '.join(map(str, value)))})" if value else "an empty section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "nothing" if value is None else in_yaml(value)


def in_yaml(value: object) -> str:
    """A value in one line, as YAML would have it: 1e-5 and not 1e-05."""
    if isinstance(value, float) and math.isfinite(value):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}e{int(exponent)}" if e else mantissa
    if isinstance(value, float):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {in_yaml(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(in_yaml(child) for child in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def shortened(text: str) -> str:
    """The first part of a long text."""
    return text if len(text) <= 60 else text[:57] + "..."
