"""docs/coming_from.md says what the tables of the code say, and what the commands in it print.

`python tests/importing/test_coming_from.py` writes both.
"""

import contextlib
import io
import re
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from cpt.importing import axolotl_keys, llamafactory_keys
from cpt.importing.command import command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming_from.md"
TABLES = {"axolotl": axolotl_keys, "llamafactory": llamafactory_keys}
EXAMPLES = re.compile(
    r"```\ncpt import (\S+) --output (\S+)\n```\n\n<!-- prints -->\n```text\n(.*?)```\n\n```yaml\n(.*?)```\n", re.S
)


def keys_of(tables: ModuleType) -> str:
    """The tables of a tool's keys."""
    groups: dict[str, list[str]] = {}
    for key, where in tables.HANDLED.items():
        groups.setdefault(where, []).append(key)
    for key, name in tables.PASSED.items():
        groups.setdefault("`training:`, where the stage's class has it", []).append(
            key if key == name else f"{key} ({name})"
        )
    lines = ["| key | in the recipe |", "| --- | --- |", *(row(keys, where) for where, keys in groups.items())]
    for title, table in {
        "nothing has to be said, because": tables.IDLE,
        "not carried over; instead": tables.NOT,
    }.items():
        reasons: dict[str, list[str]] = {}
        for key, reason in table.items():
            reasons.setdefault(reason, []).append(key)
        lines += ["", f"| key | {title} |", "| --- | --- |", *(row(keys, reason) for reason, keys in reasons.items())]
    return "\n".join(lines)


def row(keys: list[str], told: str) -> str:
    """A line of a table."""
    return f"| {', '.join(f'`{key}`' for key in keys)} | {told} |"


def written(page: str) -> str:
    """The page with its tables and outputs made anew."""
    for tool, tables in TABLES.items():
        begin, end = f"<!-- keys of {tool} -->\n", f"\n<!-- end of {tool} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{keys_of(tables)}{end}{rest.partition(end)[2]}"
    return EXAMPLES.sub(lambda found: example(found[1], found[2]), page)


def example(config: str, name: str) -> str:
    """A command with what it prints, and the recipe that it writes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        output = Path(folder) / name
        command(Path(config), output=output)
        told, recipe = printed.getvalue().replace(str(output), name), output.read_text()
    return (
        f"```\ncpt import {config} --output {name}\n```\n\n<!-- prints"
        f" -->\n```text\n{told}```\n\n```yaml\n{recipe}```\n"
    )


def test_the_page_says_what_the_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text()
    assert len(EXAMPLES.findall(page)) == 2
    assert page == written(page), f"python {Path(__file__).relative_to(ROOT)}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
