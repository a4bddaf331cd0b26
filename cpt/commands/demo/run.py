"""The demo: text, a base model, then what a user does: init, check, train with three seeds, verdict, export, serve."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.rule import Rule

from cpt.commands.demo.commands import Commands, Word
from cpt.commands.demo.corpus import write_files
from cpt.commands.demo.verdict import is_judged, show, summarize, write_summary
from cpt.console import open_console
from cpt.errors import ResourceError
from cpt.installation import SHIPPED_FILES
from cpt.runs.record import Run

RECIPES = SHIPPED_FILES / "recipes"
FOLDER = Path("demo_runs")  # the one that the recipes name
VOCABULARY_SIZE = 4096
TOKENS = 220_000  # of each continued pre-training: less than one epoch, so that it takes half a minute
LOG = "training.logging_steps=50"  # few lines
SEEDS = (1, 2, 3)
WIDTH_OF_A_TITLE = 80
PROMPT = "def read_lines(path):\n"


def command(
    folder: Annotated[Path, typer.Option(help="Where texts, tokenizer, runs and summary go.")] = FOLDER,
    seeds: Annotated[str, typer.Option(help="One continued pre-training for each, separated by commas.")] = ",".join(
        map(str, SEEDS)
    ),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, any key of the recipes, for all runs.")
    ] = None,
) -> None:
    """Run the whole path, offline in minutes: documents, init, check, train, verdict, served answer.

    Parts that are finished in the folder are skipped.

    Example: cpt demo --seeds 4,5
    """
    try:
        numbers = list(dict.fromkeys(int(seed) for seed in seeds.split(",")))
    except ValueError as problem:
        raise typer.BadParameter(
            f"--seeds takes numbers with commas between them, such as 1,2,3; not {seeds!r}"
        ) from problem
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = run_demo(folder, numbers, overrides or ())
    except KeyboardInterrupt:
        typer.echo("Interrupted. Start the demo again to resume.", err=True)
        code = 130
    raise typer.Exit(code)


def run_demo(folder: Path = FOLDER, seeds: Sequence[int] = SEEDS, overrides: Sequence[str] = ()) -> int:
    """Run all of it and print the table; 0 if every seed passed, else 1.

    Raises:
        ResourceError: the folder cannot be written.
        TrainingError: one of the commands failed.
    """
    console = open_console()
    cpt = Commands(console, {"CPT_CACHE": str(folder / "cache")})
    title(console, "1  Text: code and prose out of this Python's standard library")
    documents, general = make_texts(folder, console)
    title(console, "2  A base model: a tokenizer and 1.3M parameters, trained on the prose")
    base = train_base(folder, general, overrides, cpt)
    title(console, "3  Your turn: a folder of documents and a base model become a recipe")
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        what: list[Word] = ["--general", general, "--shift", "strong", "--tokens", TOKENS]  # code is far from prose
        cpt.run("init", documents, "--model", base.export_folder, "--gpu", "cpu", *what, "--output", recipe)
    else:
        console.print(f"{recipe} is there already.", highlight=False)
    title(console, f"4  Continued pre-training, {len(seeds)} time{'s' if len(seeds) > 1 else ''}")
    runs = train_seeds(folder, recipe, seeds, overrides, cpt)
    title(console, "5  Hand over: weights that others read, and a server")
    model = folder / "model"
    if not model.exists():
        cpt.run("export", runs[0].folder, "--output", model)
    answer = cpt.ask_server(model, PROMPT)
    title(console, "Result")
    summary = summarize(base, runs, answer)
    write_summary(summary, folder)
    show(summary, console, folder)
    return 0 if summary.passed else 1


def title(console: Console, text: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{text}", align="left"), width=min(console.width, WIDTH_OF_A_TITLE))


def make_texts(folder: Path, console: Console) -> tuple[Path, Path]:
    """The two folders of text files.

    Raises:
        ResourceError: nothing can be written there.
    """
    try:
        folders = write_files(folder)
    except OSError as problem:
        raise ResourceError(
            f"cannot write into {folder}: {problem.strerror}. Name another place: cpt demo --folder FOLDER"
        ) from problem
    documents, general = folders["domain", "train"], folders["general", "train"]
    for path, what in ((documents, "code, the documents to learn"), (general, "prose, what a base has read")):
        sizes = [file.stat().st_size for file in path.iterdir()]
        console.print(
            f"{path}: {len(sizes):,} files, {sum(sizes) / 1e6:.2f} MB of {what}", highlight=False, soft_wrap=True
        )
    return documents, general


def train_base(folder: Path, general: Path, overrides: Sequence[str], cpt: Commands) -> Run:
    """What a user takes from the Hub is made here, since the demo is offline."""
    recipe = RECIPES / "demo" / "base.yaml"
    tokenizer, base = folder / "tokenizer", Run(folder / "base")
    if not (tokenizer / "tokenizer.json").exists():
        cpt.run(
            "tokenizer", "train", "--text", f"prose={general}", "--vocabulary", VOCABULARY_SIZE, "--output", tokenizer
        )
    if not base.is_finished:
        recipe = Path(os.path.relpath(recipe)) if recipe.is_relative_to(Path.cwd()) else recipe
        cpt.run("train", recipe, *moved_paths(folder), *overrides)
    cpt.console.print(f"The base model is {base.export_folder}.", highlight=False)
    return base


def moved_paths(folder: Path) -> list[str]:
    """Overrides that move what the base's recipe names under `demo_runs/` to another folder."""
    if folder == FOLDER:
        return []
    return [
        f"output_dir={folder}",
        f"tokenizer.path={folder / 'tokenizer'}",
        f"data.sources.0.path={folder / 'general'}",
    ]


def train_seeds(
    folder: Path, recipe: Path, seeds: Sequence[int], overrides: Sequence[str], cpt: Commands
) -> list[Run]:
    """The recipe that `cpt init` wrote, once a seed; each run ends with its verdict."""
    runs = [Run(folder / f"code-seed{seed}") for seed in seeds]
    if not all(map(is_judged, runs)):
        cpt.run("check", recipe, f"output_dir={folder}", *overrides)
    for seed, run in zip(seeds, runs, strict=True):
        if is_judged(run):
            cpt.console.print(f"{run.folder} is finished.", highlight=False)
        else:
            cpt.run(
                "train", recipe, f"output_dir={folder}", f"name={run.folder.name}", f"seed={seed}", LOG, *overrides
            )
    return runs
