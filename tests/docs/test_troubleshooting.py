"""docs/troubleshooting.md quotes our messages: each of them must be one that cpt can say."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"  # where a message has a value
SHORTEST = 6  # letters; shorter pieces between values are in every message


def said_by_cpt() -> list[str]:
    """Every text in cpt's source as it is put together, with gaps for values."""
    texts = []
    for path in (ROOT / "cpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else GAP for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                texts.append("".join(parts_of(node)))
    return texts


def parts_of(node: ast.AST) -> list[str]:
    """The pieces of texts that are added."""
    if isinstance(node, ast.BinOp):
        return [*parts_of(node.left), *parts_of(node.right)]
    if isinstance(node, ast.JoinedStr):
        return [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
    return [node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP]


def quoted(page: str) -> list[str]:
    """The lines of its boxes."""
    boxes = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    return [line for box in boxes for line in box.splitlines() if line.strip(". ")]


def can_be_said(line: str, texts: list[str]) -> bool:
    """Whether one of the texts has all pieces of the line, in their order."""
    pieces = [piece.strip() for piece in line.split("...") if len(piece.strip()) >= SHORTEST]
    assert pieces, f"nothing but gaps: {line}"
    return any(has_in_order(text, pieces) for text in texts)


def has_in_order(text: str, pieces: list[str]) -> bool:
    """Whether the pieces stand in the text one after the other."""
    at = 0
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return said_by_cpt()


@pytest.mark.parametrize("line", quoted(PAGE.read_text(encoding="utf-8")), ids=lambda line: line[:50])
def test_each_quoted_message_is_one_of_ours(line, texts):
    assert can_be_said(line, texts), f"no message in cpt/ reads: {line}"


def test_a_message_that_was_reworded_would_be_found(texts):
    assert can_be_said("... is being trained already, by ...", texts)
    assert not can_be_said("... is being trained right now, by ...", texts)
