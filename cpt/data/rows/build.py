"""Build the training rows and the evaluation rows from the recipe's `data` section."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
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
from cpt.recipe.schema import Budget, Data, Evaluation, Recipe, Source
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
    step = max(1, (budget.global_batch_tokens or 0) // data.sequence_length)
    if budget.tokens is not None:
        steps = math.ceil(budget.tokens / data.sequence_length / step)
    else:
        steps = steps_of_epochs(data, budget.epochs or 0, rows_of_epoch, step)
    return max(1, steps) * step


def steps_of_epochs(data: Data, epochs: float, rows_of_epoch: int, rows_per_step: int) -> int:
    """Whole steps for this many epochs: rounded up, or down if a source may not be read any further."""
    steps = epochs * rows_of_epoch / rows_per_step
    return (
        math.floor(steps)
        if any(source.max_epochs == epochs for source in data.sources)
        else math.ceil(steps)
    )


def exceeds_max_epochs(data: Data, name: str, epochs: float, tokens: int) -> str | None:
    """The reason why a run may not read this source so often; None if it may."""
    source = next(source for source in data.sources if reported_name(source) == name)
    if source.max_epochs is None or epochs <= source.max_epochs:
        return None
    return f"`max_epochs` of `{name}`: it has {tokens:,} tokens, the run needs {epochs:.2f} times as many"


def check_repeats(
    data: Data, mixture: MixtureRows, reports: Sequence[SourceReport], rows: int
) -> None:
    """Warn about sources that a run reads more than once, and reject those over `max_epochs`."""
    lacking, repeated = [], []
    for report, count in zip(reports, mixture.counts(rows), strict=True):
        epochs = count / report.rows
        if why := exceeds_max_epochs(data, report.name, epochs, report.tokens):
            lacking.append(why)
        elif epochs > 1:
            repeated.append(f"{report.name} {epochs:.2f} epochs ({report.tokens:,} tokens)")
    if lacking:
        raise RecipeError(
            f"{'; '.join(lacking)}. Lower its weight or the budget, add documents, or raise `max_epochs`."
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
    """Of a checkpoint's state, the chunks of sources that are not in the mixture now; they may return."""

    @property
    def tokenized(self) -> dict[str, TokenizedSource]:
        """Sources and held-out sets with separate files, by name."""
        sources = [*self.evaluated, *(rows.tokenized for rows in self.chunked)]
        return {reported_name(source.work.source): source for source in sources}

    @property
    def held_out_files(self) -> Mapping[str, Mapping[str, str]]:
        """Held-out set -> file -> xxh3-128 of its content, for sets with separate files."""
        return {reported_name(one.work.source): one.finish().files for one in self.evaluated}

    @property
    def positions(self) -> Mapping[str, Position]:
        """Of the sources at the first row."""
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
        counts = [
            upto - before
            for upto, before in zip(self.rows.counts(rows), self.rows.counts(first), strict=True)
        ]
        length = self.chunked[0].layout.sequence_length
        before = self.positions.items() if first == 0 < rows else ()
        return {name: one.rows * one.filled * length for name, one in before} | {
            report.name: count * rows.filled * length
            for report, rows, count in zip(self.sources, self.chunked, counts, strict=True)
        }

    def shares(self, rows: int, first: int = 0) -> dict[str, float]:
        tokens = self.tokens(rows, first)
        return {name: number / sum(tokens.values()) for name, number in tokens.items()}

    def filled(self, rows: int, first: int = 0) -> float:
        """The share of tokens among the positions of these rows; the rest is padding."""
        return sum(self.tokens(rows, first).values()) / (
            (rows - first) * self.chunked[0].layout.sequence_length
        )

    def epochs(self, rows: int) -> dict[str, float]:
        counts = self.rows.counts(rows)
        return {
            report.name: count / report.rows
            for report, count in zip(self.sources, counts, strict=True)
        }

    def read_ahead(self, first_row: int) -> ReadAhead | None:
        """Create the thread that prepares a run's next chunks from `first_row` on; None if all are on disk."""
        place, turns = self.rows.row_in_mixture(first_row), self.rows.turns
        ahead = [
            (rows, share, turn)
            for rows, share, turn in zip(
                self.chunked, turns.shares(place), turns.counts(place), strict=True
            )
            if not rows.is_complete
        ]
        return ReadAhead(ahead) if ahead else None

    def state(self, first_row: int) -> dict[str, Any]:
        """The data state for a checkpoint, to resume at `first_row`, even with an empty store."""
        turns = list(zip(self.sources, self.chunked, self.rows.counts(first_row), strict=True))
        chunks = {
            report.name: rows.state(turn)
            for report, rows, turn in turns
            if not rows.tokenized.plan.is_whole
        }
        now = {
            report.name: Position(turn, rows.fingerprint, rows.filled)
            for report, rows, turn in turns
        }
        return {
            "fingerprint": self.fingerprint,
            "comparison": self.comparison,
            "stretch": len(self.earlier),
            "row": first_row,
            "chunks": self.unused_chunks | chunks,
            "positions": {name: asdict(one) for name, one in {**self.positions, **now}.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Prepare to resume from a checkpoint's state, also one of an earlier stretch; raises DataError if the data
        have changed since."""
        if state["fingerprint"] not in (
            self.fingerprint,
            *(one.fingerprint for one in self.earlier),
        ):
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
    asked = [with_checked_form(one.data, one.evaluation, form) for one in earlier]
    ended = [
        replace(one, data=then[0], evaluation=then[1])
        for one, then in zip(earlier, asked, strict=True)
    ]
    data, evaluation, form = with_checked_form(data, evaluation, form)
    encoder = DocumentEncoder(tokenizer)
    builder = Builder(
        data=data,
        evaluation=evaluation,
        encoder=encoder,
        cache_dir=cache_dir or default_cache_dir(),
        seed=seed,
        budget=budget,
        form=form,
        earlier=ended,
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
        """Of each earlier stretch, and of now: the sources that it was the first to name, and its evaluation."""
        found, seen = list[tuple[dict[str, Source], Evaluation]](), set[str]()
        for data, evaluation in (
            *((one.data, one.evaluation) for one in self.earlier),
            (self.data, self.evaluation),
        ):
            named = {reported_name(source): source for source in data.sources}
            found.append(
                ({name: source for name, source in named.items() if name not in seen}, evaluation)
            )
            seen |= named.keys()
        return found

    def build(self, *, whole: bool) -> PreparedData:
        cohorts = self.open_cohorts()
        evaluated, opened = (
            cohorts[-1].evaluated,
            [source for cohort in cohorts for source in cohort.sources],
        )
        needs_all = whole or needs_whole_sources(self.data, self.budget)
        of_sets = [source for cohort in cohorts for source in cohort.evaluated]
        wanted = shards_of(of_sets)
        for source in opened:
            if needs_all:
                wanted += shards_of([source])
            else:  # the first chunks, and the shards of the held-out set
                held_out = (
                    source.plan.held_out if self.evaluation.held_out_share is not None else []
                )
                wanted += [(source, number) for number in [*held_out, *source.plan.chunks[0]]]
        make_shards(wanted)
        for source in [*of_sets, *opened]:
            if not source.missing(source.plan.numbers):
                source.finish()
        losses = check_texts(wanted, self.data.max_text_loss)
        made = {
            rows.name: rows
            for cohort in cohorts
            if cohort.sources
            for rows in self.chunked_rows(cohort)
        }
        chunked = [made[reported_name(source)] for source in self.data.sources]
        for rows in chunked:
            rows.begin(all_chunks=needs_all)
            if (
                rows.name in self.positions
                and rows.fingerprint != self.positions[rows.name].fingerprint
            ):
                raise DataError(other_documents(rows.tokenized))
        mixture, reports, num_rows = self.mix(chunked)
        scarce = [  # estimated size: the run may reach `max_epochs` of these
            rows
            for rows, report, count in zip(chunked, reports, mixture.counts(num_rows), strict=True)
            if report.is_estimate
            and count > CLOSE_TO_ALL * (rows.max_epochs or math.inf) * report.rows
        ]
        if scarce:
            make_shards(shards_of([rows.tokenized for rows in scarce]))
            for rows in scarce:
                rows.begin(all_chunks=True)
            mixture, reports, num_rows = self.mix(chunked)
        reports = [replace(report, **losses.get(report.name, {})) for report in reports]
        for report, rows in zip(reports, chunked, strict=True):
            log_report(report, rows)
        if self.budget is not None:
            check_repeats(self.data, mixture, reports, num_rows)
        held_out_sets = self.held_out_sets(chunked, evaluated)
        for name in unrestored(losses):
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
        keys = {
            reported_name(source): f"data.sources[{number}]"
            for number, source in enumerate(self.data.sources)
        }
        in_use = dict(zip(keys, self.data.sources, strict=True))
        compares = self.evaluation.held_out_share is not None or "across" in (
            self.data.deduplicate or ""
        )
        cohorts, so_far, known = list[Cohort](), list[TokenizedSource](), list[Source]()
        for number, (named, evaluation) in enumerate(self.stretches):
            names = [name for name in named if compares or name in in_use]
            if not names and number + 1 < len(self.stretches):
                continue
            own = {
                keys.get(name, f"data.sources[{name}]"): in_use.get(name, named[name])
                for name in names
            }
            sets = {
                f"evaluation.perplexity[{place}]": one
                for place, one in enumerate(evaluation.perplexity)
            }
            known += own.values()
            clean = self.data.model_copy(update={"sources": known})
            if own:
                clean = with_decontamination(clean, evaluation, self.cache_dir, self.comparison)
            opened = open_sources(
                clean,
                {**own, **sets},
                self.encoder,
                self.cache_dir,
                self.seed,
                self.evaluation.held_out_share or 0.0,
            )
            sources = [opened[key] for key in own]
            cohorts.append(
                Cohort([opened[key] for key in sets], so_far if compares else [], sources)
            )
            so_far = [*so_far, *sources]
        return cohorts

    def chunked_rows(self, cohort: Cohort) -> Iterator[ChunkedRows]:
        """The rows of the sources of a cohort that are in use."""
        known = [one.documents(one.plan.held_out).hashes for one in cohort.evaluated]
        share, sources = self.evaluation.held_out_share, [*cohort.before, *cohort.sources]
        repeated: Sequence[Repeated | None] = [None] * len(sources)
        if self.data.deduplicate is not None:
            kind, _, across = self.data.deduplicate.partition("_")
            groups = [sources] if across else [[source] for source in cohort.sources]
            repeated = [
                one
                for group in groups
                for one in repeated_documents(group, kind, self.cache_dir, self.comparison)
            ]
        longest, also_held_out = self.held_out_across(sources)
        in_use = {reported_name(source): source for source in self.data.sources}
        for place, source in enumerate(
            cohort.sources, -len(cohort.sources)
        ):  # they are the last of all these lists
            if (recipe := in_use.get(reported_name(source.work.source))) is not None:
                hashes = np.unique(np.concatenate([*known, also_held_out[place]]))
                selection = Selection(
                    share, hashes, repeated[place], recipe.max_tokens, longest[place]
                )
                yield ChunkedRows(
                    source, selection, self.layout, self.seed, self.cache_dir, recipe.max_epochs
                )

    def held_out_across(self, sources: Sources) -> tuple[list[int | None], list[Hashes]]:
        """The maximum size in bytes of a held-out document of each source (None for examples, which are short), and
        the texts held out of other sources that are above this maximum here: neither source trains on them."""
        share = self.evaluation.held_out_share
        if share is None:
            return [None] * len(sources), [NO_HASHES] * len(sources)
        longest, held_out = list[int | None](), []
        for source in sources:
            documents = source.documents(source.plan.held_out)
            limit: int | None = None
            if form_of_source(source.work.source) == "document":
                limit = longest_held_out(int(documents.num_bytes.sum()), len(documents), share)
            which = is_held_out(documents.hashes, documents.num_bytes, share, limit)
            longest.append(limit)
            held_out.append((documents.hashes[which], documents.num_bytes[which]))
        hashes, num_bytes = (np.concatenate(arrays) for arrays in zip(*held_out, strict=True))
        return longest, [
            hashes[:0] if limit is None else hashes[num_bytes > limit] for limit in longest
        ]

    def mix(self, chunked: Chunked) -> tuple[MixtureRows, list[SourceReport], int]:
        """The rows, a report on each source, and the number of rows that the run reads; 1 if unknown."""
        reports = [report_on(rows) for rows in chunked]
        asked = from_row(
            shares_of_phases(self.data, [report.tokens for report in reports]), self.first_row
        )
        filled = np.array([rows.filled for rows in chunked])
        read = [
            self.positions[rows.name].rows if rows.name in self.positions else 0 for rows in chunked
        ]
        # A source whose rows are half full needs twice as many rows for the same tokens.
        turns = Turns([(first, (shares / filled).tolist()) for first, shares in asked], read)
        lengths = from_row(lengths_of_phases(self.data), self.first_row)
        in_order = [name for named, _ in self.stretches for name in named]
        numbers = [in_order.index(rows.name) for rows in chunked]
        mixture = MixtureRows(chunked, turns, self.seed, lengths, self.first_row, numbers)
        rows_of_epoch = sum(report.rows for report in reports)
        num_rows = 1 if self.budget is None else rows_of_run(self.data, self.budget, rows_of_epoch)
        num_rows = max(num_rows, self.first_row + 1)
        shares = shares_over(asked, num_rows - self.first_row).tolist()
        return (
            mixture,
            [replace(report, share=share) for report, share in zip(reports, shares, strict=True)],
            num_rows,
        )

    def held_out_sets(self, chunked: Chunked, evaluated: Sources) -> dict[str, HeldOutSet]:
        sets, num_documents, share = {}, 0, self.evaluation.held_out_share
        for rows in chunked if share is not None else []:
            shards, name = rows.tokenized.plan.held_out, rows.name
            documents = rows.tokenized.documents(shards)
            num_documents += len(documents)
            chosen = rows.selection.held_out(documents, shards)
            if not len(chosen):
                log.warning(
                    f"{name}: none of its {len(documents):,} documents was chosen by `evaluation.held_out_share`; it"
                    " is not evaluated."
                )
                continue
            sets[name] = held_out_set(name, documents, chosen, self.layout, self.cache_dir)
            if not documents.are_examples and is_main_process():
                sizes = documents.num_bytes
                if warning := other_share(
                    name, share or 0.0, int(sizes[chosen].sum()), int(sizes.sum()), len(chosen)
                ):
                    log.warning(f"{warning}.")
        if share is not None and not sets:
            raise DataError(nothing_held_out(share, num_documents))
        for source in evaluated:
            sets[reported_name(source.work.source)] = whole_set(source, self.layout, self.cache_dir)
        return sets

    def fingerprint(self, mixture: MixtureRows, chunked: Chunked) -> str:
        """A hash of everything that decides the rows: documents, packing, weights, seed, and the first chunks."""
        turns, first = mixture.turns, self.first_row
        before = [[name, one.rows, one.fingerprint] for name, one in self.positions.items()]
        return key_of(
            {
                "sources": [rows.fingerprint for rows in chunked],
                "proportions": list(zip(turns.first_rows, turns.proportions, strict=True)),
                "seed": mixture.seed,
                "layout": self.layout.content(),
                **({"lengths": mixture.lengths} if mixture.lengths else {}),
                "order": [
                    [*mixture.turn(first + number), shuffled(number, 1000, mixture.seed)]
                    for number in range(100)
                ],
                **(
                    {"first_row": first, "positions": before, "numbers": mixture.numbers}
                    if self.earlier
                    else {}
                ),
            }
        )


def shards_of(sources: Iterable[TokenizedSource]) -> list[SourceShard]:
    return [(source, number) for source in sources for number in source.plan.numbers]


def check_texts(wanted: Sequence[SourceShard], most: float) -> dict[str, dict[str, Any]]:
    """Warn of special tokens in the texts of these shards, and of characters that the tokenizer does not give back;
    RecipeError if these are more than the share `most` of a source. Returns for each source what its account says."""
    found: dict[str, dict[str, Any]] = {}
    numbers: dict[TokenizedSource, list[int]] = {}
    for source, number in dict.fromkeys(wanted):
        numbers.setdefault(source, []).append(number)
    for source, shards in numbers.items():
        name = reported_name(source.work.source)
        described = [source.shard(number).description for number in shards]
        spelled = sum((Counter(one.spelled) for one in described), Counter[str]())
        first = next((one.spelled_at for one in described if one.spelled_at), "")
        log_once(spelled_warnings(name, spelled, first))
        text_loss = total_loss(one.text_loss for one in described)
        log_once(check_text_loss(name, source.work.encoder.name, text_loss, most))
        lost_share = None if text_loss is None else text_loss.share
        found[name] = {"lost_share": lost_share, "num_spelled": spelled.total()}
    return found


def log_once(warnings: Sequence[str]) -> None:
    """Log warnings in the main process only."""
    if is_main_process():
        for warning in warnings:
            log.warning(f"{warning}.")


def unrestored(losses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The sources whose text the tokenizer does not give back, so their bits per byte mean nothing; logs them."""
    names = [name for name, one in losses.items() if (one["lost_share"] or 0) > UNRESTORED_SHARE]
    if names and is_main_process():
        log.warning(
            f"{', '.join(names)}: no bits per byte, because the tokenizer does not give more than"
            f" {UNRESTORED_SHARE:.0%} of the characters back."
        )
    return names


def with_checked_form(
    data: Data, evaluation: Evaluation, form: str
) -> tuple[Data, Evaluation, str]:
    """The sections with the form of their rows, and this form. Raises RecipeError for duplicate names."""
    if twice := [f"`{found.location}`: {found.text}" for found in check_names(data, evaluation)]:
        raise RecipeError(f"{'; '.join(twice)}.")
    data, evaluation = with_form(data, evaluation, form)
    form = form_of_source(data.sources[0])
    refuse_layout(data, form)
    return data, evaluation, form


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
    given = {"data.sequence_length": sequence_length, "seed": seed}
    words = [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    recipe = load_section(path, "data", words)
    return build_data(
        recipe.data, tokenizer_at(tokenizer), seed=recipe.seed, cache_dir=cache_dir
    ).rows
