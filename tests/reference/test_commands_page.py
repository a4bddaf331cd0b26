import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command

from cpt.cli import COMMANDS
from cpt.reference.commands_page import PAGES, commands_page, described, kind_of

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_in_docs_is_the_one_that_the_commands_give():
    assert (DOCS / "reference" / "commands.md").read_text() == commands_page(), "python -m cpt.reference"


def test_the_pages_that_say_more_are_there_and_of_commands_that_are():
    assert PAGES.keys() <= COMMANDS.keys()
    assert [page for page in PAGES.values() if not (DOCS / page).exists()] == []


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def paint(
    wall: Annotated[Path, typer.Argument(help="What is painted.")],
    words: Annotated[list[str] | None, typer.Argument(help="Written | on it.")] = None,
    colour: Annotated[Colour | None, typer.Option("--in", help="Its colour.")] = None,
    coats: Annotated[int, typer.Option(help="How many.", min=1, max=9)] = 2,
    dry: Annotated[bool, typer.Option("--dry/--wet", help="Wait for it.")] = True,
    secret: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Paint a wall."""


def test_a_command_is_shown_with_arguments_types_defaults_and_choices():
    app = typer.Typer(add_completion=False)
    app.command("paint", help="Paint a wall.")(paint)
    shown = "\n".join(described(get_command(app), "cpt paint", 2))
    assert shown.startswith("## `cpt paint`\n\nPaint a wall.\n\n```text\ncpt paint WALL [WORDS]... [OPTIONS]\n```\n")
    assert re.findall(r"^\| `.*$", shown, re.MULTILINE) == [
        "| `WALL` | path; needed | What is painted. |",
        "| `[WORDS]...` | list of texts | Written \\| on it. |",
        "| `--in` | one of `red`, `blue` | Its colour. |",
        "| `--coats` | whole number from 1 to 9; default `2` | How many. |",
        "| `--dry / --wet` |  | Wait for it. |",
    ]


@pytest.mark.parametrize(
    ("hint", "default", "words"),
    [(str, "latest", "text; default `latest`"), (float | None, None, "number"), (bool, False, "")],
)
def test_a_default_is_told_where_there_is_one(hint, default, words):
    assert kind_of(hint, default) == words
