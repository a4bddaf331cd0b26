"""Types and defaults of the schema and of functions, as a reader of YAML says them."""

import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path", NoneType: "null"}
MANY = {bool: "truth values", int: "whole numbers", float: "numbers", str: "texts"}
BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "from"), (Lt, "lt", "below"), (Le, "le", "to"))


def type_in_words(annotation: Any, bounds: Iterable[Any] = ()) -> str:
    """`whole number above 0, or null` for `Positive | None`.

    Args:
        bounds: what pydantic keeps beside the annotation of a whole field.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        return type_in_words(inner, [*metadata, *bounds])
    if origin in (Union, UnionType):
        parts = [type_in_words(part, bounds if part is not NoneType else ()) for part in get_args(annotation)]
        return ", or ".join(dict.fromkeys(parts))
    if origin is Literal:
        words = ", ".join(f"`{word}`" for word in get_args(annotation))
        return f"one of {words}" if len(get_args(annotation)) > 1 else words
    return simple_in_words(annotation, origin) + bounds_in_words(bounds)


def simple_in_words(annotation: Any, origin: Any) -> str:
    """Of what is neither a choice nor a union."""
    kind = origin or annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return (
            "`{name: ..., its options}`"
            if "name" in kind.model_fields and kind.model_config.get("extra") == "allow"
            else "section"
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(f"`{one.value}`" for one in kind)
    if isinstance(kind, type) and kind not in WORDS and issubclass(kind, Mapping):
        return mapping_in_words(*get_args(annotation))
    if isinstance(kind, type) and kind not in WORDS and issubclass(kind, Iterable):
        inside = next(iter(get_args(annotation)), Any)
        return "list" if inside is Any else f"list of {many_in_words(inside)}"
    return WORDS.get(kind, "any value")


def mapping_in_words(key: Any = Any, value: Any = Any) -> str:
    """`keys and values`, the keys named where the schema knows them."""
    names = ", ".join(f"`{word}`" for word in get_args(key)) if get_origin(key) is Literal else ""
    values = "" if value is Any else f", each a {type_in_words(value)}"
    return f"mapping with the keys {names}" if names else f"mapping of names to values{values}"


def many_in_words(annotation: Any) -> str:
    """What a list holds."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(inner) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(inner))
    return MANY.get(inner) or type_in_words(annotation).replace("section", "sections")


def bounds_in_words(bounds: Iterable[Any]) -> str:
    """` above 0 and below 1`."""
    flat = [one for bound in bounds for one in (bound.metadata if isinstance(bound, FieldInfo) else [bound])]
    found = [
        f"{word} {getattr(bound, attribute):g}"
        if getattr(bound, attribute) < 10**6
        else f"{word} {getattr(bound, attribute):_}"
        for kind, attribute, word in BOUNDS
        for bound in flat
        if isinstance(bound, kind)
    ]
    return f" {' and '.join(found)}".replace(" and to ", " to ") if found else ""


def default_in_words(default: Any) -> str:
    """As it would be written in YAML; a section's own keys tell its defaults."""
    if default is inspect.Parameter.empty:
        return "needed"
    if isinstance(default, BaseModel):
        written = default.model_dump(mode="json", exclude_defaults=True)
        return f"default `{json.dumps(written)}`" if written else "by default as its keys say"
    if isinstance(default, float) and 0 < abs(default) < 1e-3:
        return f"default `{default:.0e}`".replace("e-0", "e-")
    if isinstance(default, int) and abs(default) >= 100_000:
        return f"default `{default:_}`"
    if default == sys.executable:
        return "by default the Python that runs cpt"
    if isinstance(default, str | Path) and str(default):
        return f"default `{default}`"
    return f"default `{json.dumps(list(default) if is_sequence(default) else default, ensure_ascii=False)}`"


def is_sequence(value: Any) -> bool:
    """A tuple or its like, written as a list in YAML."""
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)
