"""Convert a row to text: a column or template for a document; all parts for an example, which can be parsed back.

Filters and transforms work on this text. It is the same for every tokenizer: its hash decides what is held out, and
its bytes count in bits per byte. The model reads the output of the tokenizer's chat template for the messages
(`chat_template.py`).

A message is a line with its role after U+001E ("record separator"), then its content. Other keys of a message (tool
calls, a name) follow its role as JSON. U+001D ("group separator") and a name begin each part of an example: a
transcript, a plain text, or JSON (`tools`, `columns`). A chat without tools is the transcript alone."""

import datetime
import decimal
import json
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cpt.data.readers.columns import (
    columns_in,
    form_of_source,
    row_columns,
    template_columns,
    value_of,
    value_or_none,
)
from cpt.data.readers.documents import (
    BadRow,
    BadValue,
    Document,
    Origin,
    clean,
    kind_of_value,
    row_as_json,
)
from cpt.recipe.schema import DocumentSource


def item_of(
    row: Mapping[str, object], source: DocumentSource, origin: Origin, number: int
) -> Document | BadRow:
    try:
        return document_of(row, source, origin, number)
    except BadValue as bad:
        return bad.at(origin, number, content=row_as_json(row))


def document_of(
    row: Mapping[str, object], source: DocumentSource, origin: Origin, number: int
) -> Document:
    return Document(text_of(row, source), origin, number)


