"""Translate MathML and Word's equations (OMML) to TeX, as far as both can be read as the same few structures."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Untranslatable(ValueError):  # noqa: N818 -- always caught
    """The formula has a structure that is not translated."""


COMMANDS = """
    ∑ sum  ∏ prod  ∐ coprod  ∫ int  ∬ iint  ∭ iiint  ∮ oint  ⋃ bigcup  ⋂ bigcap  ⨁ bigoplus  ⨂ bigotimes
    ∞ infty  ∂ partial  ∇ nabla  ± pm  ∓ mp  × times  ÷ div  ⋅ cdot  · cdot  ∘ circ  ⊕ oplus  ⊗ otimes
    ≤ le  ≥ ge  ≠ ne  ≈ approx  ≡ equiv  ∼ sim  ≃ simeq  ≅ cong  ∝ propto  ≪ ll  ≫ gg  ⊥ perp  ∥ parallel
    ∈ in  ∉ notin  ⊂ subset  ⊆ subseteq  ⊃ supset  ⊇ supseteq  ∪ cup  ∩ cap  ∖ setminus  ∅ emptyset
    ∀ forall  ∃ exists  ∧ land  ∨ lor  ¬ neg  → to  ← leftarrow  ↔ leftrightarrow  ⇒ Rightarrow
    ⇔ Leftrightarrow  ↦ mapsto  … dots  ⋯ cdots  ⋮ vdots  ⋱ ddots  † dagger  ℏ hbar  ℓ ell
    ⟨ langle  ⟩ rangle  ⌊ lfloor  ⌋ rfloor  ⌈ lceil  ⌉ rceil  ‖ Vert  \\ backslash
