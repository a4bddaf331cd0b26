"""`cpt tokenizer train` and `extend`: a new tokenizer, or a model with new tokens for a domain."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from cpt.command_line import refuse_ignored
from cpt.console import open_console
from cpt.data.readers.sources import open_source
from cpt.errors import DataError, RecipeError
from cpt.models.build import load_weights
from cpt.models.config import load_config
from cpt.models.new_rows import EXTENSION, Rows, add_rows, tables
from cpt.models.token_distillation import Distilled, check_can_distill, distill_rows
from cpt.recipe.schema import DocumentSource, Model
from cpt.recipe.sense_data import reported_name
from cpt.tokenizer.extend_vocabulary import Extension, extend_vocabulary
from cpt.tokenizer.load import from_folder_or_hub
from cpt.tokenizer.train_bpe import train_bpe

COMMANDS = {  # name -> module:function
    "report": "cpt.commands.tokenizer_report:report_command",
    "extend": "cpt.commands.tokenizer:extend_command",
    "train": "cpt.commands.tokenizer:train_command",
}


SAMPLE_DOCUMENTS = 1000  # of which the lengths before and after are compared


SAMPLE_CHARACTERS = 20_000  # of each


DISTILLED_TOKENS = 256  # of each, that new rows are taught on


ROWS_MULTIPLE = 64  # a grown embedding has a multiple of so many rows, which GPUs multiply faster


Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="File, folder, glob, URL or Hub dataset, as a recipe's source; `name=path` gives it a name. Repeatable.",
    ),
]


TextColumn = Annotated[str, typer.Option(help="Column or JSON key that holds the text.")]


MaxBytes = Annotated[int, typer.Option(min=1, help="Read no more than so many megabytes of each text.")]


@dataclass
class Read:
    """How much of a text was read."""

    documents: int = 0
    bytes: int = 0
    is_cut: bool = False
    """Whether the text is longer than what was read."""


def extend_command(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of the model.")],
    output: Annotated[Path, typer.Option(help="Folder for the extended model; it must not exist, or be empty.")],
    add: Annotated[int, typer.Option(help="Tokens to add: 500 to 5,000 suit a domain.")],
    text: Texts = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 200,
    rows: Annotated[
        Literal["mean", "token_distillation"],
        typer.Option(
            help=(
                "How new rows begin: mean of their pieces; or, in the input, taught to do what the pieces did (untied"
                " heads only)."
            )
        ),
    ] = "mean",
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
    if rows == "token_distillation":
        check_can_distill(built)
    typer.echo(f"Adding {add:,} tokens ...", err=True)
    extension = extend_vocabulary(tokenizer, read_texts(sources, max_mb * 10**6, read), add)
    pieces = {token.id: token.pieces for token in extension.tokens}
    grown = add_rows(built, pieces, known, ROWS_MULTIPLE)
    sample = [one[:SAMPLE_CHARACTERS] for one in islice(read_texts(sources, max_mb * 10**6, {}), SAMPLE_DOCUMENTS)]
    if rows == "token_distillation":
        typer.echo("Training the new rows ...", err=True)
    taught = distill(built, pieces, extension.tokenizer, sample) if rows == "token_distillation" else None
    record = {
        "base": model,
        "revision": revision,
        "learned_from": {name: asdict(one) for name, one in read.items()},
        "rows": asdict(grown),
    }
    lengths = write_extended(
        output, built, tokenizer, extension, sample, record | {"distilled": taught and asdict(taught)}
    )
    tell(model, output, extension, grown, len(tokenizer), described(read), lengths, taught)


def distill(
    model: PreTrainedModel,
    pieces: Mapping[int, Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
) -> Distilled:
    """Teach the new input rows on the beginnings of texts, on the accelerator where there is one."""
    sequences = [tokenizer(text)["input_ids"][:DISTILLED_TOKENS] for text in texts]
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    nn.Module.to(model, device or "cpu")
    taught = distill_rows(model, pieces, sequences)
    nn.Module.to(model, "cpu")
    return taught


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
    texts = [*sample, "".join(before.all_special_tokens)]
    old, new, read = (tokenizer(texts)["input_ids"] for tokenizer in (before, made, after))
    if read != new or read[-1] != old[-1] or any(len(ids) > len(short) for ids, short in zip(read, old, strict=True)):
        raise RecipeError(
            f"{type(before).__name__} does not load an extended tokenizer.json as it was saved. Choose another model."
        )
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in sample)
    return {"before": num_bytes / sum(map(len, old)), "after": num_bytes / sum(map(len, read))}


def tell(
    base: str,
    output: Path,
    extension: Extension,
    rows: Rows,
    num_before: int,
    learned_from: str,
    lengths: dict[str, float],
    taught: Distilled | None,
) -> None:
    """Print what was added and what comes next."""
    unused, (before, after) = sum(token.count == 0 for token in extension.tokens), lengths.values()
    head = "Embedding, which is the head too" if rows.is_tied else "Embedding and head"
    lines = [
        f"{len(extension.tokens):,} tokens added to {num_before:,}, learned from {learned_from}",
        f"  {unused:,} of them are only steps to longer ones." if unused else "",
        f"Bytes per token of its first documents: {before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.1f} %).",
        f"{rows.spare:,} new tokens took spare rows that the model had and no token used." if rows.spare else "",
        f"{head}: {rows.before:,} -> {rows.after:,} rows; each new row is the mean of its pieces' rows.",
        f"Token distillation, {taught.steps:,} steps: distance of the new embedding rows to the old tokens' states"
        f" {taught.before:.3f} -> {taught.after:.3f}."
        if taught is not None
        else "",
        f"The model is in {output}; what was added is in {output / EXTENSION}.",
        f"On text that it was not learned from: cpt tokenizer report {base} --against {output} --text FILES",
        f"Next, train only the new rows for a short phase (model.path={output} model.train_only=new_rows), then all"
        " parameters.",
    ]
    open_console().print("\n".join(filter(None, lines)), markup=False)


def train_command(
    output: Annotated[Path, typer.Option(help="Folder for the tokenizer; it must not exist, or be empty.")],
    vocabulary: Annotated[
        int, typer.Option(help="Tokens it is to have: 4,000 suit a small model, 32,000 and up a large one.")
    ],
    text: Texts = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 1000,
) -> None:
    """Train a byte-level BPE tokenizer: any text comes back from its tokens byte for byte.

    A model that is trained already keeps its own tokenizer, or has it extended: cpt tokenizer extend.

    Example: cpt tokenizer train --text code=corpus/ --vocabulary 32000 --output tokenizer
    """
    sources, read = named_texts(text, text_column), dict[str, Read]()
    trained = train_bpe(read_texts(sources, max_mb * 10**6, read), vocabulary, new_folder(output))
    console = open_console()
    console.print(f"{len(trained):,} tokens, learned from {described(read)}", markup=False)
    console.print(f"The tokenizer is in {output}. A recipe takes it: tokenizer: {{path: {output}}}", markup=False)


def named_texts(texts: Sequence[str] | None, text_column: str) -> dict[str, DocumentSource]:
    """The sources that `--text` names.

    Raises:
        RecipeError: none is given, or two have one name.
    """
    sources: dict[str, DocumentSource] = {}
    for text in texts or ():
        name, sign, path = text.partition("=")
        named = bool(sign) and "/" not in name and bool(name) and bool(path)
        source = DocumentSource(path=path if named else text, name=name if named else None, text_column=text_column)
        if reported_name(source) in sources:
            raise RecipeError(
                f"--text: two texts are called `{reported_name(source)}`. Name them: --text NAME={source.path}"
            )
        sources[reported_name(source)] = source
    if not sources:
        raise RecipeError("no text: give at least one, --text name=path (a file, folder, glob, URL or Hub dataset).")
    return sources


def read_text(source: DocumentSource, max_bytes: int, read: Read) -> Iterator[str]:
    """The documents of a text, until `max_bytes` are read.

    Args:
        read: filled in on the way.

    Raises:
        DataError: there are none.
    """
    try:
        for document in open_source(source, "--text"):
            if read.bytes >= max_bytes:
                read.is_cut = True
                break
            read.documents += 1
            read.bytes += len(document.text.encode("utf-8", "surrogatepass"))
            yield document.text
    except DataError as problem:
        raise DataError(str(problem).replace("`--text.path`", "`--text`")) from problem


def read_texts(sources: Mapping[str, DocumentSource], max_bytes: int, read: dict[str, Read]) -> Iterator[str]:
    """The documents of all texts, one after the other, at most `max_bytes` of each.

    Args:
        read: filled in on the way, by the text's name.
    """
    for name, source in sources.items():
        yield from read_text(source, max_bytes, read.setdefault(name, Read()))


def described(read: Mapping[str, Read]) -> str:
    """`domain: 1,234 documents, 2.3 MB (its beginning)`."""
    parts = (
        f"{name}: {one.documents:,} documents, {one.bytes / 1e6:.1f} MB{' (its beginning)' if one.is_cut else ''}"
        for name, one in read.items()
    )
    return "; ".join(parts)


def new_folder(output: Path) -> Path:
    """Refuse a folder that holds something already.

    Raises:
        RecipeError: it does, or it is a file.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RecipeError(
            f"--output: {output} exists already. Remove it or choose another folder: nothing is written over."
        )
    return output
