"""The rows that a model is evaluated on and never trained on, and how much of a source they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.cache import hold, key_of, publish_derived
from cpt.data.examples.encoder import fitting
from cpt.data.readers.columns import form_of_source
from cpt.data.readers.documents import absurd_share
from cpt.data.readers.sources import files_of, kind_of, pieces_of
from cpt.data.rows.contamination import work_of
from cpt.data.rows.packing import FORMAT, Layout, Row
from cpt.data.rows.selection import is_held_out, longest_held_out
from cpt.data.store.shards import texts_of
from cpt.data.store.token_files import Hashes, Int64, StoredDocuments
from cpt.errors import DataError
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Evaluation, Source

MOST_BYTES_READ = 64 * 2**20  # of a source's files by `cpt check` and `cpt init`, which takes a second or two
FAR_OFF = 2  # times
REMEDY = "add documents, or name files of their own: `evaluation.perplexity`"


@dataclass(frozen=True)
class HeldOutSet:
    name: str
    rows: Sequence[Row]
    num_documents: int
    chosen: Int64 | None = None  # which of the rows' documents are the set's; None of rows made by hand
    form: str = "document"  # of the rows: see `cpt.data.readers.columns`


def held_out_set(name: str, documents: StoredDocuments, chosen: Int64, layout: Layout, cache_dir: Path) -> HeldOutSet:
    """A set of the chosen documents; the same rows for every seed, so that runs can be compared."""
    # Windows that overlap more would count tokens twice, and rows that cut a document wherever they are full would
    # leave tokens out. These overlap by one token, which is not predicted a second time: so figures depend neither on
    # the packing nor on a row's length in tokens.
    packing = layout.packing if layout.packing in ("none", "token_budget") else "best_fit"
    stride = max(1, layout.sequence_length - 1)
    layout = replace(layout, packing=packing, stride=stride)
    # A conversation is trained on as far as a row holds it, and evaluated to its end, in windows, as a document is:
    # otherwise the bits would be of its beginning, and the bytes of all of it.
    longest = int(np.diff(documents.offsets)[chosen].max(initial=layout.sequence_length))
    most = layout.sequence_length if layout.is_one_a_row else longest
    chosen, lengths, _, _ = fitting(documents, chosen, layout.form, most)
    starts = documents.offsets[chosen]
    form = [] if layout.form == "document" else [layout.form, "whole"]
    what = {
        "format": FORMAT,
        "documents": documents.digest,
        "chosen": xxh3_128_hexdigest(starts.tobytes()),
        "layout": [layout.sequence_length, packing, stride, *form],
    }
    folder = publish_derived(cache_dir / "rows" / key_of(what), layout.packer(starts, lengths, 0))
    rows = layout.open(documents, folder)
    hold(folder, rows)
    return HeldOutSet(name, rows, len(chosen), chosen, layout.form)


def size_warnings(data: Data, evaluation: Evaluation, *, few: int) -> list[str]:
    """Warnings about one huge document, and about what `held_out_share` holds out, for sources that are quickly read.
    Below `few` held-out documents, an interval means little."""
    share, warnings, held_out = evaluation.held_out_share, list[str](), list[tuple[int, int]]()
    for number, source in enumerate(data.sources):
        name, found = reported_name(source), sizes_of(data, source, f"data.sources[{number}]")
        if found is None:
            continue
        hashes, sizes, largest = found
        total, count = int(sizes.sum()), len(sizes)
        if giant := absurd_share(name, largest, int(sizes.max()), total, count, "bytes"):
            warnings.append(giant.rstrip("."))
        if share is None:
            continue
        chosen = sizes[is_held_out(hashes, sizes, share, longest_held_out(total, count, share))]
        held_out.append((len(chosen), count))
        counts = f"{name}: `evaluation.held_out_share` holds out {len(chosen)} of {count:,} documents"
        if len(chosen) == count:
            raise DataError(f"{counts}, so none is left to train on. Lower it, {REMEDY}.")
        if len(chosen) < few:
            warnings.append(f"{counts}; below {few} the verdict's interval means little. Raise the share, {REMEDY}")
        elif warning := other_share(name, share, int(chosen.sum()), total, len(chosen)):
            warnings.append(warning)
    if share is not None and len(held_out) == len(data.sources) and not any(chosen for chosen, _ in held_out):
        raise DataError(nothing_held_out(share, sum(count for _, count in held_out)))
    return warnings


def sizes_of(data: Data, source: Source, key: str) -> tuple[Hashes, Int64, str] | None:
    """Of a small local source of documents: the hashes of the texts, their bytes, and where the largest one is."""
    is_read = kind_of(source.path) == "local" and form_of_source(source) == "document"
    if not is_read or sum(file.size for file in files_of(source, key)) > MOST_BYTES_READ:
        return None
    hashes, sizes, largest = list[int](), list[int](), ("", -1)
    for text, document in texts_of(work_of(data, source, key), pieces_of(source, key)):
        raw = text.encode()
        hashes.append(xxh3_64_intdigest(raw))
        sizes.append(len(raw))
        if len(raw) > largest[1]:
            largest = document.where, len(raw)
    return (np.array(hashes, np.uint64), np.array(sizes, np.int64), largest[0]) if sizes else None


def other_share(name: str, asked: float, held_out: int, total: int, num_documents: int) -> str | None:
    """A warning where the held-out bytes are a very different share of the source than the recipe requests."""
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
    enough = min(0.5, 50 / num_documents)
    return (
        f"`evaluation.held_out_share` is {share:g}, and none of {num_documents:,} documents fell into it, so nothing"
        f" can be evaluated. {f'Make it {enough:.2g}' if enough > share else 'Add documents'}, or name files of their"
        " own: `evaluation.perplexity`."
    )
