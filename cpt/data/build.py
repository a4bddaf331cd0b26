"""From the recipe's `data` section to the rows that are trained on and the rows for evaluation."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cpt.cache import default_cache_dir, key_of
from cpt.data.contamination import with_decontamination
from cpt.data.held_out import HeldOutSet, held_out_set, nothing_held_out, other_share
from cpt.data.mixture import MixtureRows, asked_shares, lengths_of_phases, shares_over
from cpt.data.open_sources import open_sources
from cpt.data.prepared import PreparedData, SourceReport, report_on, rows_of_run, tell, tell_repeats
from cpt.data.readers.forms import form_of_source, refuse_layout, with_form
from cpt.data.rows.rows import Layout
from cpt.data.rows.selection import Repeated, Selection, is_held_out, longest_held_out, repeated_documents
from cpt.data.rows.windows import WindowedRows
from cpt.data.store.order import shuffled
from cpt.data.store.token_files import StoredDocuments
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource, Wanted, make_shards
from cpt.errors import DataError, RecipeError
from cpt.ranks import is_main_process, main_process_first
from cpt.recipe.load import load_mixture
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Budget, Data, Evaluation

log = logging.getLogger("cpt")
NO_EVALUATION = Evaluation()
CLOSE_TO_ALL = 0.9  # of a source; from here on an estimate of its size will not do


def build_data(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    evaluation: Evaluation = NO_EVALUATION,
    budget: Budget | None = None,
    cache_dir: Path | None = None,
    whole: bool = False,
    form: str = "document",
) -> PreparedData:
    """Read, filter, tokenise, split and pack the sources; what was done before is found in `cache_dir`.

    Training documents that hold what the model is judged by are left out, unless the recipe refuses it
    (`own_evaluation: false`). Of a source larger than `data.window_bytes`, only what the run begins with.

    Args:
        budget: how long the run is, to tell how often it reads each source.
        cache_dir: where tokens are kept; by default $CPT_CACHE or ~/.cache/cpt.
        whole: make all of every source.
        form: of the sources' rows: documents, or examples (`cpt.data.readers.forms`); by default each source's own.

    Raises:
        DataError: a source is missing, bad or empty after its filters.
        RecipeError: a filter or its options do not exist, names are not unique, the run needs more of a source than
        there is and may have,
            or something needs the whole of a source that may not be on the disk as a whole.
        ResourceError: the cache cannot be written, or the Hub not reached.
    """
    data, evaluation, form = as_asked(data, evaluation, form)
    cache = cache_dir or default_cache_dir()

    def build() -> PreparedData:
        clean = with_decontamination(data, evaluation, cache)
        return Builder(clean, evaluation, DocumentEncoder(tokenizer), cache, seed, budget, form).build(whole=whole)

    return main_process_first(build)


@dataclass(frozen=True)
class Builder:
    data: Data
    evaluation: Evaluation
    encoder: DocumentEncoder
    cache_dir: Path
    seed: int
    budget: Budget | None
    form: str = "document"

    @property
    def layout(self) -> Layout:
        return Layout(self.data.sequence_length, self.data.packing, self.data.stride, self.encoder.pad, self.form)

    def build(self, *, whole: bool) -> PreparedData:
        opened = open_sources(self.data, self.evaluation, self.encoder, self.cache_dir, self.seed)
        judges = [opened[f"evaluation.perplexity[{number}]"] for number in range(len(self.evaluation.perplexity))]
        sources = [opened[f"data.sources[{number}]"] for number in range(len(self.data.sources))]
        needs_all = whole or why_all(self.data, self.budget) is not None
        limit = self.data.disk_bytes
        refuse_small_disk(self.data, self.budget, sources, needs_all=needs_all)
        make_shards(
            [
                *everything(judges),
                *(shard for source in sources for shard in self.first_shards(source, needs_all=needs_all)),
            ]
        )
        for source in [*judges, *sources]:
            if not source.missing(range(len(source.plan.shards))):
                source.finish()
        windowed = self.windowed_rows(sources, judges, is_bounded=limit is not None)
        for rows in windowed:
            rows.begin(all_windows=needs_all)
        mixture, reports = self.mix(windowed)
        if scarce := self.scarce(windowed, mixture, reports):
            make_shards(everything([rows.tokenized for rows in scarce]))
            for rows in scarce:
                rows.begin(all_windows=True)
            mixture, reports = self.mix(windowed)
        self.tell(mixture, windowed, reports)
        held_out = self.held_out_sets(windowed, judges)
        files = {reported_name(judge.work.source): judge.finish().files for judge in judges}
        fingerprint = self.fingerprint(mixture, windowed)
        return PreparedData(mixture, windowed, held_out, reports, fingerprint, limit, self.form, files, judges)

    def tell(self, mixture: MixtureRows, windowed: Sequence[WindowedRows], reports: Sequence[SourceReport]) -> None:
        for report, rows in zip(reports, windowed, strict=True):
            if is_main_process():
                tell(report, rows)
        if self.budget is not None:
            tell_repeats(self.data, mixture, reports, self.num_rows(reports))

    def first_shards(self, source: TokenizedSource, *, needs_all: bool) -> list[Wanted]:
        if not source.plan.is_streamed or needs_all:
            return everything([source])
        held_out = source.plan.held_out if self.evaluation.held_out_share is not None else []
        return [(source, number) for number in [*held_out, *source.plan.windows[0]]]

    def windowed_rows(
        self, sources: Sequence[TokenizedSource], judges: Sequence[TokenizedSource], *, is_bounded: bool
    ) -> list[WindowedRows]:
        judged = [judge.documents(judge.plan.held_out).hashes for judge in judges]
        hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *judged]))
        repeated = self.repeated(sources)
        longest = [self.longest_held_out(source) for source in sources]
        also_held_out = self.held_out_of_others(sources, longest)
        return [
            WindowedRows(
                source,
                Selection(
                    self.evaluation.held_out_share,
                    np.union1d(hashes, also_held_out[number]),
                    repeated[number],
                    recipe.max_tokens,
                    longest[number],
                ),
                self.layout,
                self.seed,
                self.cache_dir,
                max_epochs=recipe.max_epochs,
                is_bounded=is_bounded and source.plan.is_streamed,
            )
            for number, (source, recipe) in enumerate(zip(sources, self.data.sources, strict=True))
        ]

    def longest_held_out(self, source: TokenizedSource) -> int | None:
        """Bytes of the longest document that may be held out of a source; None where its rows are examples, which are
        short."""
        if self.evaluation.held_out_share is None or form_of_source(source.work.source) != "document":
            return None
        documents = source.documents(source.plan.held_out)
        return longest_held_out(int(documents.num_bytes.sum()), len(documents), self.evaluation.held_out_share)

    def held_out_of_others(
        self, sources: Sequence[TokenizedSource], longest: Sequence[int | None]
    ) -> list[NDArray[np.uint64]]:
        """For each source the texts that are held out of another one and too long to be held out of this one: neither
        trains on them."""
        share = self.evaluation.held_out_share
        if share is None or len(sources) == 1:
            return [np.empty(0, np.uint64)] * len(sources)
        held_out = []
        for source, limit in zip(sources, longest, strict=True):
            documents = source.documents(source.plan.held_out)
            which = is_held_out(documents.hashes, documents.num_bytes, share, limit)
            held_out.append((documents.hashes[which], documents.num_bytes[which]))
        hashes, num_bytes = (np.concatenate(arrays) for arrays in zip(*held_out, strict=True))
        return [hashes[:0] if limit is None else hashes[num_bytes > limit] for limit in longest]

    def repeated(self, sources: Sequence[TokenizedSource]) -> Sequence[Repeated | None]:
        deduplicate = self.data.deduplicate
        if deduplicate is None:
            return [None] * len(sources)
        all_documents = [partial(documents_of, source) for source in sources]
        kind, _, across = deduplicate.partition("_")
        groups = [all_documents] if across else [[documents] for documents in all_documents]
        return [one for group in groups for one in repeated_documents(group, kind, self.cache_dir)]

    def mix(self, windowed: Sequence[WindowedRows]) -> tuple[MixtureRows, list[SourceReport]]:
        """The mixture whose tokens have the shares that the recipe asks for, and the reports with these shares."""
        reports = [report_on(rows) for rows in windowed]
        asked = asked_shares(self.data, [report.tokens for report in reports])
        filled = np.array([rows.filled for rows in windowed])
        # A source that fills its rows to one half needs twice the rows for the same tokens.
        (_, weights), *changes = [(first, (shares / filled).tolist()) for first, shares in asked]
        mixture = MixtureRows(windowed, weights, self.seed, changes, lengths_of_phases(self.data))
        shares = shares_over(asked, self.num_rows(reports)).tolist()
        return mixture, [replace(report, share=share) for report, share in zip(reports, shares, strict=True)]

    def num_rows(self, reports: Sequence[SourceReport]) -> int:
        """Of the whole run; 1 where its length is not known."""
        if self.budget is None:
            return 1
        return rows_of_run(self.data, self.budget, sum(report.rows for report in reports))

    def scarce(
        self, windowed: Sequence[WindowedRows], mixture: MixtureRows, reports: Sequence[SourceReport]
    ) -> list[WindowedRows]:
        """Sources that the run may use up and may not repeat, and whose size is only estimated."""
        counts = mixture.turns.counts(self.num_rows(reports))
        return [
            rows
            for rows, report, count in zip(windowed, reports, counts, strict=True)
            if report.is_estimate
            and rows.max_epochs is not None
            and count > CLOSE_TO_ALL * rows.max_epochs * report.rows
        ]

    def held_out_sets(
        self, windowed: Sequence[WindowedRows], judges: Sequence[TokenizedSource]
    ) -> dict[str, HeldOutSet]:
        """The documents of each source that the hash of their text keeps from training, and the sets of the recipe."""
        sets = {}
        looked_at = 0
        for rows in windowed if self.evaluation.held_out_share is not None else []:
            shards, name = rows.tokenized.plan.held_out, reported_name(rows.tokenized.work.source)
            documents = rows.tokenized.documents(shards)
            looked_at += len(documents)
            chosen = rows.selection.held_out(documents, shards)
            if len(chosen):
                sets[name] = held_out_set(name, documents, chosen, self.layout, self.cache_dir)
                if not documents.are_examples and is_main_process():
                    share, sizes = self.evaluation.held_out_share or 0.0, documents.num_bytes
                    if warning := other_share(name, share, int(sizes[chosen].sum()), int(sizes.sum()), len(chosen)):
                        log.warning(f"{warning}.")
            else:
                log.warning(
                    f"{name}: none of its {len(documents):,} documents fell into `evaluation.held_out_share`; it is"
                    " not evaluated."
                )
        if self.evaluation.held_out_share is not None and not sets:
            raise DataError(nothing_held_out(self.evaluation.held_out_share, looked_at))
        for judge in judges:
            documents, name = judge.documents(judge.plan.held_out), reported_name(judge.work.source)
            layout = replace(self.layout, form=form_of_source(judge.work.source))
            sets[name] = held_out_set(name, documents, np.arange(len(documents)), layout, self.cache_dir)
        return sets

    def fingerprint(self, mixture: MixtureRows, windowed: Sequence[WindowedRows]) -> str:
        """Hash of all that decides the rows: documents, packing, weights, seed, and the first places of the order
        itself."""
        return key_of(
            {
                "sources": [rows.fingerprint for rows in windowed],
                "proportions": list(zip(mixture.turns.first_rows, mixture.turns.proportions, strict=True)),
                "seed": mixture.seed,
                "layout": self.layout.content(),
                **({"lengths": mixture.lengths} if mixture.lengths else {}),
                "order": [
                    [*mixture.turns.turn(number), shuffled(number, 1000, mixture.seed)] for number in range(100)
                ],
            }
        )


def documents_of(source: TokenizedSource, verified: bool) -> StoredDocuments:
    return source.documents(range(len(source.plan.shards)), verified=verified)


def everything(sources: Sequence[TokenizedSource]) -> list[Wanted]:
    return [(source, number) for source in sources for number in range(len(source.plan.shards))]


def as_asked(data: Data, evaluation: Evaluation, form: str) -> tuple[Data, Evaluation, str]:
    """The sections with the form of their rows, and this form."""
    check_names(data, evaluation)
    data, evaluation = with_form(data, evaluation, form)
    form = form_of_source(data.sources[0])
    refuse_layout(data, form)
    return data, evaluation, form


WINDOWS_ON_DISK = 4  # of each source: read, made next, kept for slower readers, and a rest


def why_all(data: Data, budget: Budget | None) -> str | None:
    """The key that needs the whole of every source before the first row."""
    if data.deduplicate is not None:
        return "data.deduplicate"
    if data.temperature is not None:
        return "data.temperature"
    return "budget.epochs" if budget is not None and budget.epochs is not None else None


def refuse_small_disk(
    data: Data, budget: Budget | None, sources: Sequence[TokenizedSource], *, needs_all: bool
) -> None:
    """Check that `data.disk_bytes` holds some windows of each source, and that nothing needs all of one."""
    large = [source for source in sources if source.plan.is_streamed]
    if data.disk_bytes is None or not large:
        return
    if needs_all:
        what = f"`{why_all(data, budget) or 'cpt prepare'}` needs"
        raise RecipeError(f"`data.disk_bytes`: {what} the whole of each source on the disk. Remove one of the two.")
    least = WINDOWS_ON_DISK * len(large) * data.window_bytes
    if data.disk_bytes < least:
        raise RecipeError(
            f"`data.disk_bytes` is {data.disk_bytes:,}, but {len(large)} source(s) in windows of"
            f" {data.window_bytes:,} bytes need {least:,}. Raise it, or lower `data.window_bytes`."
        )


def check_names(data: Data, evaluation: Evaluation) -> None:
    """Refuse two sources, or two held-out sets, of one name: reports could not tell them apart."""
    sources = [reported_name(source) for source in data.sources]
    held_out = [reported_name(source) for source in evaluation.perplexity]
    groups = {"data.sources": sources, "evaluation.perplexity": held_out}
    if evaluation.held_out_share is not None:  # then each source has a held-out set of its name
        groups["data.sources` and `evaluation.perplexity"] = list({*sources}) + held_out
    for where, names in groups.items():
        twice = [f"`{name}`" for name, count in Counter(names).items() if count > 1]
        if twice:
            raise RecipeError(
                f"`{where}`: {', '.join(twice)} is the name of more than one. Give each a `name:` of its own."
            )


# --- open mixture ---


def open_mixture(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    overrides: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
) -> MixtureRows:
    """The rows of a mixture file or of a recipe, in the order of training: a torch dataset that a plain DataLoader
    takes.

    It has no end (its length is 10**12 rows), so leave the DataLoader's `shuffle` off: the rows are shuffled already.
    For some of them: `torch.utils.data.Subset(rows, range(1000))`. Of a recipe nothing is held out here; a run's own
    rows are `build_data(...).rows`.

    Args:
        tokenizer: a Hugging Face tokenizer with an end-of-sequence token.
        overrides: `data.key=value`, on top of the file: `data.sequence_length=512`.
        cache_dir: where tokens are kept; by default $CPT_CACHE or ~/.cache/cpt.
    """
    data, seed = load_mixture(path, overrides)
    return build_data(data, tokenizer, seed=seed, cache_dir=cache_dir).rows
