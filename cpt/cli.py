"""`cpt <command>`: one line a command, imported when it is used."""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

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
        "rehearse": ("cpt.commands.rehearse:command", "Try every part of a run once, in minutes."),
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
            "cpt.commands.tokenizer_report:COMMANDS",
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
            "cpt.commands.pipeline:command",
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
            "cpt.serving.serve:serve",
            "Serve a model to OpenAI clients, on Hugging Face's server.",
        ),
        "chat": ("cpt.serving.serve:chat", "Chat with a model in the terminal or in the browser."),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}

LONG = (  # commands whose work is worth more than what they print
    *(
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
    ),
    *(
        "merge",
        "serve",
        "mixture",
        "data ingest",
        "data rewrite",
        "tokenizer extend",
        "tokenizer train",
    ),
)

ABOUT = """Continued pre-training of causal language models, from one YAML recipe.

[bold]cpt demo[/bold] shows everything in minutes, offline, on a CPU. With your documents:

[bold]cpt init[/bold] DOCUMENTS --model MODEL --gpu GPU    writes a commented recipe
[bold]cpt check[/bold] recipe.yaml    reports its mistakes
[bold]cpt train[/bold] recipe.yaml    trains; started again, it resumes
[bold]cpt verdict[/bold] runs/NAME    did it work? Training ends with it, too

[bold]cpt COMMAND --help[/bold] explains a command, with an example."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `cpt` with these words, or with those of the command line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # A shell that completes a command gives its words in its own variables.
    completed = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    app = application(next(iter(words or completed), ""))
    run_app(app, words, name="cpt", outlives_readers=" ".join(words[:2]).startswith(LONG))


def application(command: str) -> typer.Typer:
    """All commands by name and summary; of the one that is going to run the arguments too, so that no help page
    imports torch."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help=ABOUT,
        context_settings=NAMES_OF_HELP,
    )
    app.callback()(options_of_all)
    for group, commands in GROUPS.items():
        for name, (target, summary) in commands.items():
            if name != command:  # only listed on the help page
                app.command(name, help=summary, rich_help_panel=group)(lambda: None)
            elif target.endswith(":COMMANDS"):  # a command with subcommands
                below = typer.Typer(
                    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
                )
                for name_below, target_below in constant(target).items():
                    below.command(name_below)(command_of(target_below))
                app.add_typer(below, name=name, help=summary, rich_help_panel=group)
            else:
                app.command(name, rich_help_panel=group)(command_of(target))
    return app


def show_version(wanted: bool) -> None:
    if wanted:
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


def command_of(target: str) -> Callable[..., None]:
    """A function with the signature and docstring of `module:function`. When it is called, it checks the recipe before
    it imports the module, and torch with it."""
    module, _, name = target.partition(":")
    names = OptionNames(module)
    head = names.statements[name]
    assert isinstance(head, ast.FunctionDef), f"{target} is not a function of that module"
    head.body = head.body[:1]  # the docstring
    exec(compile(ast.Module([head], []), module, "exec"), names)
    parameters = inspect.signature(names[name]).parameters
    required = [one.name for one in parameters.values() if one.default is one.empty]
    needs_recipe = "recipe" in required and "overrides" in parameters

    @wraps(names[name])
    def command(*values: Any, **options: Any) -> None:
        if needs_recipe:
            from cpt.recipe.load import load_recipe  # which a help page does not need
            from cpt.recipe.paths import document_suffix

            path = options["recipe"]
            # `cpt data check` takes documents too, and `cpt mixture` runs
            if path.suffix and not (path.is_dir() or document_suffix(path.name)):
                load_recipe(path, options["overrides"] or (), lora=options.get("lora", False))
        getattr(import_module(module), name)(*values, **options)

    return command


def constant(target: str) -> Any:
    module, _, name = target.partition(":")
    return names_of(module)[name]


class OptionNames(dict[str, Any]):
    """The names at a module's top level; each gets its value when it is first asked for."""

    def __init__(self, module: str) -> None:
        super().__init__()
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {module!r}", name=module)
        self.module = module
        self.statements: dict[str, ast.stmt] = {}
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.statements |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [
                    part.id
                    for target in targets
                    for part in ast.walk(target)
                    if isinstance(part, ast.Name)
                ]
                self.statements |= dict.fromkeys(names, node)
            elif isinstance(node, ast.FunctionDef):
                self.statements[node.name] = node

    def __missing__(self, name: str) -> Any:
        """Evaluate the statement that binds the name; `KeyError` leaves it to Python's builtins."""
        node = self.statements[name]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cpt."):
            original = next(
                alias.name for alias in node.names if (alias.asname or alias.name) == name
            )
            self[name] = names_of(node.module)[original]
        else:
            exec(compile(ast.Module([node], []), self.module, "exec"), self)
        return self[name]


names_of = cache(OptionNames)


if __name__ == "__main__":
    main()
