"""A self-contained HTML page of text, facts, tables, code and plots, rendered from `page.html`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment

from cpt.analysis.plots import Plot, plotly_script
from cpt.errors import ResourceError
from cpt.files import write_atomic


@dataclass(frozen=True)
class Table:
    """Rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Preformatted text, folded behind `title` if there is one."""

    text: str
    title: str = ""


Part = str | Table | Facts | Code | Plot
KINDS = {Plot: "plot", Table: "table", Facts: "facts", Code: "code", str: "text"}


@dataclass(frozen=True)
class Section:
    """A heading and its parts; a section without parts is not shown."""

    title: str
    parts: Sequence[Part]


def html_page(title: str, sections: Sequence[Section], lead: str = "") -> str:
    """The whole page.

    Args:
        lead: its first sentence, in large letters.

    Raises:
        ResourceError: it has plots, and plotly is not installed.
    """
    shown = [section for section in sections if section.parts]
    has_plots = any(isinstance(part, Plot) for section in shown for part in section.parts)
    environment = Environment(autoescape=True)
    environment.filters["groupby_runs"] = consecutive
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(title=title, lead=lead, sections=shown, plotly=plotly_script() if has_plots else "")


def consecutive(parts: Sequence[Part]) -> Iterable[tuple[str, list[Any]]]:
    """Parts of one kind that follow each other, as (kind, parts)."""
    return [(kind, list(group)) for kind, group in groupby(parts, key=lambda part: KINDS[type(part)])]


def write_page(path: Path, text: str) -> None:
    """Write a page that the user asked for.

    Raises:
        ResourceError: it cannot be written.
    """
    try:
        write_atomic(path, text.encode("utf-8", "replace"))
    except (OSError, ValueError) as problem:  # ValueError: an empty name
        raise ResourceError(f"{path} cannot be written: {problem}. Name a file in an existing folder.") from problem