"""
SYMBOLS = {sign: f"\\{name}" for sign, name in re.findall(r"(\S) (\w+)", COMMANDS)}
SYMBOLS |= {letter: f"\\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "ℝℤℕℂℚ"}
SYMBOLS |= {character: f"\\{character}" for character in "#$%&_{}"}
SYMBOLS |= {"\u2212": "-", "\u00a0": " ", "\u2032": "'"}
SYMBOLS |= dict.fromkeys("\u200b\u2061\u2062\u2063\u2064", "")  # signs that are not shown
GREEK = re.compile(r"GREEK (SMALL|CAPITAL) LETTER (\w+)")
SYMBOLS |= zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧο", "ABEZHIKMNOPTXo", strict=True)  # they lack commands in TeX


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = words(
    """sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp lim max min sup inf det dim gcd arg
    deg ker Pr"""
)
LARGE = words(r"\sum \prod \int \iint \iiint \oint \bigcup \bigcap \lim \max \min \sup \inf")
ACCENTS = {
    "^": "\\hat",
    "\u02c6": "\\hat",
    "\u0302": "\\hat",
    "\u02c7": "\\check",
    "\u030c": "\\check",
    "~": "\\tilde",
    "\u0303": "\\tilde",
    "\u0304": "\\bar",
    "\u0305": "\\overline",
    "_": "\\underline",
    "\u0332": "\\underline",
    "\u0300": "\\grave",
    "\u0301": "\\acute",
    "\u0306": "\\breve",
    "\u0307": "\\dot",
    "\u0308": "\\ddot",
    "\u20db": "\\dddot",
    "\u2192": "\\vec",
    "\u20d7": "\\vec",
    "\u23de": "\\overbrace",
    "\u23df": "\\underbrace",
}


def glue(parts: Iterable[str]) -> str:
    """Join TeX; a blank separates a command, or what is raised or lowered, from a letter after it."""
    formula = ""
    for part in parts:
        formula += (
            " " if re.search(r"\\[A-Za-z]+$|[\^_]\w$", formula) and part[:1].isalnum() else ""
        )
        formula += part
    return formula


def symbols(text: str) -> str:
    return glue(map(symbol, text))


def symbol(character: str) -> str:
    if "\U0001d400" <= character <= "\U0001d7ff":  # bold or italic letters of mathematics
        character = unicodedata.normalize("NFKC", character)
    if character in SYMBOLS:
        return SYMBOLS[character]
    greek = GREEK.fullmatch(unicodedata.name(character, ""))
    if greek is None:
        return character
    name = greek[2].lower().replace("lamda", "lambda")
    return "\\" + (name.capitalize() if greek[1] == "CAPITAL" else name)


def identifier(text: str) -> str:
    if text in FUNCTIONS:
        return f"\\{text}"
    if len(text) > 1 and text.isalpha() and text.isascii():
        return f"\\mathrm{{{text}}}"
    return symbols(text)


def operator(text: str) -> str:
    if text in FUNCTIONS:
        return f"\\{text}"
    return symbols(text)


def in_text(text: str) -> str:
    escaped = re.sub(r"([#$%&_{}])", r"\\\1", text)
    if text.strip():
        return f"\\text{{{escaped}}}"
    return " "


def base(tex: str) -> str:
    """An argument of ^ and _, or what they are attached to."""
    if re.fullmatch(r"[^\\{}\s]|\\[A-Za-z]+|\\text\{\w*\}", tex):
        return tex
    return f"{{{tex}}}"


def attached(tex: str, sub: str = "", sup: str = "") -> str:
    sub = sub and f"_{base(sub)}"
    sup = sup and f"^{base(sup)}"
    return (base(tex) if tex else "{}") + sub + sup


def matrix(rows: Sequence[Sequence[str]], name: str = "matrix") -> str:
    return (
        f"\\begin{{{name}}} " + " \\\\ ".join(" & ".join(row) for row in rows) + f" \\end{{{name}}}"
    )


def root(tex: str, degree: str = "") -> str:
    if degree:
        return f"\\sqrt[{degree}]{{{tex}}}"
    return f"\\sqrt{{{tex}}}"


def fraction(top: str, bottom: str) -> str:
    return f"\\frac{{{top}}}{{{bottom}}}"


def local(element: Any) -> str:
    """The name of an element without its namespace."""
    if isinstance(element.tag, str):
        return re.sub(r"^(\{.*\}|\w+:)", "", element.tag)
    return ""


# --- MathML ---


def of_mathml(element: Any) -> str:
    """TeX of an element of presentation MathML. Raises Untranslatable."""
    name = local(element)
    text = " ".join((element.text or "").split())
    if name in TOKENS:
        return TOKENS[name](text)
    children = []
    for child in element:
        if local(child) and not local(child).startswith("annotation"):
            children.append(of_mathml(child))
    if name in GROUPS:
        return glue(children).strip()
    if name == "msqrt":
        return root(glue(children).strip())
    if name in STRUCTURES and len(children) == STRUCTURES[name][0]:
        return STRUCTURES[name][1](*children)
    if name == "mfrac" and len(children) == 2:
        has_line = element.get("linethickness", "1").rstrip("pxtem.") not in ("0", "")
        if has_line:
            return fraction(*children)
        return f"{{{children[0]} \\atop {children[1]}}}"
    if name == "mfenced":
        separator = element.get("separators", ",").strip()[:1]
        inner = separator.join(children)
        return symbols(element.get("open", "(")) + inner + symbols(element.get("close", ")"))
    if name in ("mphantom", "none", "mprescripts"):
        return ""
    if name == "mtable":
        return matrix([cells(row) for row in element if local(row)])
    raise Untranslatable(name)


def cells(row: Any) -> list[str]:
    return [of_mathml(cell) for cell in row if local(cell) == "mtd"]


def over(tex: str, mark: str) -> str:
    accent = accent_of(mark)
    if accent is not None:
        return f"{accent}{{{tex}}}"
    if has_limits(tex):
        return f"{tex}^{base(mark)}"
    return f"\\overset{{{mark}}}{{{tex}}}"


def under(tex: str, mark: str) -> str:
    accent = accent_of(mark)
    if accent is not None:
        return f"{accent.replace('bar', 'underline').replace('over', 'under')}{{{tex}}}"
    if has_limits(tex):
        return f"{tex}_{base(mark)}"
    return f"\\underset{{{mark}}}{{{tex}}}"


def accent_of(mark: str) -> str | None:
    """The command of an accent, which formulas have as a combining character or with a blank (NFKD)."""
    return ACCENTS_IN_TEX.get(unicodedata.normalize("NFKD", mark).strip())


def has_limits(tex: str) -> bool:
    return tex in LARGE or tex.startswith(("\\overbrace", "\\underbrace"))


def under_over(tex: str, low: str, high: str) -> str:
    if tex in LARGE:
        return attached(tex, low, high)
    return over(under(tex, low), high)


ACCENTS_IN_TEX = {symbols(mark): command for mark, command in ACCENTS.items()}
TOKENS: dict[str, Callable[[str], str]] = {"mi": identifier, "mn": symbols, "mo": operator}
TOKENS |= {"mtext": in_text, "ms": in_text, "mspace": lambda text: " "}
GROUPS = words("math mrow mstyle mpadded menclose merror semantics mtd mtr maction")
STRUCTURES: dict[str, tuple[int, Callable[..., str]]] = {  # number of children, and their TeX
    "msup": (2, lambda tex, sup: attached(tex, sup=sup)),
    "msub": (2, lambda tex, sub: attached(tex, sub=sub)),
    "msubsup": (3, attached),
    "mroot": (2, root),
    "mover": (2, over),
    "munder": (2, under),
    "munderover": (3, under_over),
}


# --- OMML ---


def of_omml(element: Any) -> str:
    """TeX of an element of Word's equations. Raises Untranslatable."""
    name = local(element)
    if name in ("r", "t"):
        return of_run(element)
    if name in WORD_GROUPS:
        return glue(of_omml(child) for child in element if not local(child).endswith("Pr")).strip()
    if name in WORD_STRUCTURES:
        return WORD_STRUCTURES[name](element)
    if any(local(part) == "t" for part in element.iter()) and name not in ("del", "moveFrom"):
        raise Untranslatable(name)
    return ""  # a bookmark, the range of a comment, what was deleted


