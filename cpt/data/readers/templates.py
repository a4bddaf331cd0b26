"""Texts made of several columns: `"{title}\n\n{body}"`."""

import string
from collections.abc import Mapping
from functools import cache

from cpt.data.documents import BadValue
from cpt.data.examples.chat import shown
from cpt.errors import RecipeError


@cache
def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once.

    Raises:
        RecipeError: it is no template of plain columns.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as problem:
        raise RecipeError(
            f"the template {template!r} is none ({problem}). Write a column as {{title}}, a brace as {{{{."
        ) from problem
    names = [name for _, name, _, _ in parts if name is not None]
    odd = [name for name in names if not name or set(name) & set(".[]") or name.isdigit()]
    if odd or not names or any(form or conversion for _, _, form, conversion in parts):
        raise RecipeError(f"the template {template!r} must name columns, as in {{title}}, and nothing else in braces.")
    return tuple(dict.fromkeys(names))


def columns_in(written: str) -> tuple[str, ...]:
    """The columns that an entry of `chat` means: its only one, or those of a template."""
    return template_columns(written) if "{" in written else (written,)


def filled_lines(template: str, row: Mapping[str, object]) -> str:
    """A template filled in, without paragraphs and lines whose columns are all empty, null or not there; the first
    column's always stays.

    Raises:
        BadValue: a column holds neither a text nor a number, or the first one is not there.
    """
    columns = template_columns(template)
    if columns[0] not in row:
        raise BadValue("missing column", f"no column `{columns[0]}`. It has: {', '.join(map(str, row)) or 'none'}")
    values = {name: text_in(row.get(name), name) for name in columns}
    paragraphs = [part.split("\n") for part in template.split("\n\n") if has_something(part, values, columns[0])]
    lines = [[line for line in part if has_something(line, values, columns[0])] for part in paragraphs]
    return "\n\n".join("\n".join(part) for part in lines).format(**values)


def has_something(part: str, values: Mapping[str, str], first: str) -> bool:
    """Whether a part of a template names no column, the first one, or one with something in it."""
    names = {name for _, name, _, _ in string.Formatter().parse(part) if name is not None}
    return not names or first in names or any(values[name] for name in names)


def text_in(value: object, column: str) -> str:
    """A text, or a number as one; nothing for null."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue("wrong type", f"`{column}` is {shown(value)}, expected a text or a number")
    return str(value)
