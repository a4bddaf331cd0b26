"""Which training documents hold what the model will be judged by: counted before anything is trained, and left out by default."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from xxhash import xxh3_64_intdigest

from cpt.data.bad_rows import apply_policy
from cpt.data.check import filters_of, transforms_of
from cpt.data.decontamination import FEWEST_WORDS, NAME, WORDS, Judged, load_runs, read_runs
from cpt.data.documents import Document, Piece
from cpt.data.fill import POOL_BYTES
from cpt.data.parallel import map_in_order, num_workers
from cpt.data.shards import ShardWork, keep
from cpt.data.sources import files_with_sizes, pieces_of, read_piece
from cpt.data.store import default_cache_dir
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Component, Data, DocumentSource, Evaluation
from cpt.recipe.sense_data import reported_name

LISTED = 100  # of a source; more are only counted
PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Hit:
    """A training document, and what of the evaluation stands in it."""

    source: str
    where: str
    """The training document's file and line."""
    set_name: str
    """The held-out set or task."""
    evaluation_document: str
    """Its file and line, or the question's number."""
    words: str
    """The first run of words that both have."""

    def __str__(self) -> str:
        return f'{self.where} ({self.source}) has words of {self.set_name}, {self.evaluation_document}: "{self.words}"'


@dataclass(frozen=True)
class Contamination:
    """What was found in all training sources."""

    documents: dict[str, int]
    """Training documents that were read, by source."""
    counts: dict[str, dict[str, int]]
    """Source -> held-out set or task -> training documents that have words of it."""
    hits: list[Hit]
    """The first hundred of each source."""
    judged: int
    """Evaluation documents that were looked for."""
    too_short: int
    """Those of too few words, which were not."""

    @property
    def num_contaminated(self) -> int:
        """Training documents, over all sources."""
        return sum(count for by_set in self.counts.values() for count in by_set.values())

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "contaminated": self.num_contaminated, "summary": self.summary()}

    def summary(self) -> str:
        """One sentence."""
        read = sum(self.documents.values())
        short = f" {self.too_short:,} of fewer than {FEWEST_WORDS} words were not looked for." if self.too_short else ""
        return (
            f"{self.num_contaminated:,} of {read:,} training documents have {WORDS} words in a row of one of {self.judged:,} evaluation "
            f"documents.{short}"
        )


def find_contamination(
    data: Data, evaluation: Evaluation, questions: Iterable[Judged] = (), *, cache_dir: Path | None = None
) -> Contamination:
    """Read what the model is judged by, then all training sources, on all cores; documents as they are after transforms and filters.

    Args:
        questions: of tasks, which are looked for beside the recipe's held-out sets.
        cache_dir: where the runs to look for are kept for the workers; by default $CPT_CACHE or ~/.cache/cpt.

    Raises:
        DataError: there is nothing to look for, or a source cannot be read.
    """
    runs = read_runs(chain(evaluation_documents(data, evaluation), questions))
    if not runs.documents:
        raise DataError(
            f"there is no evaluation document of {FEWEST_WORDS} words or more to look for. Hold documents out "
            "(`evaluation.held_out_share`, `evaluation.perplexity`), or name tasks."
        )
    index = str(runs.save((cache_dir or default_cache_dir()) / "decontamination"))
    documents: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}
    hits: list[Hit] = []
    for number, source in enumerate(data.sources):
        name = reported_name(source)
        documents[name], counts[name], found = search_source(Searcher(work_of(data, source, f"data.sources[{number}]"), index))
        hits += found
    return Contamination(documents, counts, hits, len(runs.documents), runs.too_short)


def evaluation_documents(data: Data, evaluation: Evaluation) -> Iterator[Judged]:
    """Every document that the model is judged by: of files of their own, and those held out of the sources by the hash of their text."""
    yield from documents_of_sets(data, evaluation)
    if evaluation.held_out_share is None:
        return
    for number, source in enumerate(data.sources):
        work, name = work_of(data, source, f"data.sources[{number}]"), reported_name(source)
        for text, document in texts_of(work, pieces_of(source, work.key)):
            if xxh3_64_intdigest(text.encode()) < int(evaluation.held_out_share * 2**64):
                yield Judged(name, document.where, text)


