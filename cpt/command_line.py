"""Run a typer command: a CptError is printed once, without a traceback, and ends the process with code 2."""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from cpt.errors import CptError
from cpt.ranks import is_main_process, rank

SECONDS_FOR_THE_MAIN_PROCESS = 5


def run_command(function: Callable[..., None]) -> None:
    """Run a function's command line, as `python cpt/train.py` does."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)
    run_app(app)


def run_app(app: Callable[..., Any], arguments: Sequence[str] | None = None) -> None:
    """Run a whole application."""
    try:
        app(list(arguments) if arguments is not None else None)
    except CptError as problem:
        if not is_main_process():
            # The main process most likely found the same and prints it; then the launcher ends this one while it waits.
            time.sleep(SECONDS_FOR_THE_MAIN_PROCESS)
        who = "" if is_main_process() else f"process {rank()}: "
        sys.stderr.write(f"{who}{type(problem).__name__}: {problem}\n")
        sys.exit(2)


def app_of(commands: Mapping[str, str]) -> typer.Typer:
    """A command with commands of its own, of which only the one that is going to run is imported: torch takes seconds.

    Args:
        commands: name -> `module:function`.
    """

    class ImportedWhenUsed(TyperGroup):
        """As typer asks for its commands."""

        def list_commands(self, ctx: Any) -> list[str]:
            """All names."""
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """A command, None where there is none of that name."""
            if cmd_name not in commands:
                return None
            module, _, function = commands[cmd_name].partition(":")
            one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            one.command(cmd_name)(vars(import_module(module))[function])
            return get_command(one)

    return typer.Typer(cls=ImportedWhenUsed, no_args_is_help=True, pretty_exceptions_enable=False)


def show_log() -> None:
    """Print what cpt logs: all of it from the main process, warnings from the others."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("cpt")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if is_main_process() else logging.WARNING)