def of_run(run: Any) -> str:
    text = "".join(part.text or "" for part in run.iter() if local(part) == "t")
    if any(local(part) == "nor" for part in run.iter()):
        return in_text(text)
    parts = []
    for part in re.split(r"([A-Za-z]+)", text):
        parts.append(f"\\{part}" if part in FUNCTIONS else symbols(part))
    return glue(parts)


def part(element: Any, name: str) -> str:
    """TeX of the child of this name; empty if it is missing."""
    return next((of_omml(child) for child in element if local(child) == name), "")


def parts(element: Any, name: str) -> list[str]:
    return [of_omml(child) for child in element if local(child) == name]


def setting(element: Any, name: str, default: str) -> str:
    """The value of a property in the element's `...Pr`; a property without a value is empty, or on."""
    for properties in element:
        if local(properties).endswith("Pr"):
            for element_property in properties:
                if local(element_property) == name:
                    return next(
                        (
                            value
                            for key, value in element_property.attrib.items()
                            if key.endswith("val")
                        ),
                        "",
                    )
    return default


def word_fraction(element: Any) -> str:
    top = part(element, "num")
    bottom = part(element, "den")
    kind = setting(element, "type", "bar")
    if kind == "noBar":
        return f"{{{top} \\atop {bottom}}}"
    if kind == "lin":
        return f"{top}/{bottom}"
    return fraction(top, bottom)


def word_root(element: Any) -> str:
    return root(part(element, "e"), part(element, "deg"))


def word_sum(element: Any) -> str:
    sign = symbols(setting(element, "chr", "\u222b"))
    return f"{word_scripts(element, sign)} {part(element, 'e')}"


def word_scripts(element: Any, tex: str | None = None) -> str:
    """Attach the subscript and the superscript to this TeX, or else to that of the element."""
    if tex is None:
        tex = part(element, "e")
    return attached(tex, part(element, "sub"), part(element, "sup"))


def word_brackets(element: Any) -> str:
    begin = setting(element, "begChr", "(")
    end = setting(element, "endChr", ")")
    inner = f" {symbols(setting(element, 'sepChr', '|'))} ".join(parts(element, "e"))
    return glue([f"\\left{symbols(begin) or '.'}", inner, f"\\right{symbols(end) or '.'}"])


def word_accent(element: Any) -> str:
    return over(part(element, "e"), symbols(setting(element, "chr", "\u0302")))


def word_bar(element: Any) -> str:
    command = "overline" if setting(element, "pos", "bot") == "top" else "underline"
    return f"\\{command}{{{part(element, 'e')}}}"


def word_brace(element: Any) -> str:
    sign = symbols(setting(element, "chr", "\u23df"))
    return (over if setting(element, "pos", "bot") == "top" else under)(part(element, "e"), sign)


def word_matrix(element: Any) -> str:
    return matrix([parts(row, "e") for row in element if local(row) == "mr"])


def word_function(element: Any) -> str:
    return glue([part(element, "fName"), " ", part(element, "e")])


WORD_GROUPS = words(
    """oMath oMathPara e num den sub sup deg fName lim box borderBox phant ins moveTo smartTag sdt sdtContent
    hyperlink"""
)
WORD_STRUCTURES: dict[str, Callable[[Any], str]] = {
    "f": word_fraction,
    "rad": word_root,
    "nary": word_sum,
    "d": word_brackets,
    "acc": word_accent,
    "bar": word_bar,
    "groupChr": word_brace,
    "m": word_matrix,
    "func": word_function,
    "eqArr": lambda element: matrix(  # a `&` aligns, as in TeX
        [[row.replace("\\&", "&")] for row in parts(element, "e")], "aligned"
    ),
    **dict.fromkeys(("sSup", "sSub", "sSubSup"), word_scripts),
    "sPre": lambda element: word_scripts(element, "") + base(part(element, "e")),
    "limLow": lambda element: under(part(element, "e"), part(element, "lim")),
    "limUpp": lambda element: over(part(element, "e"), part(element, "lim")),
}
