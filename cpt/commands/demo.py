"""`cpt demo`: texts, a base model, then a user's commands: init, check, train with three seeds, export, serve."""

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from cpt.commands.demo_corpus import write_files
from cpt.console import open_console
from cpt.errors import LaunchError, ResourceError, TrainingError
from cpt.hardware import find_gpus
from cpt.process import Child
from cpt.runs.folder import VERDICT, VERDICT_PAGE, read_metrics, read_object
from cpt.runs.record import Run
from cpt.shipped import SHIPPED_FILES

RECIPES = SHIPPED_FILES / "recipes"
FOLDER = Path("demo_runs")  # the one that the recipes name
VOCABULARY_SIZE = 4096
TOKENS = 220_000  # of each continued pre-training: less than one epoch, so that it takes half a minute
LOG = "training.logging_steps=50"  # few lines
SEEDS = (1, 2, 3)
WIDTH_OF_A_TITLE = 80
PROMPT = "def read_lines(path):\n"


ANSWER_TOKENS = 48


Word = str | int | Path


DOMAIN_FALL_PERCENT = 15.0  # at least


GENERAL_RISE_PERCENT = 3.0  # at most


@dataclass(frozen=True)
class ServedAnswer:
    """A prompt for the served model, and its continuation."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Base:
    """The run that made the base model; bits per byte of held-out prose."""

    general_before: float
    general_after: float
    tokens: int
    tokens_per_second: float
    seconds: float
    """Of the whole run: loading, training, evaluating, exporting."""


@dataclass(frozen=True)
class SeedResult:
    """One continued run: bits per byte of both held-out sets before and after, and how fast it trained."""

    run: str
    domain_before: float
    domain_after: float
    general_before: float
    general_after: float
    tokens: int
    tokens_per_second: float
    seconds: float
    worked: bool
    """What its verdict says: the interval of the domain's change lies below zero."""

    @property
    def domain_change(self) -> float:
        """In percent; continued pre-training should make it fall."""
        return 100 * (self.domain_after / self.domain_before - 1)

    @property
    def general_change(self) -> float:
        """In percent; replay should keep it from rising."""
        return 100 * (self.general_after / self.general_before - 1)

    @property
    def passed(self) -> bool:
        return (
            self.worked and self.domain_change <= -DOMAIN_FALL_PERCENT and self.general_change <= GENERAL_RISE_PERCENT
        )


@dataclass(frozen=True)
class Summary:
    base: Base
    rows: list[SeedResult]
    headline: str
    """Of the first seed's verdict."""
    page: str
    answer: ServedAnswer | None
    """Of the first seed's model, if it was served."""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


