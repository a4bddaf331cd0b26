"""Commands that messages name exist, with their options."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer

from cpt.cli import COMMANDS, application

PACKAGE = Path(__file__).parents[2] / "cpt"


def literals(path: Path) -> list[tuple[int, str]]:
    """The texts of a file with their lines; of an f-string what is written out, with x for each value."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append(
                (node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values))
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append((node.lineno, node.value))
    return found


@cache
def options_of(name: str) -> dict[str, set[str]]:
    """Each subcommand's options, "" for the command itself."""
    command = typer.main.get_command(application(name)).commands[name]  # type: ignore[attr-defined]
    parts = command.commands if hasattr(command, "commands") else {"": command}
    return {
        part: {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for part, found in parts.items()
    }


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Place and text of every literal of the package, names of templates and examples included."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(f"{path.relative_to(PACKAGE)}:{line}", text) for path in files for line, text in literals(path)]


def test_every_command_that_is_named_exists(texts):
    wrong = []
    for place, text in texts:
        for quoted in re.findall(r"`(cpt [^`]+)`", text):
            name, *words = quoted.split()[1:]
            if not name.isalpha() or name in ("x", "COMMAND"):  # a version, or a name that is put in
                continue
            if name not in COMMANDS:
                wrong.append(f"{place}: {quoted}")
                continue
            parts = options_of(name)
            part = "" if "" in parts else next((word for word in words if word in parts), None)
            known = parts[part] if part is not None else set().union(*parts.values())
            wrong += [
                f"{place}: {quoted}"
                for word in words
                if word.startswith("--") and word.partition("=")[0] not in known | {"--help"}
            ]
    assert not wrong, "\n".join(wrong)
