"""The rows that a model is evaluated on and never trained on, and how much of a source they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.cache import hold, key_of, publish_derived
from cpt.data.contamination import texts_of, work_of
from cpt.data.examples.segments import fitting
from cpt.data.readers.documents import absurd_share
from cpt.data.readers.files import kind_of
from cpt.data.readers.formats import TEXTS
from cpt.data.readers.forms import form_of_source
from cpt.data.readers.opening import format_of
from cpt.data.readers.sources import files_with_sizes, pieces_of
from cpt.data.rows.packing import FORMAT
from cpt.data.rows.rows import Layout, Row
from cpt.data.rows.selection import is_held_out, longest_held_out
from cpt.data.store.token_files import StoredDocuments
from cpt.errors import DataError
from cpt.recipe.schema import Data, Evaluation, Source
from cpt.recipe.sense_data import reported_name


@dataclass(frozen=True)
class HeldOutSet:
    """Documents that the model never trains on, in rows of their own."""

    name: str
    rows: Sequence[Row]
    num_documents: int
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of what is predicted: the documents' text, of conversations the answers."""
    chosen: NDArray[np.int64] | None = None
    """Which of the documents behind the rows are the set's; None where rows were made by hand, and documents cannot be
    told apart."""
    form: str = "document"
    """What the rows are: see `cpt.data.readers.forms`."""


def held_out_set(
    name: str, documents: StoredDocuments, chosen: NDArray[np.int64], layout: Layout, cache_dir: Path
) -> HeldOutSet:
    """A set of the chosen documents; the same rows for every seed, so that runs can be compared."""
    # Windows that overlap more would count tokens twice, and rows that cut a document wherever they are full would
    # leave tokens out. These overlap by one token, which is not predicted a second time: so figures depend neither on
    # the packing nor on a row's length in tokens.
    packing = layout.packing if layout.packing in ("none", "token_budget") else "best_fit"
    stride = max(1, layout.sequence_length - 1)
    layout = replace(layout, packing=packing, stride=stride)
    # A conversation, or a text beside conversations, is trained on as far as a row holds it. It is judged to its end,
    # in windows, as a
    # document is: else the bits would be of its beginning, and the bytes of all of it.
    longest = int(np.diff(documents.offsets)[chosen].max(initial=layout.sequence_length))
    chosen, lengths, read, _ = fitting(
        documents, chosen, layout.form, layout.sequence_length if layout.is_one_a_row else longest
    )
    starts = documents.offsets[chosen]
    what = {
        "format": FORMAT,
        "documents": documents.digest,
        "chosen": xxh3_128_hexdigest(starts.tobytes()),
        "layout": [
            layout.sequence_length,
            packing,
            stride,
            *([] if layout.form == "document" else [layout.form, "whole"]),
        ],
    }
    folder = publish_derived(cache_dir / "rows" / key_of(what), layout.packer(starts, lengths, 0))
    rows = layout.open(documents, folder)
    hold(folder, rows)
    return HeldOutSet(
        name, rows, len(chosen), int(read.sum()), int(documents.num_bytes[chosen].sum()), chosen, layout.form
    )


# --- held out share ---


MOST_BYTES_READ = 64 * 2**20  # of a source's files by `cpt check` and `cpt init`, which takes a second or two
FAR_OFF = 2  # times
REMEDY = "add documents, or name files of their own: `evaluation.perplexity`"


