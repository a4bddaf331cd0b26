"""Read the pages of the documentation, parse their commands and recipes, run the commands of a tutorial."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from markdown_it import MarkdownIt
from typer.main import get_command

from cpt.cli import COMMANDS, application
from cpt.contrib.pipeline.command import load_pipeline
from cpt.contrib.search.space import load_space
from cpt.errors import CptError
from cpt.recipe.load import load_recipe
from cpt.recipe.tree import Mistakes, plain, read_yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs/**/", "recipes/", "launch/", "deepspeed_configs/")
PAGES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md"))
GENERATED = ("CHANGELOG.md", "docs/reference/recipe.md", "docs/reference/commands.md")
PAGES = [page for page in PAGES if str(page) not in GENERATED]
TUTORIALS = [
    page for page in PAGES if str(page) == "README.md" or {"tutorials", "howto"} & {*page.parts}
]
SHELL = """set -eo pipefail
if [ -f "$PAGE_STATE" ]; then source "$PAGE_STATE"; fi
trap '{ export -p; printf "cd %q\\n" "$PWD"; } > "$PAGE_STATE"' EXIT
"""
SECONDS = 900
SMALL: dict[str, Any] = {
    "name": "part",
    "model": {"path": "a/b"},
    "tokenizer": {"path": "a/b"},
    "data": {"sources": [{"path": "a/b"}]},
    "budget": {"tokens": 100_000_000_000},
}
STAGES = ("cpt", "pretrain", "sft", "dpo", "grpo", "distill")


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comments before it: `<!-- needs: gpu; exit: 2 -->`."""

    line: int
    language: str
    text: str
    settings: dict[str, str]

    @property
    def is_commands(self) -> bool:
        return self.language in ("", "bash", "console")

    @property
    def is_run(self) -> bool:
        return (self.is_commands or self.language == "python") and not self.settings.keys() & {
            "needs",
            "file",
        }

    @property
    def commands(self) -> list[str]:
        """With prompts, each line behind a `$ ` and the lines it continues on; without, the whole block."""
        if not self.text.startswith("$ "):
            return [self.text]
        return re.findall(r"^\$ ((?:.*\\\n)*.*)", self.text, re.MULTILINE)


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found, settings = [], {}
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        if token.type == "html_block":
            for said in re.findall(r"<!--(.*?)-->", token.content, re.DOTALL):
                settings |= {
                    key.strip(): value.strip()
                    for key, _, value in (s.partition(":") for s in said.split(";"))
                }
        elif token.type == "fence":
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(line, token.info.strip(), token.content, settings))
            settings = {}
    return found


def complaints(page: Path, folder: Path) -> Iterator[str]:
    """Every `cpt` command that cpt would not take, and every recipe that would not load."""
    for block in blocks_of(page):
        try:
            if block.is_commands:
                for words in cpt_commands(block):
                    check_command(words, folder)
            elif block.language == "yaml" and block.settings.get("yaml") != "any":
                check_yaml(block, folder)
        except (CptError, ValueError) as problem:
            yield f"{page}:{block.line}: {problem}"


def cpt_commands(block: Block) -> Iterator[list[str]]:
    """The words behind `cpt` of each command in a block, up to a pipe, a redirection or a comment."""
    for text in block.commands:
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if "cpt " not in line:
                continue
            reader = shlex.shlex(line, posix=True, punctuation_chars=True)
            reader.whitespace_split = True
            words: list[str] = []
            for word in [*reader, ";"]:
                if not set(word) <= set("();|&<>"):
                    words.append(word)
                    continue
                if "cpt" in words[:3] and not any(
                    "-" in before for before in words[: words.index("cpt")]
                ):
                    yield words[words.index("cpt") + 1 :]
                words = []


