"""Read the pages of the documentation, parse their commands and recipes, run the blocks of a tutorial."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from markdown_it import MarkdownIt
from typer.main import get_command

from cpt.cli import COMMANDS, application
from cpt.commands.pipeline import load_pipeline
from cpt.errors import CptError
from cpt.recipe.load import load_recipe
from cpt.recipe.tree import Mistakes, plain, read_yaml
from cpt.search.space import load_space

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/**/*.md",
        *(f"{name}/README.md" for name in ("recipes", "launch", "deepspeed_configs")),
    )
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
TUTORIALS = [page for page in PAGES if str(page) == "README.md" or "tutorials" in page.parts]
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
NUMBER = re.compile(r"[+-]?\d[\d,._]*(e[+-]?\d+)?|\b(?=[0-9a-f]*\d)[0-9a-f]{7,64}\b")


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
        return (self.is_commands or self.language == "python") and not self.settings.keys() & {"needs", "file"}

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The commands, each with what it is shown to print; without prompts, the whole block."""
        if not self.text.startswith("$ "):
            return [(self.text, "")]
        parts = [part.split("\n") for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]]
        ends = [next(n for n, line in enumerate(part) if not line.endswith("\\")) + 1 for part in parts]
        return [("\n".join(part[:end]), "\n".join(part[end:])) for part, end in zip(parts, ends, strict=True)]


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found, settings = [], {}
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        if token.type == "html_block":
            for said in re.findall(r"<!--(.*?)-->", token.content, re.DOTALL):
                settings |= {
                    key.strip(): value.strip() for key, _, value in (s.partition(":") for s in said.split(";"))
                }
        elif token.type == "fence":
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(line, token.info.strip(), token.content, settings))
            settings = {}
    return found


def complaints(page: Path, folder: Path) -> Iterator[str]:
    """Every `cpt` command that cpt would not take, every recipe that would not load, every link to nothing."""
    for block in blocks_of(page):
        try:
            if block.is_commands and "reference" not in page.parts:
                for words in cpt_commands(block):
                    check_command(words, folder)
            elif block.language == "yaml" and block.settings.get("yaml") != "any":
                check_yaml(block, folder)
            elif block.language == "python":
                compile(block.text, str(page), "exec")
            elif block.language == "json":
                json.loads(block.text)
        except (CptError, ValueError, SyntaxError) as problem:
            yield f"{page}:{block.line}: {problem}"
    for link in re.findall(
        r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    ):
        if "://" not in link and not link.startswith("mailto:") and not (ROOT / page).parent.joinpath(link).exists():
            yield f"{page}: no file {link}"


def cpt_commands(block: Block) -> Iterator[list[str]]:
    """The words behind `cpt` of each command in a block, up to a pipe, a redirection or a comment."""
    for text, _ in block.steps:
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
                if "cpt" in words[:3] and not any("-" in before for before in words[: words.index("cpt")]):
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
        values = parameters_of(get_command(application(name)), "cpt", given)
    except typer.Exit:  # --help
        return
    except errors.UsageError as problem:
        stands_for_a_value = any(re.fullmatch(r"[A-Z][A-Z_]*", word) for word in words) or "..." in words
        if "does not exist" in problem.format_message() or stands_for_a_value and "No such" not in str(problem):
            return
        raise ValueError(f"cpt {' '.join(words)}: {problem.format_message()}") from problem
    overrides = [word for word in values.get("overrides") or [] if "$" not in word and word != "..."]
    recipe = folder / str(values.get("recipe"))
    if overrides and name != "pipeline":
        load_recipe(recipe if recipe.is_file() else written(folder, SMALL), overrides)


def parameters_of(command: Any, name: str, words: list[str]) -> dict[str, Any]:
    """The values of the innermost command's parameters."""
    context = command.make_context(name, list(words))
    rest = [*context._protected_args, *context.args] if hasattr(command, "resolve_command") else []
    return (
        parameters_of(command.resolve_command(context, rest)[1], rest[0], rest[1:]) if rest else dict(context.params)
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
        small = SMALL
        if "yaml" in block.settings:
            small = json.loads(
                load_recipe(ROOT / block.settings["yaml"]).model_dump_json(by_alias=True, exclude_unset=True)
            )
        for stage in (values.get("stage"),) if small is not SMALL or "stage" in values else STAGES:
            parts = {key: {**small.get(key, {}), **part} if is_part(part) else part for key, part in values.items()}
            try:
                load_recipe(written(folder, {**small, **({"stage": stage} if stage else {}), **parts}))
            except CptError as found:
                problem = found
            else:
                return
        raise problem


def is_part(section: object) -> bool:
    """Whether a section goes on top of the small recipe's; a model with a shape of its own needs no path."""
    return isinstance(section, dict) and not section.keys() & {"config", "base", "epochs"}


def written(folder: Path, recipe: dict[str, Any]) -> Path:
    """A recipe as a file; JSON is YAML."""
    (folder / ".small.yaml").write_text(json.dumps(recipe))
    return folder / ".small.yaml"


def run_page(page: Path, folder: Path) -> None:
    """Run a page from top to bottom, in one folder and one shell; compare what it shows with what is printed."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    servers: list[subprocess.Popen[bytes]] = []
    printed = ""
    try:
        for block in blocks_of(page):
            text = re.sub(r"\b(8000|7860)\b", port, block.text)
            if "file" in block.settings:
                (folder / block.settings["file"]).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.settings["file"]).write_text(text)
            elif "prints" in block.settings:
                compare(page, block, block.text, printed)
            elif block.is_run:
                printed = ""
                for command, shown in Block(block.line, block.language, text, block.settings).steps:
                    printed += run_step(page, block, command, folder, servers)
                    compare(page, block, shown, printed)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGINT)
            server.wait(60)


def run_step(page: Path, block: Block, command: str, folder: Path, servers: list[subprocess.Popen[bytes]]) -> str:
    """What a command prints; with `until:`, it continues in the background once it printed that."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": programs, "HF_HUB_OFFLINE": "1", "COLUMNS": "140", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    own |= {"CPT_CACHE": str(folder / ".cache"), "PAGE_STATE": str(folder / ".shell"), "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-c", command] if block.language == "python" else ["bash", "-c", SHELL + command]
    log = folder / ".printed"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
        )
    if "until" in block.settings:
        servers.append(process)
        end = time.monotonic() + SECONDS
        while block.settings["until"] not in log.read_text() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert block.settings["until"] in log.read_text(), f"{page}:{block.line}: {log.read_text()[-2000:]}"
        return log.read_text()
    is_last = command == block.steps[-1][0] or not block.text.startswith("$ ")
    expected = int(block.settings.get("exit", "0")) if is_last else 0
    assert process.wait(SECONDS) == expected, f"{page}:{block.line}: {command}\n{log.read_text()[-3000:]}"
    return log.read_text()


def compare(page: Path, block: Block, shown: str, printed: str) -> None:
    """Each shown line is printed, in this order; numbers and blanks do not matter, `...` stands for anything."""

    def plain(line: str) -> str:
        return NUMBER.sub("#", re.sub(r"[━─┄-]{2,}", "-", " ".join(line.split())))

    lines = iter([plain(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        pattern = ".*".join(re.escape(part) for part in plain(line).split("..."))
        if plain(line) not in ("", "...") and not any(re.fullmatch(pattern, one) for one in lines):
            raise AssertionError(f"{page}:{block.line}: not printed: {line}\n{printed[-4000:]}")
