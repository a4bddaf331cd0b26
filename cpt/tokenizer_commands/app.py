"""`cpt tokenizer`: train one, see how it fits a text, extend it for a domain."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

COMMANDS = {  # name -> module:function
    "report": "cpt.tokenizer_commands.report:report_command",
    "extend": "cpt.tokenizer_commands.extend:extend_command",
    "train": "cpt.tokenizer_commands.train:train_command",
}


class ImportedWhenUsed(TyperGroup):
    """The commands, of which only the one that is going to run is imported: torch takes seconds."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(cmd_name)(vars(import_module(module))[function])
        return get_command(one)


app = typer.Typer(cls=ImportedWhenUsed, no_args_is_help=True, pretty_exceptions_enable=False)
