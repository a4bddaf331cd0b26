"""Seventy manuals as web pages, PDF, DOCX and Markdown; a base; the prose that it has read."""

from html import escape
from pathlib import Path

import docx
from guide_texts import manuals, write_base, write_general
from tiny_documents import write_pdf

PORTS = [8000]


def prepare(folder: Path) -> None:
    """`papers`, `base` and `general`."""
    papers = folder / "papers"
    papers.mkdir()
    for number, (name, passages) in enumerate(manuals(70).items()):
        if number % 20 == 0:
            lines = [line for passage in passages for line in [*passage.splitlines(), ""]]
            write_pdf(
                papers / f"{name}.pdf", [lines[start : start + 50] for start in range(0, len(lines), 50)], title=name
            )
        elif number % 20 == 1:
            write_word(papers / f"{name}.docx", name, passages)
        elif number % 5 == 2:
            (papers / f"{name}.md").write_text(f"# {name}\n\n" + "\n\n".join(passages), encoding="utf-8")
        else:
            (papers / f"{name}.html").write_text(web_page(name, passages), encoding="utf-8")
    write_base(folder / "base")
    write_general(folder / "general")


def write_word(path: Path, name: str, passages: list[str]) -> None:
    """A heading and a paragraph for each passage."""
    document = docx.Document()
    document.add_heading(name, 0)
    for passage in passages:
        document.add_paragraph(passage)
    document.save(str(path))


def web_page(name: str, passages: list[str]) -> str:
    """With the menu and the footer that such pages have."""
    body = "".join(f"<p>{escape(passage)}</p>" for passage in passages)
    return (
        f'<html><head><title>{name}</title></head><body><nav><a href="/">Home</a> <a href="/all">All</a></nav>'
        f"<article><h1>{name}</h1>{body}</article><footer>We use cookies.</footer></body></html>"
    )
