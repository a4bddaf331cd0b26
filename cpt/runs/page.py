"""A self-contained HTML page of sections: text, facts, tables and plots, read without a network, in light and dark, on
a phone too."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cpt.runs.page_style import DRAW, STYLE
from cpt.runs.plots import Bars, Drawing, Intervals, Plot, as_text, figure_json, plotly_script

NUMBER = re.compile(r"[-+±]?[\d.,]+(e[-+]?\d+)?( ?(%|GiB|MiB|s|ms|h|W|°C|±.*|to .*))*")
LONG = 44  # characters of a fact that takes more room than others
# Nothing is fetched, whatever stands in the page: the browser itself sees to it.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Table:
    """Rows of text; numbers stand to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    has_texts: bool = False
    """Long ones, to be compared: columns are equally wide, and on a narrow screen beneath each other."""


@dataclass(frozen=True)
class Facts:
    """Short names and what they are."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Listing:
    """Sentences, each with its point."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text as it is written, in a box; folded away behind `title` where there is one."""

    text: str
    title: str = ""


Part = str | Table | Facts | Listing | Code | Drawing


@dataclass(frozen=True)
class Section:
    """A part of the page; one without a title stands at the top."""

    title: str
    parts: Sequence[Part]


def html_page(title: str, sections: Sequence[Section], lead: str = "") -> str:
    """The whole page; sections without parts are left out.

    Args:
        lead: what the page says first, in large letters.

    Raises:
        ResourceError: there is a plot, and plotly is not installed.
    """
    shown = [section for section in sections if section.parts]
    has_plots = any(isinstance(part, Plot | Bars | Intervals) for section in shown for part in section.parts)
    named = [(number, section.title) for number, section in enumerate(shown) if section.title]
    links = "".join(f'<a href="#s{number}">{as_text(name)}</a>' for number, name in named) if len(named) > 2 else ""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            (
                '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme"'
                ' content="light dark">'
            ),
            f"<title>{as_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<header><h1>{as_text(title)}</h1>",
            f'<p class="lead">{as_text(lead)}</p>' if lead else "",
            f"<nav>{links}</nav>" if links else "",
            "</header>\n<main>",
            *(section_html(number, section) for number, section in enumerate(shown)),
            "</main>",
            f"<script>{plotly_script()}</script>\n<script>{DRAW}</script>" if has_plots else "",
            "</body>\n</html>\n",
        ]
    )


def section_html(number: int, section: Section) -> str:
    """Its heading and parts; plots that follow each other stand side by side where there is room."""
    parts: list[str] = []
    row: list[str] = []
    for part in [*section.parts, ""]:
        if isinstance(part, Plot | Bars | Intervals):
            row.append(drawing_html(part))
            continue
        if row:
            parts.append(f'<div class="plots">{"".join(row)}</div>')
            row = []
        parts.append(part_html(part))
    heading = f"<h2>{as_text(section.title)}</h2>" if section.title else ""
    return f'<section id="s{number}">{heading}{"".join(parts)}</section>'


def part_html(part: str | Table | Facts | Listing | Code) -> str:
    """Anything that is not drawn."""
    if isinstance(part, Table):
        return table_html(part)
    if isinstance(part, Facts):
        return f"<dl>{''.join(fact_html(name, value) for name, value in part.pairs)}</dl>"
    if isinstance(part, Listing):
        return f"<ul>{''.join(f'<li>{as_text(line)}</li>' for line in part.lines)}</ul>"
    if isinstance(part, Code):
        box = f"<pre>{as_text(part.text)}</pre>"
        return f"<details><summary>{as_text(part.title)}</summary>{box}</details>" if part.title else box
    return "".join(f"<p>{as_text(paragraph)}</p>" for paragraph in part.split("\n\n") if paragraph.strip())


def fact_html(name: str, value: str) -> str:
    """Long ones have a line of their own."""
    kind = ' class="long"' if len(value) > LONG else ""
    return f"<div{kind}><dt>{as_text(name)}</dt><dd>{as_text(value)}</dd></div>"


def table_html(table: Table) -> str:
    """In a box of its own, which a narrow screen moves sideways."""
    box = "texts" if table.has_texts else "table"
    head = "".join(
        f"<th{alignment(table, place)}>{as_text(column)}</th>" for place, column in enumerate(table.columns)
    )
    rows = "".join(
        f"<tr>{''.join(cell_html(table, place, cell) for place, cell in enumerate(row))}</tr>" for row in table.rows
    )
    caption = f"<caption>{as_text(table.caption)}</caption>" if table.caption else ""
    return f'<div class="{box}"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def cell_html(table: Table, place: int, cell: str) -> str:
    """With its column's name where the heading may be far away."""
    name = f' data-column="{as_text(table.columns[place])}"' if table.has_texts else alignment(table, place)
    return f"<td{name}><div>{as_text(cell)}</div></td>" if table.has_texts else f"<td{name}>{as_text(cell)}</td>"


def alignment(table: Table, place: int) -> str:
    """Columns of numbers stand to the right."""
    cells = [row[place] for row in table.rows if place < len(row) and row[place]]
    return ' class="number"' if cells and all(NUMBER.fullmatch(cell) for cell in cells) else ""


def drawing_html(drawing: Drawing) -> str:
    """A place for plotly, with the figure beside it."""
    note = f"<small>{as_text(drawing.note)}</small>" if drawing.note else ""
    title = as_text(drawing.title)
    place = (
        f'<div class="plot" role="img" aria-label="{title}"></div><script'
        f' type="application/json">{figure_json(drawing)}</script>'
    )
    return f"<figure><figcaption>{title}</figcaption>{place}{note}</figure>"
