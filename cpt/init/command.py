"""`cpt init DOCUMENTS --model MODEL --gpu GPU`: a commented recipe, or the reason why there can be none."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored
from cpt.data.held_out import size_warnings
from cpt.data.readers.files import kind_of
from cpt.data.readers.sources import files_with_sizes
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.evaluation.paired import FEW
from cpt.hardware import find_gpus
from cpt.init.base_model import look_at_model
from cpt.init.choices import Shift, choose
from cpt.init.documents import estimate_tokens, look_at_documents
from cpt.init.sentences import told_cost, told_documents, told_tokens
from cpt.init.writing import PUBLIC_GENERAL, recipe_text
from cpt.planner.target import find_target
from cpt.ranks import tell
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import DocumentSource

NO_REPLAY = "none"


def command(
    documents: Annotated[
        str | None, typer.Argument(help="File, folder or glob: txt, md, jsonl, json, parquet, csv, tsv, arrow.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or Hub id of the base model.")] = None,
    gpu: Annotated[str | None, typer.Option(help='"RTX 4090", A100-80GB, H100, ...; or cpu.')] = None,
    gpus: Annotated[int, typer.Option(help="How many of them.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="The recipe's file.")] = Path("recipe.yaml"),
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Of one GPU, in any currency: adds the cost.")
    ] = None,
    general: Annotated[
        str | None, typer.Option(help="What is replayed: documents of yours, a Hub dataset, or none.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column or JSON key of the text.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="The budget, instead of so many times through the documents.", min=1)
    ] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of the machine's own memory, for offloading.")] = None,
    full: Annotated[
        bool | None, typer.Option("--full/--lora", help="All parameters or adapters, instead of what fits.")
    ] = None,
    shift: Annotated[
        Shift | None, typer.Option(help="How far the documents are from what the base read, where you know.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Write a recipe for these documents, this model and this machine; without the three, ask for them.

    Without documents, model and GPU it asks for them, one after the other.

    Example: cpt init papers/ --model Qwen/Qwen2.5-1.5B --gpu "RTX 4090" --price-per-gpu-hour 0.4
    """
    if None in (documents, model, gpu):
        documents, model, gpu, price_per_gpu_hour = ask(documents, model, gpu, price_per_gpu_hour)
    assert documents is not None and model is not None and gpu is not None, "they were asked for"
    if output.exists() and not force:
        raise RecipeError(f"{output} exists. Choose another name with --output, or write over it with --force.")
    target = find_target(gpu, gpus, host_memory)
    refuse_ignored({"--gpus": gpus > 1 and target.on_cpu}, "with --gpu cpu")
    check_general(general)
    base = look_at_model(model)
    facts = look_at_documents(documents, text_column)
    estimate = estimate_tokens(facts, DocumentEncoder(base.tokenizer))
    choices = choose(
        facts, estimate, base, target, with_replay=general != NO_REPLAY, tokens=tokens, full=full, shift=shift
    )
    text = recipe_text(
        facts, estimate, base, target, choices, output=output, general=general, price_per_gpu_hour=price_per_gpu_hour
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    recipe = load_recipe(output)  # shape and sense; what it refers to is looked at by `cpt check`
    tell(f"Documents: {told_documents(facts)}")
    tell(f"Tokens: {told_tokens(estimate)}")
    tell(f"Cost: {told_cost(choices.cost, target, price_per_gpu_hour)}")
    domain = recipe.data.model_copy(update={"sources": recipe.data.sources[:1]})  # without the replay
    for warning in size_warnings(domain, recipe.evaluation, few=FEW):
        tell(f"warning: {warning}.")
    tell(f"{output} is written; its comments give the reasons. Next: cpt check {output}")


def ask(
    documents: str | None, model: str | None, gpu: str | None, price: float | None
) -> tuple[str, str, str, float | None]:
    """The four questions, of which those are asked that the command line left open.

    Raises:
        RecipeError: nobody is there to answer.
    """
    missing = [
        name for name, value in {"DOCUMENTS": documents, "--model": model, "--gpu": gpu}.items() if value is None
    ]
    if not sys.stdin.isatty():
        raise RecipeError(
            f"{', '.join(missing)} missing. Write: cpt init DOCUMENTS --model MODEL --gpu GPU (`--gpu cpu` for none)."
        )
    here = found[0].name if (found := find_gpus()) else "cpu"
    documents = documents or typer.prompt("Where are your documents (file, folder or glob)?")
    model = model or typer.prompt("Which model is to learn from them (folder or Hub id)?")
    gpu = gpu or typer.prompt("On which GPU?", default=here)
    if price is None:
        answer = typer.prompt("What does an hour of it cost (empty: skip)?", default="", show_default=False)
        price = price_in(answer)
    return str(documents), str(model), str(gpu), price


def price_in(answer: str) -> float | None:
    """A number, or nothing."""
    try:
        return float(answer) if answer.strip() else None
    except ValueError as problem:
        raise RecipeError(f"`{answer}` is no number. Write the price as 0.5, without a currency.") from problem


def check_general(general: str | None) -> None:
    """What is to be replayed is there, where this machine can tell.

    Raises:
        DataError: it is not, with the public set that would do.
    """
    if general in (None, NO_REPLAY) or kind_of(str(general)) != "local":
        return
    try:
        files_with_sizes(DocumentSource(path=str(general)), "GENERAL")
    except DataError as problem:
        raise DataError(
            f"--general: {str(problem).split(' Set `GENERAL.path`')[0].rstrip('.')}. Leave --general out to take the"
            f" public {PUBLIC_GENERAL} (subset sample-10BT), or give documents like those that the base was"
            " trained on."
        ) from problem
