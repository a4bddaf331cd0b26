"""Decode text and web pages as browsers do: a byte order mark, a declaration, or UTF-8. Nothing is guessed."""

import codecs
import re
from contextlib import suppress
from dataclasses import dataclass

from cpt.contrib.documents.errors import NotConverted

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
PRESCAN = 1024  # bytes where a declaration counts
HEAD = 2**16  # bytes where it counts if the page is not UTF-8
# Comments, raw text and tags are matched as a whole, so that no declaration is found inside them.
TOKEN = re.compile(
    rb"""<!--(?:-?>|.*?(?:-->|\Z))
    | <(script|style|title|textarea)\b.*?</\1
    | <(?:meta(?=[\s/])(?P<meta>)|[a-z/])(?P<attributes>(?:=\s*(?:"[^"]*"|'[^']*')|[^>])*+)>""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
ATTRIBUTE = re.compile(rb"""([^\s=>/"']+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?""")
CONTENT_CHARSET = re.compile(
    r"""charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"']+))""", re.IGNORECASE
)
XML_DECLARATION = re.compile(rb"""<\?xml\s[^>]*?encoding\s*=\s*["']([\w.:-]+)["']""")
WIDE_DECLARATION = {"<?x".encode(codec): codec for codec in ("utf-16-le", "utf-16-be")}
EDITOR_LINE = re.compile(
    rb"(?:-\*-.*?\bcoding:\s*|\bvim?:.*?\b(?:fileencoding|fenc)=)([\w.:-]+?)(?:-unix|-dos|-mac)?(?![\w.:-])"
)


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
    for start, encoding in WIDE_DECLARATION.items():
        if kind != "txt" and raw.startswith(start):
            return replaced(raw, encoding)
    declared = declaration(raw[:PRESCAN], kind)
    if declared is not None:
        return replaced(raw, declared)
    is_wide = fallback is not None and fallback.startswith("utf-16") and b"\0" in raw
    text = replaced(raw, "utf-8")
    num_foreign = sum(character > "\x7f" for character in text.text)
    if text.num_replaced * 10 <= num_foreign - text.num_replaced and not is_wide:
        return text
    if kind != "txt":
        declared = meta_charset(raw[:HEAD])
    if declared is not None:
        return replaced(raw, declared)
    if fallback is None:
        remedy = "it is not UTF-8 and declares no encoding. Name it: --encoding cp1251 (or the one that it has)"
        raise NotConverted("unknown encoding", remedy)
    decoded = replaced(raw, fallback)
    if decoded.num_replaced:
        try:
            raw.decode(fallback)
        except UnicodeDecodeError as problem:
            detail = f"byte {problem.start:,} is not {fallback}"
            raise NotConverted("not in the given encoding", detail) from problem
    return decoded


def replaced(raw: bytes, encoding: str) -> Decoded:
    text = raw.decode(encoding, errors=vendor_character.__name__)
    return Decoded(text, encoding, num_replaced=text.count("\ufffd") if "\ufffd" in text else 0)


def vendor_character(problem: UnicodeError) -> tuple[str, int]:
    """Read as browsers do where Python's codec fails: the euro in Chinese, NEC's and IBM's characters in Japanese."""
    assert isinstance(problem, UnicodeDecodeError)
    start = problem.start
    pair = problem.object[start : start + 2]
    if problem.encoding == "gb18030" and pair[0] == 0x80:
        return "\u20ac", start + 1
    lowest = {"euc_jp": 0xA1, "iso2022_jp": 0x21}.get(problem.encoding, 0xFF)
    if len(pair) == 2 and all(lowest <= byte < lowest + 94 for byte in pair):
        # The same cell of the table in Shift_JIS, whose codec in Python has these characters.
        lead, trail = divmod((pair[0] - lowest) * 94 + pair[1] - lowest, 188)
        lead += 0x81 if lead < 0x1F else 0xC1
        trail += 0x40 if trail < 0x3F else 0x41
        return bytes([lead, trail]).decode("cp932", "replace")[:1], start + 2
    return "\ufffd", problem.end


codecs.register_error(vendor_character.__name__, vendor_character)


def codec_named(name: str) -> str | None:
    """Python's codec for a name that browsers or Python know (`latin-1` means windows-1252), otherwise None."""
    try:
        b"".decode(name)  # also fails for codecs of other things than text
        own_name = codecs.lookup(name).name
    except LookupError:
        own_name = None
    for label in (name, (own_name or "").replace("_", "-")):
        with suppress(NotConverted):
            codec = codec_of(label)
            if codec is not None:
                return codec
    return own_name


def codec_of(label: str) -> str | None:
    """Python's codec for a label of a page (`iso-8859-1` means windows-1252), or None if browsers do not know it.

    Raises NotConverted for an encoding that browsers refuse."""
    import webencodings

    encoding = webencodings.lookup(label)
    if encoding is None:
        return None
    if encoding.name == "replacement":
        raise NotConverted(
            "unknown encoding", f"it declares {label}, which browsers refuse. Save it as UTF-8"
        )
    special = {"x-user-defined": "cp1252", "gbk": "gb18030"}
    return special.get(encoding.name, encoding.codec_info.name)


def declaration(head: bytes, kind: str) -> str | None:
    """Python's codec for the encoding that the beginning of a file declares."""
    if kind == "txt":
        lines = b"\n".join(head.split(b"\n", 2)[:2])
        codecs_named = (codec_named(label.decode()) for label in EDITOR_LINE.findall(lines))
        return next((as_declared(codec) for codec in codecs_named if codec is not None), None)
    xml = XML_DECLARATION.match(head.lstrip())
    in_xml = as_declared(codec_of(xml[1].decode())) if xml else None
    if kind == "xml":
        return in_xml
    return meta_charset(head) or in_xml


def as_declared(codec: str | None) -> str | None:
    """A declaration that was read as ASCII is not in UTF-16, whatever it says."""
    if codec is not None and codec.startswith("utf-16"):
        return "utf-8"
    return codec


def meta_charset(head: bytes) -> str | None:
    """Python's codec for the first <meta> with a label that browsers know."""
    for token in TOKEN.finditer(head):
        attributes: dict[str, str] = {}
        content_of_meta = token["attributes"] if token["meta"] is not None else b""
        for name, *values in ATTRIBUTE.findall(content_of_meta):
            attributes.setdefault(
                name.decode("latin-1").lower(), b"".join(values).decode("latin-1")
            )
        label = attributes.get("charset")
        if label is None and attributes.get("http-equiv", "").strip().lower() == "content-type":
            content = CONTENT_CHARSET.search(attributes.get("content", ""))
            label = next(filter(None, content.groups()), None) if content else None
        encoding = None if label is None else as_declared(codec_of(label))
        if encoding is not None:
            return encoding
    return None
