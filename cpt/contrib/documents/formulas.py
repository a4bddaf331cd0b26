"""Find the formulas of web pages, each once, as TeX: KaTeX, MathJax, MathML, Wikipedia.

A formula is kept from the conversion to Markdown by a mark in its place, which becomes TeX between dollars at last."""

import re
from collections import Counter
from typing import Any
from urllib.parse import unquote

from cpt.contrib.documents.tex import Untranslatable, local, of_mathml

FORMULA = "\ue003"  # before and after the number of a formula
MARK = re.compile(f"{FORMULA}(\\d+){FORMULA}")
HINTS = re.compile(
    r"<math\b|<m:math\b|math/|katex|mathjax|mjx-|mwe-math|latex|\btex\b", re.IGNORECASE
)
STYLE = re.compile(r"\{\\(?:displaystyle|textstyle)\b\s*(.*)\}", re.DOTALL)
DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
RENDERED = re.compile(  # classes of what MathJax 2 draws
    r"MathJax(_Preview|_Display|_SVG|_SVG_Display|_CHTML|_MathML|_MathContainer)?|MJXc-display|mjx-chtml"
)
IMAGES = {"tex", "latex", "mwe-math-fallback-image-inline", "mwe-math-fallback-image-display"}
IMAGE_SOURCES = re.compile(r"latex\.php|\?tex=|codecogs\.com|/math/render/|images/math/")
NO_LAYOUT = "formulas without their layout"


