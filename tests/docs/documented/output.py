"""Whether a program printed what a page shows of it: in this order, numbers and spaces aside, `...` for anything."""

import re
from collections.abc import Sequence

NUMBER = re.compile(r"[+-]?\d[\d,._]*(e[+-]?\d+)?")
HEX = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,64}\b")
RULES = re.compile(r"([━─┄-]){2,}")
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANYTHING = "..."


def not_printed(shown: Sequence[str], printed: str) -> str | None:
    """The first shown line that is not found in what was printed after the one before; None if all are."""
    lines = [plain(line) for line in COLOURS.sub("", printed).replace("\r", "\n").splitlines()]
    at = 0
    for line in shown:
        if plain(line) in ("", ANYTHING):
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in plain(line).split(ANYTHING)))
        while at < len(lines) and not pattern.fullmatch(lines[at]):
            at += 1
        if at == len(lines):
            return line
        at += 1
    return None


def plain(line: str) -> str:
    """The line without what differs from run to run or from screen to screen."""
    line = RULES.sub(r"\1", " ".join(line.split()))
    return NUMBER.sub("#", HEX.sub("#", line))
