"""`cpt data rewrite`: let a local model rewrite documents or ask about them."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column, Table

from cpt.command_line import refuse_ignored, show_log
from cpt.commands.rewriting import PROMPTS, WRAP_TOKENS, Rewritten, Task, find_prompt, rewrite
from cpt.commands.rewriting_model import Sampling
from cpt.console import open_console
from cpt.recipe.schema import DocumentSource, Model

TOP_P, SEED = 0.95, 42


def rewrite_command(
    source: Annotated[
        str, typer.Argument(help="Documents, as a recipe's `path` means them: files, a folder, a URL, a dataset's id.")
    ],
    model: Annotated[str, typer.Option(help="Folder or Hub id of the model that writes.")],
    output: Annotated[Path, typer.Option(help="Folder for the jsonl files; what is in it already is not made again.")],
    text_column: Annotated[str, typer.Option(help="Column or JSON key that holds the text.")] = "text",
    max_documents: Annotated[int | None, typer.Option(min=1, help="Only so many documents.")] = None,
    prompt: Annotated[str, typer.Option(help=f"{', '.join(PROMPTS)}; or a file with {{text}} in it.")] = "clear_prose",
    revision: Annotated[str | None, typer.Option(help="The model's commit, tag or branch on the Hub.")] = None,
    max_input_tokens: Annotated[
        int, typer.Option(min=8, help="Longer documents are cut at the ends of paragraphs.")
    ] = WRAP_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw among the tokens that have this probability together.")
    ] = TOP_P,
    seed: Annotated[int, typer.Option(min=0, help="Each text's own seed follows from it and the text.")] = SEED,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Texts at a time: for the speed. In float32 it does not change the answers.")
    ] = 8,
    cut_off: Annotated[
        Literal["drop", "keep"], typer.Option(help="Answers that had not ended at --max-new-tokens.")
    ] = "drop",
    min_characters: Annotated[int, typer.Option(min=1, help="Drop shorter answers.")] = 40,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model; --revision must be a commit.")
    ] = False,
) -> None:
    """Write new text from documents with a local model, each with its provenance: source, model, prompt, sampling and
    seed.

    A tokenizer's chat template is used where there is one. The same command resumes an interrupted run.

    Example: cpt data rewrite 'corpus/*.jsonl' --model Qwen/Qwen2.5-1.5B-Instruct --prompt question_answers --output qa
    """
    show_log()
    refuse_ignored(
        {"--top-p": top_p != TOP_P, "--seed": seed != SEED} if temperature == 0 else {},
        "with --temperature 0, which draws nothing",
    )
    refuse_ignored(
        {"--revision": revision is not None and Path(model).expanduser().is_dir()}, "with a model in a folder"
    )
    task = Task(
        source=DocumentSource(path=source, text_column=text_column, max_documents=max_documents),
        model=Model(path=model, revision=revision, trust_remote_code=trust_remote_code),
        prompt=find_prompt(prompt),
        sampling=Sampling(max_new_tokens, temperature, top_p),
        max_input_tokens=max_input_tokens,
        seed=seed,
        cut_off=cut_off,
        min_characters=min_characters,
        batch_size=batch_size,
    )
    done = rewrite(task, output, tell)
    show_rewritten(done, output)


def tell(done: Rewritten) -> None:
    typer.echo(f"{done.documents:,} documents, {done.texts:,} texts made, {done.dropped.total():,} dropped")


def show_rewritten(done: Rewritten, output: Path) -> None:
    console = open_console()
    table = Table(Column("texts", justify="right"), "became")
    table.add_row(f"{done.texts:,}", "kept")
    for reason, count in done.dropped.most_common():
        table.add_row(f"{count:,}", f"dropped: {reason}", style="yellow")
    console.print(table)
    console.print(
        f"{done.documents:,} documents, {done.pieces:,} texts asked about; {done.groups_done_before:,} group(s) were"
        " there before."
    )
    if done.texts:
        console.print(f"A recipe reads them: data.sources: [{{path: {output}}}]", markup=False)
