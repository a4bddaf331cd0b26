"""From the recipe's `data` section to the rows that are trained on and the rows that the model is judged by."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cpt.data.check import filters_of, keyed_sources, transforms_of
from cpt.data.duplicates import repeated_documents
from cpt.data.fill_in_the_middle import MiddleEncoder
from cpt.data.ingest import tokenize_source
from cpt.data.mixture import MixtureRows
from cpt.data.packing import pack_once
from cpt.data.phases import asked_shares, shares_over
from cpt.data.repeats import epochs_of, rows_of_run, tell_repeats
from cpt.data.report import SourceReport, report_on
from cpt.data.rows import PackedRows, Row
from cpt.data.store import TokenStore, default_cache_dir, key_of
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.ranks import main_process_first
from cpt.recipe.schema import Budget, Data, DocumentSource, Evaluation, Source
from cpt.recipe.sense_data import reported_name

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
class PreparedData:
    """All that a run reads."""

    rows: MixtureRows
    held_out: dict[str, HeldOutSet]
    sources: list[SourceReport]
    num_tokens: int
    """Of all sources once."""
    fingerprint: str
    """Changes when any training row, or the order of rows, does; moving or touching files changes nothing."""

    def shares(self, rows: int, first: int = 0) -> dict[str, float]:
        """Each source's share of the tokens, without padding, among the rows from `first` to `rows`; arithmetic, nothing is read."""
        counts = [upto - before for upto, before in zip(self.rows.turns.counts(rows), self.rows.turns.counts(first), strict=True)]
        tokens = {report.name: count * (1 - report.padding) for report, count in zip(self.sources, counts, strict=True)}
        return {name: number / sum(tokens.values()) for name, number in tokens.items()}

    def epochs(self, rows: int) -> dict[str, float]:
        """How many times the first `rows` rows go through each source."""
        return dict(zip((report.name for report in self.sources), epochs_of(self.rows, rows), strict=True))


@dataclass(frozen=True)
class Packer:
    """What packing needs beyond the documents."""

    data: Data
    encoder: DocumentEncoder
    cache_dir: Path

    def rows(self, store: TokenStore, chosen: NDArray[np.int64], seed: int, packing: str | None = None) -> PackedRows:
        """Rows of the chosen documents of a store, packed as the recipe says or as is given."""
        starts, lengths = store.offsets[chosen], np.diff(store.offsets)[chosen]
        length = self.data.sequence_length
        packing, stride = packing or self.data.packing, self.data.stride
        folder = pack_once(store.description.digest, starts, lengths, length, packing, seed, self.cache_dir, stride)
        return PackedRows(store, folder, length, self.encoder.pad)

    def held_out(self, name: str, store: TokenStore, chosen: NDArray[np.int64]) -> HeldOutSet:
        """A held-out set of the chosen documents; the same rows for every seed, so that runs can be compared."""
        num_tokens = int(np.diff(store.offsets)[chosen].sum())
        # Windows that overlap would count tokens twice.
        packing = "best_fit" if self.data.packing == "sliding_window" else None
        rows = self.rows(store, chosen, seed=0, packing=packing)
        return HeldOutSet(name, rows, len(chosen), num_tokens, int(store.num_bytes[chosen].sum()))


def build_data(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    evaluation: Evaluation = NO_EVALUATION,
    budget: Budget | None = None,
    cache_dir: Path | None = None,
) -> PreparedData:
    """Read, filter, tokenise, split and pack the sources; what was done before is found in `cache_dir`.

    Args:
        budget: how long the run is, to tell how often it reads each source.
        cache_dir: where tokens are kept; by default $CPT_CACHE or ~/.cache/cpt.

    Raises:
        DataError: a source is missing, bad or empty after its filters.
        RecipeError: a filter or its options do not exist, names are not unique, or the run needs more of a source than there is and
            `when_exhausted` is `stop`.
        ResourceError: the cache cannot be written, or the Hub not reached.
    """
    check_names(data, evaluation)
    packer = Packer(data, DocumentEncoder(tokenizer), cache_dir or default_cache_dir())
    return main_process_first(lambda: prepare(data, evaluation, packer, seed, budget))


