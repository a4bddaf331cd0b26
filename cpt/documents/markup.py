"""Write a tree of HTML as plain text: headings with `#`, lists, tables, code, and blank lines between paragraphs."""

from collections.abc import Iterator, Sequence
from typing import Final

from lxml import etree

HEADINGS: Final = {f"h{level}": level for level in range(1, 7)}
NEVER_TEXT: Final = frozenset(
    {"script", "style", "noscript", "template", "svg", "head", "title", "iframe", "object", "audio", "video", "canvas"}
    | {"button", "input", "select", "textarea", "rt", "rp"}
)
AROUND_THE_TEXT: Final = frozenset({"nav", "footer", "aside", "form"})
"""What a web page has besides its text."""
LISTS: Final = frozenset({"ul", "ol", "menu"})
CELLS: Final = frozenset({"td", "th"})
BLOCKS: Final = LISTS | {
    *("p", "div", "section", "article", "main", "header", "footer", "nav", "aside", "form", "body", "html", "figure", "figcaption"),
    *("address", "dl", "dt", "dd", "hr", "details", "summary", "center", "fieldset", "blockquote", "li", "table", "pre"),
}
BREAK: Final = "\v"  # stands for a <br>; line ends of the source are mere blanks


def render(root: etree._Element, skip: frozenset[str] = frozenset()) -> str:
    """The text of all that is in a tree.

    Args:
        skip: elements to leave out, besides those that never are text.
    """
    return "\n\n".join(blocks_of(root, skip | NEVER_TEXT))


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first one as the head."""
    width = max(map(len, rows))
    lines = [f"| {' | '.join([*map(cell_text, row), *[''] * (width - len(row))])} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def cell_text(text: str) -> str:
    """What may stand between two bars."""
    return " ".join(text.split()).replace("|", "\\|")


def blocks_of(element: etree._Element, skip: frozenset[str]) -> Iterator[str]:
    """The blocks in an element: paragraphs, headings, whole lists, tables, code."""
    line = element.text or ""
    for child in element:
        if is_block(child, skip):
            yield from paragraph(line)
            yield from block(child, skip)
            line = ""
        else:
            line += inline_text(child, skip)
        line += child.tail or ""
    yield from paragraph(line)


def block(element: etree._Element, skip: frozenset[str]) -> Iterator[str]:
    """One element that stands by itself, as one block or several."""
    name = name_of(element)
    if name in HEADINGS:
        if title := " ".join(inline_text(element, skip).replace(BREAK, " ").split()):
            yield "#" * HEADINGS[name] + " " + title
    elif name in LISTS:
        if lines := list(list_lines(element, skip, "")):
            yield "\n".join(lines)
    elif name == "table":
        yield from table(element, skip)
    elif name == "pre":
        if code := "".join(map(str, element.itertext())).strip("\n"):
            yield f"```\n{code}\n```"
    elif name == "blockquote":
        if quoted := "\n\n".join(blocks_of(element, skip)):
            yield "\n".join(f"> {line}".rstrip() for line in quoted.split("\n"))
    else:
        yield from blocks_of(element, skip)


def table(element: etree._Element, skip: frozenset[str]) -> Iterator[str]:
    """A table of data; one that holds tables is there for the looks, and is read cell by cell."""
    cells = [inner for inner in element.iterdescendants() if name_of(inner) in CELLS and nearest(inner, ("table",)) is element]
    if any(name_of(inner) == "table" for inner in element.iterdescendants()):
        for cell in cells:
            yield from blocks_of(cell, skip)
        return
    rows: dict[etree._Element | None, list[str]] = {}
    for cell in cells:
        rows.setdefault(nearest(cell, ("tr",)), []).append(" ".join(blocks_of(cell, skip)))
    if filled := [row for row in rows.values() if any(row)]:
        yield table_text(filled)


def list_lines(element: etree._Element, skip: frozenset[str], indent: str) -> Iterator[str]:
    """A line for each item; those of inner lists stand further in."""
    number = 0
    for item in element:
        if name_of(item) in LISTS:  # against the standard, and common
            yield from list_lines(item, skip, indent + "  ")
        elif name_of(item) == "li":
            number += 1
            if own := " ".join(" ".join(blocks_of(item, skip | LISTS)).split()):
                yield indent + (f"{number}. " if name_of(element) == "ol" else "- ") + own
            for inner in item.iterdescendants():
                if name_of(inner) in LISTS and nearest(inner, ("li",)) is item:
                    yield from list_lines(inner, skip, indent + "  ")


def nearest(element: etree._Element, names: Sequence[str]) -> etree._Element | None:
    """The innermost element of these names around another."""
    return next((outer for outer in element.iterancestors() if name_of(outer) in names), None)


def paragraph(text: str) -> Iterator[str]:
    """A text with single blanks, if anything is in it."""
    if joined := "\n".join(" ".join(line.split()) for line in text.split(BREAK)).strip():
        yield joined


def inline_text(element: etree._Element, skip: frozenset[str]) -> str:
    """The text of what stands in a line."""
    name = name_of(element)
    if not name or name in skip:
        return ""
    if name == "br":
        return BREAK
    return (element.text or "") + "".join(inline_text(child, skip) + (child.tail or "") for child in element)


def is_block(element: etree._Element, skip: frozenset[str]) -> bool:
    """True for what interrupts a line, or holds something that does, like a link around a heading."""
    name = name_of(element)
    if not name or name in skip:
        return False
    return name in BLOCKS or name in HEADINGS or any(is_block(child, skip) for child in element)


def name_of(element: etree._Element) -> str:
    """The tag without its namespace; empty for comments and entities."""
    return element.tag.rpartition("}")[2].lower() if isinstance(element.tag, str) else ""
