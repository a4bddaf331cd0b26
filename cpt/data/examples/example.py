"""An example as a document: all of its parts as one text, and the parts back from it.

Before each part stands U+001D (the control character "group separator") with the part's name; a part is a transcript
(`chat.py`), a plain text, or JSON (`tools`, `columns`). A chat without tools is the transcript alone, and a plain text
is itself.
"""

import datetime
import decimal
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cpt.data.documents import BadValue
from cpt.data.examples.chat import MARK, PART, Message, as_json, messages_of, refuse_control, shown, transcript
from cpt.data.examples.turns import BEFORE, value_in, with_turns
from cpt.data.forms import BESIDE, ELSEWHERE, NAMED, columns_named, form_of_source
from cpt.data.readers.templates import columns_in
from cpt.recipe.schema import DocumentSource, Source

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
    """What an example of the source is made of, each with its column, among the columns that are there.

    Raises:
        BadValue: they are not there.
    """
    form, named = form_of_source(source), columns_named(source)
    tools = (
        {"tools": named.get("tools", "tools")} if "tools" in named or "tools" in found and form != "document" else {}
    )
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
        return (
            f"Plain text (`text_column: {column}`) is learned from in stage cpt, and beside conversations in sft; not"
            " here. "
        )
    return f"To measure the bits per byte of plain text, write `template: '{{{column}}}'`. "


def example_text(row: Mapping[str, Any], source: DocumentSource, columns: Mapping[str, str]) -> str:
    """The text of the example that a row is.

    Args:
        columns: what it is made of, each with its column: `example_columns`.

    Raises:
        BadValue: a value is none of what it should be.
    """
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
    """Parts as one text."""
    return "\n".join(f"{PART}{name}\n{text}" for name, text in parts.items())


def words_of(value: object, column: str) -> str:
    """A plain text, or messages as a transcript."""
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
