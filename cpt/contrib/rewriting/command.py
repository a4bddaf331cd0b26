"""`cpt data rewrite`: a model rewrites documents."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Column, Table

from cpt.command_line import refuse_ignored, show_log
from cpt.contrib.rewriting.styles import NAMES, WRAP_TOKENS, find_styles
from cpt.errors import DataError, RecipeError
from cpt.formatting import open_console
from cpt.recipe.schema import DocumentSource, Model

if TYPE_CHECKING:
    from cpt.contrib.rewriting.model import Endpoint
    from cpt.contrib.rewriting.rewrite import Estimate, Rewritten

CONCURRENCY = 32
TIMEOUT = 600.0
TOP_P = 0.95
SEED = 42
SECONDS_OF_PROGRESS = 10


def command(
    source: Annotated[
        str, typer.Argument(help="Like `path` in a recipe: files, a folder, a URL, a dataset's id.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Folder or Hub id of the model that rewrites; or its name at --endpoint."
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for the jsonl files; finished texts are not repeated.")
    ],
    styles: Annotated[
        str, typer.Option(help=f"{', '.join(NAMES)}; or a file with {{text}}. Several: a,b.")
    ] = "clear_prose",
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible server: http://localhost:8000/v1.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Calls at a time to --endpoint.")
    ] = CONCURRENCY,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds before a call to --endpoint is repeated.")
    ] = TIMEOUT,
    repeats: Annotated[int, typer.Option(min=1, help="Texts of each style.")] = 1,
    further_calls: Annotated[
        int,
        typer.Option(
            min=1, help="active_reading, entigraph: most calls for a text after the first one."
        ),
    ] = 8,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Print calls and tokens, and stop.")
    ] = False,
    price: Annotated[
        str | None, typer.Option(help="IN,OUT of a million tokens, for the estimate: 0.15,0.6.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column or JSON key with the text.")] = "text",
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Rewrite at most this many documents.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="The model's commit, tag or branch on the Hub.")
    ] = None,
    max_input_tokens: Annotated[
        int, typer.Option(min=8, help="Split longer documents at paragraphs.")
    ] = WRAP_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy decoding.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")
    ] = TOP_P,
    seed: Annotated[
        int, typer.Option(min=0, help="Each text's seed derives from this one and the text.")
    ] = SEED,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Texts per batch; does not change answers in float32.")
    ] = 8,
    cut_off: Annotated[
        Literal["drop", "keep"], typer.Option(help="Answers cut off at --max-new-tokens.")
    ] = "drop",
    min_characters: Annotated[int, typer.Option(min=1, help="Drop shorter answers.")] = 40,
    decontaminate_against: Annotated[
        list[str] | None,
        typer.Option(help="Evaluation files; texts and answers that contain them are dropped."),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the model's code; --revision must be a commit."
        ),
    ] = False,
) -> None:
    """Rewrite documents with a model, local or behind a server, and record their provenance: source, model, prompt,
    sampling and seed.

    A local model's chat template is used if it has one. A server's key is read from CPT_API_KEY or OPENAI_API_KEY.
    The same command resumes an interrupted run.

    Example: cpt data rewrite 'corpus/*.jsonl' --model Qwen/Qwen2.5-1.5B-Instruct --styles question_answers --output qa
    """
    show_log()
    if temperature == 0:
        of_draws = {"--top-p": top_p != TOP_P, "--seed": seed != SEED, "--repeats": repeats > 1}
        refuse_ignored(of_draws, "with --temperature 0, which draws nothing")
    if endpoint is None:
        of_server = {"--concurrency": concurrency != CONCURRENCY, "--timeout": timeout != TIMEOUT}
        refuse_ignored(of_server, "without --endpoint")
        in_folder = Path(model).expanduser().is_dir()
        refuse_ignored(
            {"--revision": revision is not None and in_folder}, "with a model in a folder"
        )
    else:
        of_local = {
            "--batch-size": batch_size != 8,
            "--trust-remote-code": trust_remote_code,
            "--revision": revision is not None,
        }
        refuse_ignored(of_local, "with --endpoint")
        if not endpoint.startswith(("http://", "https://")):
            raise RecipeError(
                f"--endpoint {endpoint}: expected a URL such as http://localhost:8000/v1."
            )
    chosen_styles = find_styles(styles)
    has_further_calls = any(style.then for style in chosen_styles)
    refuse_ignored(
        {"--further-calls": further_calls != 8 and not has_further_calls},
        "without active_reading or entigraph",
    )

    # Imported after the options are checked: they import torch, which takes seconds.
    from cpt.contrib.rewriting.model import Endpoint, Sampling
    from cpt.contrib.rewriting.rewrite import Task, estimate, rewrite

    writer: Model | Endpoint = Model(
        path=model, revision=revision, trust_remote_code=trust_remote_code
    )
    if endpoint is not None:
        writer = Endpoint(endpoint, model, concurrency, timeout)
    task = Task(
        source=DocumentSource(path=source, text_column=text_column, max_documents=max_documents),
        model=writer,
        styles=chosen_styles,
        sampling=Sampling(max_new_tokens, temperature, top_p),
        max_input_tokens=max_input_tokens,
        seed=seed,
        repeats=repeats,
        further_calls=further_calls,
        against=tuple(decontaminate_against or ()),
        cut_off=cut_off,
        min_characters=min_characters,
        batch_size=batch_size,
    )
    expected = estimate(task)
    typer.echo(described(expected, price, task.model))
    if not only_estimate:
        done = rewrite(task, output, progress_of(expected.calls), expected.calls)
        show_rewritten(done, output)


def described(expected: "Estimate", price: str | None, model: "Model | Endpoint") -> str:
    most_calls = expected.calls
    calls = f"{expected.documents:,} documents, {expected.texts:,} texts"
    if isinstance(model, Model):
        calls += f", at most {expected.calls:,} calls"
    else:
        most_calls = model.most_calls(expected.calls)
        calls += (
            f", {expected.calls:,} calls, at most {most_calls:,} calls with repeated ones;"
            " without these"
        )
    tokens = f"at most about {expected.input_tokens:,} tokens in and {expected.output_tokens:,} out"
    if price is None:
        return f"{calls}: {tokens}"
    try:
        of_input, of_output = map(float, price.split(","))
    except ValueError as problem:
        raise RecipeError(f"--price {price}: expected two numbers such as 0.15,0.6.") from problem
    cost = (expected.input_tokens * of_input + expected.output_tokens * of_output) / 1e6
    priced = f"{calls}: {tokens}; cost at most {cost:,.2f}"
    if most_calls > expected.calls > 0:
        with_repeated = cost * most_calls / expected.calls
        priced += f", and {with_repeated:,.2f} with all repeated calls"
    return priced


def progress_of(most_calls: int) -> Callable[["Rewritten"], None]:
    """Print the progress every ten seconds."""
    begin = last = monotonic()

    def report(done: "Rewritten") -> None:
        nonlocal last
        seconds_now = monotonic()
        if seconds_now - last < SECONDS_OF_PROGRESS or not done.calls:
            return
        last = seconds_now
        speed = done.calls / (seconds_now - begin)
        remaining = timedelta(seconds=round((most_calls - done.calls_settled) / speed))
        calls = f"{done.calls_settled:,} of {most_calls:,} calls, {speed:,.1f} per second"
        texts = f"{done.texts:,} texts written, {done.dropped.total():,} dropped"
        typer.echo(f"{calls}, {remaining} left; {texts}")

    return report


def show_rewritten(done: "Rewritten", output: Path) -> None:
    from cpt.contrib.rewriting.rewrite import nothing_kept

    console = open_console()
    table = Table(Column("texts", justify="right"), "became")
    table.add_row(f"{done.texts:,}", "kept")
    for reason, count in done.dropped.most_common():
        table.add_row(f"{count:,}", f"dropped: {reason}", style="yellow")
    console.print(table)
    read = f"{done.documents:,} documents, {done.pieces:,} texts"
    calls = f"{done.calls:,} calls answered by the model in this run"
    console.print(f"{read}; {calls}; {done.groups_done_before:,} group(s) were finished before.")
    if done.removed:
        removed = done.removed.most_common()
        listed = ", ".join(f"{reason} from {count:,}" for reason, count in removed)
        console.print(f"Removed from answers: {listed}.", markup=False)
    if not done.texts:
        raise DataError(nothing_kept(output, done.pieces, done.dropped))
    console.print(f"A recipe reads them: data.sources: [{{path: {output}}}]", markup=False)
