"""Run a typer command: a CptError is printed once, without a traceback, and ends the process with code 2."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from cpt.errors import CptError
from cpt.ranks import is_main_process


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
        if is_main_process():
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
        sys.exit(2)


def show_log() -> None:
    """Print what cpt logs: all of it from the main process, warnings from the others."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("cpt")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if is_main_process() else logging.WARNING)
