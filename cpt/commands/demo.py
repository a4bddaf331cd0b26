"""`cpt demo`: texts, a base model, then a user's commands: init, check, train with three seeds, export, serve."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table

from cpt.data.readers.standard_library import write_files
from cpt.errors import LaunchError, ResourceError, TrainingError, install_line
from cpt.files import SHIPPED_FILES
from cpt.formatting import open_console
from cpt.interrupts import end_like_ctrl_c
from cpt.process import Child, free_port
from cpt.runs.folder import VERDICT, VERDICT_PAGE, read_object
from cpt.runs.record import Run

RECIPES = SHIPPED_FILES / "recipes"
FOLDER = Path("demo_runs")  # named in the recipes
VOCABULARY_SIZE = 4096
TOKENS = 220_000  # per continued pre-training: under one epoch, half a minute
LOG = "training.logging_steps=50"  # few lines
SEEDS = "1,2,3"
WIDTH_OF_A_TITLE = 80
PROMPT = "def read_lines(path):\n"
ANSWER_TOKENS = 48
DOMAIN_FALL_PERCENT = 15.0  # at least
GENERAL_RISE_PERCENT = 3.0  # at most

Word = str | int | Path


@dataclass(frozen=True)
class SeedResult:
    """One continued run: bits per byte of both held-out sets before and after."""

    run: str
    domain_before: float
    domain_after: float
    general_before: float
    general_after: float
    worked: bool
    """By its verdict."""
    headline: str

    @property
    def domain_change(self) -> float:
        """In percent."""
        return 100 * (self.domain_after / self.domain_before - 1)

    @property
    def general_change(self) -> float:
        """In percent."""
        return 100 * (self.general_after / self.general_before - 1)

    @property
    def passed(self) -> bool:
        is_better = self.worked and self.domain_change <= -DOMAIN_FALL_PERCENT
        return is_better and self.general_change <= GENERAL_RISE_PERCENT


@dataclass(frozen=True)
class Commands:
    """Prints and starts commands."""

    console: Console

    def run(self, *arguments: Word) -> None:
        """Wait for a command; TrainingError if it fails. A signal is forwarded to it, so that a run can save a
        checkpoint; then KeyboardInterrupt."""
        exit_code, forwarded = Child(self.printed(*arguments)).wait_for_end()
        if forwarded:
            raise KeyboardInterrupt
        if exit_code:
            raise TrainingError(
                f"`cpt {arguments[0]}` ended with exit code {exit_code}; see above. Repeat it to resume."
            )

    def ask_server(self, model: Path, prompt: str) -> str | None:
        """Serve a model, complete a prompt with OpenAI's client, stop it; None if a package is missing."""
        packages = ("fastapi", "uvicorn", "openai")
        if any(importlib.util.find_spec(package) is None for package in packages):
            self.print(
                f"Serving skipped: fastapi, uvicorn or openai is not installed ({install_line('serving')})."
            )
            return None
        from openai import DefaultHttpxClient, OpenAI

        port = free_port()
        command = self.printed("serve", model, "--port", port)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                for line in server.stdout or ():
                    self.print(line.rstrip())
                    if line.startswith("curl "):  # the last line before it is ready
                        break
                else:
                    raise LaunchError(
                        "`cpt serve` exited before it was ready; see its message above."
                    )
                url = f"http://localhost:{port}/v1"
                # Without the environment's proxies: the server is on this machine.
                client = OpenAI(
                    base_url=url, api_key="none", http_client=DefaultHttpxClient(trust_env=False)
                )
                self.print(f">>> client = OpenAI(base_url={url!r}, api_key='none')")
                request: Any = {
                    "model": str(model),
                    "prompt": prompt,
                    "max_tokens": ANSWER_TOKENS,
                    "temperature": 0,
                }
                call = ", ".join(f"{name}={value!r}" for name, value in request.items())
                self.print(f">>> client.completions.create({call})")
                with client:
                    completion = client.completions.create(**request)
            finally:
                server.terminate()
        answer = str(completion.choices[0].text)
        self.print(f"{prompt}{answer}")
        return answer

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def title(self, text: str) -> None:
        self.console.print()
        self.console.print(
            Rule(f"[bold]{text}", align="left"), width=min(self.console.width, WIDTH_OF_A_TITLE)
        )

    def printed(self, *arguments: Word) -> list[str]:
        """Print the command, and return its argument list for this Python."""
        texts = list(map(str, arguments))
        self.console.print(
            f"[bold]$[/bold] cpt {shlex.join(texts)}", highlight=False, soft_wrap=True
        )
        return [sys.executable, "-m", "cpt", *texts]


