"""Text and Markdown, passed on as they are."""

import re
from pathlib import Path

from cpt.documents.converted import Converted, NotConverted

TITLE = re.compile(r"\s*# +(.+)")


def convert_plain(path: Path) -> Converted:
    """The file's text; a Markdown file that begins with a heading has it as its title."""
    raw = path.read_bytes()
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as problem:
        what = f"byte {problem.start:,}: {problem.reason}. Text in Latin-1: iconv -f latin1 -t utf-8"
        raise NotConverted("not UTF-8", what) from problem
    if "\0" in text:
        raise NotConverted("not text", "a NUL byte stands in it")
    title = TITLE.match(text) if path.suffix.lower() in (".md", ".markdown") else None
    return Converted(text.replace("\r\n", "\n").replace("\r", "\n"), title[1].strip() if title else None)
