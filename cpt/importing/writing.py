"""The recipe as text: each value with the key that it came from, where that is called otherwise."""

import json
import re
import shlex
import textwrap
from typing import Any

from cpt.importing.ledger import Ledger
from cpt.recipe.schema import Recipe
from cpt.recipe.sections import keys_of
from cpt.recipe.words import in_yaml
from cpt.recipe.yaml_lines import resolve_scalar

WIDTH = 118
PLAIN = re.compile(r"[A-Za-z_./~][A-Za-z0-9_./ +-]*[A-Za-z0-9_./+-]|[A-Za-z_]")
NOT_PLAIN = {"null", "true", "false", "yes", "no", "on", "off", "~", "y", "n"}


def recipe_text(ledger: Ledger) -> str:
    """The whole file."""
    tool, file = ledger.called, shlex.quote(str(ledger.config.path))
    missing = sum(entry.verdict == "not" for entry in ledger.entries)
    left = f" {missing} of its keys could not be carried over. To list them:" if missing else ""
    head = f"From the {tool} config {file}, by `cpt import`. A comment names the key that a value came from.{left}"
    parts = [comment(head, 0), *([f"#   cpt import {file}"] if missing else [])]
    for section in keys_of(Recipe):
        if section in ledger.recipe:
            parts.append(section_text(ledger, section))
    return "\n".join(parts) + "\n"


def section_text(ledger: Ledger, section: str) -> str:
    """A section with its comments."""
    value, said = ledger.recipe[section], ledger.comments.get(section, "")
    if not isinstance(value, dict):
        return (
            line(section, value, said, 0)
            if section != "rewards"
            else "\n".join(["", "rewards:" + remark(said), *items(value, 2)])
        )
    lines = ["", f"{section}:"]
    for key, child in value.items():
        told = ledger.comments.get(f"{section}.{key}", "")
        if isinstance(child, list) and child and isinstance(child[0], dict):
            lines += [f"  {key}:" + remark(told), *items(child, 4)]
        else:
            lines.append(line(key, child, told, 2))
    return "\n".join(lines)


def line(key: str, value: Any, said: str, indent: int) -> str:
    """A key with its value, and the comment behind it or, where that is long, above it."""
    lead = " " * indent
    short = f"{lead}{key}: {in_line(value)}"
    if len(short) + len(said) + 4 <= WIDTH:
        return short + remark(said)
    return "\n".join([*([comment(said, indent)] if said else []), short])


def items(entries: list[Any], indent: int) -> list[str]:
    """A list, each of whose entries stands in lines of its own."""
    lines = []
    for entry in entries:
        if not isinstance(entry, dict):
            lines.append(f"{' ' * indent}- {in_line(entry)}")
            continue
        mark = "- "
        for key, value in entry.items():
            lines.append(f"{' ' * indent}{mark}{key}: {in_line(value)}")
            mark = "  "
    return lines


def remark(said: str) -> str:
    """A comment behind a value."""
    return f"  # {said}" if said else ""


def comment(text: str, indent: int) -> str:
    """Wrapped lines that begin with a hash."""
    lead = " " * indent + "# "
    return textwrap.fill(
        text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False, break_on_hyphens=False
    )


def in_line(value: Any) -> str:
    """A value in one line, as YAML that says the same to every reader."""
    if isinstance(value, str):
        return value if is_plain(value) else quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{in_line(str(key))}: {in_line(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(in_line(child) for child in value) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return in_yaml(value)


def quoted(text: str) -> str:
    """In quotes; characters that YAML does not take, or takes for the end of a line, by their numbers."""
    return "".join(
        letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in json.dumps(text, ensure_ascii=False)
    )


def is_plain(text: str) -> bool:
    """Whether a text needs no quotes, inside braces too."""
    return (
        PLAIN.fullmatch(text) is not None
        and text.lower() not in NOT_PLAIN
        and "  " not in text
        and isinstance(resolve_scalar(text), str)
    )
