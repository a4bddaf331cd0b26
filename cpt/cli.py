"""`cpt <command>`: one line a command, imported when it is used."""

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from cpt.command_line import run_app

COMMANDS = {  # name -> (module:function, what it does)
    "init": ("cpt.init.command:command", "Write a commented recipe for your documents, a model and a GPU."),
    "import": ("cpt.importing.command:command", "Write a recipe from a config of axolotl or LLaMA-Factory."),
    "train": ("cpt.train:command", "Run a recipe; goes on by itself from its newest checkpoint."),
    "launch": ("cpt.launchers.launch_command:command", "Write the files that start a recipe on one or many nodes, and say the command."),
    "pipeline": ("cpt.pipeline.command:command", "Run several recipes in a row, each one from what the one before learned."),
    "check": ("cpt.check:command", "Find every mistake of a recipe before GPU time is spent."),
    "rehearse": ("cpt.rehearsal.command:command", "Do once, in minutes, all that a run will do, before days are spent on it."),
    "plan": ("cpt.plan_command:command", "Memory, time and money of a run, and the cheapest change that makes it fit."),
    "mixture": ("cpt.mixture.command:command", "Count what a run will read of each source, before it starts."),
    "data": ("cpt.data_commands.app:app", "Check and preview documents; convert PDF, HTML, DOCX and EPUB; let a model rewrite them."),
    "tokenizer": ("cpt.tokenizer_commands.app:app", "Report on a tokenizer, extend one with a domain's tokens, or train a new one."),
    "prepare": ("cpt.prepare.command:command", "Read, filter, tokenise and pack a recipe's documents ahead of its run."),
    "store": ("cpt.store_command:app", "List, verify or prune the tokens that are kept between runs."),
    "verify": ("cpt.verify_command:command", "Compare a run's checkpoints, or one of them, with what was written."),
    "export": ("cpt.checkpoints.export_command:command", "Write a trained model for others to load, proven by its logits."),
    "merge": ("cpt.checkpoints.merge_command:command", "Make one model of several: adapter and base, chat vector, mean of checkpoints."),
    "serve": ("cpt.serving.serve:command", "Serve a model to OpenAI clients, on Hugging Face's own server."),
    "chat": ("cpt.serving.chat:command", "Chat with a model in the terminal."),
    "contamination": ("cpt.contamination_command:command", "Find training documents that hold what the model will be judged by."),
    "evaluate": ("cpt.evaluate_command:command", "Measure a model on held-out text, questions and tasks, against its base."),
    "verdict": ("cpt.verdict:command", "Judge a finished run against its base, on one page."),
    "runs": ("cpt.runs.list_command:command", "List runs: state, tokens, loss, speed, age, tags."),
    "compare": ("cpt.compare.command:command", "Say exactly what differs between runs: recipes, versions, data, curves, evaluations."),
    "report": ("cpt.report.command:command", "Tell a run's whole story in one HTML file."),
    "reproduce": ("cpt.reproduce.command:command", "Run a run again from its record, and say whether its losses are the same."),
    "search": ("cpt.search.command:command", "Search for better values of a recipe's keys, each trial a run; learning-rate range test."),
    "schema": ("cpt.recipe.json_schema:command", "Print the recipe's JSON schema, for editors."),
    "doctor": ("cpt.doctor:command", "Show what this machine has, or whether the nodes of a cluster fit together."),
    "demo": ("cpt.demo.run:command", "The whole path, offline in minutes: documents, init, check, train, verdict, served answer."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `cpt` with these words, or with those of the command line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    run_app(application(words[0] if words else ""), words)


def application(command: str) -> typer.Typer:
    """All commands by name and summary; only the one that is going to run is imported, so that `cpt --help` imports no torch."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Continued pre-training of causal language models, from one YAML recipe.",
    )
    for name, (target, summary) in COMMANDS.items():
        module, _, function = target.partition(":")
        loaded = vars(import_module(module))[function] if name == command else only_listed
        if isinstance(loaded, typer.Typer):  # a command with commands of its own
            app.add_typer(loaded, name=name, help=summary)
        else:
            app.command(name, help=summary)(loaded)
    return app


def only_listed() -> None:
    """Stands for a command on the help page."""


if __name__ == "__main__":
    main()