def size_warnings(data: Data, evaluation: Evaluation, *, few: int) -> list[str]:
    """Warnings about one huge document, and about what `held_out_share` holds out, for the sources that are quickly
    read.

    Args:
        few: held-out documents, below which an interval means little.
    """
    sizes = [sizes_of(data, source, f"data.sources[{number}]") for number, source in enumerate(data.sources)]
    warnings = [warning.rstrip(".") for one in sizes if one is not None and (warning := one.giant())]
    share = evaluation.held_out_share
    if share is None:
        return warnings
    held_out = [(one, chosen) for one in sizes if one is not None and (chosen := one.held_out(share)) is not None]
    if len(held_out) == len(sizes) and not any(len(chosen) for _, chosen in held_out):
        raise DataError(nothing_held_out(share, sum(len(one.num_bytes) for one, _ in held_out)))
    for one, chosen in held_out:
        count = f"{one.name}: `evaluation.held_out_share` holds out {len(chosen)} of {len(one.num_bytes):,} documents"
        if len(chosen) == len(one.num_bytes):
            raise DataError(f"{count}, so none is left to train on. Lower it, {REMEDY}.")
        if len(chosen) < few:
            warnings.append(f"{count}; below {few} the verdict's interval means little. Raise the share, {REMEDY}")
        elif warning := other_share(one.name, share, int(chosen.sum()), int(one.num_bytes.sum()), len(chosen)):
            warnings.append(warning)
    return warnings


@dataclass(frozen=True)
class Sizes:
    """The documents of a source, by size."""

    name: str
    num_bytes: NDArray[np.int64]
    hashes: NDArray[np.uint64] | None
    """xxh3-64 of each text; None where only the sizes of files were looked at."""
    largest: str
    """Where the largest document is."""

    def giant(self) -> str | None:
        """A warning where one document is an absurd part of the source."""
        if not len(self.num_bytes):
            return None
        return absurd_share(
            self.name, self.largest, int(self.num_bytes.max()), int(self.num_bytes.sum()), len(self.num_bytes), "bytes"
        )

    def held_out(self, share: float) -> NDArray[np.int64] | None:
        """Bytes of each document that is held out."""
        if self.hashes is None:
            return None
        longest = longest_held_out(int(self.num_bytes.sum()), len(self.num_bytes), share)
        return self.num_bytes[is_held_out(self.hashes, self.num_bytes, share, longest)]


def sizes_of(data: Data, source: Source, key: str) -> Sizes | None:
    """The sizes of a source's documents: of a small source all are read, of a large one of text files the files' sizes
    do; else None."""
    if kind_of(source.path) != "local" or form_of_source(source) != "document":
        return None
    files = files_with_sizes(source, key)
    if sum(size for _, size in files) <= MOST_BYTES_READ:
        hashes, num_bytes, largest = [], [], ("", -1)
        for text, document in texts_of(work_of(data, source, key), pieces_of(source, key)):
            raw = text.encode()
            hashes.append(xxh3_64_intdigest(raw))
            num_bytes.append(len(raw))
            if len(raw) > largest[1]:
                largest = document.where, len(raw)
        return Sizes(reported_name(source), np.array(num_bytes, np.int64), np.array(hashes, np.uint64), largest[0])
    if source.text_documents == "file" and all(format_of(file) in TEXTS for file, _ in files):
        sizes = np.array([size for _, size in files], np.int64)
        return Sizes(reported_name(source), sizes, None, files[int(sizes.argmax())][0])
    return None


def other_share(name: str, asked: float, held_out: int, total: int, num_documents: int) -> str | None:
    """A warning where the held-out documents are a very different share of the source than the recipe asks for.

    Args:
        held_out, total: bytes of text.
        num_documents: that are held out.
    """
    share = held_out / max(1, total)
    if asked / FAR_OFF <= share <= asked * FAR_OFF:
        return None
    documents = f"{num_documents:,} document{'' if num_documents == 1 else 's'}"
    return (
        f"{name}: `evaluation.held_out_share` asks for {asked:.2%}, but {share:.2%} of the text is held out, in"
        f" {documents}. Documents are chosen by their hash, and very long ones never are. Split long documents,"
        f" {REMEDY}"
    )


def nothing_held_out(share: float, num_documents: int) -> str:
    """What to say where no document of any source is held out."""
    enough = min(0.5, 50 / num_documents)
    return (
        f"`evaluation.held_out_share` is {share:g}, and none of {num_documents:,} documents fell into it, so nothing"
        f" can be evaluated. {f'Make it {enough:.2g}' if enough > share else 'Add documents'}, or name files of their"
        " own: `evaluation.perplexity`."
    )
