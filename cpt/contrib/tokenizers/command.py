"""`cpt tokenizer train` and `extend`: train a tokenizer, or add tokens for a domain to a model."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cpt.command_line import hide_transformers_bars, refuse_ignored
from cpt.data.readers.sources import open_source
from cpt.errors import DataError, RecipeError
from cpt.formatting import open_console
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource, Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cpt.contrib.tokenizers.extend_vocabulary import Extension
    from cpt.models.new_rows import Distilled, Rows

SAMPLE_DOCUMENTS = 1000  # to compare lengths before and after
SAMPLE_CHARACTERS = 20_000  # of each document
DISTILLED_TOKENS = 256  # of each document, to train new rows on

Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text", help="A path as in a recipe's source; `name=path` names it. Repeatable."
    ),
]
TextColumn = Annotated[str, typer.Option(help="Column or JSON key with the text.")]
MaxBytes = Annotated[int, typer.Option(min=1, help="Most megabytes to read of each text.")]


@dataclass
class TextReader:
    """A text of `--text`, and the amount read."""

    source: DocumentSource
    max_bytes: int
    documents: int = 0
    bytes: int = 0
    is_cut: bool = False  # the text is longer than `max_bytes`

    def __iter__(self) -> Iterator[str]:
        """Yield documents up to `max_bytes`; DataError if empty."""
        try:
            for document in open_source(self.source, "--text"):
                if self.bytes >= self.max_bytes:
                    self.is_cut = True
                    break
                self.documents += 1
                self.bytes += len(document.text.encode("utf-8", "surrogatepass"))
                yield document.text
        except DataError as problem:
            raise DataError(str(problem).replace("`--text.path`", "`--text`")) from problem

    def metrics(self) -> dict[str, Any]:
        return {"documents": self.documents, "bytes": self.bytes, "is_cut": self.is_cut}


def train_command(
    output: Annotated[Path, typer.Option(help="Folder for the tokenizer; must be new or empty.")],
    vocabulary: Annotated[
        int, typer.Option(help="Number of tokens: 4,000 suit a small model, 32,000 a large one.")
    ],
    text: Texts = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 1000,
) -> None:
    """Train a byte-level BPE tokenizer: decoding restores any text byte for byte.

    A trained model keeps its tokenizer, or extends it: cpt tokenizer extend.

    Example: cpt tokenizer train --text code=corpus/ --vocabulary 32000 --output tokenizer
    """
    texts = open_texts(text, text_column, max_mb)

    from cpt.contrib.tokenizers.train_bpe import train_bpe
    from cpt.export.write import check_output  # torch

    check_output(output)
    documents = chain.from_iterable(texts.values())
    trained = train_bpe(documents, vocabulary, output)
    console = open_console()
    console.print(f"{len(trained):,} tokens, learned from {describe(texts)}", markup=False)
    console.print(
        f"The tokenizer is in {output}. Use it in a recipe: tokenizer: {{path: {output}}}",
        markup=False,
    )


def extend_command(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of the model.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the extended model; must be new or empty.")
    ],
    add: Annotated[int, typer.Option(help="Tokens to add: 500 to 5,000 suit a domain.")],
    text: Texts = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 200,
    rows: Annotated[
        Literal["mean", "token_distillation"],
        typer.Option(
            help="Initial new rows; token_distillation trains the input rows (untied heads only)."
        ),
    ] = "mean",
    revision: Annotated[
        str | None, typer.Option(help="Commit, tag or branch of a model on the Hub.")
    ] = None,
) -> None:
    """Add tokens for a domain by continuing the tokenizer's byte-pair encoding on the domain's text.

    Old tokens keep their ids, no text gets longer, and each new token can be produced. Its rows start as the mean of
    its pieces' rows.

    Example: cpt tokenizer extend Qwen/Qwen3-0.6B-Base --text corpus/train.jsonl --add 2000 --output extended
    """
    in_folder = Path(model).expanduser().is_dir()
    refuse_ignored({"--revision": revision is not None and in_folder}, "with a model in a folder")
    texts = open_texts(text, text_column, max_mb)

    # Imported after the options are checked: they import torch, which takes seconds.
    from cpt.contrib.tokenizers.extend_vocabulary import extend_vocabulary
    from cpt.export.write import check_output
    from cpt.models.build import ROWS_MULTIPLE, load_weights
    from cpt.models.config import load_config
    from cpt.models.new_rows import add_rows, check_can_distill, tables
    from cpt.tokenizer.load import from_folder_or_hub

    hide_transformers_bars()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    check_output(output)
    typer.echo(f"Loading {model}, and reading up to {max_mb} MB of text ...", err=True)
    section = Model(path=model, revision=revision)
    config = load_config(section)
    tokenizer = from_folder_or_hub(model, revision, trust_remote_code=False)
    extended = load_weights(section, config, None, "auto")
    num_ids = max(tokenizer.get_vocab().values()) + 1
    num_rows = tables(extended)[0].weight.shape[0]
    if num_ids > num_rows:
        raise RecipeError(
            f"{model}: its tokenizer has ids up to {num_ids - 1:,}, its embedding {num_rows:,} rows. Use its own."
        )
    if rows == "token_distillation":
        check_can_distill(extended)
    typer.echo(f"Adding {add:,} tokens ...", err=True)
    sample: list[str] = []
    extension = extend_vocabulary(tokenizer, sampled(texts.values(), sample), add)
    pieces = {token.id: token.pieces for token in extension.tokens}
    new_rows = add_rows(extended, pieces, num_ids, ROWS_MULTIPLE)
    distilled = None
    if rows == "token_distillation":
        distilled = distill(extended, pieces, extension.tokenizer, sample)
    record = {
        "base": model,
        "revision": revision,
        "learned_from": {name: reader.metrics() for name, reader in texts.items()},
        "rows": asdict(new_rows),
        "distilled": None if distilled is None else asdict(distilled),
    }
    lengths = write_extended(output, extended, tokenizer, extension, sample, record)
    print_extension(
        output,
        extension,
        new_rows,
        lengths,
        base=model,
        added_to=f"{len(tokenizer):,}, learned from {describe(texts)}",
    )


def open_texts(texts: Sequence[str] | None, text_column: str, max_mb: int) -> dict[str, TextReader]:
    """Return the texts of `--text` by name; RecipeError if `--text` is missing, or two have the same name."""
    readers: dict[str, TextReader] = {}
    for text in texts or ():
        name, _, path = text.partition("=")
        if not name or not path or "/" in name:
            name, path = "", text
        source = DocumentSource(path=path, name=name or None, text_column=text_column)
        if reported_name(source) in readers:
            raise RecipeError(
                f"--text: two texts named `{reported_name(source)}`. Rename one: --text NAME={path}"
            )
        readers[reported_name(source)] = TextReader(source, max_mb * 10**6)
    if not readers:
        raise RecipeError(
            "no text. Add --text name=path (a file, folder, glob, URL or Hub dataset)."
        )
    return readers


def describe(texts: Mapping[str, TextReader]) -> str:
    """Such as `domain: 1,234 documents, 2.3 MB (its beginning)`."""
    descriptions = []
    for name, reader in texts.items():
        description = f"{name}: {reader.documents:,} documents, {reader.bytes / 1e6:.1f} MB"
        if reader.is_cut:
            description += " (its beginning)"
        descriptions.append(description)
    return "; ".join(descriptions)


def sampled(texts: Iterable[TextReader], sample: list[str]) -> Iterator[str]:
    """Yield the documents of all texts; add the beginnings of the first ones to `sample`."""
    for document in chain.from_iterable(texts):
        if len(sample) < SAMPLE_DOCUMENTS:
            sample.append(document[:SAMPLE_CHARACTERS])
        yield document


def distill(
    model: "PreTrainedModel",
    pieces: Mapping[int, Sequence[int]],
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
) -> "Distilled":
    """Train the new input rows on the beginnings of texts, on the accelerator if there is one."""
    import torch

    from cpt.models.new_rows import distill_rows

    typer.echo("Training the new rows ...", err=True)
    sequences = [tokenizer(text)["input_ids"][:DISTILLED_TOKENS] for text in texts]
    torch.nn.Module.to(model, torch.accelerator.current_accelerator(check_available=True) or "cpu")
    distilled = distill_rows(model, pieces, sequences)
    torch.nn.Module.to(model, "cpu")
    typer.echo(
        f"Token distillation, {distilled.steps:,} steps: distance of the new embedding rows to the old tokens' states"
        f" {distilled.before:.3f} -> {distilled.after:.3f}."
    )
    return distilled


def write_extended(
    output: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    extension: "Extension",
    sample: Sequence[str],
    record: Mapping[str, Any],
) -> dict[str, float]:
    """Write the folder atomically, and return bytes per token of the sample before and after; RecipeError if the
    reloaded tokenizer differs from the new one, or makes a text longer."""
    from cpt.export.export import new_folder
    from cpt.models.new_rows import EXTENSION
    from cpt.tokenizer.load import from_folder_or_hub

    with new_folder(output) as unfinished:
        extension.tokenizer.save_pretrained(unfinished)
        reloaded = from_folder_or_hub(str(unfinished), None, trust_remote_code=False)
        texts = [*sample, "".join(tokenizer.all_special_tokens)]
        old_ids = tokenizer(texts)["input_ids"]
        new_ids = extension.tokenizer(texts)["input_ids"]
        reloaded_ids = reloaded(texts)["input_ids"]
        is_longer = any(len(new) > len(old) for new, old in zip(reloaded_ids, old_ids, strict=True))
        changes_special = reloaded_ids[-1] != old_ids[-1]
        if reloaded_ids != new_ids or changes_special or is_longer:
            kind = type(tokenizer).__name__
            raise RecipeError(
                f"{kind} does not reload an extended tokenizer.json unchanged. Use another model."
            )
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in sample)
        lengths = {
            "before": num_bytes / sum(map(len, old_ids)),
            "after": num_bytes / sum(map(len, reloaded_ids)),
        }
        model.save_pretrained(unfinished)
        tokens = []
        for token in extension.tokens:
            piece_ids = list(token.pieces)
            pieces = tokenizer.convert_ids_to_tokens(piece_ids)
            tokens.append({**asdict(token), "pieces": pieces, "piece_ids": piece_ids})
        content = {**record, "bytes_per_token": lengths, "tokens": tokens}
        (unfinished / EXTENSION).write_text(
            json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
    return lengths


def print_extension(
    output: Path,
    extension: "Extension",
    rows: "Rows",
    lengths: Mapping[str, float],
    *,
    base: str,
    added_to: str,
) -> None:
    from cpt.models.new_rows import EXTENSION

    before = lengths["before"]
    after = lengths["after"]
    tables = "Embedding, which is the head too" if rows.is_tied else "Embedding and head"
    lines = [
        f"{len(extension.tokens):,} tokens added to {added_to}",
        f"Bytes per token of its first documents: {before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.1f} %).",
        f"{tables}: {rows.before:,} -> {rows.after:,} rows; each new row is the mean of its pieces' rows.",
        f"The model is in {output}; the added tokens are in {output / EXTENSION}.",
        f"Evaluate it on other text: cpt tokenizer report {base} --against {output} --text FILES",
    ]
    open_console().print("\n".join(lines), markup=False)