class Formulas:
    """The formulas of a document, numbered, and how many could not be kept."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.dropped = Counter[str]()

    def mark(self, tex: str, *, display: bool = False) -> str:
        """Keep a formula, and return the mark for its place."""
        tex = " ".join(tex.split())
        for before, after in DELIMITERS:
            if tex.startswith(before) and tex.endswith(after) and len(tex) >= len(before + after):
                tex = tex[len(before) : -len(after)].strip()
                display = display or before in ("\\[", "$$")
                break
        styled = STYLE.fullmatch(tex)
        if styled and is_balanced(styled[1]):
            tex = styled[1].strip()
        dollars = "$$" if display else "$"
        self.texts.append(f"{dollars}{tex}{dollars}" if tex else "")
        return f"{FORMULA}{len(self.texts) - 1}{FORMULA}"

    def restore(self, text: str) -> str:
        return "\n".join(map(self.restored, text.split("\n")))

    def restored(self, line: str) -> str:
        return MARK.sub(lambda mark: self.tex(int(mark[1]), line.startswith("|")), line)

    def tex(self, number: int, in_table: bool) -> str:
        tex = self.texts[number]
        if in_table:  # a bar would end its cell
            tex = tex.replace(r"\|", r"\Vert ").replace("|", r"\vert ")
        return tex


def is_balanced(tex: str) -> bool:
    """Whether no brace closes a group that was opened before the text."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", tex):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def mark_formulas(page: str, formulas: Formulas) -> str:
    """Replace the formulas of a page by marks; a page without any is returned as it is."""
    if not HINTS.search(page):
        return page
    import lxml.html

    parser = lxml.html.HTMLParser(
        encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    tree = lxml.html.document_fromstring(page.encode("utf-8", "replace"), parser=parser)
    sources = set()
    for script in tree.iter("script"):
        if is_math_script(script):
            sources.add(str(script.get("id")))
    elements = list(tree.iter())
    for element in elements:
        if isinstance(element.tag, str) and tree in element.iterancestors():
            replace_formula(element, formulas, sources)
    if len(list(tree.iter())) == len(elements):
        return page
    return lxml.html.tostring(tree, encoding="unicode")


def replace_formula(element: Any, formulas: Formulas, sources: set[str]) -> None:
    classes = set((element.get("class") or "").split())
    name = local(element)
    is_drawn = any(map(RENDERED.fullmatch, classes))
    if is_math_script(element):
        keep_script(element, formulas)
    elif is_drawn and (follows_source(element, sources) or "MathJax_Preview" in classes):
        put(element, "")  # its script follows
    elif classes & {"katex", "katex-display", "mwe-math-element"} or name in (
        "math",
        "mjx-container",
    ):
        keep_rendered(element, formulas, classes)
    elif element.get("data-mathml"):
        keep_mathml(element, element.get("data-mathml"), formulas, "MathJax_Display" in classes)
    elif is_drawn and element.find(".//math") is not None:  # for screen readers
        keep_rendered(element, formulas, classes)
    elif name == "img":
        tex = tex_of_image(element, classes)
        if tex:
            put(element, formulas.mark(tex))


def tex_of_image(image: Any, classes: set[str]) -> str | None:
    source = image.get("src") or ""
    if not (classes & IMAGES or IMAGE_SOURCES.search(source)):
        return None
    return image.get("alt") or unquote(source.partition("codecogs.com")[2].partition("?")[2])


def is_math_script(element: Any) -> bool:
    return element.tag == "script" and (element.get("type") or "").lower().startswith("math/")


def follows_source(element: Any, sources: set[str]) -> bool:
    """Whether the element is what MathJax 2 has drawn of a script of the page."""
    names = [part.get("id") or "" for part in element.iter() if isinstance(part.tag, str)]
    of_mathjax = [name for name in names if name.startswith("MathJax-Element")]
    return any(name.removesuffix("-Frame") in sources for name in of_mathjax)


def keep_script(script: Any, formulas: Formulas) -> None:
    kind = script.get("type").lower()
    content = (script.text or "").strip()
    content = re.sub(r"^(?:%\s*)?<!\[CDATA\[|(?:%\s*)?\]\]>$", "", content).strip()
    display = "mode=display" in kind.replace(" ", "")
    if kind.startswith("math/mml"):
        keep_mathml(script, content, formulas, display)
    elif kind.startswith("math/tex"):
        put(script, formulas.mark(content, display=display))
    else:
        put(script, content)  # AsciiMath is text


def keep_mathml(element: Any, content: str, formulas: Formulas, display: bool) -> None:
    import lxml.html

    math = lxml.html.fragment_fromstring(content, create_parent="div")
    tex = tex_inside(math)
    if tex is None:
        formulas.dropped[NO_LAYOUT] += 1
    put(element, formulas.mark(tex, display=display) if tex is not None else math.text_content())


def keep_rendered(element: Any, formulas: Formulas, classes: set[str]) -> None:
    """Keep the formula of an element that shows it, often twice: for the eye, and for screen readers."""
    tex = tex_inside(element)
    related = [*element.iterancestors(), *element.iter()]
    display = element.get("display") in ("true", "block") or "katex-display" in classes
    display = display or any(part.get("display") == "block" for part in element.iter("math"))
    display = display or any(
        "-display" in (part.get("class") or "") for part in related if isinstance(part.tag, str)
    )
    if tex is not None:
        put(element, formulas.mark(tex, display=display))
        return
    formulas.dropped[NO_LAYOUT] += 1
    math = next((part for part in element.iter() if local(part) == "math"), element)
    labels = (part.get("aria-label") for part in element.iter() if isinstance(part.tag, str))
    put(element, " ".join(math.text_content().split()) or next(filter(None, labels), ""))


def tex_inside(element: Any) -> str | None:
    """The TeX that the element holds; otherwise that of its MathML; or None."""
    parts = [part for part in element.iter() if isinstance(part.tag, str)]
    for part in parts:
        if local(part) == "annotation" and "tex" in (part.get("encoding") or "").lower():
            return part.text_content()
    for part in parts:
        if part.get("data-latex"):
            return str(part.get("data-latex"))
        if part.get("alttext") and (
            "\\" in part.get("alttext") or "ltx" in (part.get("class") or "")
        ):
            return str(part.get("alttext"))
        if part.tag == "img" and part.get("alt"):
            return str(part.get("alt"))
    math = next((part for part in parts if local(part) == "math"), None)
    try:
        if math is None:
            return None
        return of_mathml(math)
    except Untranslatable:
        return None


def put(element: Any, text: str) -> None:
    """Put text in the place of an element."""
    tail = element.tail or ""
    parent = element.getparent()
    previous = element.getprevious()
    if previous is not None:
        previous.tail = (previous.tail or "") + text + tail
    else:
        parent.text = (parent.text or "") + text + tail
    element.tail = None
    parent.remove(element)
