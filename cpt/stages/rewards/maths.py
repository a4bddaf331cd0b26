r"""A reward for right answers to exercises: the number that a completion comes to, or its last `\boxed{}`.

What cannot be read as a number is compared as text without spaces and decoration. Nothing is computed: `2x+2` is not `2(x+1)`.
"""  # noqa: E501

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from cpt.stages.rewards.texts import Text, text_of

NUMBERS = re.compile(
    r"[-+−]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?\s*\\?%?"
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|quad|,|;|!|:| )|\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|[$\s]|\^\{?\\circ\}?"
)


def maths_answer(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    *,
    column: str = "answer",
    tolerance: float = 1e-6,
    **columns: Sequence[Any],
) -> list[float]:
    r"""1 where a completion comes to the right answer, else 0.

    An answer is what the last `\boxed{}` holds; without one, what stands behind the last `####`; else the last number. Numbers are equal
    as numbers: 0.5, 1/2, \frac{1}{2} and 50% are the same, 1,000 and 1000 too.

    Args:
        column: which column of the data has the answers: numbers, or texts of which the answer is found in the same way.
        tolerance: how far a number may be off, relative to the right one where that is above 1.
    """  # noqa: E501
    pairs = zip(completions, columns[column], strict=True)
    return [float(is_same(found_in(text_of(said)), right(answer), tolerance)) for said, answer in pairs]


def right(answer: Any) -> str:
    """The answer of the data, which may be a whole solution."""
    text = str(answer)
    return marked(text) or text.strip()


def found_in(text: str) -> str:
    """The answer that a completion comes to; nothing where it has no number and marks none."""
    numbers = NUMBERS.findall(text)
    return marked(text) or (numbers[-1].strip() if numbers else "")


def marked(text: str) -> str:
    r"""What a text marks as its answer, in `\boxed{}` or behind `####`."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        return braced(text[start + len("\\boxed") :])
    return text.rpartition("####")[2].strip().split("\n")[0] if "####" in text else ""


def braced(text: str) -> str:
    """The content of the braces that a text begins with, to its end where they are not closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[1:place].strip()
    return text[1:].strip()


def is_same(said: str, answer: str, tolerance: float) -> bool:
    """Whether two answers are equal, as numbers where they are numbers."""
    number, wanted = as_number(said), as_number(answer)
    if number is None or wanted is None:
        return bool(plain(said)) and plain(said) == plain(answer)
    close = Fraction(tolerance) * max(Fraction(1), abs(wanted))
    if abs(number - wanted) <= close:
        return True
    # `50%` is 0.5, but who is asked for a percentage may leave the sign away.
    return ("%" in said) != ("%" in answer) and abs(
        number * (100 if "%" in said else Fraction(1, 100)) - wanted
    ) <= close


def as_number(text: str) -> Fraction | None:
    """A decimal, fraction, mixed number or percentage; None for anything else."""
    bare = plain(text)
    share = Fraction(1, 100) if bare.endswith("%") else Fraction(1)
    bare = bare.removesuffix("%").removesuffix("\\")
    mixed = re.fullmatch(r"([-+]?\d+)\((\d+)/(\d+)\)", bare)
    try:
        if mixed:
            whole, part = int(mixed[1]), Fraction(int(mixed[2]), int(mixed[3]))
            return share * (whole - part if mixed[1].startswith("-") else whole + part)
        above, _, below = bare.replace("(", "").replace(")", "").partition("/")
        return share * Fraction(without_commas(above)) / Fraction(without_commas(below) if below else 1)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def without_commas(number: str) -> str:
    """`1,000,000` as Python reads it; other commas stay."""
    return number.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", number) else number


def plain(text: str) -> str:
    r"""Without spaces, dollars and LaTeX's decoration, behind the last `=`; `\frac{a}{b}` becomes `(a/b)`."""
    bare = DECORATION.sub(lambda found: "".join((found[1] or "").split()), text.replace("−", "-"))
    bare = LATEX_FRACTION.sub(lambda found: f"({found[1] or found[2]}/{found[3] or found[4]})", bare)
    return bare.rpartition("=")[2].strip(".").casefold()
