"""The smallest real PDF, DOCX, EPUB and HTML files that show behaviour."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import docx
from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas

SENTENCE = "A catalyst is a substance that speeds up a reaction and is not used up by it."
PAGE = f"""<html><head><title>On catalysts</title></head><body>
<nav><a href="/">Home</a> <a href="/about">About us</a></nav>
<article><h1>Catalysts</h1><p>{SENTENCE} {SENTENCE} {SENTENCE}</p><h2>Kinds</h2>
<ul><li>homogeneous</li><li>heterogeneous</li></ul><p>{SENTENCE} They are used in most of industry, from ammonia to margarine.</p>
<table><tr><th>Metal</th><th>Use</th></tr><tr><td>Nickel</td><td>Margarine</td></tr></table></article>
<footer>All rights reserved. We use cookies.</footer></body></html>"""  # noqa: E501
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile'
    ' full-path="{}"/></rootfiles></container>'
)

Draw = Callable[[Canvas, int], None]


def write_pdf(
    path: Path,
    pages: int | Sequence[Sequence[str]],
    draw: Draw | None = None,
    *,
    title: str | None = None,
    password: str | None = None,
) -> Path:
    """A PDF of so many pages, or of pages with these lines; `draw` adds to each page."""
    canvas = Canvas(str(path), pagesize=A4, encrypt=password, invariant=1)
    if title is not None:
        canvas.setTitle(title)
    for number, lines in enumerate([[]] * pages if isinstance(pages, int) else pages, 1):
        text = canvas.beginText(72, 760)
        text.setFont("Helvetica", 10, leading=12)
        for line in lines:
            text.textLine(line)
        canvas.drawText(text)
        if draw is not None:
            draw(canvas, number)
        canvas.showPage()
    canvas.save()
    return path


def write_docx(path: Path, text: str = SENTENCE) -> Path:
    """A document with a title, a heading, text, a list and a table."""
    document = docx.Document()
    document.core_properties.title = "On catalysts"
    document.add_heading("Catalysts", 0)
    document.add_heading("Kinds", 2)
    document.add_paragraph(text)
    for item in ("homogeneous", "heterogeneous"):
        document.add_paragraph(item, style="List Bullet")
    for item in ("first", "second"):
        document.add_paragraph(item, style="List Number")
    table = document.add_table(2, 2)
    for number, cell in enumerate(["Metal", "Use", "Nickel", "Margarine"]):
        table.cell(number // 2, number % 2).text = cell
    document.add_paragraph("The end.")
    document.save(str(path))
    return path


def chapter(body: str) -> str:
    """An XHTML file of an EPUB."""
    return (
        '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">'
        f"<head><title/></head><body>{body}</body></html>"
    )


def write_epub(
    path: Path,
    chapters: Mapping[str, str],
    extra: Mapping[str, str] | None = None,
    title: str = "The book",
) -> Path:
    """A book of files name -> XHTML, to be read in the reverse order of their names in the manifest."""
    items = "".join(
        f'<item id="{name}" href="text/{name}" media-type="application/xhtml+xml"/>'
        for name in sorted(chapters)
    )
    refs = "".join(f'<itemref idref="{name}"/>' for name in sorted(chapters, reverse=True))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>{title}</dc:title></metadata><manifest>{items}</manifest><spine>{refs}</spine></package>"
    )
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER.format("OPS/book.opf"),
        "OPS/book.opf": package,
    }
    files |= {f"OPS/text/{name}": text for name, text in chapters.items()} | dict(extra or {})
    return write_zip(path, files)


def write_zip(path: Path, files: Mapping[str, str | bytes]) -> Path:
    """A zip file of these files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path
