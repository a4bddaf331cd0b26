"""What does `cpt data ingest` keep of real documents? `python -m benchmarks.documents FOLDER`: 2 minutes on a core.

A small page of each kind of content that converters lose (pages.py) must become exactly the expected text.

FOLDER holds the unpacked Debian packages postgresql-doc-15, python3.11-doc, debian-policy and installation-guide-amd64
(newer ones do as well), for example by `apt-get download NAME` and `dpkg -x NAME_*.deb FOLDER`. The HTML is the
reference: without menus and tables of contents, its words, headings, code blocks and raised characters are what each
conversion should hold. The PDFs and the EPUB are the same texts; titles, page numbers and tables of contents, which
they have besides, count as nothing. Writes benchmarks/results/documents.json.
"""

import argparse
import gzip
import json
import os
import platform
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import lxml.html

from benchmarks.documents.pages import PAGES
from cpt.contrib.documents.charsets import decode
from cpt.contrib.documents.convert import CONVERTERS, with_clean_text

RESULTS = Path(__file__).parents[1] / "results" / "documents.json"
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)
FENCE = re.compile(
    r"^([ >]*(?:(?:\d+\.|-) +)*)```[^\n`]*\n(.*?)\n[ >]*```[ ]*$", re.MULTILINE | re.DOTALL
)
CJK_BLANK, CJK_PAIR = re.compile(rf"(?<=[{CJK}]) +(?=[{CJK}])"), re.compile(rf"[{CJK}](?=[{CJK}])")
LEADERS = re.compile(r"(?:[.\u2026] ?){5,}")
MENUS = ("navheader", "navfooter", "headerlink", "sphinxsidebar", "related", "footer", "toc")
INLINE = {
    "a",
    "abbr",
    "acronym",
    "b",
    "cite",
    "code",
    "del",
    "dfn",
    "em",
    "font",
    "i",
    "ins",
    "kbd",
    "mark",
    "q",
    "s",
    "samp",
    "small",
}
INLINE |= {"span", "strong", "tt", "u", "var"}
GUIDE, POLICY = "usr/share/doc/installation-guide-amd64", "usr/share/doc/debian-policy"
TARGETS = {"words found again": 0.995, "headings kept": 0.95, "code blocks kept": 0.95}
LIMITS = {
    "blanks between CJK characters": 0.001,
    "dot leaders": 0,
    "pilcrows": 0,
    "raised characters glued to the word": 0,
}


@dataclass
class Content:
    words: Counter[str] = field(default_factory=Counter)
    headings: Counter[str] = field(default_factory=Counter)
    code: list[str] = field(default_factory=list)
    raised: list[tuple[str, str]] = field(default_factory=list)
    leaders: int = 0
    blanks: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the unpacked packages")
    folder = parser.parse_args().folder
    rows: list[dict[str, Any]] = []
    for name, page in PAGES.items():
        is_right = page.is_right()
        measurement = {
            "name": f"{name}: the right text",
            "target": ">= 1",
            "measured": int(is_right),
        }
        rows.append({**measurement, "unit": "", "met": is_right})
    for name, glob in {
        "PostgreSQL": "usr/share/doc/postgresql-doc-*/html/*.html",
        "Python": "usr/share/doc/python3*/html/**/*.html",
    }.items():
        pages = sorted(
            {
                page.resolve()
                for page in folder.glob(glob)
                if "genindex" not in page.name and page.name != "search.html"
            }
        )
        rows += measure(
            f"{name}, {len(pages):,} HTML pages",
            [(page.read_bytes(), "html") for page in pages],
            content_of(pages, toc=True),
        )
    policy = content_of(sorted((folder / POLICY / "policy.html").glob("*.html")))
    rows += measure(
        "Debian Policy, EPUB", [((folder / POLICY / "policy.epub").read_bytes(), "epub")], policy
    )
    rows += measure(
        "Debian Policy, PDF",
        [(gzip.decompress((folder / POLICY / "policy.pdf.gz").read_bytes()), "pdf")],
        policy,
    )
    for language in ("en", "de", "ja"):
        raw = gzip.decompress(
            (folder / GUIDE / language / f"install.{language}.pdf.gz").read_bytes()
        )
        rows += measure(
            f"Debian's installation, {language}, PDF",
            [(raw, "pdf")],
            content_of(sorted((folder / GUIDE / language).glob("*.html"))),
        )
    device = f"{platform.machine()}, one of {os.cpu_count()} cores, load at the end {os.getloadavg()[0]:.1f}"
    names = {module.replace("_", "-") for _, modules in CONVERTERS.values() for module in modules}
    libraries = {name: metadata.version(name) for name in sorted(names)}
    RESULTS.write_text(
        json.dumps(
            {
                "device": device,
                "python": platform.python_version(),
                "libraries": libraries,
                "measurements": rows,
            },
            indent=1,
        )
        + "\n"
    )


