"""What a docstring says of a function and of its arguments."""

import inspect
import re
from typing import Any

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def summary_of(documented: Any) -> str:
    """The text before `Args`, `Returns` and `Raises`, each paragraph on one line."""
    text = re.split(r"^(?:Args|Returns|Raises):$", inspect.getdoc(documented) or "", maxsplit=1, flags=re.MULTILINE)[0]
    return on_one_line(text)


def on_one_line(text: str) -> str:
    """Paragraphs without the line breaks of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def arguments_of(documented: Any) -> dict[str, str]:
    """Argument -> what `Args` says of it; `above, below: ...` speaks of both."""
    _, _, rest = (inspect.getdoc(documented) or "").partition("Args:\n")
    told: dict[str, str] = {}
    names: list[str] = []
    for line in re.split(r"^\w+:$", rest, maxsplit=1, flags=re.MULTILINE)[0].splitlines():
        if found := ARGUMENT.match(line.removeprefix("    ")):
            names = found[1].split(", ")
            told.update(dict.fromkeys(names, found[2]))
        elif line.strip():
            told.update({name: f"{told[name]} {line.strip()}" for name in names})
    return told