def command(
    folder: Annotated[
        Path, typer.Option(help="Folder for texts, tokenizer, runs and summary.")
    ] = FOLDER,
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas; one continued pre-training each.")
    ] = SEEDS,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, for all recipes.")
    ] = None,
) -> None:
    """Run the whole workflow, offline in minutes: documents, init, check, train, verdict, served answer.

    Finished parts in the folder are skipped.

    Example: cpt demo --seeds 4,5
    """
    try:
        numbers = list(dict.fromkeys(map(int, seeds.split(","))))
    except ValueError as problem:
        raise typer.BadParameter(
            f"--seeds: expected numbers such as 1,2,3, got {seeds!r}"
        ) from problem
    end_like_ctrl_c()
    os.environ["CPT_CACHE"] = str(folder / "cache")  # for all commands
    for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)
    try:
        code = run_demo(folder, numbers, overrides or ())
    except KeyboardInterrupt:
        typer.echo("Interrupted. Repeat the command to resume.", err=True)
        code = 130
    raise typer.Exit(code)


def run_demo(folder: Path, seeds: Sequence[int] = (1, 2, 3), overrides: Sequence[str] = ()) -> int:
    """Run all parts and print the table; 0 if every seed passed, else 1."""
    console = open_console()
    cpt = Commands(console)
    cpt.title("1  Text: code and prose from this Python's standard library")
    documents, general = write_documents(folder, cpt)
    cpt.title("2  A base model: a tokenizer and 1.3M parameters, trained on the prose")
    base = train_base(folder, general, overrides, cpt)
    cpt.title("3  Your turn: a folder of documents and a base model become a recipe")
    recipe = folder / "recipe.yaml"
    if recipe.exists():
        cpt.print(f"{recipe} exists already.")
    else:
        options: list[Word] = ["--model", base.export_folder, "--gpu", "cpu"]
        options += ["--general", general, "--shift", "strong"]  # code is far from prose
        options += ["--tokens", TOKENS, "--output", recipe]
        cpt.run("init", documents, *options)
    times = "times" if len(seeds) > 1 else "time"
    cpt.title(f"4  Continued pre-training, {len(seeds)} {times}")
    runs = train_seeds(folder, recipe, seeds, overrides, cpt)
    cpt.title("5  Export: weights for other programs, and a server")
    model = folder / "model"
    if not model.exists():
        cpt.run("export", runs[0].folder, "--output", model)
    answer = cpt.ask_server(model, PROMPT)
    cpt.title("Result")
    results = list(map(read_result, runs))
    passed = all(result.passed for result in results)
    summary = {
        "rows": list(map(asdict, results)),
        "page": str(runs[0].folder / VERDICT_PAGE),
        "answer": {"prompt": PROMPT, "text": answer} if answer else answer,
        "passed": passed,
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    print_results(results, console, folder)
    return 0 if passed else 1


def write_documents(folder: Path, cpt: Commands) -> tuple[Path, Path]:
    """Write the texts of the demo; return the folders of the domain's documents and of general text."""
    try:
        folders = write_files(folder)
    except OSError as problem:
        raise ResourceError(
            f"cannot write into {folder}: {problem.strerror}. Choose another --folder."
        ) from problem
    documents = folders["domain", "train"]
    general = folders["general", "train"]
    contents = {
        documents: "code, the domain to learn",
        general: "prose, the base's training data",
    }
    for path, content in contents.items():
        sizes = [file.stat().st_size for file in path.iterdir()]
        cpt.print(f"{path}: {len(sizes):,} files, {sum(sizes) / 1e6:.2f} MB of {content}")
    return documents, general


def train_base(folder: Path, general: Path, overrides: Sequence[str], cpt: Commands) -> Run:
    """Train the base model that a user would download from the Hub: the demo works offline."""
    tokenizer = folder / "tokenizer"
    base = Run(folder / "base")
    if not (tokenizer / "tokenizer.json").exists():
        options: list[Word] = ["--text", f"prose={general}", "--vocabulary", VOCABULARY_SIZE]
        cpt.run("tokenizer", "train", *options, "--output", tokenizer)
    if not base.is_finished:
        recipe = RECIPES / "demo" / "base.yaml"
        if recipe.is_relative_to(Path.cwd()):
            recipe = Path(os.path.relpath(recipe))
        cpt.run("train", recipe, *moved_paths(folder), *overrides)
    cpt.print(f"The base model is {base.export_folder}.")
    return base


def moved_paths(folder: Path) -> list[str]:
    """Overrides that replace `demo_runs/` in the base's recipe by another folder."""
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
    """Train the recipe that `cpt init` wrote, once per seed; each run ends with its verdict."""
    runs = [Run(folder / f"code-seed{seed}") for seed in seeds]
    finished = [run for run in runs if has_verdict(run)]
    if len(finished) < len(runs):
        cpt.run("check", recipe, f"output_dir={folder}", *overrides)
    for seed, run in zip(seeds, runs, strict=True):
        if run in finished:
            cpt.print(f"{run.folder} is finished.")
        else:
            name = f"name={run.folder.name}"
            cpt.run("train", recipe, f"output_dir={folder}", name, f"seed={seed}", LOG, *overrides)
    return runs


def has_verdict(run: Run) -> bool:
    return run.is_finished and bool(read_object(run.folder / VERDICT).get("is_complete"))


def read_result(run: Run) -> SeedResult:
    verdict = read_object(run.folder / VERDICT)
    domain, general = sorted(verdict["sets"], key=lambda of_set: bool(of_set["is_general"]))
    return SeedResult(
        run=run.folder.name,
        domain_before=domain["before"],
        domain_after=domain["after"],
        general_before=general["before"],
        general_after=general["after"],
        worked=bool(verdict["worked"]),
        headline=verdict["headline"],
    )


def print_results(results: Sequence[SeedResult], console: Console, folder: Path) -> None:
    headings = ("domain before", "after", "change", "general before", "after", "change")
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table("", *columns, title="Bits per byte on held-out documents")
    for result in results:
        table.add_row(
            result.run.removeprefix("code-"),
            f"{result.domain_before:.3f}",
            f"{result.domain_after:.3f}",
            f"{result.domain_change:+.1f} %",
            f"{result.general_before:.3f}",
            f"{result.general_after:.3f}",
            f"{result.general_change:+.1f} %",
        )
    console.print(table)
    num_passed = sum(result.passed for result in results)
    outcome = "[bold green]Passed" if num_passed == len(results) else "[bold red]NOT passed"
    console.print(
        f"{outcome}: domain text falls by {DOMAIN_FALL_PERCENT:.0f} % or more, general text rises by"
        f" {GENERAL_RISE_PERCENT:.0f} % or less, in {num_passed} of {len(results)} seeds."
    )
    for result in results:
        console.print(f"{result.run.removeprefix('code-')}: {result.headline}", highlight=False)
    first = folder / results[0].run
    last = folder / results[-1].run
    lines = [
        f"The verdict: {first / VERDICT_PAGE}",
        f"The model: {folder / 'model'}",
        "Next:",
        f"  cpt report {first}",
    ]
    if first != last:
        lines.append(f"  cpt compare {first} {last}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
