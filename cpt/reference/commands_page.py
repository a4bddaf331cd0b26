"""docs/reference/commands.md: every command with its arguments and options, from the help that it prints itself."""

import inspect
import re
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.main import get_command

from cpt.cli import COMMANDS, GROUPS, application
from cpt.reference.docstrings import on_one_line
from cpt.reference.types_in_words import default_in_words, type_in_words

BEGIN = """# Command reference

<!-- Written by `python -m cpt.reference` from the commands' own help; change that, not this page. -->

What `cpt COMMAND --help` prints, for all commands. `key.path=value` behind a recipe changes any key of the
[recipe](recipe.md). Exit codes: 0 done, 2 something that you can mend, 75 stopped by a signal after a checkpoint was saved; `cpt plan` ends
with 3 where the run does not fit.
"""  # noqa: E501

PAGES = {
    "init": "init.md",
    "import": "coming_from.md",
    "train": "running.md",
    "launch": "launching.md",
    "pipeline": "stages.md",
    "check": "recipe.md",
    "rehearse": "reliability.md",
    "plan": "planning.md",
    "mixture": "guides/mixing.md",
    "data": "data.md",
    "tokenizer": "vocabulary.md",
    "prepare": "scaling.md",
    "store": "data.md",
    "verify": "saving.md",
    "export": "export.md",
    "merge": "hand_over.md",
    "serve": "hand_over.md",
    "chat": "chat.md",
    "contamination": "evaluation.md",
    "evaluate": "evaluation.md",
    "verdict": "evaluation.md",
    "runs": "comparing.md",
    "compare": "comparing.md",
    "report": "report.md",
    "reproduce": "reproducing.md",
    "search": "search.md",
    "schema": "recipe.md",
    "recipes": "recipe.md",
    "doctor": "installing.md",
    "demo": "demo.md",
}
"""Command -> the page of docs/ that says more."""


def commands_page() -> str:
    """The page."""
    parts = [BEGIN, "| command | does |\n| --- | --- |"]
    parts += [f"| [`cpt {name}`](#cpt-{name}) | {summary} |" for name, (_, summary) in COMMANDS.items()]
    for group, commands in GROUPS.items():
        parts.append(f"\n## {group}\n")
        for name in commands:
            command = get_command(application(name)).commands[name]  # type: ignore[attr-defined]
            parts += described(command, f"cpt {name}", 3)
    return "\n".join(parts)


def described(command: Any, name: str, level: int) -> Iterator[str]:
    """A command under its heading, then those below it."""
    yield f"{'#' * level} `{name}`\n"
    yield from in_paragraphs(command.help or "", name)
    if hasattr(command, "list_commands"):
        context = typer.Context(command, info_name=name)
        for below in command.list_commands(context):
            yield from described(command.get_command(context, below), f"{name} {below}", level + 1)
        return
    shown = [
        parameter for parameter in command.params if not parameter.hidden and parameter.name not in ("help", "version")
    ]
    arguments = [usage_of(parameter) for parameter in shown if parameter.param_type_name == "argument"]
    yield f"```text\n{' '.join([name, *arguments, '[OPTIONS]' if len(shown) > len(arguments) else '']).strip()}\n```\n"
    if shown:
        function = inspect.unwrap(command.callback)
        yield "\n".join(["| | | |", "| --- | --- | --- |", *(row(parameter, function) for parameter in shown), ""])


def in_paragraphs(text: str, name: str) -> Iterator[str]:
    """The help, the page that says more behind its first paragraph, its example as code."""
    first, *others = on_one_line(text).split("\n\n")
    page = PAGES.get(name.removeprefix("cpt "))
    title = page.rpartition("/")[2].removesuffix(".md").replace("_", " ") if page else ""
    yield f"{first} More: [{title}](../{page}).\n" if page else f"{first}\n"
    for paragraph in others:
        yield re.sub(r"^Example: (.*)$", r"Example: `\1`", paragraph) + "\n"


def usage_of(argument: Any) -> str:
    """`RECIPE`, `[OVERRIDES]...`: in brackets what may be left out."""
    word = argument.name.upper() if argument.required else f"[{argument.name.upper()}]"
    return f"{word}..." if argument.nargs == -1 else word


def row(parameter: Any, function: Callable[..., Any]) -> str:
    """Its names, its type with the default, and its help."""
    hint = get_type_hints(function, include_extras=True)[parameter.name]
    default = inspect.signature(function).parameters[parameter.name].default
    is_argument = parameter.param_type_name == "argument"
    names = usage_of(parameter) if is_argument else " / ".join([", ".join(parameter.opts), *parameter.secondary_opts])
    return f"| `{names}` | {cell(kind_of(hint, default))} | {cell(parameter.help or '')} |"


def kind_of(hint: Any, default: Any) -> str:
    """`whole number from 1; default `1``; of a flag nothing, since it is given or not."""
    bare, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = (
        [part for part in get_args(bare) if part is not NoneType] if get_origin(bare) in (Union, UnionType) else [bare]
    )
    if kinds == [bool]:
        return ""
    bounds = [
        f" {word} {limit:g}"
        for info in metadata
        for word, limit in (("from", info.min), ("to", info.max))
        if limit is not None
    ]
    kind = type_in_words(Union[tuple(kinds)]) + "".join(bounds)  # noqa: UP007 - of types that are known only here
    if default is inspect.Parameter.empty:
        return f"{kind}; needed"
    return kind if default is None else f"{kind}; {default_in_words(default)}"


def cell(text: str) -> str:
    """Fit for a table: on one line, without bars."""
    return " ".join(text.replace("|", "\\|").split())
