"""docs/ideas.md names files, functions and tables of cpt: each of them must be there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(\w+)` in \[[^\]]*\]\(\.\./([^)]+)\)", PAGE)
LINKED = sorted(set(re.findall(r"\]\(\.\./([^)]+)\)", PAGE)))


def names_in(path: str) -> set[str]:
    """Functions, classes and methods of a file, and what it assigns at the top."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [
        node.targets if isinstance(node, ast.Assign) else [node.target]
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    return defined | {one.id for some in targets for one in some if isinstance(one, ast.Name)}


@pytest.mark.parametrize(("name", "path"), NAMED, ids=lambda value: value)
def test_each_name_is_in_its_file(name, path):
    assert name in names_in(path), f"{path} has no `{name}`"


@pytest.mark.parametrize("path", LINKED)
def test_each_file_is_there(path):
    assert (ROOT / path).exists()


def test_the_tables_are_read():
    assert len(NAMED) > 25 and len(LINKED) > 30


def test_the_classes_of_the_last_section_exist():
    last = PAGE.partition("## Where there are classes")[2]
    names = {name for path in (ROOT / "cpt").rglob("*.py") for name in names_in(str(path.relative_to(ROOT)))}
    assert set(re.findall(r"`([A-Z]\w+)`", last)) <= names
