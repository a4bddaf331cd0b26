"""Rewrite what mammoth loses or should not show in DOCX files: equations, text boxes, fields, ruby, hidden text."""

import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import chain
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cpt.contrib.documents.formulas import NO_LAYOUT, Formulas
from cpt.contrib.documents.tex import Untranslatable, local, of_omml

PARTS = ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml")
MARGIN = re.compile(r"word/(?:header|footer)\d*\.xml")
UNWRAPPED = ("fldSimple", "bdo", "dir")
DELETED = ("del", "moveFrom")
BOXED = ("AlternateContent", "drawing", "pict", "object")
BLANKS = {"ptab": "tab", "cr": "br", "br": "br"}  # mammoth passes over the end of a page
NUMBER = "\ue007"  # before and after the number of a paragraph in a list
IN_LIST = re.compile(rf"(?:^( *)\d+\. )?{NUMBER}(\d+){NUMBER}", re.MULTILINE)
OFF = {"0", "false", "off"}


def rewritten(archive: zipfile.ZipFile, formulas: Formulas) -> bytes:
    """The file with everything in a form that mammoth reads; formulas are marks."""
    styles = styles_of(archive)
    copy = BytesIO()
    with zipfile.ZipFile(copy, "w") as target:
        for member in archive.infolist():
            part = archive.read(member)
            if member.filename in PARTS:
                part = WordPart(formulas, styles).rewritten(part)
            target.writestr(member.filename, part)
    return copy.getvalue()


def with_numbers(text: str) -> str:
    """The Markdown of a document; its ordered lists continue after a paragraph between their items."""
    return IN_LIST.sub(lambda item: "" if item[1] is None else f"{item[1]}{item[2]}. ", text)


def styles_of(archive: zipfile.ZipFile) -> dict[str, Element]:
    if "word/styles.xml" not in archive.namelist():
        return {}
    styles = ElementTree.fromstring(archive.read("word/styles.xml")).iterfind("{*}style")
    return {value_of(style, "styleId"): style for style in styles}


def hidden_in(element: Element) -> bool | None:
    """Whether the properties of a run or a style hide text; None if they leave it open."""
    mark = element.find("{*}rPr/{*}vanish")
    if mark is None:
        return None
    return value_of(mark, "val") not in OFF


def value_of(element: Element | None, name: str) -> str:
    """An attribute of an element in any namespace; empty if it is missing."""
    attributes = {} if element is None else element.attrib
    return next((value for key, value in attributes.items() if key.endswith(f"}}{name}")), "")


def count_dropped(archive: zipfile.ZipFile) -> Counter[str]:
    """The pictures, charts and comments of a document, which are not in its text."""
    text = b"".join(archive.read(name) for name in PARTS if name in archive.namelist())
    counts = {"images": len(re.findall(rb"<\w+:(?:blip|imagedata)\b", text))}
    counts["charts and diagrams"] = len(re.findall(rb"<(?:c:chart|dgm:relIds)\b", text))
    counts["embedded documents"] = len(re.findall(rb"<(?:\w+:altChunk|o:OLEObject)\b", text))
    margins = [name for name in archive.namelist() if MARGIN.match(name)]
    counts["headers and footers"] = len(
        [margin for margin in margins if b":t>" in archive.read(margin)]
    )
    if "word/comments.xml" in archive.namelist():
        counts["comments"] = len(re.findall(rb"<\w+:comment\b", archive.read("word/comments.xml")))
    return Counter({kind: count for kind, count in counts.items() if count})