def prepare(data: Data, evaluation: Evaluation, packer: Packer, seed: int, budget: Budget | None) -> PreparedData:
    """One process's part of `build_data`."""
    store_of = {key: tokens_of(data, source, key, packer) for key, source in keyed_sources(data, evaluation)}
    judges = [store_of[f"evaluation.perplexity[{number}]"] for number in range(len(evaluation.perplexity))]
    judged = np.unique(np.concatenate([np.empty(0, np.uint64), *(store.hashes for store in judges)]))
    held_out, reports, training = {}, [], []
    for number, source in enumerate(data.sources):
        name, store = reported_name(source), store_of[f"data.sources[{number}]"]
        repeated = repeated_documents(store, data.deduplicate, packer.cache_dir)
        is_first = ~np.logical_or.reduce([*repeated.values(), np.zeros(len(store.hashes), bool)])
        kept_out = in_held_out_share(store, evaluation.held_out_share) & is_first
        chosen = np.flatnonzero(is_first & ~kept_out & ~np.isin(store.hashes, judged))
        if not len(chosen):
            raise DataError(all_held_out(source, number, len(store.hashes)))
        rows = packer.rows(store, chosen, seed)
        training.append(rows)
        if kept_out.any():
            held_out[name] = packer.held_out(name, store, np.flatnonzero(kept_out))
        elif evaluation.held_out_share is not None:
            log.warning(f"{name}: none of its {len(chosen):,} documents fell into `evaluation.held_out_share`, so it is not evaluated.")
        reports.append(report_on(name, store, rows, chosen, {reason: int(which.sum()) for reason, which in repeated.items()}))
    for held_out_source, store in zip(evaluation.perplexity, judges, strict=True):
        name = reported_name(held_out_source)
        held_out[name] = packer.held_out(name, store, np.arange(len(store.hashes)))
    mixture, reports = mix(data, training, reports, seed, budget)
    return PreparedData(mixture, held_out, reports, sum(r.tokens for r in reports), fingerprint(mixture, packer))


def mix(
    data: Data, sources: list[PackedRows], reports: list[SourceReport], seed: int, budget: Budget | None
) -> tuple[MixtureRows, list[SourceReport]]:
    """The mixture whose tokens have the shares that the recipe asks for, and the reports with these shares."""
    asked = asked_shares(data, [report.tokens for report in reports])
    filled = np.array([1 - report.padding for report in reports])
    # A source that fills its rows to one half needs twice the rows for the same tokens.
    (_, weights), *changes = [(first, (shares / filled).tolist()) for first, shares in asked]
    mixture = MixtureRows(sources, weights, seed, changes)
    rows = 1
    if budget is not None:
        rows = rows_of_run(budget, sum(report.tokens for report in reports), data.sequence_length)
        tell_repeats(data, mixture, {report.name: report.tokens for report in reports}, rows)
    shares = shares_over(asked, rows).tolist()
    return mixture, [replace(report, share=share) for report, share in zip(reports, shares, strict=True)]


def tokens_of(data: Data, source: DocumentSource, key: str, packer: Packer) -> TokenStore:
    """The tokens of one source or held-out set."""
    encoder, middle = packer.encoder, source.fill_in_the_middle if isinstance(source, Source) else None
    return tokenize_source(
        source,
        filters_of(data, source, key),
        encoder if middle is None else MiddleEncoder(encoder, middle, key),
        packer.cache_dir,
        key,
        transforms=transforms_of(data, source, key),
        on_bad_row=data.on_bad_row,
        max_bad_share=data.max_bad_share,
    )


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


def all_held_out(source: DocumentSource, number: int, documents: int) -> str:
    """Why nothing of a source is left to train on."""
    return (
        f"{source.path}: all {documents:,} documents are kept for evaluation, none is left to train on. Set "
        f"`data.sources[{number}].path` to more documents, a smaller `evaluation.held_out_share`, other files in `evaluation.perplexity`."
    )


def fingerprint(mixture: MixtureRows, packer: Packer) -> str:
    """Hash of all that decides the rows: tokens, packing, weights, seed, and the first places of the order itself."""
    return key_of(
        {
            "sources": [[rows.store.description.digest, rows.packing.digest()] for rows in mixture.sources],
            "proportions": list(zip(mixture.turns.first_rows, mixture.turns.proportions, strict=True)),
            "seed": mixture.seed,
            "sequence_length": packer.data.sequence_length,
            "pad": packer.encoder.pad,
            "order": [mixture.locate(number) for number in range(100)],
        }
    )
