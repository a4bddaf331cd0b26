"""Rewrite what mammoth passes over in DOCX files: equations, text boxes, simple fields, ruby, directions of text."""

import re
import zipfile
from collections import Counter
from collections.abc import Iterable
from io import BytesIO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cpt.contrib.documents.formulas import NO_LAYOUT, Formulas
from cpt.contrib.documents.tex import Untranslatable, local, of_omml

PARTS = ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml")
PASSED_OVER = re.compile(rb":(?:oMath|fldSimple|txbxContent|ruby|dir|bdo|ptab|cr|vanish)\b")
MARGIN = re.compile(r"word/(?:header|footer)\d*\.xml")
UNWRAPPED = ("fldSimple", "bdo", "dir")
DELETED = ("del", "moveFrom")
OFF = {"0", "false", "off"}


def rewritten(archive: zipfile.ZipFile, raw: bytes, formulas: Formulas) -> bytes:
    """The file with everything in a form that mammoth reads; formulas are marks."""
    parts = {name: archive.read(name) for name in PARTS if name in archive.namelist()}
    changed = {
        name: WordPart(formulas).rewritten(part)
        for name, part in parts.items()
        if PASSED_OVER.search(part)
    }
    if not changed:
        return raw
    copy = BytesIO()
    with zipfile.ZipFile(copy, "w") as target:
        for member in archive.infolist():
            target.writestr(member.filename, changed.get(member.filename) or archive.read(member))
    return copy.getvalue()


def count_dropped(archive: zipfile.ZipFile) -> Counter[str]:
    """The pictures, charts and comments of a document, which are not in its text."""
    text = b"".join(archive.read(name) for name in PARTS if name in archive.namelist())
    counts = {"images": len(re.findall(rb"<\w+:(?:blip|imagedata)\b", text))}
    counts["charts and diagrams"] = len(re.findall(rb"<(?:c:chart|dgm:relIds)\b", text))
    margins = [name for name in archive.namelist() if MARGIN.match(name)]
    counts["headers and footers"] = len([one for one in margins if b":t>" in archive.read(one)])
    if "word/comments.xml" in archive.namelist():
        counts["comments"] = len(re.findall(rb"<\w+:comment\b", archive.read("word/comments.xml")))
    return Counter({kind: count for kind, count in counts.items() if count})


class WordPart:
    def __init__(self, formulas: Formulas) -> None:
        self.formulas = formulas
        self.namespace = ""

    def rewritten(self, part: bytes) -> bytes:
        tree = ElementTree.fromstring(part)
        self.namespace = re.sub(r"[^}]*$", "", tree.tag)
        self.rewrite(tree, [])
        return ElementTree.tostring(tree, encoding="utf-8")

    def rewrite(self, element: Element, boxes: list[Element]) -> None:
        """Rewrite the children of an element in place."""
        element[:] = self.replaced(element, boxes)

    def replaced(self, elements: Iterable[Element], boxes: list[Element]) -> list[Element]:
        return [new for element in elements for new in self.replacements(element, boxes)]

    def replacements(self, element: Element, boxes: list[Element]) -> list[Element]:
        """What takes the place of an element; the paragraphs of its text boxes are added to `boxes`."""
        name = local(element)
        if name in DELETED:
            return [element]
        if name == "p":
            inside = list[Element]()
            self.rewrite(element, inside)
            return [element, *inside]
        if name == "r" and is_hidden(element):
            if element.findtext("{*}t"):
                self.formulas.dropped["hidden text"] += 1
            return []
        if name in UNWRAPPED:
            return self.replaced(element, boxes)
        if name == "ruby":  # the reading above the text is dropped, as in HTML
            self.formulas.dropped["readings"] += 1
            return [
                new
                for base in element
                if local(base) == "rubyBase"
                for new in self.replaced(base, boxes)
            ]
        if name in ("oMath", "oMathPara"):
            return self.equations(element)
        if name in ("AlternateContent", "drawing") and (found := boxes_of(element)):
            boxes += self.replaced(found, boxes)
            return []
        if name in ("ptab", "cr"):
            return [Element(f"{self.namespace}{'tab' if name == 'ptab' else 'br'}")]
        self.rewrite(element, boxes)
        return [element]

    def equations(self, element: Element) -> list[Element]:
        display = local(element) == "oMathPara"
        equations = (
            [child for child in element if local(child) == "oMath"] if display else [element]
        )
        return [self.run(self.equation(equation, display)) for equation in equations]

    def equation(self, element: Element, display: bool) -> str:
        try:
            return self.formulas.mark(of_omml(element), display=display)
        except Untranslatable:
            self.formulas.dropped[NO_LAYOUT] += 1
            return "".join(part.text or "" for part in element.iter() if local(part) == "t")

    def run(self, text: str) -> Element:
        run = Element(f"{self.namespace}r")
        ElementTree.SubElement(run, f"{self.namespace}t").text = text
        return run


def is_hidden(run: Element) -> bool:
    mark = run.find("{*}rPr/{*}vanish")
    return mark is not None and OFF.isdisjoint(mark.attrib.values())


def boxes_of(element: Element) -> list[Element]:
    """The contents of the text boxes of a drawing, without the copy for old versions of Word."""
    if local(element) == "Fallback":
        return []
    if local(element) == "txbxContent":
        return list(element)
    return [content for child in element for content in boxes_of(child)]
