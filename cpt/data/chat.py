"""A chat as a document: its messages as one text that filters and transforms can read, and that gives the messages back.

Each message is a line with its role, behind U+001E (the control character "record separator"), and then its content. So the text says the
same for every tokenizer: its hash decides what is held out, its bytes are what bits per byte count. What the model reads is what the
tokenizer's chat template makes of the messages (`chat_encoder.py`).
"""

from cpt.data.documents import BadValue

MARK = "\x1e"
NOT_TOKEN = "\x1f"
"""Stands inside what looks like a special token in a message, until it is encoded (`chat_encoder.py`)."""
KEYS = ("role", "content")


def transcript(chat: object, column: str) -> str:
    """The text of a list of messages.

    Raises:
        BadValue: it is no chat, or would lose something by being read as one.
    """
    if chat is None:
        raise BadValue("null", f"`{column}` is null, expected a list of messages")
    if not isinstance(chat, list) or not chat:
        raise not_a_chat(f"`{column}` is {shown(chat)}")
    return "\n".join(f"{MARK}{role}\n{content}" for role, content in (message_of(message, column) for message in chat))


def message_of(message: object, column: str) -> tuple[str, str]:
    """Role and content of a message."""
    if not isinstance(message, dict):
        raise not_a_chat(f"`{column}` holds {shown(message)}")
    role, content = (message.get(key) for key in KEYS)
    if not isinstance(role, str) or not isinstance(content, str) or not role.strip() or len(role.splitlines()) != 1:
        raise not_a_chat(f"`{column}` holds {shown(message)}")
    if more := [str(key) for key, value in message.items() if value is not None and key not in KEYS]:
        raise BadValue("not a chat", f"a message in `{column}` has {', '.join(more)} too, which would be lost")
    for mark in (MARK, NOT_TOKEN):
        if mark in content or mark in role:
            raise BadValue("control character", f"U+{ord(mark):04X} in a message of `{column}`: this is no text")
    return role, content


def messages_of(text: str) -> list[dict[str, str]]:
    """The messages of a transcript; none where it is not one."""
    if not text.startswith(MARK):
        return []
    parts = [part.partition("\n") for part in text[1:].split(MARK)]
    ends = [1] * (len(parts) - 1) + [0]  # the line break before the next message
    return [{"role": role, "content": content[: len(content) - end]} for (role, _, content), end in zip(parts, ends, strict=True)]


def not_a_chat(what: str) -> BadValue:
    """What was expected."""
    return BadValue("not a chat", f"{what}, expected a list of messages: {{role: a word, content: a text}}")


def shown(value: object) -> str:
    """A value as a message can hold it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