def text_of(row: Mapping[str, object], source: DocumentSource) -> str:
    columns = {} if source.chat is None else row_columns(row, source)
    if source.chat is not None and "text" not in columns:
        return clean(example_text(row, source, columns), ", ".join(columns.values()))
    if source.template is None:
        text = clean(value_of(row, source.text_column), source.text_column)
    else:
        values = {}
        for column in template_columns(source.template):
            values[column] = filled_in(value_of(row, column), column)
        text = clean(fill(source.template, values), "the template's text")
    # A plain text among examples must not look like one.
    if source.chat is not None and text.startswith(CONTROL):
        raise BadValue(
            "control character", f"it begins with the control character U+{ord(text[0]):04X}"
        )
    return text


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with values; unlike in `str.format`, a dot in a name is that of a nested column."""
    parts = string.Formatter().parse(template)
    return "".join(literal + values.get(name or "", "") for literal, name, _, _ in parts)


def filled_in(value: object, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        reason = "null" if value is None else "wrong type"
        raise BadValue(
            reason, f"`{column}` is {kind_of_value(value)}, expected a string or a number"
        )
    return str(value)


# --- chat ---


# Role in `from` -> role in chat templates.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
CALLS = "function_call"
PART = "\x1d"
MARK = "\x1e"
NOT_TOKEN = "\x1f"  # splits special tokens in a message's text until it is encoded
CONTROL = (PART, MARK, NOT_TOKEN)
# escaped, after an even number of backslashes
CONTROL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u(001[def])")
Message = dict[str, Any]


def usual_message(message: object) -> object:
    """A message with `content` instead of `value`, as chat templates expect; other objects are returned unchanged."""
    if not isinstance(message, Mapping) or "value" not in message or "content" in message:
        return message
    if not {"from", "role"} & set(message):
        return message
    role = message.get("from", message.get("role"))
    content = message["value"]
    more = dict(message)
    for key in ("from", "role", "value"):
        more.pop(key, None)
    if role == CALLS:
        return {"role": "assistant", "content": None, "tool_calls": tool_calls(content), **more}
    return {"role": ROLES.get(str(role), role), "content": content, **more}


def tool_calls(content: object) -> list[dict[str, object]]:
    """The calls in a message of the role `function_call`: one object or a list of them, often as JSON."""
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except ValueError as problem:
        raise BadValue(
            "not a chat", f"a {CALLS} is {str(content)[:80]!r}, expected JSON: {problem}"
        ) from problem
    if not isinstance(calls, list):
        calls = [calls]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise BadValue(
                "not a chat",
                f"a {CALLS} is {str(content)[:80]!r}, expected {{name: ..., arguments: {{...}}}}",
            )
    return [{"type": "function", "function": dict(call)} for call in calls]


def transcript(chat: object, column: str) -> str:
    if chat is None:
        raise BadValue("no value", f"`{column}` is null, expected a list of messages")
    if not isinstance(chat, list) or not chat:
        raise not_a_chat(f"`{column}` is {shown(chat)}")
    lines = []
    for message in map(usual_message, chat):
        if not isinstance(message, dict):
            raise not_a_chat(f"`{column}` contains {shown(message)}")
        role = message.get("role")
        content = message.get("content")
        more = {}
        for key, value in message.items():
            if value is not None and str(key) not in ("role", "content"):
                more[str(key)] = value
        if isinstance(content, list):
            content = text_of_parts(content, column)
        if content is None and "tool_calls" in more:
            content = ""
            more = {"content": None, **more}
        if not is_role(role) or not isinstance(content, str):
            raise not_a_chat(f"`{column}` contains {shown(message)}")
        where = f"a message of `{column}`"
        refuse_control(f"{role}{content}", where)
        head = f"{role} {as_json(more, where)}" if more else role
        lines.append(f"{MARK}{head}\n{content}")
    return "\n".join(lines)


def is_role(role: object) -> bool:
    if not isinstance(role, str) or not role.strip():
        return False
    return len(role.splitlines()) == 1 and " {" not in role


def text_of_parts(parts: list[Any], column: str) -> str:
    for part in parts:
        if not isinstance(part, Mapping):
            part_name = shown(part)
        elif part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            part_name = f"a part of type `{part.get('type', 'text')}`"
        else:
            continue
        raise BadValue(
            "not a chat",
            f"`{column}` has {part_name} in a message: only text is supported, not images or audio",
        )
    return "".join(part["text"] for part in parts)


def messages_of(text: str) -> list[Message]:
    """The messages of a transcript; empty if the text is not a transcript."""
    messages: list[Message] = []
    parts = text[1:].split(MARK) if text.startswith(MARK) else []
    for number, part in enumerate(parts, start=1):
        head, _, content = part.partition("\n")
        if number < len(parts):
            content = content[:-1]  # the line break before the next message
        role, brace, more = head.partition(" {")
        try:
            continued = json.loads(brace[1:] + more, strict=False) if brace else {}
            messages.append({"role": role, "content": content, **continued})
        except ValueError:  # a transform changed it
            messages.append({"role": head, "content": content})
    return messages


def as_json(value: object, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=as_text)
    except (TypeError, ValueError) as problem:
        raise BadValue("wrong value", f"{where} cannot be written as JSON: {problem}") from problem
    control = CONTROL_IN_JSON.search(text)
    if control is not None:
        refuse_control(chr(int(control[1], 16)), where)
    return text


def as_text(value: object) -> str:
    """Dates and decimals as strings: JSON lacks these types."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    raise TypeError(f"unsupported type {type(value).__name__}")


def refuse_control(text: str, where: str) -> None:
    for mark in CONTROL:
        if mark in text:
            raise BadValue(
                "control character",
                f"U+{ord(mark):04X} in {where}: control characters are not allowed",
            )


def not_a_chat(what: str) -> BadValue:
    return BadValue(
        "not a chat", f"{what}, expected a list of messages: {{role: WORD, content: TEXT}}"
    )


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- example ---


def filled_lines(template: str, row: Mapping[str, object]) -> str:
    """Fill in a template, without paragraphs and lines whose columns are all empty, null or missing; those of the
    first column are always kept."""
    columns = template_columns(template)
    value_of(row, columns[0])  # raises BadValue if it is missing
    values = {}
    for name in columns:
        value = value_or_none(row, name)
        values[name] = "" if value is None else filled_in(value, name)

    def has_value(part: str) -> bool:
        names = set()
        for _, name, _, _ in string.Formatter().parse(part):
            if name is not None:
                names.add(name)
        return not names or columns[0] in names or any(values[name] for name in names)

    paragraphs = []
    for paragraph in filter(has_value, template.split("\n\n")):
        paragraphs.append("\n".join(filter(has_value, paragraph.split("\n"))))
    return fill("\n\n".join(paragraphs), values)