def check_command(words: list[str], folder: Path) -> None:
    """cpt knows the command, its options and the keys of the recipe behind it.

    Raises:
        ValueError: it does not.
    """
    given = [word for word in words if word != "..."]
    name = next((word for word in given if not word.startswith("-")), "")
    if name and name not in COMMANDS and not name.isupper():
        raise ValueError(f"no command `cpt {name}`")
    if not name or name.isupper():
        return
    errors = sys.modules[typer.BadParameter.__module__]
    try:
        values = parameters_of(get_command(application()), "cpt", given)
    except typer.Exit:  # --help
        return
    except errors.UsageError as problem:
        stands_for_a_value = (
            any(re.fullmatch(r"[A-Z][A-Z_]*", word) for word in words) or "..." in words
        )
        if (
            "does not exist" in problem.format_message()
            or stands_for_a_value
            and "No such" not in str(problem)
        ):
            return
        raise ValueError(f"cpt {' '.join(words)}: {problem.format_message()}") from problem
    overrides = [
        word for word in values.get("overrides") or [] if "$" not in word and word != "..."
    ]
    recipe = folder / str(values.get("recipe"))
    if overrides and name != "pipeline":
        load_recipe(recipe if recipe.is_file() else written(folder, SMALL), overrides)


def parameters_of(command: Any, name: str, words: list[str]) -> dict[str, Any]:
    """The values of the innermost command's parameters."""
    context = command.make_context(name, list(words))
    rest = [*context._protected_args, *context.args] if hasattr(command, "resolve_command") else []
    return (
        parameters_of(command.resolve_command(context, rest)[1], rest[0], rest[1:])
        if rest
        else dict(context.params)
    )


def check_yaml(block: Block, folder: Path) -> None:
    """A recipe, a pipeline or a search space that loads, or a part that fits into a small recipe of some stage."""
    path = folder / block.settings.get("file", ".block.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    values = plain(read_yaml(path, Mistakes()))
    if "steps" in values:
        load_pipeline(path)
    elif "search" in values:
        load_space(path)
    elif "name" in values and values.keys() & {"base", "budget"}:
        load_recipe(path)
    else:
        small, stages = SMALL, [values["stage"]] if "stage" in values else STAGES
        if "yaml" in block.settings:
            whole = load_recipe(ROOT / block.settings["yaml"])
            small = json.loads(whole.model_dump_json(by_alias=True, exclude_unset=True))
            stages = [small["stage"]]
        parts = {
            key: {**small.get(key, {}), **part} if is_part(part) else part
            for key, part in values.items()
        }
        for stage in stages:
            try:
                load_recipe(written(folder, {**small, "stage": stage, **parts}))
                return
            except CptError as found:
                problem = found
        raise problem


def is_part(section: object) -> bool:
    """Whether a section goes on top of the small recipe's; a model with a shape of its own needs no path."""
    return isinstance(section, dict) and not section.keys() & {"config", "base", "epochs"}


def written(folder: Path, recipe: dict[str, Any]) -> Path:
    """A recipe as a file; JSON is YAML."""
    (folder / ".small.yaml").write_text(json.dumps(recipe))
    return folder / ".small.yaml"


def run_page(page: Path, folder: Path) -> None:
    """Run a page from top to bottom, in one folder and one shell."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for block in blocks_of(page):
            text = re.sub(r"\b(8000|7860)\b", port, block.text)
            if "file" in block.settings:
                (folder / block.settings["file"]).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.settings["file"]).write_text(text)
            elif block.is_run:
                commands = replace(block, text=text).commands
                for command in commands:
                    exit_code = (
                        int(block.settings.get("exit", "0")) if command is commands[-1] else 0
                    )
                    run_command(f"{page}:{block.line}", block, command, exit_code, folder, servers)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGINT)
            server.wait(60)


def run_command(
    place: str,
    block: Block,
    command: str,
    exit_code: int,
    folder: Path,
    servers: list[subprocess.Popen[bytes]],
) -> None:
    """With `until:`, the page continues once the command printed that."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {
        "PATH": programs,
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "140",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    own |= {
        "CPT_CACHE": str(folder / ".cache"),
        "PAGE_STATE": str(folder / ".shell"),
        "PYTHONUNBUFFERED": "1",
    }
    words = (
        [sys.executable, "-c", command]
        if block.language == "python"
        else ["bash", "-c", SHELL + command]
    )
    log = folder / ".printed"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**os.environ, **own},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    if "until" not in block.settings:
        assert process.wait(SECONDS) == exit_code, f"{place}: {command}\n{log.read_text()[-3000:]}"
        return
    servers.append(process)
    end = time.monotonic() + SECONDS
    while (
        block.settings["until"] not in log.read_text()
        and process.poll() is None
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    assert block.settings["until"] in log.read_text(), f"{place}: {log.read_text()[-2000:]}"
