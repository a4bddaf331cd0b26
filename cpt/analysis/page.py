"""A self-contained HTML page of text, facts, tables and plots, rendered from `page.html`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from cpt.analysis.plots import Plot
from cpt.errors import ResourceError
from cpt.files import write_atomic


@dataclass(frozen=True)
class Table:
    """Rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Folded:
    """Preformatted text behind its title."""

    title: str
    text: str


Part = str | Mapping[str, str] | Table | Folded | Plot
"""A string is a paragraph, or HTML if it is `Markup`; a mapping has names and values."""


@dataclass(frozen=True)
class PageSection:
    """A heading and its parts; a section without parts is not shown."""

    title: str
    parts: Sequence[Part]


def html_page(title: str, sections: Sequence[PageSection], lead: str = "") -> str:
    """The whole page.

    Args:
        lead: its first sentence, in large letters.
    """
    template = Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.render(title=title, lead=lead, sections=[section for section in sections if section.parts])


def write_page(path: Path, text: str) -> None:
    """Write a page that the user asked for.

    Raises:
        ResourceError: it cannot be written.
    """
    try:
        write_atomic(path, text.encode("utf-8", "replace"))
    except (OSError, ValueError) as problem:  # ValueError: an empty name
        raise ResourceError(f"{path} cannot be written: {problem}. Name a file in an existing folder.") from problem
