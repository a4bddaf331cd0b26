"""An example as a document: its parts as one text, and the parts back from it; also columns as turns, and templates.

Before each part is U+001D (the control character "group separator") with the part's name. A part is a transcript
(`chat.py`), a plain text, or JSON (`tools`, `columns`). A chat without tools is the transcript alone, and a plain text
is itself."""

import datetime
import decimal
import json
import string
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from cpt.data.readers.chat import (
    MARK,
    PART,
    Message,
    as_json,
    messages_of,
    refuse_control,
    shown,
    transcript,
    usual_message,
)
from cpt.data.readers.documents import BadValue
from cpt.data.readers.forms import BESIDE, ELSEWHERE, NAMED, columns_named, form_of_source
from cpt.errors import RecipeError
from cpt.recipe.schema import DocumentSource, Source


@cache
def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once."""
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
    column's always stays."""
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


# --- turns ---


BEFORE = ("system", "history")
"""What `chat` may name besides: it comes before the messages of an example, and a row need not have it."""
SIDES = {"user": "prompt", "assistant": "completion", "chosen": "chosen", "rejected": "rejected"}
"""Columns that are one message each where `chat` names a `user`, and which part of an example they are."""


def with_turns(
    values: dict[str, Any], columns: Mapping[str, str], *, whole: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The parts of an example, those that are turns as lists of messages, and the column of each.

    Args:
        values: what stands in each of `chat`'s columns.
        columns: what `chat` names.
        whole: a question and its answer are one conversation, with the system prompt and earlier turns.
    """
    system = system_turn(values.pop("system", None))
    history = earlier_turns(values.pop("history", None), columns.get("history", ""))
    values = {name: [value] if isinstance(value, dict) else value for name, value in values.items()}  # a message alone
    named = dict(columns)
    if "user" in values:
        values = {
            SIDES.get(name, name): as_turn(name, value) if name in SIDES else value for name, value in values.items()
        }
        named = {SIDES.get(name, name): column for name, column in columns.items()}
    elif (
        "messages" in values and "label" in values and isinstance(values["messages"], list)
    ):  # the last turn is what was judged
        talk = values.pop("messages")
        values |= {"prompt": talk[:-1], "completion": talk[-1:]}
        named |= dict.fromkeys(("prompt", "completion"), columns["messages"])
    is_text = isinstance(values.get("prompt"), str) or "user" in columns
    if is_text and all(holds_prompt(values.get(side)) for side in ("chosen", "rejected")):
        del values["prompt"]  # the conversations say it again
    if whole and "user" in columns and all(isinstance(values[side], list) for side in ("prompt", "completion")):
        values = {"messages": [*values["prompt"], *values["completion"]]}
        named["messages"] = named["prompt"]
    return (with_beginning(values, named, system, history) if system or history else values), named


def with_beginning(
    values: dict[str, Any], named: Mapping[str, str], system: list[Message], history: list[Message]
) -> dict[str, Any]:
    """A system prompt, unless there is one, and earlier turns before the messages of an example."""
    first = next(name for name in ("messages", "prompt", "chosen") if name in values)
    for side in (first, "rejected") if first == "chosen" else (first,):
        talk = values[side]
        if not isinstance(talk, list):
            what = "a system prompt or earlier turns could stand before"
            raise BadValue("texts and messages", f"`{named[side]}` is no list of messages that {what}")
        own = talk[: has_system(talk)]
        values[side] = [*(own or system), *history, *talk[len(own) :]]
    return values


def value_in(row: Mapping[str, object], written: str) -> object:
    """What an entry of `chat` means in a row: a column's value, or the text of a template."""
    return filled_lines(written, row) if "{" in written else row.get(written)


def columns_of_turns(named: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that `chat` means, each once."""
    return tuple(dict.fromkeys(column for written in named.values() for column in columns_in(written)))


def system_turn(text: object) -> list[Message]:
    return [{"role": "system", "content": text}] if isinstance(text, str) and text.strip() else []


def earlier_turns(pairs: object, column: str) -> list[Message]:
    if not pairs:
        return []
    if not isinstance(pairs, list) or not all(is_pair(pair) for pair in pairs):
        raise BadValue("not a chat", f"`{column}` is {shown(pairs)}, expected a list of [question, answer]")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def is_pair(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def as_turn(name: str, value: object) -> object:
    """A text as a message; anything else as it is."""
    return [{"role": "user" if name == "user" else "assistant", "content": value}] if isinstance(value, str) else value


def holds_prompt(talk: object) -> bool:
    """Whether these are messages of which the first is not an answer."""
    first = usual_message(talk[0]) if isinstance(talk, list) and talk else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def has_system(talk: list[object]) -> bool:
    """Whether messages begin with a system prompt of their own, which then counts."""
    first = usual_message(talk[0]) if talk else None
    return isinstance(first, Mapping) and first.get("role") == "system"


# --- example ---


LABELS = {"true": True, "1": True, "false": False, "0": False}
Words = str | list[Message]


class Example(NamedTuple):
    """An example's parts: each is a plain text or a list of messages; those that its form does not have are None."""

    prompt: Words | None = None
    completion: Words | None = None
    chosen: Words | None = None
    rejected: Words | None = None
    messages: Words | None = None
    label: bool = False
    tools: list[dict[str, Any]] | None = None
    columns: dict[str, Any] | None = None


def example_columns(source: DocumentSource, found: Sequence[str]) -> dict[str, str]:
    """What an example of the source is made of, each with its column, among the columns that are there."""
    form, named = form_of_source(source), columns_named(source)
    has_tools = "tools" in named or "tools" in found and form != "document"
    tools = {"tools": named.get("tools", "tools")} if has_tools else {}
    before = {name: named[name] for name in BEFORE if name in named}
    chosen = {name: column for name, column in named.items() if name not in BESIDE}
    if not chosen:
        chosen = usual_columns(form, found, source)
    if "text" in chosen:  # or its template's: read as in any document
        return chosen
    for column in [*(columns_in(written)[0] for written in chosen.values()), *tools.values()]:
        if column not in found:
            raise BadValue("missing column", f"no column `{column}`. It has: {', '.join(map(str, found)) or 'none'}")
    return {**before, **chosen, **tools}


def usual_columns(form: str, found: Sequence[str], source: DocumentSource) -> dict[str, str]:
    """Those with the names that they have in most files; of several kinds of examples, the first that is there."""
    if form == "conversation" and (source.template is not None or source.text_column != "text"):
        return {"text": source.text_column}
    known = [*({name: name for name in names} for names in NAMED[form]), *ELSEWHERE.get(form, ())]
    for columns in sorted(
        known, key=lambda columns: set(columns) == {"chosen", "rejected"}
    ):  # rather with what was asked
        if all(columns_in(written)[0] in found for written in columns.values()):
            return columns
    if form == "conversation" and source.text_column in found:
        return {"text": source.text_column}
    nearest = min(NAMED[form], key=lambda names: len({*names} - {*found}))
    wanted = " and ".join(f"`{name}`" for name in nearest if name not in found)
    say = "{" + ", ".join(f"{name}: COLUMN" for name in NAMED[form][0]) + "}"
    has = ", ".join(map(str, found)) or "none"
    raise BadValue(
        "missing columns",
        f"no column {wanted}, which stages that learn from a {form} read. It has: {has}."
        f" {what_text_is_for(source, found)}Say which they are: `chat: {say}`",
    )


def what_text_is_for(source: DocumentSource, found: Sequence[str]) -> str:
    """Of rows that seem to be plain texts, how a recipe may use them; nothing of others."""
    column = source.text_column
    if column not in found and source.template is None:
        return ""
    if isinstance(source, Source):
        return f"Stages cpt and sft train on plain text (`text_column: {column}`), this one does not. "
    return f"To measure the bits per byte of plain text, write `template: '{{{column}}}'`. "


def example_text(row: Mapping[str, Any], source: DocumentSource, columns: Mapping[str, str]) -> str:
    """The text of the example that a row is."""
    values = {name: unpacked(value_in(row, column)) for name, column in columns.items()}
    tools = values.pop("tools", None)
    parts = {} if not tools else {"tools": as_json(parsed(tools, columns["tools"]), f"`{columns['tools']}`")}
    values, columns = with_turns(values, columns, whole=form_of_source(source) in ("document", "conversation"))
    if "messages" in values:
        talk = transcript(values["messages"], columns["messages"])
        return talk if not parts else joined({**parts, "messages": talk})
    label = {"label": str(label_of(values.pop("label"), columns["label"])).lower()} if "label" in values else {}
    words = {name: words_of(value, columns[name]) for name, value in values.items()}
    if len({text.startswith(MARK) for text in words.values()}) > 1:
        kinds = ", ".join(
            f"`{columns[name]}` is {'messages' if text.startswith(MARK) else 'a text'}" for name, text in words.items()
        )
        raise BadValue("texts and messages", f"{kinds}: all must be texts, or all lists of messages")
    more = {}
    if form_of_source(source) == "prompt":
        others = {
            str(name): plain(value, name)
            for name, value in row.items()
            if name not in ("prompt", *columns_in(columns["prompt"]))
        }
        more["columns"] = as_json(others, "a column")
    return joined({**parts, **words, **label, **more})


def unpacked(value: object) -> object:
    """Messages that are written as JSON in a text, as in csv files; anything else as it is."""
    if (
        not isinstance(value, str)
        or not value.lstrip().startswith("[")
        or not ('"role"' in value or '"from"' in value)
    ):
        return value
    try:
        messages = json.loads(value)
    except ValueError:
        return value
    are_messages = all(isinstance(message, Mapping) and {"role", "from"} & set(message) for message in messages)
    return messages if are_messages else value


def joined(parts: Mapping[str, str]) -> str:
    return "\n".join(f"{PART}{name}\n{text}" for name, text in parts.items())


def words_of(value: object, column: str) -> str:
    if isinstance(value, list):
        return transcript(value, column)
    if not isinstance(value, str):
        what = "no value" if value is None else "wrong value"
        raise BadValue(what, f"`{column}` is {shown(value)}, expected a text or a list of messages")
    refuse_control(value, f"`{column}`")
    return value


def label_of(value: object, column: str) -> bool:
    """Whether a completion is wanted: true or false, 1 or 0, also as texts, as in csv files."""
    label = LABELS.get(str(value).lower()) if isinstance(value, bool | int | str) else None
    if label is None:
        raise BadValue(
            "no value" if value is None else "wrong value", f"`{column}` is {shown(value)}, expected true or false"
        )
    return label


def parsed(tools: object, column: str) -> list[dict[str, Any]]:
    """The tools of a chat: a list of JSON schemas, or the text of one."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as problem:
            raise BadValue(
                "wrong value", f"`{column}` is {shown(tools)}, expected a list of tools: {problem}"
            ) from problem
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadValue("wrong value", f"`{column}` is {shown(tools)}, expected a list of tools, each an object")
    return tools


def plain(value: object, column: str) -> object:
    """A column's value as JSON has it; dates become texts."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    if isinstance(value, list):
        return [plain(item, column) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item, column) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise BadValue(
        "wrong value",
        f"`{column}` is of type {type(value).__name__}, which a reward cannot be given. Leave the column out",
    )


def example_of(text: str) -> Example | None:
    """The example that a text says; None for a text that a transform broke. A text without parts is a chat or a plain
    text."""
    if not text.startswith(PART):
        return Example(messages=messages_of(text) or text)
    parts: dict[str, str] = {}
    for part in text[1:].split(f"\n{PART}"):
        name, _, value = part.partition("\n")
        parts[name] = value
    try:
        tools, columns = (
            json.loads(parts.pop(name), strict=False) if name in parts else None for name in ("tools", "columns")
        )
        label = parts.pop("label", "false") == "true"
        return Example(
            **{name: messages_of(value) or value for name, value in parts.items()},
            label=label,
            tools=tools,
            columns=columns,
        )
    except (ValueError, TypeError):
        return None
