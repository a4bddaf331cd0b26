"""A command of a page is one that exists: its options, values, recipes, overrides, targets and files, without running
it."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from cpt.cli import COMMANDS, application
from cpt.errors import CptError
from cpt.pipeline.steps import load_pipeline
from documented.benchmark_options import check_benchmark
from documented.blocks import PageError
from documented.launchers import check_launcher
from documented.recipes import check_overrides, check_space
from documented.shell import simple_commands

ROOT = Path(__file__).parents[3]
LEFT_OUT = "..."
FOLDERS = ("recipes", "deepspeed_configs", "launch", "docs", "tests", "examples", "docker", "cpt", "benchmarks")
WRITTEN_BY = re.compile(r"^(-o|--output|--markdown|--html|--folder|--write|--plot)$")
KNOWN = """
[ apt-get cat cd chmod code cp curl date df diff du echo export false find git grep head hf ip jq kill ln ls mkdir mv nano nohup nproc
nvidia-smi pdsh printf pwd rm rsync scancel scontrol scp sed set sinfo sleep sort squeue srun ssh source tail tar tee test touch trap tree
true unzip wait watch wc wget which xargs xdg-open
axolotl huggingface-cli llama-bench llama-cli llama-quantize llama-server llamafactory-cli ollama uv vllm
"""  # noqa: E501
"""Programs of the system, and of others, that a page may name."""


@dataclass(frozen=True)
class Reading:
    """How strictly a command is read.

    Args:
        folder: the page's, with copies of the repository's recipes.
        in_text: a part of a command may stand in the text, and words that are none.
        is_run: the shell itself will find what we do not know.
        written: where other commands of the page write to.
    """

    folder: Path
    in_text: bool = False
    is_run: bool = False
    written: frozenset[str] = frozenset()


def check_script(script: str, reading: Reading) -> None:
    """Check every command in a piece of shell.

    Raises:
        PageError: all that is wrong.
    """
    complaints = []
    try:
        commands = list(simple_commands(script))
    except ValueError as problem:
        raise PageError(f"the shell would not read it: {problem}") from problem
    for words in commands:
        try:
            check_command(words, reading)
        except (PageError, CptError) as problem:
            complaints.append(f"`{' '.join(words)}`: {problem}")
    if complaints:
        raise PageError("\n".join(complaints))


def check_command(words: list[str], reading: Reading) -> None:
    """Check one command."""
    head, rest = words[0], words[1:]
    if head in HEADS:
        HEADS[head](rest, reading)
    elif not (reading.in_text or reading.is_run or head in KNOWN.split() or head.startswith(("./", "/", "$"))):
        raise PageError(f"`{head}` is no command that tests/docs/documented/commands.py knows")
    if not reading.is_run:
        check_files(rest, reading)


def outputs_of(script: str) -> set[str]:
    """Where the commands in a piece of shell are told to write to."""
    found = set()
    with contextlib.suppress(ValueError):
        for words in simple_commands(script):
            found |= {word for before, word in zip(words, words[1:], strict=False) if WRITTEN_BY.match(before)}
    return found


def check_files(words: Sequence[str], reading: Reading) -> None:
    """Files below the repository's folders are there, unless a command is to write them."""
    for before, word in zip(["", *words], words, strict=False):
        path = word.partition("=")[2] if word.startswith("--") else word
        if (
            WRITTEN_BY.match(before)
            or WRITTEN_BY.match(word.partition("=")[0])
            or set(path) & set("*?{}$<>")
            or LEFT_OUT in path
        ):
            continue
        is_of_ours = Path(path).parts[:1] and Path(path).parts[0] in FOLDERS and "/" in path and Path(path).suffix
        is_written = any(Path(path).is_relative_to(output) for output in reading.written)
        if is_of_ours and not is_written and not (reading.folder / path).exists():
            raise PageError(f"there is no {path}")


def check_cpt(words: list[str], reading: Reading) -> None:
    """The command line as cpt itself reads it."""
    given = [word for word in words if word != LEFT_OUT]
    name = next((word for word in given if not word.startswith("-")), "")
    if name and name not in COMMANDS and not (reading.in_text and name.isupper()):
        raise PageError(f"there is no `cpt {name}`")
    lenient = reading.in_text or LEFT_OUT in words
    if name.isupper():
        return
    values = parsed(command_line(name), "cpt", given, lenient)
    overrides = [
        override for override in values.get("overrides") or [] if "$" not in override and LEFT_OUT not in override
    ]
    recipe = existing(values.get("recipe"), reading.folder)
    file, space = existing(values.get("file"), reading.folder), existing(values.get("space"), reading.folder)
    if name == "pipeline" and file:
        load_pipeline(file, overrides)
    elif overrides or recipe:
        check_overrides(recipe, overrides)
    if name == "search" and recipe and space:
        check_space(space, recipe)


@cache
def command_line(name: str) -> typer.core.TyperGroup:
    """All of `cpt`, with this command loaded."""
    return get_command(application(name))  # type: ignore[return-value]


def existing(value: object, folder: Path) -> Path | None:
    """The file, if it is there yet: most pages write theirs on the way."""
    path = folder / str(value)
    return path if value is not None and path.is_file() else None


def parsed(
    command: typer.core.TyperCommand | typer.core.TyperGroup, name: str, words: list[str], lenient: bool
) -> dict[str, Any]:
    """The values of the innermost command's parameters.

    Args:
        lenient: words may be left out.
    """
    errors = sys.modules[typer.BadParameter.__module__]  # click's own, or the copy of it in a newer typer
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            context = command.make_context(name, list(words))
            if isinstance(command, typer.core.TyperGroup):
                left = [*context._protected_args, *context.args]
                if not left:
                    return {}
                inner_name, inner, rest = command.resolve_command(context, left)
                return parsed(inner, inner_name, rest, lenient)
            return dict(context.params)
    except typer.Exit:  # --help, --version
        return {}
    except (errors.MissingParameter, errors.NoArgsIsHelpError, errors.BadOptionUsage) as problem:
        if lenient:
            return {}
        raise PageError(problem.format_message()) from problem
    except errors.BadParameter as problem:
        if "does not exist" in problem.format_message() or stands_for_a_value(problem.param, words):
            return {}
        raise PageError(problem.format_message()) from problem
    except errors.ClickException as problem:
        raise PageError(problem.format_message()) from problem


def stands_for_a_value(parameter: object, words: list[str]) -> bool:
    """Whether a word in capitals stands where the parameter's value goes: `--nodes N`."""
    options = vars(parameter).get("opts", [])
    return any(
        before in options and re.fullmatch(r"[A-Z][A-Z_]*", word)
        for before, word in zip(words, words[1:], strict=False)
    )


def check_python(words: list[str], reading: Reading) -> None:
    """A module of ours with its options, or a file that is there."""
    if words[:1] == ["-m"] and len(words) > 1:
        module = words[1]
        if module == "cpt" or module.startswith("cpt."):
            check_cpt(["train", *words[2:]] if module == "cpt.train" else words[2:], reading)
        elif module.startswith("benchmarks"):
            check_benchmark(module, words[2:], lenient=reading.in_text or LEFT_OUT in words)
    elif words and words[0] == "cpt/train.py":
        check_cpt(["train", *words[1:]], reading)


def check_started(head: str) -> Callable[[list[str], Reading], None]:
    """A launcher with its own options, and what it starts."""

    def check(words: list[str], reading: Reading) -> None:
        script, rest = check_launcher(
            head, [word for word in words if word != LEFT_OUT], lenient=reading.in_text or LEFT_OUT in words
        )
        if script in ("cpt/train.py", "cpt.train"):
            check_cpt(["train", *rest], reading)
        elif script and script.endswith(".py") and not reading.is_run and not (reading.folder / script).exists():
            raise PageError(f"there is no {script}")

    return check


def check_make(words: list[str], _: Reading) -> None:
    """The targets are in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M))
    variables = set(re.findall(r"^([A-Z_]+) *\?=", (ROOT / "Makefile").read_text(), re.M))
    for word in words:
        name, assigned, _value = word.partition("=")
        if assigned and name not in variables:
            raise PageError(f"the Makefile has no {name}; it has {', '.join(sorted(variables))}")
        if not assigned and not word.startswith("-") and word not in targets and word != LEFT_OUT:
            raise PageError(f"the Makefile has no target {word}")


def check_pip(words: list[str], _: Reading) -> None:
    """The extras that are asked for are ours."""
    extras = set(
        re.findall(
            r"^([\w-]+) = \[",
            (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2],
            re.M,
        )
    )
    for asked in re.findall(r"(?:\bcpt|\.|\.whl)\[([\w,-]+)\]", " ".join(words)):
        if missing := set(asked.split(",")) - extras:
            raise PageError(f"there is no extra {', '.join(missing)}; there is {', '.join(sorted(extras))}")


def check_docker(words: list[str], _: Reading) -> None:
    """The Dockerfile is there."""
    for option, file in zip(words, words[1:], strict=False):
        if option in ("-f", "--file") and not (ROOT / file).is_file():
            raise PageError(f"there is no {file}")


def check_shell_script(words: list[str], reading: Reading) -> None:
    """The script is there, or is one that the page writes."""
    check_files([word for word in words if not word.startswith("-")], reading)


HEADS: dict[str, Callable[[list[str], Reading], None]] = {
    "cpt": check_cpt,
    "python": check_python,
    "python3": check_python,
    "accelerate": check_started("accelerate"),
    "torchrun": check_started("torchrun"),
    "deepspeed": check_started("deepspeed"),
    "make": check_make,
    "pip": check_pip,
    "docker": check_docker,
    "sbatch": check_shell_script,
    "bash": check_shell_script,
}
