"""From the recipe's `data` section to the rows that are trained on and the rows that the model is judged by."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cpt.data.check import filters_of, keyed_sources
from cpt.data.ingest import tokenize_source
from cpt.data.mixture import MixtureRows
from cpt.data.packing import pack_once
from cpt.data.rows import PackedRows, Row
from cpt.data.sources import AnySource
from cpt.data.store import TokenStore, default_cache_dir, key_of
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.ranks import is_main_process, main_process_first
from cpt.recipe.schema import Data, Evaluation
from cpt.recipe.sense import reported_name

log = logging.getLogger("cpt")
NO_EVALUATION = Evaluation()


@dataclass(frozen=True)
class HeldOutSet:
    """Documents that the model never trains on, in rows of their own."""

    name: str
    rows: Sequence[Row]
    num_documents: int
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of the documents' text."""


@dataclass(frozen=True)
class SourceReport:
    """What became of one source."""

    name: str
    documents: int
    """Trained on."""
    held_out: int
    """Kept from training, because the model is judged by them or by an equal document of a held-out set."""
    dropped: dict[str, int]
    """Reason -> documents."""
    tokens: int
    """Of the documents trained on, once."""
    rows: int
    share: float
    """Of the training rows, as asked."""
    files: dict[str, str]
    """File -> xxh3-128 of its content."""


@dataclass(frozen=True)
class PreparedData:
    """All that a run reads."""

    rows: MixtureRows
    held_out: dict[str, HeldOutSet]
    sources: list[SourceReport]
    num_tokens: int
    """Of all sources once."""
    fingerprint: str
    """Changes when any training row, or the order of rows, does; moving or touching files changes nothing."""


@dataclass(frozen=True)
class Packer:
    """What packing needs beyond the documents."""

    data: Data
    encoder: DocumentEncoder
    cache_dir: Path

    def rows(self, store: TokenStore, chosen: NDArray[np.int64], seed: int) -> PackedRows:
        """Rows of the chosen documents of a store."""
        starts, lengths = store.offsets[chosen], np.diff(store.offsets)[chosen]
        length = self.data.sequence_length
        folder = pack_once(store.description.digest, starts, lengths, length, self.data.packing, seed, self.cache_dir)
        return PackedRows(store, folder, length, self.encoder.pad)

    def held_out(self, name: str, store: TokenStore, chosen: NDArray[np.int64]) -> HeldOutSet:
        """A held-out set of the chosen documents; the same rows for every seed, so that runs can be compared."""
        num_tokens = int(np.diff(store.offsets)[chosen].sum())
        return HeldOutSet(name, self.rows(store, chosen, seed=0), len(chosen), num_tokens, int(store.num_bytes[chosen].sum()))


def build_data(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    evaluation: Evaluation = NO_EVALUATION,
    cache_dir: Path | None = None,
) -> PreparedData:
    """Read, filter, tokenise, split and pack the sources; what was done before is found in `cache_dir`.

    Args:
        cache_dir: where tokens are kept; by default $CPT_CACHE or ~/.cache/cpt.

    Raises:
        DataError: a source is missing, bad or empty after its filters.
        RecipeError: a filter or its options do not exist, or names are not unique.
        ResourceError: the cache cannot be written, or the Hub not reached.
    """
    check_names(data, evaluation)
    packer = Packer(data, DocumentEncoder(tokenizer), cache_dir or default_cache_dir())
    return main_process_first(lambda: prepare(data, evaluation, packer, seed))