@dataclass(frozen=True)
class Commands:
    """Prints and starts commands, all with the same environment."""

    console: Console
    variables: Mapping[str, str]

    def run(self, *words: Word) -> None:
        """Wait for a command. A signal is forwarded to it, so that a run can save a checkpoint.

        Raises:
            TrainingError: it failed.
            KeyboardInterrupt: it was stopped by a signal.
        """
        code, forwarded = Child(self.printed(*words), environment=self.environment()).wait_for_end()
        if forwarded:
            raise KeyboardInterrupt
        if code:
            raise TrainingError(
                f"`cpt {words[0]}` ended with exit code {code}; its message is above. Start the demo again to resume."
            )

    def ask_server(self, model: Path, prompt: str) -> ServedAnswer | None:
        """Serve a model, ask it once with OpenAI's client, stop it; None if a package for it is not installed.

        Raises:
            LaunchError: the server did not start.
        """
        if any(importlib.util.find_spec(package) is None for package in ("fastapi", "uvicorn", "openai")):
            missing = "fastapi, uvicorn or openai is not installed (pip install 'cpt[serving]')"
            self.console.print(f"Not served: {missing}.", highlight=False)
            return None
        from openai import DefaultHttpxClient, OpenAI

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        words = self.printed("serve", model, "--port", port)
        environment = {**os.environ, **self.environment()}
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as server:
            try:
                self.wait_until_ready(server)
                url = f"http://localhost:{port}/v1"
                # Without the environment's proxies: the server is on this machine.
                client = OpenAI(base_url=url, api_key="none", http_client=DefaultHttpxClient(trust_env=False))
                self.print(f">>> client = OpenAI(base_url={url!r}, api_key='none')")
                asked: Any = {"model": str(model), "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
                call = ", ".join(f"{name}={value!r}" for name, value in asked.items())
                self.print(f">>> client.completions.create({call})")
                with client:
                    completion = client.completions.create(**asked)
            finally:
                server.terminate()
        answer = ServedAnswer(prompt, completion.choices[0].text)
        self.print(f"{answer.prompt}{answer.text}")
        return answer

    def wait_until_ready(self, server: subprocess.Popen[str]) -> None:
        """Print the server's output up to the line with an example for curl."""
        for line in server.stdout or ():
            self.print(line.rstrip())
            if line.startswith("curl "):
                return
        raise LaunchError("`cpt serve` ended before it was ready; its message is above.")

    def print(self, text: str) -> None:
        """Print a text as it is."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def printed(self, *words: Word) -> list[str]:
        """Print the command; the words that start it with this Python."""
        texts = [str(word) for word in words]
        self.console.print(f"[bold]$[/bold] cpt {shlex.join(texts)}", highlight=False, soft_wrap=True)
        return [sys.executable, "-m", "cpt", *texts]

    def environment(self) -> dict[str, str]:
        """Variables to add: the Hub is not asked, and DeepSpeed does not warn about the missing GPU."""
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if not find_gpus():
            quiet["DS_ACCELERATOR"] = "cpu"
        return {**{key: os.environ.get(key, value) for key, value in quiet.items()}, **self.variables}


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


def summarize(base: Run, runs: Sequence[Run], answer: ServedAnswer | None) -> Summary:
    first = runs[0].folder
    headline = read_object(first / VERDICT)["headline"]
    return Summary(read_base(base), [read_row(run) for run in runs], headline, str(first / VERDICT_PAGE), answer)


def read_base(run: Run) -> Base:
    metrics = read_metrics(run.folder)
    tokens, general = metrics.curve("eval_general_bits_per_byte")
    speed = float(np.median(metrics.curve("tokens_per_second")[1]))
    return Base(float(general[0]), float(general[-1]), int(tokens[-1]), speed, run.status()["seconds"])


def read_row(run: Run) -> SeedResult:
    verdict = read_object(run.folder / VERDICT)
    domain, general = sorted(verdict["sets"], key=lambda one: bool(one["is_general"]))
    return SeedResult(
        run=run.folder.name,
        domain_before=domain["before"],
        domain_after=domain["after"],
        general_before=general["before"],
        general_after=general["after"],
        tokens=verdict["tokens"],
        tokens_per_second=float(np.median(read_metrics(run.folder).curve("tokens_per_second")[1])),
        seconds=run.status()["seconds"],
        worked=bool(verdict["worked"]),
    )


def is_judged(run: Run) -> bool:
    """Whether a run is finished and its verdict complete."""
    return run.is_finished and bool(read_object(run.folder / VERDICT).get("is_complete"))


def write_summary(summary: Summary, folder: Path) -> None:
    """Save summary.json."""
    content = {**asdict(summary), "passed": summary.passed}
    (folder / "summary.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(summary: Summary, console: Console, folder: Path) -> None:
    """Print the table, the verdict, and where everything is."""
    base, first = summary.base, summary.rows[0]
    seconds = base.seconds + sum(row.seconds for row in summary.rows)
    console.print(
        f"Base model: {base.tokens:,} tokens of prose at {base.tokens_per_second:,.0f} tokens/s; its bits per byte on"
        f" other prose went from {base.general_before:.3f} to {base.general_after:.3f}. Continued pre-training:"
        f" {first.tokens:,} tokens a seed. All runs together took {seconds:.0f} s.",
        highlight=False,
    )
    table = Table("", title="Bits per byte on held-out documents")
    for title in ("domain before", "after", "change", "general before", "after", "change", "tokens/s"):
        table.add_column(title, justify="right")
    for row in summary.rows:
        domain = (f"{row.domain_before:.3f}", f"{row.domain_after:.3f}", f"{row.domain_change:+.1f} %")
        general = (f"{row.general_before:.3f}", f"{row.general_after:.3f}", f"{row.general_change:+.1f} %")
        table.add_row(row.run.removeprefix("code-"), *domain, *general, f"{row.tokens_per_second:,.0f}")
    console.print(table)
    num_passed = sum(row.passed for row in summary.rows)
    console.print(
        f"[bold {'green' if summary.passed else 'red'}]{'Passed' if summary.passed else 'NOT passed'}: domain text"
        f" falls by {DOMAIN_FALL_PERCENT:.0f} % or more, general text rises by {GENERAL_RISE_PERCENT:.0f} % or less,"
        f" in {num_passed} of {len(summary.rows)} seeds."
    )
    console.print(summary.headline, highlight=False)
    run, last = (folder / summary.rows[number].run for number in (0, -1))
    compare = [f"  cpt compare {run} {last}"] if run != last else []
    for line in (
        f"The verdict: {summary.page}",
        f"The figures: {folder / 'summary.json'}",
        f"The model:   {folder / 'model'}",
        "Next:",
        *(f"  cpt report {run}", *compare, f"  cpt reproduce {run} --steps 100"),
    ):
        console.print(line, highlight=False, soft_wrap=True)
