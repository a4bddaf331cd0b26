"""The fenced blocks of a Markdown page, each with what it is: commands, a recipe, a program, a file, or only text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

COMMANDS = ("", "bash", "console")
FILES = ("yaml", "python", "json", "jsonl", "toml")
TEXTS = ("text", "diff", "jinja")
NEEDS = ("gpu", "hub", "nodes", "docker", "time", "yours")
SETTINGS = ("needs", "exit", "until", "file", "prints", "yaml")
COMMENT = re.compile(r"<!--(.*?)-->", re.S)
PROMPT = "$ "


class PageError(Exception):
    """Something in a page that is not as tests/docs/README.md says, or a command in it that is wrong."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: the word after the fence.
        settings: of the comments before it: `needs`, `exit`, ...
    """

    page: Path
    line: int
    language: str
    text: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def is_commands(self) -> bool:
        """Whether a reader types it."""
        return self.language in COMMANDS

    @property
    def is_run(self) -> bool:
        """Whether a test can do what the reader does."""
        return (self.is_commands or self.language == "python") and not self.settings.keys() & {"needs", "file"}

    @property
    def exit_code(self) -> int:
        """What the last command ends with."""
        return int(self.settings.get("exit", "0"))

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Typed:
    """A command, or a whole script where a block has no prompts, and the lines that it is said to print."""

    command: str
    printed: tuple[str, ...] = ()


def read_blocks(page: Path) -> list[Block]:
    """All blocks of a page.

    Raises:
        PageError: a block that cannot be told, or a comment that does not fit it.
    """
    blocks, settings = [], {}
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            settings |= settings_in(token.content, f"{page.name}:{line}")
        elif token.type == "code_block":
            raise PageError(f"{page.name}:{line}: an indented block; write a fence with the word that says what it is")
        elif token.type == "fence":
            if not token.info.startswith("{"):  # {toctree} and its like are the generator's, no block of the reader's
                blocks.append(checked(Block(page, line, token.info.strip(), token.content, settings)))
            settings = {}
        elif settings:
            raise PageError(f"{page.name}:{line}: the comment {settings} is followed by no block")
    if settings:
        raise PageError(f"{page.name}: the comment {settings} is followed by no block")
    return blocks


def read_inline_code(page: Path) -> Iterator[tuple[int, str]]:
    """What stands between backticks in the text, each with its line."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or ():
            if child.type == "code_inline":
                yield (token.map[0] + 1 if token.map else 0), child.content


def typed(block: Block) -> list[Typed]:
    """The commands of a block, in order.

    Raises:
        PageError: a block that begins with output.
    """
    lines = block.text.splitlines()
    if not any(line.startswith(PROMPT) for line in lines):
        return [Typed(block.text)]
    found: list[tuple[list[str], list[str]]] = []
    for line in lines:
        if line.startswith(PROMPT):
            found.append(([line.removeprefix(PROMPT)], []))
        elif not found:
            raise PageError(f"{block.place}: `{line}` stands before the first command")
        elif found[-1][0][-1].endswith("\\"):
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return [Typed("\n".join(command) + "\n", tuple(printed)) for command, printed in found]


def settings_in(html: str, place: str) -> dict[str, str]:
    """What the comments say: `needs: gpu; exit: 2`. Comments in other words than ours say nothing to us."""
    found = {}
    for said in (part.strip() for comment in COMMENT.findall(html) for part in comment.split(";")):
        name, colon, value = (part.strip() for part in said.partition(":"))
        if name in SETTINGS and (colon or name == "prints"):
            found[name] = value
        elif colon and re.fullmatch(r"\w+", name):
            raise PageError(f"{place}: `{name}:` is none of {', '.join(SETTINGS)}")
    return found


def checked(block: Block) -> Block:
    """The block itself, if its comments fit it."""
    settings = block.settings
    mistakes = {
        f"`{block.language}` is none of {', '.join([*COMMANDS[1:], *FILES, *TEXTS])}": block.language
        not in COMMANDS + FILES + TEXTS,
        f"`needs:` is {settings.get('needs')}, not of {', '.join(NEEDS)}": not needs_of(block) <= set(NEEDS),
        "`needs:` is for commands and programs": "needs" in settings
        and not (block.is_commands or block.language == "python"),
        "`exit:` and `until:` are for commands that are run": bool(settings.keys() & {"exit", "until"})
        and not (block.is_commands and block.is_run),
        "`exit:` takes a number": not settings.get("exit", "0").isdigit(),
        "`until:` takes what the command prints": settings.get("until") == "",
        "`file:` takes a path, and is not for commands": settings.get("file") == ""
        or "file" in settings
        and block.is_commands,
        "commands, which begin with `$ `, are not `text`": block.language == "text"
        and f"\n{PROMPT}" in f"\n{block.text}",
        "`prints` is for `text`": "prints" in settings and block.language != "text",
        "`yaml:` is for `yaml`, and says `any` or a recipe": "yaml" in settings
        and (block.language != "yaml" or settings["yaml"] != "any" and not settings["yaml"].endswith(".yaml")),
    }
    wrong = [mistake for mistake, is_there in mistakes.items() if is_there]
    if wrong:
        raise PageError(f"{block.place}: {'; '.join(wrong)}")
    return block


def needs_of(block: Block) -> set[str]:
    """What keeps the block from being run."""
    return {word.strip() for word in block.settings["needs"].split(",")} if "needs" in block.settings else set()
