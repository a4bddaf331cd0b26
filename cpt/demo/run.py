"""The demo, start to end: corpus, tokenizer, base model, continued pre-training with three seeds, and the verdict."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cpt.demo.corpus import Corpus, build_corpus
from cpt.demo.verdict import show, summarize, write_summary
from cpt.errors import ResourceError, TrainingError
from cpt.runs.record import Run
from cpt.tokenizer.train_bpe import train_bpe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
FOLDER = Path("demo_runs")  # the one that the recipes name
VOCABULARY_SIZE = 4096
SEEDS = (1, 2, 3)


def command(
    folder: Annotated[Path, typer.Option(help="Where corpus, tokenizer, runs and summary go.")] = FOLDER,
    seeds: Annotated[str, typer.Option(help="One continued pre-training for each, separated by commas.")] = ",".join(map(str, SEEDS)),
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipes, for all runs.")] = None,
) -> None:
    """Run the demo; what is finished already in the folder is not done again."""
    try:
        numbers = list(dict.fromkeys(int(seed) for seed in seeds.split(",")))
    except ValueError as problem:
        raise typer.BadParameter(f"--seeds takes numbers with commas between them, such as 1,2,3; not {seeds!r}") from problem
    raise typer.Exit(run_demo(folder, numbers, overrides or ()))


def run_demo(folder: Path = FOLDER, seeds: Sequence[int] = SEEDS, overrides: Sequence[str] = ()) -> int:
    """Run all of it and print the table; 0 when continued pre-training did what it should for every seed, else 1.

    Raises:
        ResourceError: the recipes are not there.
        TrainingError: one of the runs failed.
    """
    console = Console()
    console.rule("[bold]1  Text: this Python's standard library", align="left")
    corpus = build_corpus(folder / "corpus")
    describe_corpus(corpus, console)
    console.rule("[bold]2  Tokenizer: byte-level BPE on the training text", align="left")
    tokenizer = train_bpe(training_texts(corpus), VOCABULARY_SIZE, folder / "tokenizer")
    console.print(f"{len(tokenizer):,} tokens, in {folder / 'tokenizer'}")
    console.rule("[bold]3  Base model: pre-training on general text", align="left")
    base = train_recipe(RECIPES / "demo" / "pretrain.yaml", folder, "base", overrides, console)
    runs = []
    for seed in seeds:
        console.rule(f"[bold]4  Continued pre-training on code, seed {seed}", align="left")
        runs.append(train_recipe(RECIPES / "demo.yaml", folder, f"demo-seed{seed}", [f"seed={seed}", *overrides], console))
    summary = summarize(base, runs)
    write_summary(summary, folder)
    show(summary, console, folder)
    return 0 if summary.passed else 1


def describe_corpus(corpus: Corpus, console: Console) -> None:
    """One line for each of the four files."""
    for (kind, part), path in corpus.files.items():
        console.print(f"{path}: {corpus.documents[kind, part]:,} documents, {corpus.num_bytes[kind, part] / 1e6:.2f} MB", highlight=False)


def training_texts(corpus: Corpus) -> Iterator[str]:
    """What the tokenizer learns from: never the held-out documents."""
    for (_, part), path in corpus.files.items():
        if part == "train":
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line)["text"] for line in lines)


def train_recipe(recipe: Path, folder: Path, name: str, overrides: Sequence[str], console: Console) -> Run:
    """Start a recipe as a user would, in a process of its own, and wait for it."""
    if not recipe.exists():
        raise ResourceError(f"{recipe} is not there: the demo needs the recipes beside the package. Run it in a clone of the repository.")
    arguments = [str(ROOT / "cpt" / "train.py"), str(recipe), f"name={name}", *moved_paths(recipe, folder), *overrides]
    console.print(f"$ python {' '.join(arguments)}", highlight=False, soft_wrap=True)
    environment = {"CPT_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false", **os.environ}
    code = subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
    if code:
        raise TrainingError(f"the run {folder / name} failed with exit code {code}. Its own message stands above, and in its status.json.")
    return Run(folder / name)


def moved_paths(recipe: Path, folder: Path) -> list[str]:
    """Overrides that move what the recipe names under `demo_runs/` to another folder."""
    if folder == FOLDER:
        return []
    held_out = [(f"evaluation.perplexity.{i}.path", f"corpus/{kind}/held_out.jsonl") for i, kind in enumerate(("domain", "general"))]
    if recipe.name == "pretrain.yaml":
        paths = [("tokenizer.path", "tokenizer"), ("data.sources.0.path", "corpus/general/train.jsonl")]
    else:
        paths = [("model.path", "base/final")]
        paths += [(f"data.sources.{i}.path", f"corpus/{kind}/train.jsonl") for i, kind in enumerate(("domain", "general"))]
    return [f"output_dir={folder}", *(f"{key}={folder / path}" for key, path in [*paths, *held_out])]