def documents_of_sets(data: Data, evaluation: Evaluation) -> Iterator[Judged]:
    """The documents of `evaluation.perplexity`, as they are judged."""
    for number, held_out in enumerate(evaluation.perplexity):
        work, name = work_of(data, held_out, f"evaluation.perplexity[{number}]"), reported_name(held_out)
        yield from (Judged(name, document.where, text) for text, document in texts_of(work, pieces_of(held_out, work.key)))


def with_decontamination(data: Data, evaluation: Evaluation, cache_dir: Path) -> Data:
    """The data section with a filter against the documents of `evaluation.perplexity`, where the recipe does not refuse it.

    Documents that `held_out_share` keeps out are not looked for: which they are is known only when all sources were read. Equal copies of
    them are held out with them, since the hash of the text decides; `cpt contamination` counts the others.

    Raises:
        DataError: a held-out set cannot be read.
        RecipeError: the filter is asked for, and there is nothing to look for.
    """
    own = [component for component in data.filters if component.name == NAME]
    if not evaluation.perplexity and any(not component.options for component in own):
        raise RecipeError(
            "`data.filters`: `decontaminate` has nothing to look for. Give `evaluation.perplexity`, or files: `against: [held_out.jsonl]`."
        )
    if not evaluation.perplexity or any(component.options.get("own_evaluation") is False for component in own):
        return data
    runs = read_runs(documents_of_sets(data, evaluation))
    others = [component for component in data.filters if component.name != NAME or component.options.get("against")]
    # Plain text, as a recipe would hold it: options are part of what the stored tokens are found by.
    added = Component.model_validate({"name": NAME, "index": str(runs.save(cache_dir / "decontamination"))})
    return data.model_copy(update={"filters": [*others, added]})


def work_of(data: Data, source: DocumentSource, key: str) -> ShardWork:
    """What makes training documents of a source's rows; the documents are looked at and not encoded."""
    nothing = cast(DocumentEncoder, None)
    return ShardWork(source, key, filters_of(data, source, key), transforms_of(data, source, key), nothing, data.on_bad_row, Path())


def texts_of(work: ShardWork, pieces: Sequence[Piece]) -> Iterator[tuple[str, Document]]:
    """The texts that would be trained on, each with the document it comes from."""
    rows = (item for piece in pieces for item in read_piece(work.source, piece, work.key))
    return keep(islice(apply_policy(rows, work.on_bad_row, work.key, []), work.source.max_documents), work, Counter())


@dataclass(frozen=True)
class Searcher:
    """Looks through pieces of a source; travels to worker processes."""

    work: ShardWork
    index: str
    """A file of `Runs.save`."""

    def __call__(self, pieces: Sequence[Piece]) -> tuple[int, list[Hit]]:
        """How many documents there are, and the contaminated ones."""
        runs, name = load_runs(self.index), reported_name(self.work.source)
        hits, number = [], 0
        for text, document in texts_of(self.work, pieces):
            number += 1
            overlap = runs.find(text)
            if overlap is not None:
                hits.append(Hit(name, document.where, overlap.set_name, overlap.where, overlap.words))
        return number, hits


def search_source(searcher: Searcher) -> tuple[int, dict[str, int], list[Hit]]:
    """Documents of a source, contaminated ones by evaluation set, and the first of them."""
    source, key = searcher.work.source, searcher.work.key
    pieces = pieces_of(source, key, PIECE_BYTES)
    # A limit counts over all pieces in order, which only one process can do.
    jobs = [[piece] for piece in pieces] if source.max_documents is None else [pieces]
    is_small = len(jobs) == 1 or sum(size for _, size in files_with_sizes(source, key)) < POOL_BYTES
    counts: Counter[str] = Counter()
    hits: list[Hit] = []
    number = 0
    prepare = partial(same, searcher)
    for documents, found in map_in_order(prepare, jobs, 0 if is_small else num_workers(), ("cpt.data.contamination",)):
        number += documents
        counts.update(hit.set_name for hit in found)
        hits.extend(found[: max(0, LISTED - len(hits))])
    return number, dict(counts), hits


def same(searcher: Searcher) -> Searcher:
    """What `map_in_order` asks for: something that gives the function."""
    return searcher
