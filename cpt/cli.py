"""`cpt <command>`: one line a command, imported when it is used."""

import sys
from collections.abc import Sequence
from importlib import import_module

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from cpt.errors import CptError
from cpt.ranks import is_main_process

COMMANDS = {  # name -> (module:function, what it does)
    "train": ("cpt.train:command", "Run a recipe; goes on by itself from its newest checkpoint."),
    "check": ("cpt.check:command", "Find every mistake of a recipe before GPU time is spent."),
    "schema": ("cpt.recipe.json_schema:command", "Print the recipe's JSON schema, for editors."),
    "doctor": ("cpt.doctor:command", "Show what this machine has, and what each missing piece costs."),
    "demo": ("cpt.demo.run:command", "Tokenizer, pre-training, continued pre-training and its verdict, offline in minutes."),
}


class LazyCommands(TyperGroup):
    """Looks commands up in COMMANDS, so that `cpt --help` and `cpt check` import no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Name and summary only, for the help page."""
        return click.Command(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is going to run; only now its module is imported."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        target, summary = COMMANDS[name]
        module, _, function = target.partition(":")
        lone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        lone.command(name, help=summary)(getattr(import_module(module), function))
        return name, get_command(lone), rest


app = typer.Typer(cls=LazyCommands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(help="Continued pre-training of causal language models, from one YAML recipe.")
def root() -> None:
    """Everything happens in the commands."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a CptError is printed once, without a traceback, and ends the process with code 2."""
    try:
        app(list(arguments) if arguments is not None else None)
    except CptError as problem:
        if is_main_process():
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
