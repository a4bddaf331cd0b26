"""The small files of a run's folder, read as far as they can be: one may be missing, cut off, rubbish, or of another
version."""

import json
import logging
from pathlib import Path
from typing import Any

from cpt.files import DAMAGED
from cpt.recipe.tree import Mistakes, plain
from cpt.recipe.yaml_lines import UnreadableError, read_yaml

Content = dict[str, Any]
log = logging.getLogger("cpt")


def read_object(path: Path, unreadable: list[str]) -> Content:
    """A JSON object; empty where there is none, with a sentence in `unreadable` where the file is there all the
    same."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except OSError as problem:
        unreadable.append(f"{path} cannot be read: {problem.strerror}")
    except (ValueError, RecursionError):
        unreadable.append(f"{path} is cut off or no JSON")
    else:
        if isinstance(content, dict):
            return content
        unreadable.append(f"{path} holds no JSON object")
    return {}


def read_objects(path: Path, unreadable: list[str]) -> list[Content]:
    """The objects of a JSONL file; lines that are none, such as one that a crash cut off, are left out and counted in
    `unreadable`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as problem:
        unreadable.append(f"{path} cannot be read: {problem.strerror}")
        return []
    found = [
        object_of(line) for line in text.split("\n") if line.strip()
    ]  # splitlines also cuts at U+2028, which a text may hold
    if lost := found.count({}):
        unreadable.append(f"{path}: {lost:,} line{'s' if lost > 1 else ''} cannot be read")
    return [content for content in found if content]


def read_lines(path: Path) -> list[Content]:
    """As `read_objects`; what cannot be read is logged."""
    unreadable: list[str] = []
    found = read_objects(path, unreadable)
    for sentence in unreadable:
        log.warning(f"{sentence}.", extra={"event": DAMAGED})
    return found


def object_of(line: str) -> Content:
    """Empty where the line is none."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_tree(path: Path, unreadable: list[str]) -> Content:
    """A recipe's keys and values as they are written, without asking whether the schema knows them."""
    if not path.exists():
        return {}
    try:
        return dict(plain(read_yaml(path, Mistakes())))
    except UnreadableError:
        unreadable.append(f"{path} is cut off or no YAML")
    return {}
