"""Build the training rows and the evaluation rows from the recipe's `data` section."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cpt.cache import default_cache_dir, key_of
from cpt.data.readers.account import Account, files_read, format_account, separator_warning
from cpt.data.readers.columns import form_of_source, form_of_stage, refuse_layout, with_form
from cpt.data.readers.comparing import COMPARISON
from cpt.data.readers.documents import absurd_share
from cpt.data.rows.chunks import ChunkedRows, other_documents, shuffled
from cpt.data.rows.contamination import with_decontamination
from cpt.data.rows.held_out import (
    HeldOutSet,
    held_out_set,
    nothing_held_out,
    other_share,
    whole_set,
)
from cpt.data.rows.loader import ReadAhead
from cpt.data.rows.mixture import (
    Changes,
    MixtureRows,
    Turns,
    from_row,
    lengths_of_phases,
    shares_of_phases,
    shares_over,
)
from cpt.data.rows.open_sources import open_sources
from cpt.data.rows.packing import Layout
from cpt.data.rows.selection import (
    Repeated,
    Selection,
    is_held_out,
    longest_held_out,
    repeated_documents,
)
from cpt.data.rows.stretches import EndedStretch, Position
from cpt.data.store.parallel import shared_workers
from cpt.data.store.text_loss import UNRESTORED_SHARE, check_text_loss, spelled_warnings, total_loss
from cpt.data.store.token_files import Hashes
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import SourceShard, TokenizedSource, make_shards
from cpt.distributed import is_main_process, main_process_first
from cpt.errors import DataError, RecipeError
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.load import load_section
from cpt.recipe.rules import check_names, reported_name
from cpt.recipe.schema import Budget, Data, DocumentSource, Evaluation, Recipe, Source
from cpt.tokenizer.load import tokenizer_at

Sources = Sequence[TokenizedSource]
Chunked = Sequence[ChunkedRows]
log = logging.getLogger("cpt")
NO_EVALUATION = Evaluation()
CLOSE_TO_ALL = 0.9  # above this share of a source is read, its exact size is needed
NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, kw_only=True)
class SourceReport(Account):
    held_out: int
    lengths: dict[int, int]  # power of two n -> documents of n to 2n - 1 tokens
    tokens: int  # in the documents trained on, counted once
    rows: int
    padding: float  # share of positions without a token
    share: float  # requested share of training tokens; with phases, over the whole run if its length is known
    files: dict[str, str]  # file -> xxh3-128 of its content, once the whole source was read
    licence: str | None


def report_on(rows: ChunkedRows) -> SourceReport:
    so_far, num_chunks = rows.sum_so_far()
    tokenized = rows.tokenized
    source = tokenized.work.source
    description = tokenized.description
    is_estimate = rows.total is None
    scale = tokenized.plan.scale_from(num_chunks) if is_estimate else 1.0

    def scaled(counts: Mapping[Any, int]) -> dict[Any, int]:
        return {key: round(scale * count) for key, count in counts.items()}

    return SourceReport(
        name=reported_name(source),
        documents=round(scale * so_far.documents),
        held_out=round(scale * so_far.held_out),
        dropped=scaled(so_far.left_out),
        bad_rows=scaled(so_far.bad_rows),
        is_estimate=is_estimate,
        text=None if so_far.text is None else so_far.text.scaled(scale),
        files_read=files_read(tokenized.states),
        files_passed_over=tokenized.passed_over,
        lengths=scaled(dict(sorted(so_far.lengths.items()))),
        tokens=round(scale * so_far.tokens),
        rows=round(scale * so_far.rows),
        padding=1 - so_far.tokens_in_rows / max(1, so_far.positions),
        share=0.0,
        files=description.files if description else {},
        licence=source.licence if isinstance(source, Source) else None,
    )


def log_report(report: SourceReport, rows: ChunkedRows) -> None:
    if not is_main_process():
        return
    so_far, chunks_so_far = rows.sum_so_far()
    # A long example is cut to one row, so the warning is only for documents.
    if rows.layout.form == "document" and not report.is_estimate:
        where, tokens = so_far.longest
        giant = absurd_share(report.name, where, tokens, report.tokens, report.documents)
        if giant:
            log.warning(f"{giant}.")
    unused_separator = separator_warning(rows.tokenized.work.source, report)
    if unused_separator:
        log.warning(f"{unused_separator}.")
    estimated = ""
    if report.is_estimate:
        num_chunks = len(rows.tokenized.plan.chunks)
        estimated = f", estimated from the first {chunks_so_far} of {num_chunks} chunks"
    log.info(f"{format_account(report)} ({report.padding:.2%} padding){estimated}")


def rows_of_run(data: Data, budget: Budget, rows_of_epoch: int) -> int:
    """The rows of the whole run; up to one step more without `global_batch_tokens`: the launch decides the length of a
    step. An epoch counts rows, padding included: counted in tokens it would end before the last rows."""
    rows_per_step = max(1, (budget.global_batch_tokens or 0) // data.sequence_length)
    if budget.tokens is not None:
        steps = math.ceil(budget.tokens / data.sequence_length / rows_per_step)
    else:
        steps = steps_of_epochs(data, budget.epochs or 0, rows_of_epoch, rows_per_step)
    return max(1, steps) * rows_per_step


def steps_of_epochs(data: Data, epochs: float, rows_of_epoch: int, rows_per_step: int) -> int:
    """Whole steps for this many epochs: rounded up, or down if a source may not be read any further."""
    steps = epochs * rows_of_epoch / rows_per_step
    if any(source.max_epochs == epochs for source in data.sources):
        return math.floor(steps)
    return math.ceil(steps)


def exceeds_max_epochs(data: Data, name: str, epochs: float, tokens: int) -> str | None:
    """The reason why a run may not read this source so often; None if it may."""
    source = sources_by_name(data)[name]
    if source.max_epochs is None or epochs <= source.max_epochs:
        return None
    return f"`max_epochs` of `{name}`: it has {tokens:,} tokens, the run needs {epochs:.2f} times as many"


def check_repeats(
    data: Data, mixture: MixtureRows, reports: Sequence[SourceReport], rows: int
) -> None:
    """Warn about sources that a run reads more than once, and reject those over `max_epochs`."""
    reasons = []
    repeated = []
    for report, source_rows in zip(reports, mixture.counts(rows), strict=True):
        epochs = source_rows / report.rows
        reason = exceeds_max_epochs(data, report.name, epochs, report.tokens)
        if reason is not None:
            reasons.append(reason)
        elif epochs > 1:
            repeated.append(f"{report.name} {epochs:.2f} epochs ({report.tokens:,} tokens)")
    if reasons:
        raise RecipeError(
            f"{'; '.join(reasons)}. Lower its weight or the budget, add documents, or raise `max_epochs`."
        )
    if repeated and is_main_process():
        log.warning(
            f"The run reads some sources more than once: {', '.join(repeated)}, in a new order each epoch. "
            "Set `max_epochs` of a source to forbid this."
        )


@dataclass(frozen=True)
class PreparedData:
    rows: MixtureRows
    chunked: list[ChunkedRows]
    held_out: dict[str, HeldOutSet]
    sources: list[SourceReport]
    fingerprint: str
    """Changes with any training row or the order of rows; moving or touching files does not change it."""
    form: str  # of the rows: see `cpt.data.readers.columns`
    evaluated: list[TokenizedSource]
    """The held-out sets with separate files."""
    earlier: Sequence[EndedStretch]
    """The stretches of the run before `rows`."""
    comparison: int = COMPARISON
    unused_chunks: dict[str, Any] = field(default_factory=dict)
    """The chunks in a checkpoint's state of sources that are not in the mixture now; they may return."""

    @property
    def tokenized(self) -> dict[str, TokenizedSource]:
        """Sources and held-out sets with separate files, by name."""
        sources = [*self.evaluated, *(rows.tokenized for rows in self.chunked)]
        return {reported_name(source.work.source): source for source in sources}

    @property
    def held_out_files(self) -> Mapping[str, Mapping[str, str]]:
        """Held-out set -> file -> xxh3-128 of its content, for sets with separate files."""
        files = {}
        for source in self.evaluated:
            name = reported_name(source.work.source)
            files[name] = source.finish().files
        return files

    @property
    def positions(self) -> Mapping[str, Position]:
        """The positions of the sources at the first row."""
        return self.earlier[-1].positions if self.earlier else {}

    @property
    def num_rows(self) -> int:
        """Rows of one epoch: exact with `budget.epochs`, which reads all sources first, else maybe estimated."""
        return sum(report.rows for report in self.sources)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources, counted once; an estimate if one of the sources is estimated."""
        return sum(report.tokens for report in self.sources)

    def tokens(self, rows: int, first: int = 0) -> dict[str, float]:
        """Tokens of each source in the rows from `first` to `rows`, without padding; computed without reading rows.
        From row 0 on, earlier stretches and their sources are included."""
        length = self.chunked[0].layout.sequence_length
        tokens: dict[str, float] = {}
        if first == 0 < rows:
            for name, position in self.positions.items():
                tokens[name] = position.rows * position.filled * length
        after = self.rows.counts(rows)
        before = self.rows.counts(first)
        for number, report in enumerate(self.sources):
            num_rows = after[number] - before[number]
            tokens[report.name] = num_rows * self.chunked[number].filled * length
        return tokens

    def shares(self, rows: int, first: int = 0) -> dict[str, float]:
        tokens = self.tokens(rows, first)
        total = sum(tokens.values())
        return {name: number / total for name, number in tokens.items()}

    def filled(self, rows: int, first: int = 0) -> float:
        """The share of tokens among the positions of these rows; the rest is padding."""
        positions = (rows - first) * self.chunked[0].layout.sequence_length
        return sum(self.tokens(rows, first).values()) / positions

    def epochs(self, rows: int) -> dict[str, float]:
        counts = self.rows.counts(rows)
        epochs = {}
        for report, count in zip(self.sources, counts, strict=True):
            epochs[report.name] = count / report.rows
        return epochs

    def read_ahead(self, first_row: int) -> ReadAhead | None:
        """Create the thread that prepares a run's next chunks from `first_row` on; None if all are on disk."""
        row = self.rows.row_in_mixture(first_row)
        shares = self.rows.turns.shares(row)
        turns = self.rows.turns.counts(row)
        incomplete = []
        for rows, share, turn in zip(self.chunked, shares, turns, strict=True):
            if not rows.is_complete:
                incomplete.append((rows, share, turn))
        return ReadAhead(incomplete) if incomplete else None

    def state(self, first_row: int) -> dict[str, Any]:
        """The data state for a checkpoint, to resume at `first_row`, even with an empty store."""
        chunks = dict(self.unused_chunks)
        positions = dict(self.positions)
        turns = self.rows.counts(first_row)
        for report, rows, turn in zip(self.sources, self.chunked, turns, strict=True):
            if not rows.tokenized.plan.is_whole:
                chunks[report.name] = rows.state(turn)
            positions[report.name] = Position(turn, rows.fingerprint, rows.filled)
        return {
            "fingerprint": self.fingerprint,
            "comparison": self.comparison,
            "stretch": len(self.earlier),
            "row": first_row,
            "chunks": chunks,
            "positions": {name: asdict(position) for name, position in positions.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Prepare to resume from a checkpoint's state, also one of an earlier stretch; raises DataError if the data
        have changed since."""
        fingerprints = [self.fingerprint, *(stretch.fingerprint for stretch in self.earlier)]
        if state["fingerprint"] not in fingerprints:
            raise DataError(
                "the checkpoint was written with different data. Restore it, or start a new run: another `name`."
            )
        chunks = dict(state["chunks"])
        for report, rows in zip(self.sources, self.chunked, strict=True):
            if report.name in chunks:
                rows.restore(chunks.pop(report.name))
        self.unused_chunks.update(chunks)


@shared_workers()
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
    earlier: Sequence[EndedStretch] = (),
    comparison: int = COMPARISON,
) -> PreparedData:
    """Read, filter, tokenise, split and pack the sources; earlier work is reused from `cache_dir`.

    Training documents that contain evaluation text are dropped, unless the recipe sets `own_evaluation: false`. For a
    source larger than `data.chunk_bytes`, only the first chunks are prepared here.

    Args:
        budget: the length of the run, to check how often it reads each source.
        cache_dir: where tokens are stored; default: $CPT_CACHE or ~/.cache/cpt.
        whole: prepare all chunks of every source.
        form: documents, or examples (`cpt.data.readers.columns`); default: the form of each source.
        earlier: stretches of the run before this mixture, which begins at the row where the last one ends. Sources
            continue where they were; a new one begins with its first row.
        comparison: how documents are compared with evaluation documents and each other; that of a resumed run.

    Raises:
        DataError: a source is missing, bad, or empty after its filters, or has changed since an earlier stretch.
        RecipeError: a filter or its options do not exist, names are not unique, or a source has too few tokens for
            the run.
        ResourceError: the cache is not writable, or the Hub is not reachable.
    """
    ended_stretches = []
    for stretch in earlier:
        stretch_data, stretch_evaluation = with_checked_form(stretch.data, stretch.evaluation, form)
        ended_stretches.append(replace(stretch, data=stretch_data, evaluation=stretch_evaluation))
    data, evaluation = with_checked_form(data, evaluation, form)
    builder = Builder(
        data=data,
        evaluation=evaluation,
        encoder=DocumentEncoder(tokenizer),
        cache_dir=cache_dir or default_cache_dir(),
        seed=seed,
        budget=budget,
        form=form_of_source(data.sources[0]),
        earlier=ended_stretches,
        comparison=comparison,
    )
    return main_process_first(lambda: builder.build(whole=whole))


def data_of(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    earlier: Sequence[EndedStretch] = (),
    *,
    checks_budget: bool = True,
    whole: bool = False,
    comparison: int = COMPARISON,
) -> PreparedData:
    """`build_data` of a recipe; unless it `checks_budget`, a source may have too few tokens."""
    return build_data(
        phases_in_tokens(recipe),
        tokenizer,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        budget=recipe.budget if checks_budget else None,
        whole=whole,
        form=form_of_stage(recipe.stage),
        earlier=earlier,
        comparison=comparison,
    )


@dataclass(frozen=True)
class Cohort:
    """The sources that came into use in the same stretch of the run: their rows stay as they were then."""

    evaluated: list[TokenizedSource]
    before: list[TokenizedSource]
    """The sources of earlier cohorts that these are compared with."""
    sources: list[TokenizedSource]


@dataclass(frozen=True)
class Builder:
    data: Data
    evaluation: Evaluation
    encoder: DocumentEncoder
    cache_dir: Path
    seed: int
    budget: Budget | None
    form: str = "document"
    earlier: Sequence[EndedStretch] = ()
    comparison: int = COMPARISON

    @property
    def layout(self) -> Layout:
        return Layout(
            self.data.sequence_length,
            self.data.packing,
            self.data.stride,
            self.encoder.pad,
            self.form,
        )

    @property
    def first_row(self) -> int:
        return self.earlier[-1].row if self.earlier else 0

    @property
    def positions(self) -> Mapping[str, Position]:
        return self.earlier[-1].positions if self.earlier else {}

    @cached_property
    def stretches(self) -> list[tuple[dict[str, Source], Evaluation]]:
        """The sources that each stretch, the current one included, was the first to name, and its evaluation."""
        sections = [(stretch.data, stretch.evaluation) for stretch in self.earlier]
        sections.append((self.data, self.evaluation))
        stretches = []
        earlier_names: set[str] = set()
        for data, evaluation in sections:
            new = sources_by_name(data)
            for name in earlier_names & new.keys():
                del new[name]
            stretches.append((new, evaluation))
            earlier_names |= new.keys()
        return stretches

    def build(self, *, whole: bool) -> PreparedData:
        cohorts = self.open_cohorts()
        needs_all = whole or needs_whole_sources(self.data, self.budget)
        text_checks = self.make_first_shards(cohorts, needs_all=needs_all)
        chunked = self.open_rows(cohorts)
        for rows in chunked:
            rows.begin(all_chunks=needs_all)
            position = self.positions.get(rows.name)
            if position is not None and rows.fingerprint != position.fingerprint:
                raise DataError(other_documents(rows.tokenized))
        mixture, reports, num_rows = self.mix(chunked)
        scarce = find_scarce(chunked, reports, mixture.counts(num_rows))
        if scarce:
            make_shards(shards_of([rows.tokenized for rows in scarce]))
            for rows in scarce:
                rows.begin(all_chunks=True)
            mixture, reports, num_rows = self.mix(chunked)
        reports = [replace(report, **text_checks.get(report.name, {})) for report in reports]
        for report, rows in zip(reports, chunked, strict=True):
            log_report(report, rows)
        if self.budget is not None:
            check_repeats(self.data, mixture, reports, num_rows)
        evaluated = cohorts[-1].evaluated
        held_out_sets = self.held_out_sets(chunked, evaluated)
        for name in unrestored(text_checks):
            held_out_sets.pop(name, None)
        return PreparedData(
            rows=mixture,
            chunked=chunked,
            held_out=held_out_sets,
            sources=reports,
            fingerprint=self.fingerprint(mixture, chunked),
            form=self.form,
            evaluated=evaluated,
            earlier=self.earlier,
            comparison=self.comparison,
        )

    def open_cohorts(self) -> list[Cohort]:
        """Open the sources in use, with the held-out sets of the stretch in which they came into use; the last cohort
        has the held-out sets of now. If sources also depend on those before them (duplicates, held-out texts; these
        keys never change), all are opened."""
        deduplicate = self.data.deduplicate
        deduplicates_across = deduplicate is not None and "across" in deduplicate
        compares = self.evaluation.held_out_share is not None or deduplicates_across
        in_use = sources_by_name(self.data)
        cohorts: list[Cohort] = []
        tokenized_before: list[TokenizedSource] = []
        sources_so_far: list[Source] = []
        for number, (named, evaluation) in enumerate(self.stretches):
            is_last = number + 1 == len(self.stretches)
            names = [name for name in named if compares or name in in_use]
            if not names and not is_last:
                continue
            sources = {name: in_use.get(name, named[name]) for name in names}
            sources_so_far += sources.values()
            cohort = self.open_cohort(
                sources,
                evaluation,
                self.data.model_copy(update={"sources": sources_so_far}),
                tokenized_before if compares else [],
            )
            cohorts.append(cohort)
            tokenized_before = [*tokenized_before, *cohort.sources]
        return cohorts

    def open_cohort(
        self,
        sources: Mapping[str, Source],
        evaluation: Evaluation,
        data: Data,
        before: list[TokenizedSource],
    ) -> Cohort:
        """Open new sources, by name, and the held-out sets of a stretch; `data` has the sources until then."""
        names_in_use = list(sources_by_name(self.data))
        keyed: dict[str, DocumentSource] = {}
        for name, source in sources.items():
            position = names_in_use.index(name) if name in names_in_use else name
            keyed[f"data.sources[{position}]"] = source
        source_keys = list(keyed)
        set_keys = []
        for index, held_out in enumerate(evaluation.perplexity):
            set_key = f"evaluation.perplexity[{index}]"
            keyed[set_key] = held_out
            set_keys.append(set_key)
        if sources:
            data = with_decontamination(data, evaluation, self.cache_dir, self.comparison)
        share = self.evaluation.held_out_share or 0.0
        opened = open_sources(data, keyed, self.encoder, self.cache_dir, self.seed, share)
        return Cohort(
            evaluated=[opened[key] for key in set_keys],
            before=before,
            sources=[opened[key] for key in source_keys],
        )

    def make_first_shards(
        self, cohorts: Sequence[Cohort], *, needs_all: bool
    ) -> dict[str, dict[str, Any]]:
        """Make what is needed before the first row, and check its texts (`check_texts`): the held-out sets, and of
        each source the first chunk and the shards with its held-out set, or all shards."""
        evaluated: list[TokenizedSource] = []
        sources: list[TokenizedSource] = []
        for cohort in cohorts:
            evaluated += cohort.evaluated
            sources += cohort.sources
        shards = shards_of(evaluated)
        for source in sources:
            if needs_all:
                shards += shards_of([source])
                continue
            if self.evaluation.held_out_share is not None:
                shards += product([source], source.plan.held_out)
            shards += product([source], source.plan.chunks[0])
        make_shards(shards)
        for source in [*evaluated, *sources]:
            if not source.missing(source.plan.numbers):
                source.finish()
        return check_texts(shards, self.data.max_text_loss)

    def open_rows(self, cohorts: Sequence[Cohort]) -> list[ChunkedRows]:
        """The rows of the sources in use, in the order of the recipe."""
        rows_of: dict[str, ChunkedRows] = {}
        for cohort in cohorts:
            if cohort.sources:
                rows_of.update((rows.name, rows) for rows in self.chunked_rows(cohort))
        return [rows_of[reported_name(source)] for source in self.data.sources]

    def chunked_rows(self, cohort: Cohort) -> Iterator[ChunkedRows]:
        """The rows of the sources of a cohort that are in use."""
        evaluated_hashes = []
        for source in cohort.evaluated:
            evaluated_hashes.append(source.documents(source.plan.held_out).hashes)
        repeated = self.repeated_in(cohort)
        held_out = self.held_out_across([*cohort.before, *cohort.sources])
        in_use = sources_by_name(self.data)
        for number, tokenized in enumerate(cohort.sources):
            source_in_use = in_use.get(reported_name(tokenized.work.source))
            if source_in_use is None:
                continue
            longest, above_longest = held_out[len(cohort.before) + number]
            selection = Selection(
                held_out_share=self.evaluation.held_out_share,
                evaluated=np.unique(np.concatenate([*evaluated_hashes, above_longest])),
                repeated=repeated[number],
                max_tokens=source_in_use.max_tokens,
                longest_held_out=longest,
            )
            yield ChunkedRows(
                tokenized=tokenized,
                selection=selection,
                layout=self.layout,
                seed=self.seed,
                cache_dir=self.cache_dir,
                max_epochs=source_in_use.max_epochs,
            )

    def repeated_in(self, cohort: Cohort) -> Sequence[Repeated | None]:
        """The repeated documents of each source of a cohort."""
        if self.data.deduplicate is None:
            return [None] * len(cohort.sources)
        kind, _, across = self.data.deduplicate.partition("_")
        if across:
            sources = [*cohort.before, *cohort.sources]
            repeated = repeated_documents(sources, kind, self.cache_dir, self.comparison)
            return repeated[len(cohort.before) :]
        repeated = []
        for source in cohort.sources:
            repeated += repeated_documents([source], kind, self.cache_dir, self.comparison)
        return repeated

    def held_out_across(self, sources: Sources) -> list[tuple[int | None, Hashes]]:
        """The maximum size in bytes of a held-out document of each source (None for examples, which are short), and
        the texts held out of other sources that are above this maximum here: neither source trains on them."""
        share = self.evaluation.held_out_share
        if share is None:
            return [(None, NO_HASHES)] * len(sources)
        limits: list[int | None] = []
        held_out_hashes = []
        held_out_bytes = []
        for source in sources:
            documents = source.documents(source.plan.held_out)
            limit: int | None = None
            if form_of_source(source.work.source) == "document":
                limit = longest_held_out(int(documents.num_bytes.sum()), len(documents), share)
            limits.append(limit)
            mask = is_held_out(documents.hashes, documents.num_bytes, share, limit)
            held_out_hashes.append(documents.hashes[mask])
            held_out_bytes.append(documents.num_bytes[mask])
        hashes = np.concatenate(held_out_hashes)
        num_bytes = np.concatenate(held_out_bytes)
        limits_and_hashes: list[tuple[int | None, Hashes]] = []
        for limit in limits:
            if limit is None:
                limits_and_hashes.append((None, NO_HASHES))
            else:
                is_longer = num_bytes > limit
                limits_and_hashes.append((limit, hashes[is_longer]))
        return limits_and_hashes

    def mix(self, chunked: Chunked) -> tuple[MixtureRows, list[SourceReport], int]:
        """The rows, a report on each source, and the number of rows that the run reads; 1 if unknown."""
        reports = list(map(report_on, chunked))
        tokens = [report.tokens for report in reports]
        requested_shares = from_row(shares_of_phases(self.data, tokens), self.first_row)
        mixture = MixtureRows(
            sources=chunked,
            turns=self.turns(chunked, requested_shares),
            seed=self.seed,
            lengths=from_row(lengths_of_phases(self.data), self.first_row),
            first_row=self.first_row,
            numbers=self.numbers_of_first_use(chunked),
        )
        num_rows = 1
        if self.budget is not None:
            rows_of_epoch = sum(report.rows for report in reports)
            num_rows = rows_of_run(self.data, self.budget, rows_of_epoch)
        num_rows = max(num_rows, self.first_row + 1)
        shares = shares_over(requested_shares, num_rows - self.first_row).tolist()
        reports_with_shares = []
        for report, share in zip(reports, shares, strict=True):
            reports_with_shares.append(replace(report, share=share))
        return mixture, reports_with_shares, num_rows

    def turns(self, chunked: Chunked, requested_shares: Changes) -> Turns:
        # A source whose rows are half full needs twice as many rows for the same tokens.
        filled = np.array([rows.filled for rows in chunked])
        changes = [(first, (shares / filled).tolist()) for first, shares in requested_shares]
        rows_read = [0] * len(chunked)
        for number, rows in enumerate(chunked):
            if rows.name in self.positions:
                rows_read[number] = self.positions[rows.name].rows
        return Turns(changes, rows_read)

    def numbers_of_first_use(self, chunked: Chunked) -> list[int]:
        names: list[str] = []
        for new_sources, _ in self.stretches:
            names += new_sources
        return [names.index(rows.name) for rows in chunked]

    def held_out_sets(self, chunked: Chunked, evaluated: Sources) -> dict[str, HeldOutSet]:
        sets: dict[str, HeldOutSet] = {}
        share = self.evaluation.held_out_share
        if share is not None:
            for rows in chunked:
                held_out = self.held_out_of(rows, share)
                if held_out is not None:
                    sets[rows.name] = held_out
            if not sets:
                num_documents = 0
                for rows in chunked:
                    num_documents += len(rows.tokenized.documents(rows.tokenized.plan.held_out))
                raise DataError(nothing_held_out(share, num_documents))
        for source in evaluated:
            sets[reported_name(source.work.source)] = whole_set(source, self.layout, self.cache_dir)
        return sets

    def held_out_of(self, rows: ChunkedRows, share: float) -> HeldOutSet | None:
        """The held-out set of a training source; None, with a warning, if no document was chosen."""
        name = rows.name
        shards = rows.tokenized.plan.held_out
        documents = rows.tokenized.documents(shards)
        numbers = rows.selection.held_out(documents, shards)
        if not len(numbers):
            log.warning(
                f"{name}: none of its {len(documents):,} documents was chosen by `evaluation.held_out_share`; it"
                " is not evaluated."
            )
            return None
        held_out = held_out_set(name, documents, numbers, self.layout, self.cache_dir)
        if not documents.are_examples:
            sizes = documents.num_bytes
            chosen_bytes = int(sizes[numbers].sum())
            warning = other_share(name, share, chosen_bytes, int(sizes.sum()), len(numbers))
            if warning is not None:
                log_once([warning])
        return held_out

    def fingerprint(self, mixture: MixtureRows, chunked: Chunked) -> str:
        """A hash of everything that decides the rows: documents, packing, weights, seed, and the first chunks."""
        turns = mixture.turns
        first = self.first_row
        order = []
        for number in range(100):
            turn = mixture.turn(first + number)
            order.append([*turn, shuffled(number, 1000, mixture.seed)])
        content = {
            "sources": [rows.fingerprint for rows in chunked],
            "proportions": list(zip(turns.first_rows, turns.proportions, strict=True)),
            "seed": mixture.seed,
            "layout": self.layout.content(),
            "order": order,
        }
        if mixture.lengths:
            content["lengths"] = mixture.lengths
        if self.earlier:
            positions = []
            for name, position in self.positions.items():
                positions.append([name, position.rows, position.fingerprint])
            content["first_row"] = first
            content["numbers"] = mixture.numbers
            content["positions"] = positions
        return key_of(content)


def sources_by_name(data: Data) -> dict[str, Source]:
    return {reported_name(source): source for source in data.sources}


def shards_of(sources: Iterable[TokenizedSource]) -> list[SourceShard]:
    shards: list[SourceShard] = []
    for source in sources:
        shards += product([source], source.plan.numbers)
    return shards


def find_scarce(
    chunked: Chunked, reports: Sequence[SourceReport], run_rows: Sequence[int]
) -> list[ChunkedRows]:
    """The sources of estimated size of which the run may reach `max_epochs`."""
    scarce = []
    for rows, report, num_rows in zip(chunked, reports, run_rows, strict=True):
        most_rows = (rows.max_epochs or math.inf) * report.rows
        if report.is_estimate and num_rows > CLOSE_TO_ALL * most_rows:
            scarce.append(rows)
    return scarce


def check_texts(shards: Sequence[SourceShard], max_text_loss: float) -> dict[str, dict[str, Any]]:
    """Warn of special tokens in the texts of these shards, and of characters that the tokenizer does not give back;
    RecipeError if these are more than this share of a source. Returns for each source what its account says."""
    checks: dict[str, dict[str, Any]] = {}
    numbers_of: dict[TokenizedSource, list[int]] = {}
    for source, number in dict.fromkeys(shards):
        numbers_of.setdefault(source, []).append(number)
    for source, numbers in numbers_of.items():
        name = reported_name(source.work.source)
        descriptions = [source.shard(number).description for number in numbers]
        spelled = Counter[str]()
        for description in descriptions:
            spelled.update(description.spelled)
        spelled_at = [description.spelled_at for description in descriptions]
        log_once(spelled_warnings(name, spelled, next(filter(None, spelled_at), "")))
        text_loss = total_loss(description.text_loss for description in descriptions)
        log_once(check_text_loss(name, source.work.encoder.name, text_loss, max_text_loss))
        lost_share = None if text_loss is None else text_loss.share
        checks[name] = {"lost_share": lost_share, "num_spelled": spelled.total()}
    return checks


def log_once(warnings: Sequence[str]) -> None:
    """Log warnings in the main process only."""
    if is_main_process():
        for warning in warnings:
            log.warning(f"{warning}.")


def unrestored(text_checks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The sources whose text the tokenizer does not give back, so their bits per byte mean nothing; logs them."""
    names = []
    for name, checks in text_checks.items():
        if (checks["lost_share"] or 0) > UNRESTORED_SHARE:
            names.append(name)
    if names and is_main_process():
        log.warning(
            f"{', '.join(names)}: no bits per byte, because the tokenizer does not give more than"
            f" {UNRESTORED_SHARE:.0%} of the characters back."
        )
    return names


def with_checked_form(data: Data, evaluation: Evaluation, form: str) -> tuple[Data, Evaluation]:
    """The sections with the form of their rows. Raises RecipeError for duplicate names."""
    problems = []
    for problem in check_names(data, evaluation):
        problems.append(f"`{problem.location}`: {problem.text}")
    if problems:
        raise RecipeError(f"{'; '.join(problems)}.")
    data, evaluation = with_form(data, evaluation, form)
    refuse_layout(data, form_of_source(data.sources[0]))
    return data, evaluation


def needs_whole_sources(data: Data, budget: Budget | None) -> bool:
    """Whether all of every source is needed before the first row."""
    is_by_epochs = budget is not None and budget.epochs is not None
    return data.deduplicate is not None or data.temperature is not None or is_by_epochs


def open_mixture(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | str | Path,
    overrides: Sequence[str] = (),
    *,
    sequence_length: int | None = None,
    seed: int | None = None,
    cache_dir: Path | None = None,
) -> MixtureRows:
    """The packed rows of a mixture file or a recipe, in training order: a torch dataset for a plain DataLoader.

    The dataset is endless (its length is 10**12 rows) and already shuffled, so do not set the DataLoader's `shuffle`.
    Row i is always the same: to continue at row 4,000, pass `sampler=range(4000, len(rows))`; each of n processes
    takes `range(4000 + rank, len(rows), n)`. With a recipe, nothing is held out here; the rows of a run are
    `build_data(...).rows`.

    Args:
        tokenizer: a Hugging Face tokenizer with an end-of-sequence token, its folder or its Hub id.
        overrides: `data.key=value`, applied to the file: `data.packing=concatenate`.
        sequence_length: tokens in a row; by default the file's.
        seed: of the order; by default the recipe's, or 42.
        cache_dir: where tokens are stored; default: $CPT_CACHE or ~/.cache/cpt.

    Raises:
        RecipeError: a mistake in the file, or in an override.
        DataError: a source is missing, damaged or empty.
    """
    overrides = list(overrides)
    if sequence_length is not None:
        overrides.append(f"data.sequence_length={sequence_length}")
    if seed is not None:
        overrides.append(f"seed={seed}")
    recipe = load_section(path, "data", overrides)
    prepared = build_data(
        recipe.data, tokenizer_at(tokenizer), seed=recipe.seed, cache_dir=cache_dir
    )
    return prepared.rows
