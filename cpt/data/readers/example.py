"""A row as text: a column or a template of a document; all parts of an example, which are read back from the text.

Filters and transforms read the text. It is the same for every tokenizer: its hash decides what is held out, and its
bytes are those of bits per byte. What the model reads is what the tokenizer's chat template makes of the messages
(`chat_template.py`).

A message is a line with its role behind U+001E (the control character "record separator"), then its content. Other
keys of a message (tool calls, a name, the reasoning) follow its role as JSON. Before each part of an example is U+001D
("group separator") with the part's name. A part is a transcript, a plain text, or JSON (`tools`, `columns`). A chat
without tools is the transcript alone, and a plain text is itself."""

import datetime
import decimal
import json
import math
import string
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cpt.data.readers.columns import (
    columns_in,
    columns_of_row,
    form_of_source,
    missing_column,
    score_column,
    template_columns,
)
from cpt.data.readers.documents import BadValue, Document, Origin, clean, kind
from cpt.recipe.schema import DocumentSource


def document_of(row: Mapping[str, object], source: DocumentSource, origin: Origin, number: int) -> Document:
    column = score_column(source)
    return Document(
        text_of(row, source), origin, number, math.nan if column is None else score_of(value_of(row, column), column)
    )


def score_of(value: object, column: str) -> float:
    """A number, or a text that is one, as in csv files."""
    try:
        score = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        score = math.nan
    if math.isnan(score):
        raise BadValue(
            "null" if value is None else "wrong type", f"`{column}` is {kind(value)}, expected a number to order by"
        )
    return score


def text_of(row: Mapping[str, object], source: DocumentSource) -> str:
    if source.chat is not None:
        columns = columns_of_row(row, source)
        if "text" not in columns:
            return clean(example_text(row, source, columns), ", ".join(columns.values()))
        return refuse_marks(written_text(row, source))
    return written_text(row, source)


def refuse_marks(text: str) -> str:
    """A plain text among examples, which must not look like one."""
    if text.startswith(CONTROL):
        raise BadValue("control character", f"it begins with U+{ord(text[0]):04X}: this is no text")
    return text


def written_text(row: Mapping[str, object], source: DocumentSource) -> str:
    if source.template is None:
        return clean(value_of(row, source.text_column), source.text_column)
    values = {column: value_of(row, column) for column in template_columns(source.template)}
    return clean(
        source.template.format(**{column: filled_in(value, column) for column, value in values.items()}),
        "the template's text",
    )


def value_of(row: Mapping[str, object], column: str) -> object:
    if column not in row:
        raise missing_column(list(row), column)
    return row[column]


def filled_in(value: object, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue(
            "null" if value is None else "wrong type", f"`{column}` is {kind(value)}, expected a string or a number"
        )
    return str(value)


# --- chat ---


ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool", "function_response": "tool"}
"""What `from` says, and how chat templates call it."""
CALLS = "function_call"


def usual_message(message: object) -> object:
    """A message with `value` instead of `content` as chat templates want it; anything else as it is."""
    if (
        not isinstance(message, Mapping)
        or "value" not in message
        or "content" in message
        or not {"from", "role"} & set(message)
    ):
        return message
    said = message.get("from", message.get("role"))
    more = {key: value for key, value in message.items() if key not in ("from", "role", "value")}
    if said == CALLS:
        return {"role": "assistant", "content": None, "tool_calls": calls_in(message["value"]), **more}
    return {"role": ROLES.get(str(said), said), "content": message["value"], **more}


def calls_in(value: object) -> list[dict[str, Any]]:
    """The calls that a text holds as JSON: one, or a list of them."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as problem:
        raise BadValue("not a chat", f"a {CALLS} is {str(value)[:80]!r}, expected JSON: {problem}") from problem
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise BadValue("not a chat", f"a {CALLS} is {str(value)[:80]!r}, expected {{name: ..., arguments: {{...}}}}")
    return [{"type": "function", "function": dict(call)} for call in calls]


# --- chat ---


PART = "\x1d"
"""Stands before each part of an example (`examples.py`)."""
MARK = "\x1e"
NOT_TOKEN = "\x1f"
"""Stands inside what looks like a special token in a message, until it is encoded (`chat_encoder.py`)."""
CONTROL = (PART, MARK, NOT_TOKEN)
KEYS = ("role", "content")
Message = dict[str, Any]


def transcript(chat: object, column: str) -> str:
    if chat is None:
        raise BadValue("no value", f"`{column}` is null, expected a list of messages")
    if not isinstance(chat, list) or not chat:
        raise not_a_chat(f"`{column}` is {shown(chat)}")
    return "\n".join(f"{MARK}{role}\n{content}" for role, content in (message_of(message, column) for message in chat))


def message_of(message: object, column: str) -> tuple[str, str]:
    """Role, with what the message has besides, and content of a message; it may be null beside tool calls."""
    message = usual_message(message)
    if not isinstance(message, dict):
        raise not_a_chat(f"`{column}` holds {shown(message)}")
    role, content = (message.get(key) for key in KEYS)
    more = {str(key): value for key, value in message.items() if value is not None and key not in KEYS}
    if isinstance(content, list):
        content = text_of_parts(content, column)
    if content is None and "tool_calls" in more:
        content, more = "", {"content": None, **more}
    if (
        not isinstance(role, str)
        or not isinstance(content, str)
        or not role.strip()
        or len(role.splitlines()) != 1
        or " {" in role
    ):
        raise not_a_chat(f"`{column}` holds {shown(message)}")
    refuse_control(f"{role}{content}", f"a message of `{column}`")
    return f"{role} {as_json(more, f'a message of `{column}`')}" if more else role, content


def text_of_parts(parts: list[Any], column: str) -> str:
    """The text of a content that is a list of parts, {type: text, text: ...}."""
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or not isinstance(part.get("text"), str)
            or part.get("type", "text") != "text"
        ):
            what = f"a part of type `{part['type']}`" if isinstance(part, Mapping) and "type" in part else shown(part)
            raise BadValue(
                "not a chat", f"`{column}` holds {what} in a message: only texts are learned from, no images or sounds"
            )
    return "".join(part["text"] for part in parts)


def messages_of(text: str) -> list[Message]:
    """The messages of a transcript; none where it is not one."""
    if not text.startswith(MARK):
        return []
    parts = [part.partition("\n") for part in text[1:].split(MARK)]
    ends = [1] * (len(parts) - 1) + [0]  # the line break before the next message
    return [
        as_message(head, content[: len(content) - end]) for (head, _, content), end in zip(parts, ends, strict=True)
    ]


def as_message(head: str, content: str) -> Message:
    role, brace, more = head.partition(" {")
    if not brace:
        return {"role": role, "content": content}
    try:
        return {"role": role, "content": content, **json.loads(brace[1:] + more, strict=False)}
    except ValueError:  # a transform changed it
        return {"role": head, "content": content}


def as_json(value: object, where: str) -> str:
    for text in texts_in(value):
        refuse_control(text, where)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise BadValue("wrong value", f"{where} cannot be written as JSON: {problem}") from problem


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, Mapping):
        yield from map(str, value)
        for item in value.values():
            yield from texts_in(item)


def refuse_control(text: str, where: str) -> None:
    for mark in CONTROL:
        if mark in text:
            raise BadValue("control character", f"U+{ord(mark):04X} in {where}: this is no text")


def not_a_chat(what: str) -> BadValue:
    return BadValue("not a chat", f"{what}, expected a list of messages: {{role: a word, content: a text}}")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- example ---


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