def prepare(data: Data, evaluation: Evaluation, packer: Packer, seed: int) -> PreparedData:
    """One process's part of `build_data`."""
    store_of = {
        key: tokenize_source(source, filters_of(data, source, key), packer.encoder, packer.cache_dir, key)
        for key, source in keyed_sources(data, evaluation)
    }
    judges = [store_of[f"evaluation.perplexity[{number}]"] for number in range(len(evaluation.perplexity))]
    judged = np.unique(np.concatenate([np.empty(0, np.uint64), *(store.hashes for store in judges)]))
    held_out, reports, training = {}, [], []
    total_weight = sum(source.weight for source in data.sources)
    for number, source in enumerate(data.sources):
        name, store = reported_name(source), store_of[f"data.sources[{number}]"]
        kept_out = in_held_out_share(store, evaluation.held_out_share)
        chosen = np.flatnonzero(~kept_out & ~np.isin(store.hashes, judged))
        if not len(chosen):
            raise DataError(all_held_out(source, number, len(store.hashes)))
        rows = packer.rows(store, chosen, seed)
        training.append(rows)
        if kept_out.any():
            held_out[name] = packer.held_out(name, store, np.flatnonzero(kept_out))
        elif evaluation.held_out_share is not None:
            log.warning(f"{name}: none of its {len(chosen):,} documents fell into `evaluation.held_out_share`, so it is not evaluated.")
        reports.append(report(name, store, rows, chosen, source.weight / total_weight))
    for held_out_source, store in zip(evaluation.perplexity, judges, strict=True):
        name = reported_name(held_out_source)
        held_out[name] = packer.held_out(name, store, np.arange(len(store.hashes)))
    mixture = MixtureRows(training, [source.weight for source in data.sources], seed)
    return PreparedData(mixture, held_out, reports, sum(r.tokens for r in reports), fingerprint(mixture, packer))


def check_names(data: Data, evaluation: Evaluation) -> None:
    """Refuse two sources, or two held-out sets, of one name: reports could not tell them apart."""
    sources, held_out = ([reported_name(source) for source in section] for section in (data.sources, evaluation.perplexity))
    groups = {"data.sources": sources, "evaluation.perplexity": held_out}
    if evaluation.held_out_share is not None:  # then each source has a held-out set of its name
        groups["data.sources` and `evaluation.perplexity"] = list({*sources}) + held_out
    for where, names in groups.items():
        twice = [f"`{name}`" for name, count in Counter(names).items() if count > 1]
        if twice:
            raise RecipeError(f"`{where}`: {', '.join(twice)} is the name of more than one. Give each a `name:` of its own.")


def in_held_out_share(store: TokenStore, share: float | None) -> NDArray[np.bool_]:
    """Which documents the hash of their text keeps from training: an equal text in any source, any run, has the same fate."""
    if share is None:
        return np.zeros(len(store.hashes), bool)
    return store.hashes < np.uint64(int(share * 2**64))


def all_held_out(source: AnySource, number: int, documents: int) -> str:
    """Why nothing of a source is left to train on."""
    return (
        f"{source.path}: all {documents:,} documents are kept for evaluation, none is left to train on. Set "
        f"`data.sources[{number}].path` to more documents, a smaller `evaluation.held_out_share`, other files in `evaluation.perplexity`."
    )


def report(name: str, store: TokenStore, rows: PackedRows, chosen: NDArray[np.int64], share: float) -> SourceReport:
    """Count what became of a source, and say it once."""
    lengths = np.diff(store.offsets)[chosen]
    tokens = int(lengths.sum())
    what, held_out = store.description, len(store.hashes) - len(chosen)
    if is_main_process():
        if len(chosen) >= 10 and lengths.max() > tokens / 2:
            log.warning(
                f"{name}: one of {len(chosen):,} documents makes up {lengths.max() / tokens:.0%} of the tokens. Is it one document?"
            )
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in what.dropped.items())
        padding = 1 - tokens / (len(rows) * rows.sequence_length)
        counts = f"{len(chosen):,} documents, {tokens:,} tokens in {len(rows):,} rows ({padding:.2%} padding)"
        log.info(f"{name}: {counts}, {held_out:,} held out{dropped}")
    return SourceReport(name, len(chosen), held_out, what.dropped, tokens, len(rows), share, what.files)


def fingerprint(mixture: MixtureRows, packer: Packer) -> str:
    """Hash of all that decides the rows: tokens, packing, weights, seed, and the first places of the order itself."""
    return key_of(
        {
            "sources": [[rows.store.description.digest, rows.packing.digest()] for rows in mixture.sources],
            "proportions": mixture.proportions,
            "seed": mixture.seed,
            "sequence_length": packer.data.sequence_length,
            "pad": packer.encoder.pad,
            "order": [mixture.locate(number) for number in range(100)],
        }
    )
