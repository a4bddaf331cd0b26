"""A chat as a document: its messages as one text that filters and transforms can read, and the messages back from it.

Each message is a line with its role behind U+001E (the control character "record separator"), then its content. Other
keys of a message (tool calls, a name, the reasoning) follow its role as JSON. So the text is the same for every
tokenizer: its hash decides what is held out, and its bytes are those of bits per byte. What the model reads is what
the tokenizer's chat template makes of the messages (`chat_template.py`)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cpt.data.readers.documents import BadValue

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