def content_of(pages: Iterable[Path], *, toc: bool = False) -> Content:
    """What is in HTML pages, read by lxml.

    Args:
        toc: with the tables of contents that chapters begin with.
    """
    content = Content()
    for page in pages:
        tree = lxml.html.document_fromstring(
            decode(page.read_bytes(), "html").text.encode(), lxml.html.HTMLParser(encoding="utf-8")
        )
        for element in list(tree.iter()):
            marks = set(str(element.get("class")).split()) | {element.get("role")}
            is_menu = element.tag in ("script", "style", "head", "nav", "svg") or marks & {
                *MENUS[: None if not toc else -1],
                "navigation",
                "search",
            }
            if element.getparent() is not None and (not isinstance(element.tag, str) or is_menu):
                element.drop_tree()
        content.headings.update(
            key_of(one.text_content()) for one in tree.iter("h1", "h2", "h3", "h4", "h5", "h6")
        )
        content.code += [one.text_content() for one in tree.iter("pre")]
        for one in tree.iter("sup", "sub"):
            previous = one.getprevious()
            before = re.search(
                r"\w+$",
                (
                    one.getparent().text
                    if previous is None
                    else previous.tail or previous.text_content()
                )
                or "",
            )
            if before and re.match(r"[\w-]", one.text_content().strip()):
                content.raised.append((before[0], one.text_content().strip()))
        content.blanks += len(re.findall(rf"(?<=[{CJK}])[ \t]+(?=[{CJK}])", tree.text_content()))
        content.leaders += len(LEADERS.findall(tree.text_content()))
        for element in tree.iter():
            if element.tag not in INLINE:
                element.text, element.tail = f" {element.text or ''} ", f" {element.tail or ''}"
        content.words += words_of(tree.text_content())
    return content


def measure(
    name: str, documents: Sequence[tuple[bytes, str]], content: Content
) -> list[dict[str, Any]]:
    """How much of the content the converted documents hold."""
    started = time.perf_counter()
    text = "\n\n".join(with_clean_text(CONVERTERS[kind][0](raw)).text for raw, kind in documents)
    seconds = time.perf_counter() - started
    code = "\n\0".join(
        without_blank_ends(
            re.sub(
                rf"^ {{1,{len(found[1])}}}" if found[1] else "^(?!)",
                "",
                found[2],
                flags=re.MULTILINE,
            )
        )
        for found in FENCE.finditer(text)
    )
    headings = Counter(map(key_of, HEADING.findall(FENCE.sub("", text))))
    whole = [block for block in map(without_blank_ends, content.code) if block]
    figures = {
        "words found again": 1 - (content.words - words_of(text)).total() / content.words.total(),
        "headings kept": (content.headings & headings).total() / content.headings.total(),
        "code blocks kept": sum(block in code for block in whole) / len(whole),
        "blanks between CJK characters": max(0, len(CJK_BLANK.findall(text)) - content.blanks)
        / max(1, len(CJK_PAIR.findall(text))),
        "dot leaders": max(0, len(LEADERS.findall(text)) - content.leaders),
        "pilcrows": text.count("\u00b6"),
        "raised characters glued to the word": sum(
            f"{a}^{b}" not in text and f"{a}_{b}" not in text and f"({b})" not in text
            for a, b in content.raised
        ),
    }
    return [
        row_of(name, what, value, seconds)
        for what, value in {**figures, "seconds": seconds}.items()
    ]


def row_of(name: str, what: str, value: float, seconds: float) -> dict[str, Any]:
    """A row as results are written; the targets of headings and code are those of HTML."""
    at_least = TARGETS.get(what) if what == "words found again" or "PDF" not in name else None
    target = f">= {at_least}" if at_least else f"<= {LIMITS[what]}" if what in LIMITS else None
    met = value >= at_least if at_least else value <= LIMITS[what] if what in LIMITS else None
    return {
        "name": f"{name}: {what}",
        "target": target,
        "measured": round(value, 5),
        "unit": "s" if what == "seconds" else "",
        "met": met,
    }


def words_of(text: str) -> Counter[str]:
    """Each with how often it occurs; a Chinese or Japanese character is a word."""
    return Counter(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def key_of(heading: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", heading).casefold())


def without_blank_ends(code: str) -> str:
    """Without blanks at the ends of its lines."""
    return re.sub(r"[ \t]+$", "", code, flags=re.MULTILINE).strip("\n")


if __name__ == "__main__":
    main()