class WordPart:
    def __init__(self, formulas: Formulas, styles: Mapping[str, Element]) -> None:
        self.formulas = formulas
        self.styles = styles
        self.namespace = ""
        self.paragraph_style = ""
        self.numbers = defaultdict[str, Counter[str]](Counter)  # list -> level -> number
        self.in_result = list[bool]()  # of each open field: past its instruction?

    def rewritten(self, part: bytes) -> bytes:
        tree = ElementTree.fromstring(part)
        self.namespace = re.sub(r"[^}]*$", "", tree.tag)
        self.rewrite(tree, [])
        return ElementTree.tostring(tree, encoding="utf-8")

    def rewrite(self, element: Element, boxes: list[Element]) -> None:
        """Rewrite the children of an element in place."""
        element[:] = self.replaced(element, boxes)

    def replaced(self, elements: Iterable[Element], boxes: list[Element]) -> list[Element]:
        nodes = []
        for element in elements:
            nodes += self.replacements(element, boxes)
        return nodes

    def replacements(self, element: Element, boxes: list[Element]) -> list[Element]:
        """The replacements of an element; the paragraphs of its text boxes are added to `boxes`."""
        name = local(element)
        lost = self.loss(element)
        if lost is not None:
            self.formulas.dropped[lost] += 1
        if name in DELETED:
            return [element]
        if name == "p":
            outer_style = self.paragraph_style
            inside = list[Element]()
            self.paragraph_style = value_of(element.find("{*}pPr/{*}pStyle"), "val")
            self.rewrite(element, inside)
            self.mark_number(element)
            self.paragraph_style = outer_style
            return [element, *inside]
        if name in UNWRAPPED:
            return self.replaced(element, boxes)
        if name == "ruby":  # the reading above the text is dropped, as in HTML
            bases = [base for base in element if local(base) == "rubyBase"]
            return self.replaced(chain.from_iterable(bases), boxes)
        if name in ("oMath", "oMathPara"):
            return self.equations(element)
        if name in BOXED and (text_boxes := boxes_of(element)):
            boxes += self.replaced(text_boxes, boxes)
            return []
        if name in BLANKS:
            return [Element(f"{self.namespace}{BLANKS[name]}")]
        if name == "fldChar":
            self.enter_field(value_of(element, "fldCharType"))
        if (name == "r" and self.is_hidden(element)) or (name == "t" and self.in_instruction()):
            return []
        self.rewrite(element, boxes)
        return [element]

    def mark_number(self, paragraph: Element) -> None:
        style = self.styles.get(self.paragraph_style)
        for source in (paragraph, style):
            item = None if source is None else source.find("{*}pPr/{*}numPr")
            if item is None:
                continue
            level = value_of(item.find("{*}ilvl"), "val") or "0"
            numbers = self.numbers[value_of(item.find("{*}numId"), "val")]
            numbers[level] += 1
            for deeper in [other for other in numbers if other > level]:
                del numbers[deeper]
            if paragraph.findtext(".//{*}t"):
                paragraph.insert(1, self.run(f"{NUMBER}{numbers[level]}{NUMBER}"))
            return

    def loss(self, element: Element) -> str | None:
        """The kind of content that the text loses by this element itself."""
        name = local(element)
        if name == "ruby":
            return "readings"
        if name in DELETED and any(local(part) == "delText" for part in element.iter()):
            return "deleted text"
        if name == "r" and element.findtext("{*}t") and self.is_hidden(element):
            return "hidden text"
        if name == "t" and self.in_instruction():
            return "values in the instructions of fields"
        if name == "instrText" and (element.text or "").split()[:1] == ["EQ"]:
            return "formulas in fields"
        return None

    def in_instruction(self) -> bool:
        """Whether this is the result of a field in the instruction of another, which Word does not show."""
        return not all(self.in_result[:-1])

    def is_hidden(self, run: Element) -> bool:
        """Whether a run is hidden by its own mark, or else by its style, or that of its paragraph."""
        style = value_of(run.find("{*}rPr/{*}rStyle"), "val")
        marks = (hidden_in(run), self.hidden_by(style), self.hidden_by(self.paragraph_style))
        return next((mark for mark in marks if mark is not None), False)

    def hidden_by(self, name: str) -> bool | None:
        style = self.styles.get(name)
        if style is None:
            return None
        mark = hidden_in(style)
        base = value_of(style.find("{*}basedOn"), "val")
        if mark is None and base != name:
            return self.hidden_by(base)
        return mark

    def enter_field(self, kind: str) -> None:
        if kind == "begin":
            self.in_result.append(False)
        elif kind == "separate" and self.in_result:
            self.in_result[-1] = True
        elif kind == "end" and self.in_result:
            self.in_result.pop()

    def equations(self, element: Element) -> list[Element]:
        display = local(element) == "oMathPara"
        if display:
            equations = [child for child in element if local(child) == "oMath"]
        else:
            equations = [element]
        return [self.run(" ".join(self.equation(equation, display) for equation in equations))]

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


def boxes_of(element: Element) -> list[Element]:
    """The contents of the text boxes of a drawing, without the copy for old versions of Word."""
    if local(element) == "Fallback":
        return []
    if local(element) == "txbxContent":
        return list(element)
    boxes = []
    for child in element:
        boxes += boxes_of(child)
    return boxes
