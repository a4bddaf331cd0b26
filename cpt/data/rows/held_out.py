"""Build the held-out rows, and check before a run how much of a source is held out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.cache import hold, key_of, publish_derived
from cpt.data.examples.encoder import select_fitting
from cpt.data.readers.account import Account, Losses, separator_warning, with_held_out
from cpt.data.readers.columns import form_of_source
from cpt.data.readers.documents import absurd_share
from cpt.data.readers.sources import files_of, kind_of, listing_of, pieces_of
from cpt.data.rows.contamination import work_of
from cpt.data.rows.packing import FORMAT, Layout, Row
from cpt.data.rows.selection import LARGEST_OF_AVERAGE, is_held_out, longest_held_out
from cpt.data.store.shards import texts_of
from cpt.data.store.token_files import Hashes, Int64, StoredDocuments
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import DataError
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Evaluation, Source

log = logging.getLogger("cpt")
MOST_BYTES_READ = 64 * 2**20  # per source in `cpt check` and `cpt init`, in a second or two
FAR_OFF = 2  # factor between requested and actual share
REMEDY = "add documents, or name separate files: `evaluation.perplexity`"


@dataclass(frozen=True)
class HeldOutSet:
    name: str
    rows: Sequence[Row]
    num_documents: int
    chosen: Int64 | None = None  # numbers of the set's documents; None for rows made by hand
    form: str = "document"  # of the rows: see `cpt.data.readers.columns`
    left_out: str = ""  # a sentence on very long documents that are not evaluated


def held_out_set(
    name: str, documents: StoredDocuments, numbers: Int64, layout: Layout, cache_dir: Path
) -> HeldOutSet:
    """Build a set of the documents of these numbers; its rows are the same for every seed, so runs can be compared."""
    # More overlap would count tokens twice, and cutting documents at full rows would lose tokens. These windows
    # overlap by one token, which is predicted once, so metrics do not depend on the packing. They do depend on the row
    # length for documents longer than a row: each window but the first starts without the tokens before it as context.
    packing = layout.packing if layout.packing in ("none", "token_budget") else "best_fit"
    stride = max(1, layout.sequence_length - 1)
    layout = replace(layout, packing=packing, stride=stride)
    # A conversation is cut to one row in training, but evaluated to its end, in windows, like a document: otherwise
    # the bits would be those of its beginning, and the bytes those of all of it.
    longest = layout.sequence_length
    if not layout.is_one_a_row:
        longest = int(np.diff(documents.offsets)[numbers].max(initial=longest))
    fitting = select_fitting(documents, numbers, layout.form, longest)
    starts = documents.offsets[fitting.numbers]
    form = [] if layout.form == "document" else [layout.form, "whole"]
    content = {
        "format": FORMAT,
        "documents": documents.digest,
        "chosen": xxh3_128_hexdigest(starts.tobytes()),
        "layout": [layout.sequence_length, packing, stride, *form],
    }
    packer = layout.packer(starts, fitting.lengths, 0)
    folder = publish_derived(cache_dir / "rows" / key_of(content), packer)
    rows = layout.open(documents, folder)
    hold(folder, rows)
    return HeldOutSet(
        name=name,
        rows=rows,
        num_documents=len(fitting.numbers),
        chosen=fitting.numbers,
        form=layout.form,
    )


def whole_set(source: TokenizedSource, layout: Layout, cache_dir: Path) -> HeldOutSet:
    """A held-out set with separate files. As in a held-out share, a very long document is skipped."""
    documents = source.documents(source.plan.held_out)
    name = reported_name(source.work.source)
    layout = replace(layout, form=form_of_source(source.work.source))
    sizes = documents.num_bytes
    longest = LARGEST_OF_AVERAGE * sizes.mean() if layout.form == "document" else sizes.max()
    numbers = np.flatnonzero(sizes <= longest)
    held_out = held_out_set(name, documents, numbers, layout, cache_dir)
    if len(numbers) == len(sizes):
        return held_out
    share = 1 - sizes[numbers].sum() / sizes.sum()
    count = len(sizes) - len(numbers)
    left_out = (
        f"`{name}`: {count:,} of {len(sizes):,} documents not evaluated, longer than {LARGEST_OF_AVERAGE} average ones"
        f" ({100 * share:.0f} % of the bytes). Training text that contains parts of them is dropped all the same."
    )
    log.info(left_out)
    return replace(held_out, left_out=left_out)


def check_sizes(data: Data, evaluation: Evaluation, *, few: int) -> tuple[list[Account], list[str]]:
    """Read the sources that are quick to read: their accounts, and warnings about one huge document and about the
    result of `held_out_share`. Below `few` held-out documents, a confidence interval means little."""
    share = evaluation.held_out_share
    accounts: list[Account] = []
    warnings: list[str | None] = []
    num_held_out: list[int] = []  # of each source that was read
    for number, source in enumerate(data.sources):
        key = f"data.sources[{number}]"
        losses = Losses()
        texts = read_texts(data, source, key, losses)
        if texts is None:
            continue
        name = reported_name(source)
        account = losses.account(name, texts.count, texts.total_bytes, listing_of(source, key))
        warnings.append(separator_warning(source, account))
        warnings.append(texts.giant_warning(name))
        if share is not None:
            sizes = texts.held_out_sizes(share)
            num_held_out.append(len(sizes))
            account = with_held_out(account, len(sizes), int(sizes.sum()))
            warnings.append(check_held_out(name, share, sizes, texts, few))
        accounts.append(account)
    if share is not None and len(num_held_out) == len(data.sources) and not any(num_held_out):
        raise DataError(nothing_held_out(share, sum(account.documents for account in accounts)))
    return accounts, [warning for warning in warnings if warning is not None]


@dataclass(frozen=True)
class Texts:
    """The texts of a small source: what decides which of them are held out."""

    hashes: Hashes
    sizes: Int64  # bytes
    largest_at: str  # file and line of the largest one

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    def held_out_sizes(self, share: float) -> Int64:
        longest = longest_held_out(self.total_bytes, self.count, share)
        return self.sizes[is_held_out(self.hashes, self.sizes, share, longest)]

    def giant_warning(self, name: str) -> str | None:
        largest = int(self.sizes.max())
        return absurd_share(name, self.largest_at, largest, self.total_bytes, self.count, "bytes")


def read_texts(data: Data, source: Source, key: str, losses: Losses) -> Texts | None:
    """Read a small local source of documents; None for any other, and for one without a text."""
    if kind_of(source.path) != "local" or form_of_source(source) != "document":
        return None
    if sum(file.size for file in files_of(source, key)) > MOST_BYTES_READ:
        return None
    hashes: list[int] = []
    sizes: list[int] = []
    largest_at = ""
    largest = -1
    for text, document in texts_of(work_of(data, source, key), pieces_of(source, key), losses):
        raw = text.encode()
        hashes.append(xxh3_64_intdigest(raw))
        sizes.append(len(raw))
        if len(raw) > largest:
            largest = len(raw)
            largest_at = document.where
    if not sizes:
        return None
    return Texts(np.array(hashes, np.uint64), np.array(sizes, np.int64), largest_at)


def check_held_out(
    name: str, share: float, held_out_sizes: Int64, texts: Texts, few: int
) -> str | None:
    """A warning about the sizes of the documents that a share holds out of a source; DataError if it is all of it."""
    count = len(held_out_sizes)
    counts = f"{name}: `evaluation.held_out_share` holds out {count} of {texts.count:,} documents"
    if count == texts.count:
        raise DataError(f"{counts}, so none is left to train on. Lower it, {REMEDY}.")
    if count < few:
        return (
            f"{counts}; below {few} the confidence interval means little. Raise the share, {REMEDY}"
        )
    return other_share(name, share, int(held_out_sizes.sum()), texts.total_bytes, count)


def other_share(
    name: str, requested_share: float, held_out_bytes: int, total_bytes: int, num_documents: int
) -> str | None:
    """A warning if the held-out bytes are a very different share of the source than the recipe requests."""
    share = held_out_bytes / max(1, total_bytes)
    if requested_share / FAR_OFF <= share <= requested_share * FAR_OFF:
        return None
    documents = f"{num_documents:,} document{'' if num_documents == 1 else 's'}"
    return (
        f"{name}: `evaluation.held_out_share` is {requested_share:.2%}, but {share:.2%} of the text is held out, in"
        f" {documents}. Documents are chosen by hash, and very long ones are never held out. To choose others,"
        f" {REMEDY}"
    )


def nothing_held_out(share: float, num_documents: int) -> str:
    enough = min(0.5, 50 / num_documents)
    remedy = f"Set it to {enough:.2g}" if enough > share else "Add documents"
    return (
        f"`evaluation.held_out_share` is {share:g}, which selects none of {num_documents:,} documents, so nothing can"
        f" be evaluated. {remedy}, or name separate files: `evaluation.perplexity`."
    )