SIDES = {"user": "prompt", "assistant": "completion", "chosen": "chosen", "rejected": "rejected"}
"""Columns with one message each, if `chat` names a `user` -> part of an example."""


def with_turns(
    values: dict[str, Any], columns: Mapping[str, str], *, whole: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The parts of an example, with turns as lists of messages, and the column of each. If `whole`, a question and its
    answer form one conversation."""
    system = values.pop("system", None)
    history = values.pop("history", None)
    for name, value in values.items():
        if isinstance(value, dict):  # a message alone
            values[name] = [value]
    named = dict(columns)
    if "user" in values:
        values = {SIDES.get(name, name): as_message(name, text) for name, text in values.items()}
        named = {SIDES.get(name, name): column for name, column in columns.items()}
    elif "label" in values and isinstance(values.get("messages"), list):
        messages = values.pop("messages")  # the label applies to the last turn
        values |= {"prompt": messages[:-1], "completion": messages[-1:]}
        named |= dict.fromkeys(("prompt", "completion"), columns["messages"])
    if isinstance(values.get("prompt"), str) or "user" in columns:
        first_roles = [first_role(values.get(side)) for side in ("chosen", "rejected")]
        if None not in first_roles and "assistant" not in first_roles:
            del values["prompt"]  # the conversations contain it
    if whole and "user" in columns:
        prompt = values["prompt"]
        completion = values["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            values = {"messages": [*prompt, *completion]}
            named["messages"] = named["prompt"]
    system_messages: list[Message] = []
    if isinstance(system, str) and system.strip():
        system_messages = [{"role": "system", "content": system}]
    earlier_turns = turns_of(history or [], named)
    if system_messages or earlier_turns:
        put_before(values, system_messages, earlier_turns, named)
    return values, named


def as_message(name: str, text: object) -> object:
    """The text of a column for one message as this message; other values are returned unchanged."""
    if name not in SIDES or not isinstance(text, str):
        return text
    return [{"role": "user" if name == "user" else "assistant", "content": text}]


def turns_of(history: object, named: Mapping[str, str]) -> list[Message]:
    """The messages of a list of [question, answer]."""

    def is_pair(pair: object) -> bool:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return False
        return isinstance(pair[0], str) and isinstance(pair[1], str)

    if not isinstance(history, list) or not all(map(is_pair, history)):
        raise BadValue(
            "not a chat",
            f"`{named['history']}` is {shown(history)}, expected a list of [question, answer]",
        )
    turns = []
    for question, answer in history:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    return turns


def put_before(
    values: dict[str, Any],
    system_messages: list[Message],
    earlier_turns: list[Message],
    named: Mapping[str, str],
) -> None:
    """Put the system prompt, unless the messages have one, and earlier turns before the messages."""
    first = next(name for name in ("messages", "prompt", "chosen") if name in values)
    sides = ["chosen", "rejected"] if first == "chosen" else [first]
    for side in sides:
        messages = values[side]
        if not isinstance(messages, list):
            raise BadValue(
                "texts and messages",
                f"`{named[side]}` must be a list of messages: only those can follow a system prompt or earlier turns",
            )
        if first_role(messages) == "system":  # overrides the system prompt of the source
            values[side] = [messages[0], *earlier_turns, *messages[1:]]
        else:
            values[side] = [*system_messages, *earlier_turns, *messages]


def first_role(messages: object) -> object:
    """The role of the first message; None if these are not messages."""
    if not isinstance(messages, list) or not messages:
        return None
    first = usual_message(messages[0])
    return first.get("role", "") if isinstance(first, Mapping) else None


LABELS = {"true": True, "1": True, "false": False, "0": False}
Words = str | list[Message]


class Example(NamedTuple):
    """The parts of an example: each is a plain text or a list of messages; None for parts that its form lacks."""

    prompt: Words | None = None
    completion: Words | None = None
    chosen: Words | None = None
    rejected: Words | None = None
    messages: Words | None = None
    label: bool = False
    tools: list[dict[str, Any]] | None = None
    columns: dict[str, Any] | None = None


def example_text(row: Mapping[str, Any], source: DocumentSource, columns: Mapping[str, str]) -> str:
    values: dict[str, Any] = {}
    for name, column in columns.items():
        value = filled_lines(column, row) if "{" in column else value_or_none(row, column)
        values[name] = unpacked(value)
    parts: dict[str, str] = {}
    tools = values.pop("tools", None)
    if tools:
        column = columns["tools"]
        if isinstance(tools, str):
            with suppress(ValueError):
                tools = json.loads(tools)
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadValue(
                "wrong value",
                f"`{column}` is {shown(tools)}, expected a list of tools, each an object",
            )
        parts["tools"] = as_json(tools, f"`{column}`")
    values, columns = with_turns(
        values, columns, whole=form_of_source(source) in ("document", "conversation")
    )
    if "messages" in values:
        messages = transcript(values["messages"], columns["messages"])
        return joined({**parts, "messages": messages}) if parts else messages
    label = {}
    if "label" in values:
        label = {"label": label_text(values.pop("label"), columns["label"])}
    kinds = {}
    for name, value in values.items():
        parts[name] = words_of(value, columns[name])
        kinds[name] = "messages" if parts[name].startswith(MARK) else "a text"
    if len(set(kinds.values())) > 1:
        listing = ", ".join(f"`{columns[name]}` is {kind}" for name, kind in kinds.items())
        raise BadValue(
            "texts and messages", f"{listing}: all must be texts, or all lists of messages"
        )
    parts |= label
    if form_of_source(source) == "prompt":
        named_columns = ("prompt", *columns_in(columns["prompt"]))
        other_columns = {}
        for name, value in row.items():
            if name not in named_columns:
                other_columns[str(name)] = value
        parts["columns"] = as_json(other_columns, f"the columns {', '.join(other_columns)}")
    return joined(parts)


def label_text(value: object, column: str) -> str:
    """Labels may be strings, as in csv files."""
    label = LABELS.get(str(value).lower()) if isinstance(value, bool | int | str) else None
    if label is None:
        reason = "no value" if value is None else "wrong value"
        raise BadValue(reason, f"`{column}` is {shown(value)}, expected true or false")
    return str(label).lower()


def unpacked(value: object) -> object:
    """Parse messages stored as a JSON string, as in csv files; other values are returned unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    if '"role"' not in value and '"from"' not in value:
        return value
    try:
        messages = json.loads(value)
    except ValueError:
        return value
    return messages if all(map(is_message, messages)) else value


def is_message(value: object) -> bool:
    return isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value)


def joined(parts: Mapping[str, str]) -> str:
    return "\n".join(f"{PART}{name}\n{text}" for name, text in parts.items())


def words_of(value: object, column: str) -> str:
    if isinstance(value, list):
        return transcript(value, column)
    if not isinstance(value, str):
        reason = "no value" if value is None else "wrong value"
        raise BadValue(
            reason, f"`{column}` is {shown(value)}, expected a text or a list of messages"
        )
    refuse_control(value, f"`{column}`")
    return value


def example_of(text: str) -> Example | None:
    """Parse an example's text; None if a transform broke it. A text without parts is a chat or a plain text."""
    if not text.startswith(PART):
        return Example(messages=messages_of(text) or text)
    values: dict[str, Any] = {}
    try:
        for part in text[1:].split(f"\n{PART}"):
            name, _, value = part.partition("\n")
            if name in ("tools", "columns"):
                values[name] = json.loads(value, strict=False)
            elif name == "label":
                values[name] = value == "true"
            else:
                values[name] = messages_of(value) or value
        return Example(**values)
    except (ValueError, TypeError):
        return None
