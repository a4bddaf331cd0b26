"""`cpt COMMAND`: the help page lists all commands; the module of one is imported when it is typed.

No module of a command imports torch or transformers at its top; its functions import what they need. So
`cpt COMMAND --help`, a wrong option and a mistake in a recipe take less than a second.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from cpt.command_line import NAMES_OF_HELP, run_app
from cpt.errors import DISTRIBUTION

GROUPS = {  # heading on the help page -> name -> (module:function, what it does)
    "Start here": {
        "demo": (
            "cpt.commands.demo:command",
            "Run everything once in minutes, offline, up to a served model.",
        ),
        "init": (
            "cpt.commands.init:command",
            "Write a commented recipe for your documents, a model and a GPU.",
        ),
        "check": (
            "cpt.commands.check:command",
            "Report every mistake in a recipe before GPU time is spent.",
        ),
        "train": (
            "cpt.commands.train:command",
            "Run a recipe; resumes automatically from the newest checkpoint.",
        ),
        "verdict": (
            "cpt.commands.verdict:command",
            "Evaluate a finished run against its base, on one page.",
        ),
    },
    "Plan": {
        "plan": (
            "cpt.commands.plan:command",
            "Memory, time and cost of a run, and the cheapest change that fits.",
        ),
        "rehearse": (
            "cpt.commands.rehearse:command",
            "Try every part of a run once, in minutes.",
        ),
        "doctor": (
            "cpt.commands.doctor:command",
            "Show what this machine has, or compare the nodes of a cluster.",
        ),
        "recipes": (
            "cpt.commands.recipes:command",
            "List the recipes that come with cpt, or copy them.",
        ),
        "import": (
            "cpt.contrib.importers.command:command",
            "Write a recipe from a config of another tool.",
        ),
        "schema": (
            "cpt.recipe.json_schema:command",
            "Print the recipe's JSON schema, for editors.",
        ),
    },
    "Data": {
        "data": (
            "cpt.commands.data:COMMANDS",
            "Check, preview, convert (PDF, HTML, EPUB) or rewrite documents.",
        ),
        "mixture": ("cpt.commands.mixture:command", "Count what a run will read from each source."),
        "tokenizer": (
            "cpt.contrib.tokenizers.report:COMMANDS",
            "Report on a tokenizer, extend one, or train one.",
        ),
        "prepare": (
            "cpt.commands.prepare:command",
            "Read, filter, tokenize and pack documents ahead of a run.",
        ),
        "store": ("cpt.commands.store:COMMANDS", "List, verify or prune stored tokens."),
        "contamination": (
            "cpt.commands.data_check:contamination_command",
            "Find evaluation data in training texts.",
        ),
    },
    "Runs": {
        "launch": (
            "cpt.launch.launch_command:command",
            "Write the files that start a recipe on one or many nodes.",
        ),
        "pipeline": (
            "cpt.contrib.pipeline.command:command",
            "Run several recipes, each from the model of the one before.",
        ),
        "search": (
            "cpt.contrib.search.command:command",
            "Search for better values of keys; learning-rate range test.",
        ),
        "runs": ("cpt.commands.runs:command", "List runs: state, tokens, loss, speed, age, tags."),
        "compare": (
            "cpt.commands.compare:command",
            "Show how runs differ: recipes, versions, data, results.",
        ),
        "report": ("cpt.analysis.report:command", "Write one HTML page about a run."),
    },
    "Evaluate and repeat": {
        "evaluate": (
            "cpt.commands.evaluate:command",
            "Evaluate a model and its base on text, questions and tasks.",
        ),
        "reproduce": (
            "cpt.commands.reproduce:command",
            "Repeat a run from its record, and compare the losses.",
        ),
        "verify": (
            "cpt.commands.runs:verify_command",
            "Compare checkpoints with the hashes in their manifests.",
        ),
    },
    "Use the model": {
        "export": (
            "cpt.commands.export:command",
            "Write a trained model for other programs, checked by its logits.",
        ),
        "merge": (
            "cpt.contrib.merging.command:command",
            "Merge models: adapter and base, chat vector, mean of checkpoints.",
        ),
        "serve": (
            "cpt.contrib.serving.serve:serve",
            "Serve a model to OpenAI clients, on Hugging Face's server.",
        ),
        "chat": (
            "cpt.contrib.serving.serve:chat",
            "Chat with a model in the terminal or in the browser.",
        ),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}

LONG = (  # commands whose work is worth more than what they print
    "demo",
    "rehearse",
    "prepare",
    "train",
    "pipeline",
    "search",
    "verdict",
    "evaluate",
    "reproduce",
    "export",
    "merge",
    "serve",
    "mixture",
    "data ingest",
    "data rewrite",
    "tokenizer extend",
    "tokenizer train",
)

ABOUT = """Continued pre-training of causal language models, from one YAML recipe.

[bold]cpt demo[/bold] shows everything in minutes, offline, on a CPU. With your documents:

[bold]cpt init[/bold] DOCUMENTS --model MODEL --gpu GPU    writes a commented recipe
[bold]cpt check[/bold] recipe.yaml    reports its mistakes
[bold]cpt train[/bold] recipe.yaml    trains; started again, it resumes
[bold]cpt verdict[/bold] runs/NAME    did it work? Training ends with it, too

[bold]cpt COMMAND --help[/bold] explains a command, with an example."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `cpt` with these arguments, or with those of the command line."""
    if arguments is None:
        arguments = sys.argv[1:]
    is_long = " ".join(arguments[:2]).startswith(LONG)
    run_app(application(), arguments, name="cpt", outlives_readers=is_long)


class LazyGroup(TyperGroup):
    """Commands that are imported when they are typed. Until then, each is a name with a summary.

    click's documentation overrides `get_command` instead, but the help page calls that for every command.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, further_words = super().resolve_command(ctx, args)
        if name is not None:
            command = load_command(name)
        return name, command, further_words


def application() -> typer.Typer:
    app = typer.Typer(
        cls=LazyGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help=ABOUT,
        context_settings=NAMES_OF_HELP,
    )
    app.callback()(options_of_all)
    for group, commands in GROUPS.items():
        for name, (_, summary) in commands.items():
            app.command(name, help=summary, rich_help_panel=group)(not_imported_yet)
    return app


def not_imported_yet() -> None:
    """The place of a command on the help page; `LazyGroup` replaces it."""


def load_command(name: str) -> Any:
    """Import the command, or the group of commands below it, as typer (click) runs it."""
    target, summary = COMMANDS[name]
    loaded = import_target(target)
    if isinstance(loaded, dict):
        app = typer.Typer(add_completion=False, no_args_is_help=True, help=summary)
        for name_below, target_below in loaded.items():
            app.command(name_below)(import_target(target_below))
    else:
        app = typer.Typer(add_completion=False)
        app.command(name)(loaded)
    return get_command(app)


def import_target(target: str) -> Any:
    """The function, or the dictionary of commands, at `module:name`."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def show_version(is_requested: bool) -> None:
    if is_requested:
        from importlib import metadata  # a fifth of the time of a help page

        typer.echo(f"cpt {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options before a command."""


if __name__ == "__main__":
    main()
