"""`cpt tokenizer extend`: a model with new tokens for a domain's text, ready for continued pre-training."""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from cpt.command_line import refuse_ignored
from cpt.console import open_console
from cpt.errors import RecipeError
from cpt.models.build import load_weights
from cpt.models.config import load_config
from cpt.models.new_rows import EXTENSION, Rows, add_rows, tables
from cpt.recipe.schema import Model
from cpt.tokenizer.extend_vocabulary import Extension, extend_vocabulary
from cpt.tokenizer.load import from_folder_or_hub
from cpt.tokenizer_commands.texts import (
    MaxBytes,
    Read,
    TextColumn,
    Texts,
    described,
    named_texts,
    new_folder,
    read_texts,
)

SAMPLE_DOCUMENTS = 1000  # of which the lengths before and after are compared
SAMPLE_CHARACTERS = 20_000  # of each


def extend_command(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of the model.")],
    output: Annotated[Path, typer.Option(help="Folder for the extended model; it must not exist, or be empty.")],
    add: Annotated[int, typer.Option(help="Tokens to add: 500 to 5,000 suit a domain.")],
    text: Texts = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 200,
    multiple: Annotated[
        int, typer.Option(min=1, help="Round the rows of a grown embedding up to a multiple of it.")
    ] = 64,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a model on the Hub.")] = None,
) -> None:
    """Add tokens for a domain by continuing the tokenizer's own byte-pair encoding on the domain's text.

    Old tokens keep their ids, no text gets longer, and each new token is reached. Its rows start as the mean of its
    pieces' rows.

    Example: cpt tokenizer extend Qwen/Qwen3-0.6B-Base --text corpus/train.jsonl --add 2000 --output extended
    """
    disable_progress_bar()
    refuse_ignored(
        {"--revision": revision is not None and Path(model).expanduser().is_dir()}, "with a model in a folder"
    )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sources, read = named_texts(text, text_column), dict[str, Read]()
    new_folder(output)
    typer.echo(f"Loading {model}, and reading up to {max_mb} MB of text ...", err=True)
    section = Model(path=model, revision=revision)
    config = load_config(section)
    tokenizer = from_folder_or_hub(model, revision, trust_remote_code=False)
    built = load_weights(section, config, None, "auto")
    known = max(tokenizer.get_vocab().values()) + 1
    if known > tables(built)[0].weight.shape[0]:
        there = tables(built)[0].weight.shape[0]
        raise RecipeError(
            f"{model}: its tokenizer has ids up to {known - 1:,}, its embedding {there:,} rows. Put its own there."
        )
    typer.echo(f"Adding {add:,} tokens ...", err=True)
    extension = extend_vocabulary(tokenizer, read_texts(sources, max_mb * 10**6, read), add)
    pieces = {token.id: token.pieces for token in extension.tokens}
    grown = add_rows(built, pieces, known, multiple)
    sample = [one[:SAMPLE_CHARACTERS] for one in islice(read_texts(sources, max_mb * 10**6, {}), SAMPLE_DOCUMENTS)]
    record = {
        "base": model,
        "revision": revision,
        "learned_from": {name: asdict(one) for name, one in read.items()},
        "rows": asdict(grown),
    }
    lengths = write_extended(output, built, tokenizer, extension, sample, record)
    tell(model, output, extension, grown, len(tokenizer), described(read), lengths)


def write_extended(
    output: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    extension: Extension,
    sample: Sequence[str],
    record: dict[str, Any],
) -> dict[str, float]:
    """Write the folder whole or not at all, and return bytes per token of the sample before and after, as the written
    tokenizer has them.

    Raises:
        RecipeError: the tokenizer that is read back is not the one that was made.
    """
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    extension.tokenizer.save_pretrained(unfinished)
    try:
        lengths = compare(
            tokenizer, extension.tokenizer, from_folder_or_hub(str(unfinished), None, trust_remote_code=False), sample
        )
    except RecipeError:
        shutil.rmtree(unfinished)
        raise
    model.save_pretrained(unfinished)
    old = tokenizer.convert_ids_to_tokens
    tokens = [
        {**asdict(token), "pieces": old(list(token.pieces)), "piece_ids": list(token.pieces)}
        for token in extension.tokens
    ]
    (unfinished / EXTENSION).write_text(
        json.dumps({**record, "bytes_per_token": lengths, "tokens": tokens}, ensure_ascii=False, indent=1) + "\n",
        encoding="utf-8",
    )
    if output.exists():
        output.rmdir()
    unfinished.rename(output)
    return lengths


def compare(
    before: PreTrainedTokenizerBase,
    made: PreTrainedTokenizerBase,
    after: PreTrainedTokenizerBase,
    sample: Sequence[str],
) -> dict[str, float]:
    """Bytes per token of the sample; the tokenizer that was read back must be the one that was made, and never the
    longer one."""
    special = [token for token in before.all_special_tokens if token in after.all_special_tokens]
    if before.convert_tokens_to_ids(special) != after.convert_tokens_to_ids(special) or len(special) != len(
        before.all_special_tokens
    ):
        raise RecipeError(
            f"{type(before).__name__} does not keep its special tokens when it is extended and read back. Choose"
            " another."
        )
    num_before = num_after = 0
    texts = [*sample, "".join(before.all_special_tokens)]
    for old, new, read in zip(*(tokenizer(texts)["input_ids"] for tokenizer in (before, made, after)), strict=True):
        if new != read or len(read) > len(old):
            raise RecipeError(
                f"{type(before).__name__} does not read an extended tokenizer.json back as it was written. Choose"
                " another."
            )
        num_before, num_after = num_before + len(old), num_after + len(read)
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in sample)
    return {"before": num_bytes / num_before, "after": num_bytes / num_after}


def tell(
    base: str,
    output: Path,
    extension: Extension,
    rows: Rows,
    num_before: int,
    learned_from: str,
    lengths: dict[str, float],
) -> None:
    """Say what was added and what comes next."""
    console = open_console()
    added, unused = len(extension.tokens), sum(token.count == 0 for token in extension.tokens)
    console.print(f"{added:,} tokens added to {num_before:,}, learned from {learned_from}", markup=False)
    if unused:
        console.print(
            f"  {unused:,} of them do not stand in that text under all merges: they are steps to longer ones."
        )
    before, after = lengths["before"], lengths["after"]
    console.print(
        f"Bytes per token of its first documents: {before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.1f} %)."
    )
    head = "embedding, which is the head too," if rows.is_tied else "embedding and head"
    if rows.spare:
        console.print(f"{rows.spare:,} new tokens took spare rows that the model had and no token used.")
    grown = (
        f"grew from {rows.before:,} to {rows.after:,} rows"
        if rows.after > rows.before
        else f"keep their {rows.before:,} rows"
    )
    console.print(f"{head} {grown}; each new row is the mean of its pieces' rows.".capitalize())
    console.print(f"The model is in {output}; what was added is in {output / EXTENSION}.", markup=False)
    console.print(
        f"On text that it was not learned from: cpt tokenizer report {base} --against {output} --text FILES",
        markup=False,
    )
    console.print(
        f"Next, a short phase in which only the new rows learn: model.path={output} model.train_only=new_rows; then"
        " all parameters.",
        markup=False,
    )
