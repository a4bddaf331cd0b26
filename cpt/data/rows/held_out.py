"""Build the held-out rows, and check before a run how much of a source is held out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.cache import hold, key_of, publish_derived
from cpt.data.examples.encoder import fitting
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
    name: str, documents: StoredDocuments, chosen: Int64, layout: Layout, cache_dir: Path
) -> HeldOutSet:
    """Build a set of the chosen documents; its rows are the same for every seed, so runs can be compared."""
    # More overlap would count tokens twice, and cutting documents at full rows would lose tokens. These windows
    # overlap by one token, which is predicted once, so metrics do not depend on the packing. They do depend on the row
    # length for documents longer than a row: each window but the first starts without the tokens before it as context.
    packing = layout.packing if layout.packing in ("none", "token_budget") else "best_fit"
    stride = max(1, layout.sequence_length - 1)
    layout = replace(layout, packing=packing, stride=stride)
    # A conversation is cut to one row in training, but evaluated to its end, in windows, like a document: otherwise
    # the bits would be those of its beginning, and the bytes those of all of it.
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


def whole_set(source: TokenizedSource, layout: Layout, cache_dir: Path) -> HeldOutSet:
    """A held-out set with separate files. As in a held-out share, a very long document is left out."""
    documents, name = source.documents(source.plan.held_out), reported_name(source.work.source)
    layout = replace(layout, form=form_of_source(source.work.source))
    sizes = documents.num_bytes
    longest = LARGEST_OF_AVERAGE * sizes.mean() if layout.form == "document" else sizes.max()
    chosen = np.flatnonzero(sizes <= longest)
    found = held_out_set(name, documents, chosen, layout, cache_dir)
    if len(chosen) == len(sizes):
        return found
    share = 1 - sizes[chosen].sum() / sizes.sum()
    count = len(sizes) - len(chosen)
    text = (
        f"`{name}`: {count:,} of {len(sizes):,} documents not evaluated, longer than {LARGEST_OF_AVERAGE} average ones"
        f" ({100 * share:.0f} % of the bytes). Training text that contains parts of them is dropped all the same."
    )
    log.info(text)
    return replace(found, left_out=text)


def check_sizes(data: Data, evaluation: Evaluation, *, few: int) -> tuple[list[Account], list[str]]:
    """Read the sources that are quick to read: their accounts, and warnings about one huge document and about the
    result of `held_out_share`. Below `few` held-out documents, a confidence interval means little."""
    share, warnings, held_out = evaluation.held_out_share, list[str](), list[tuple[int, int]]()
    accounts: list[Account] = []
    for number, source in enumerate(data.sources):
        key, losses = f"data.sources[{number}]", Losses()
        name, found = reported_name(source), sizes_of(data, source, key, losses)
        if found is None:
            continue
        hashes, sizes, largest = found
        total, count = int(sizes.sum()), len(sizes)
        account = losses.account(name, count, total, listing_of(source, key))
        accounts.append(account)
        if unused := separator_warning(source, account):
            warnings.append(unused)
        if giant := absurd_share(name, largest, int(sizes.max()), total, count, "bytes"):
            warnings.append(giant.rstrip("."))
        if share is None:
            continue
        chosen = sizes[is_held_out(hashes, sizes, share, longest_held_out(total, count, share))]
        held_out.append((len(chosen), count))
        accounts[-1] = with_held_out(account, len(chosen), int(chosen.sum()))
        if warning := check_held_out(name, share, chosen, total, count, few):
            warnings.append(warning)
    if (
        share is not None
        and len(held_out) == len(data.sources)
        and not any(chosen for chosen, _ in held_out)
    ):
        raise DataError(nothing_held_out(share, sum(count for _, count in held_out)))
    return accounts, warnings


def check_held_out(
    name: str, share: float, held_out: Int64, total: int, num_documents: int, few: int
) -> str | None:
    """A warning about the sizes of the documents that a share holds out of a source; DataError if it is all of it."""
    counts = f"{name}: `evaluation.held_out_share` holds out {len(held_out)} of {num_documents:,} documents"
    if len(held_out) == num_documents:
        raise DataError(f"{counts}, so none is left to train on. Lower it, {REMEDY}.")
    if len(held_out) < few:
        return (
            f"{counts}; below {few} the confidence interval means little. Raise the share, {REMEDY}"
        )
    return other_share(name, share, int(held_out.sum()), total, len(held_out))


def sizes_of(
    data: Data, source: Source, key: str, losses: Losses
) -> tuple[Hashes, Int64, str] | None:
    """For a small local source of documents: hashes of the texts, their bytes, and the place of the largest one."""
    is_read = kind_of(source.path) == "local" and form_of_source(source) == "document"
    if not is_read or sum(file.size for file in files_of(source, key)) > MOST_BYTES_READ:
        return None
    hashes, sizes, largest = list[int](), list[int](), ("", -1)
    for text, document in texts_of(work_of(data, source, key), pieces_of(source, key), losses):
        raw = text.encode()
        hashes.append(xxh3_64_intdigest(raw))
        sizes.append(len(raw))
        if len(raw) > largest[1]:
            largest = document.where, len(raw)
    return (np.array(hashes, np.uint64), np.array(sizes, np.int64), largest[0]) if sizes else None


def other_share(
    name: str, asked: float, held_out: int, total: int, num_documents: int
) -> str | None:
    """A warning if the held-out bytes are a very different share of the source than the recipe requests."""
    share = held_out / max(1, total)
    if asked / FAR_OFF <= share <= asked * FAR_OFF:
        return None
    documents = f"{num_documents:,} document{'' if num_documents == 1 else 's'}"
    return (
        f"{name}: `evaluation.held_out_share` is {asked:.2%}, but {share:.2%} of the text is held out, in"
        f" {documents}. Documents are chosen by hash, and very long ones are never held out. To choose others,"
        f" {REMEDY}"
    )


def nothing_held_out(share: float, num_documents: int) -> str:
    enough = min(0.5, 50 / num_documents)
    return (
        f"`evaluation.held_out_share` is {share:g}, which selects none of {num_documents:,} documents, so nothing can"
        f" be evaluated. {f'Set it to {enough:.2g}' if enough > share else 'Add documents'}, or name separate files:"
        " `evaluation.perplexity`."
    )
