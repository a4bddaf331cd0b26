"""Decode text and web pages as browsers do: a byte order mark, a declaration, or UTF-8. Nothing is guessed."""

import codecs
import re
from dataclasses import dataclass

from cpt.contrib.documents.errors import NotConverted

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
PRESCAN, HEAD = (
    1024,
    2**16,
)  # bytes where a declaration counts; where it counts if the page is not UTF-8
# Comments and elements of raw text are matched as a whole, so that no declaration is found inside them.
TOKEN = re.compile(
    rb"""<!--.*?(?:-->|\Z)
    | <(script|style|title|textarea)\b.*?</\1
    | <meta(?=[\s/])(?P<meta>(?:"[^"]*"|'[^']*'|[^'">])*+)>""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
ATTRIBUTE = re.compile(rb"""([^\s=>/"']+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?""")
CONTENT_CHARSET = re.compile(
    r"""charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"']+))""", re.IGNORECASE
)
XML_DECLARATION = re.compile(rb"""<\?xml\s[^>]*?encoding\s*=\s*["']([\w.:-]+)["']""")
EDITOR_LINE = re.compile(rb"(?:-\*-.*?\bcoding:\s*|\bvim?:.*?\b(?:fileencoding|fenc)=)([\w.:-]+)")


@dataclass(frozen=True)
class Decoded:
    text: str
    encoding: str
    num_replaced: int = 0  # bytes that are not valid in the encoding, now U+FFFD


def decode(raw: bytes, kind: str, fallback: str | None = None) -> Decoded:
    """Decode a file of the kind `html`, `xml` or `txt`; `fallback` is the encoding of a file that is not UTF-8 and
    declares none.

    Raises NotConverted if the encoding is unknown."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            return replaced(raw[len(mark) :], encoding)
    declared = declaration(raw[:PRESCAN], kind)
    if declared is not None:
        return replaced(raw, declared)
    text = replaced(raw, "utf-8")
    num_foreign = sum(character > "\x7f" for character in text.text)
    if text.num_replaced * 10 <= num_foreign - text.num_replaced:
        return text
    declared = declaration(raw[:HEAD], kind)
    if declared is not None:
        return replaced(raw, declared)
    if fallback is None:
        what = "it is not UTF-8 and declares no encoding. Name it: --encoding cp1251 (or the one that it has)"
        raise NotConverted("unknown encoding", what)
    try:
        return Decoded(raw.decode(fallback), fallback)
    except UnicodeDecodeError as problem:
        raise NotConverted(
            "not in the given encoding", f"byte {problem.start:,} is not {fallback}"
        ) from problem


def replaced(raw: bytes, encoding: str) -> Decoded:
    text = raw.decode(encoding, errors="replace")
    return Decoded(text, encoding, num_replaced=text.count("\ufffd") if "\ufffd" in text else 0)


def codec_of(label: str) -> str | None:
    """Python's codec for a label of a page (`iso-8859-1` means windows-1252), or None if browsers know no such label.

    Raises NotConverted for an encoding that browsers refuse."""
    import webencodings

    encoding = webencodings.lookup(label)
    if encoding is None:
        return None
    if encoding.name == "replacement":
        raise NotConverted(
            "unknown encoding", f"it declares {label}, which browsers refuse. Save it as UTF-8"
        )
    special = {
        "utf-16le": "utf-8",
        "utf-16be": "utf-8",
        "x-user-defined": "cp1252",
        "gbk": "gb18030",
    }
    return special.get(encoding.name, encoding.codec_info.name)


def declaration(head: bytes, kind: str) -> str | None:
    """Python's codec for the encoding that the beginning of a file declares."""
    if kind == "txt":
        lines = b"\n".join(head.split(b"\n", 2)[:2])
        return next(
            filter(None, (codec_of(label.decode()) for label in EDITOR_LINE.findall(lines))), None
        )
    xml = XML_DECLARATION.match(head.lstrip())
    in_xml = codec_of(xml[1].decode()) if xml else None
    return (in_xml or meta_charset(head)) if kind == "xml" else (meta_charset(head) or in_xml)


def meta_charset(head: bytes) -> str | None:
    """Python's codec for the first <meta> with a label that browsers know."""
    for token in TOKEN.finditer(head):
        attributes: dict[str, str] = {}
        for name, *values in ATTRIBUTE.findall(token["meta"] or b""):
            attributes.setdefault(
                name.decode("latin-1").lower(), b"".join(values).decode("latin-1")
            )
        label = attributes.get("charset")
        if label is None and attributes.get("http-equiv", "").strip().lower() == "content-type":
            content = CONTENT_CHARSET.search(attributes.get("content", ""))
            label = next(filter(None, content.groups()), None) if content else None
        encoding = None if label is None else codec_of(label)
        if encoding is not None:
            return encoding
    return None
