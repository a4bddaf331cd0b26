"""Find training documents that contain evaluation documents: count them before a run, and drop them by default."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from cpt.cache import default_cache_dir, key_of, write_once
from cpt.data.readers.columns import form_of_source
from cpt.data.readers.comparing import COMPARISON
from cpt.data.readers.decontamination import (
    NAME,
    WORDS,
    EvaluationDocument,
    Hashes,
    load_runs,
    read_runs,
)
from cpt.data.readers.documents import Piece
from cpt.data.readers.filters import sieve_of
from cpt.data.readers.sources import files_of, jobs_of, kind_of, pieces_of, states_of
from cpt.data.rows.selection import longest_held_out
from cpt.data.store.file_states import signatures_of
from cpt.data.store.parallel import map_in_order, shared_workers, workers_for
from cpt.data.store.shards import ShardWork, plan_of, texts_of
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import reading_content
from cpt.errors import DataError, RecipeError
from cpt.files import hash_of, read_sealed, report_damage, sealed
from cpt.recipe.rules import keyed_sources, reported_name
from cpt.recipe.schema import Component, Data, DocumentSource, Evaluation, HeldOut, Source

LISTED = 100  # per source; further ones are only counted
PIECE_BYTES = 8 * 2**20
WORKERS_IMPORT = ("cpt.data.rows.contamination",)


@dataclass(frozen=True)
class Hit:
    """A training document that contains an evaluation document, or a large part of it."""

    source: str
    where: str
    set_name: str
    evaluation_document: str  # its file and line, or the number of the question
    words: str
    share: float  # of the evaluation document's words, those in the training document
    own_share: float = 0.0  # of the training document's words, those in the evaluation document

    def __str__(self) -> str:
        return f'{self.where} ({self.source}) {self.overlap}, for example "{self.words}"'

    @property
    def overlap(self) -> str:
        """The larger of the two shares."""
        document = f"{self.evaluation_document} (set {self.set_name})"
        if self.share >= self.own_share:
            return f"contains {self.share:.0%} of the words of {document}"
        return f"has {self.own_share:.0%} of its words from {document}"


@dataclass(frozen=True)
class Contamination:
    documents: dict[str, int]
    """Source -> training documents that were searched, without held-out documents and their exact copies."""
    counts: dict[str, dict[str, int]]
    """Source -> held-out set or task -> contaminated training documents."""
    hits: list[Hit]  # the first hundred of each source
    touched: int  # further training documents that only share a phrase with one
    evaluated: int
    too_short: int
    num_exact_copies: int = 0
    """Training documents equal to one of `evaluation.perplexity`. No run trains on them, so they are not counted."""

    @property
    def num_contaminated(self) -> int:
        return sum(count for by_set in self.counts.values() for count in by_set.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "contaminated": self.num_contaminated, "summary": self.summary()}

    def summary(self) -> str:
        searched = sum(self.documents.values())
        sentences = [
            f"{self.num_contaminated:,} of {searched:,} training documents contain at least half of one of the"
            f" {self.evaluated:,} evaluation documents, or have half of their words from one."
        ]
        more = {
            "more are equal to an evaluation document and dropped by hash": self.num_exact_copies,
            f"more share a phrase with one ({WORDS} or more words in a row)": self.touched,
            f"with fewer than {WORDS} words were not searched for": self.too_short,
        }
        for documents, count in more.items():
            if count:
                sentences.append(f"{count:,} {documents}.")
        return " ".join(sentences)


@dataclass(frozen=True)
class TrainingSearch:
    contamination: Contamination
    copied: Hashes
    """Runs of words of evaluation documents that documents of the training have, sorted."""


def find_contamination(
    data: Data, evaluation: Evaluation, questions: Iterable[EvaluationDocument] = ()
) -> Contamination:
    return search_training(data, evaluation, questions).contamination


@shared_workers()
def search_training(
    data: Data, evaluation: Evaluation, questions: Iterable[EvaluationDocument] = ()
) -> TrainingSearch:
    """Search the training documents, after transforms and filters, for the evaluation documents, on all cores.

    Args:
        questions: of tasks, searched for in addition to the recipe's held-out sets.
    """
    of_sets = list(documents_of_sets(data, evaluation))
    of_tasks = (question._replace(is_held_out=False) for question in questions)
    runs = read_runs(chain(of_sets, held_out_documents(data, evaluation), of_tasks))
    if not runs.documents:
        raise DataError(
            f"there is nothing to search for: no evaluation document has {WORDS} words or more. Hold documents out "
            "(`evaluation.held_out_share`, `evaluation.perplexity`), or name tasks."
        )
    index = str(runs.save(default_cache_dir() / "decontamination"))
    hashes = {xxh3_64_intdigest(document.text.encode()) for document in of_sets}
    documents: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}
    hits: list[Hit] = []
    copied: set[int] = set()
    touched = 0
    num_exact_copies = 0
    for number, source in enumerate(data.sources):
        work = work_of(data, source, f"data.sources[{number}]")
        overlaps = search_source(work, index, is_trained_on_copies=is_refused(data))
        name = reported_name(source)
        documents[name] = overlaps.documents
        counts[name] = dict(overlaps.counts)
        hits += overlaps.hits
        copied |= overlaps.copied
        touched += overlaps.touched
        num_exact_copies += len([digest for digest in overlaps.equal if digest in hashes])
    contamination = Contamination(
        documents=documents,
        counts=counts,
        hits=hits,
        touched=touched,
        evaluated=len(runs.documents),
        too_short=runs.too_short,
        num_exact_copies=num_exact_copies,
    )
    return TrainingSearch(contamination, np.array(sorted(copied), np.uint64))


def documents_of_sets(data: Data, evaluation: Evaluation) -> Iterator[EvaluationDocument]:
    for number, held_out in enumerate(evaluation.perplexity):
        work = work_of(data, held_out, f"evaluation.perplexity[{number}]")
        for text, document in texts_of(work, pieces_of(held_out, work.key)):
            yield EvaluationDocument(reported_name(held_out), document.where, text)


def small_sets(
    data: Data, evaluation: Evaluation, fewest: int
) -> Iterator[tuple[str, HeldOut, int]]:
    """(key, set, documents) of the local held-out sets with fewer than `fewest` documents; no more are read."""
    for number, held_out in enumerate(evaluation.perplexity):
        key = f"evaluation.perplexity[{number}]"
        if kind_of(held_out.path) == "local":
            texts = texts_of(work_of(data, held_out, key), pieces_of(held_out, key))
            count = sum(1 for _ in islice(texts, fewest))
            if count < fewest:
                yield key, held_out, count


def held_out_documents(
    data: Data, evaluation: Evaluation, *, only_local: bool = False
) -> Iterator[EvaluationDocument]:
    """The documents that are held out by the hash of their text."""
    share = evaluation.held_out_share
    if not share:
        return
    for number, source in enumerate(data.sources):
        if not only_local or kind_of(source.path) == "local":
            yield from held_out_of(data, source, f"data.sources[{number}]", share)


def held_out_of(data: Data, source: Source, key: str, share: float) -> Iterator[EvaluationDocument]:
    plan = plan_of(source, key, states_of(source, key), chunk_bytes=data.chunk_bytes, seed=0)
    jobs = [plan.shards[shard] for shard in plan.held_out]
    workers = workers_for(sum(plan.num_bytes[shard] for shard in plan.held_out), len(jobs))
    search = partial(held_out_texts, work_of(data, source, key), share)
    texts: list[tuple[str, str]] = []
    num_documents = 0
    num_bytes = 0
    for part, documents_of_part, bytes_of_part in map_in_order(
        lambda: search, jobs, workers, WORKERS_IMPORT
    ):
        texts += part
        num_documents += documents_of_part
        num_bytes += bytes_of_part
    longest = math.inf
    if form_of_source(source) == "document":
        # Same as in `build_data`. The decontamination filter drops some documents later, which moves the limit a bit.
        longest = longest_held_out(num_bytes, num_documents, share)
    for where, text in texts:
        if len(text.encode()) <= longest:
            yield EvaluationDocument(reported_name(source), where, text)


def held_out_texts(
    work: ShardWork, share: float, pieces: Sequence[Piece]
) -> tuple[list[tuple[str, str]], int, int]:
    """Place and text of the documents held out, of any length; the number of all documents, and their bytes."""
    texts = []
    num_documents = 0
    num_bytes = 0
    limit = int(share * 2**64)
    for text, document in texts_of(work, pieces):
        raw = text.encode()
        num_documents += 1
        num_bytes += len(raw)
        if xxh3_64_intdigest(raw) < limit:
            texts.append((document.where, text))
    return texts, num_documents, num_bytes


def with_decontamination(
    data: Data, evaluation: Evaluation, cache_dir: Path, comparison: int = COMPARISON
) -> Data:
    """The data section with a filter against the recipe's evaluation documents, unless the recipe turns it off. With
    `held_out_share`, only the documents of local sources are searched for: others would be read twice. Equal copies
    are held out everywhere, because the hash of the text decides. `comparison`: the version, for a resumed run."""
    has_evaluation = bool(evaluation.perplexity) or evaluation.held_out_share is not None
    filters = list(data.filters)
    if not has_evaluation:
        for component in filters:
            if component.name == NAME and not component.options:
                raise RecipeError(
                    "`data.filters`: `decontaminate` needs evaluation documents. Set `evaluation.perplexity`,"
                    " `evaluation.held_out_share`, or files: `against: [held_out.jsonl]`."
                )
    elif not is_refused(data):
        index = index_of(data, evaluation, cache_dir / "decontamination", comparison)
        has_effect = []
        for component in filters:
            if component.name != NAME or component.options.get("against"):
                has_effect.append(component)
        filters = has_effect
        # Plain text, as in a recipe: options are part of the key of the stored tokens.
        filters.append(Component.model_validate({"name": NAME, "index": str(index)}))
    if comparison != COMPARISON:
        for number, component in enumerate(filters):
            if component.name == NAME:
                options = {**component.options, "comparison": comparison}
                filters[number] = Component.model_validate({"name": NAME, **options})
    return data.model_copy(update={"filters": filters})


def is_refused(data: Data) -> bool:
    for component in data.filters:
        if component.name == NAME and component.options.get("own_evaluation") is False:
            return True
    return False


def index_of(data: Data, evaluation: Evaluation, folder: Path, comparison: int) -> Path:
    """The index file of the evaluation documents; rebuilt when their files, or their processing, change."""
    has_share = evaluation.held_out_share is not None
    states: dict[str, Any] = {}
    content: dict[str, Any] = {}
    names: list[str] = []
    max_documents: list[int | None] = []
    for key, source in keyed_sources(data, evaluation):
        if "perplexity" in key or has_share and kind_of(source.path) == "local":
            states[key] = signatures_of(files_of(source, key))
            content[key] = reading_content(source, sieve_of(data, source, key))
            names.append(reported_name(source))
            max_documents.append(source.max_documents)
    limits = [evaluation.held_out_share, data.chunk_bytes, data.on_bad_row, max_documents]
    decides = {
        "format": comparison,
        "states": states,
        "content": content,
        "names": names,
        "limits": limits,
    }
    record_file = folder / key_of(decides)
    has_states = all(states.values())  # a source without files may change unnoticed
    record = read_sealed(record_file) if has_states else None
    if record is not None:
        path = folder / record["index"]
        if path.exists():
            if hash_of(path) == record["digest"]:
                return path
            report_damage(path)
    evaluated = chain(
        documents_of_sets(data, evaluation), held_out_documents(data, evaluation, only_local=True)
    )
    path = read_runs(evaluated, comparison).save(folder)
    if has_states:
        write_once(record_file, sealed({"index": path.name, "digest": hash_of(path)}))
    return path


def work_of(data: Data, source: DocumentSource, key: str) -> ShardWork:
    """The work that produces a source's training documents, without tokenisation."""
    return ShardWork(
        source=source,
        key=key,
        sieve=sieve_of(data, source, key),
        encoder=cast(DocumentEncoder, None),
        on_bad_row=data.on_bad_row,
        folder=Path(),
    )


@dataclass
class Overlaps:
    """The overlaps of training documents with evaluation documents."""

    documents: int = 0
    touched: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    hits: list[Hit] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)
    """Hashes of the texts that are equal to an evaluation document."""
    copied: set[int] = field(default_factory=set)
    """Runs of words in documents that are not dropped."""


def search_source(work: ShardWork, index: str, *, is_trained_on_copies: bool) -> Overlaps:
    jobs = jobs_of(work.source, work.key, PIECE_BYTES)
    workers = workers_for(sum(file.size for file in files_of(work.source, work.key)), len(jobs))
    search = partial(search_pieces, work, index, is_trained_on_copies)
    total = Overlaps()
    for overlaps in map_in_order(lambda: search, jobs, workers, WORKERS_IMPORT):
        total.documents += overlaps.documents
        total.touched += overlaps.touched
        total.counts += overlaps.counts
        total.equal += overlaps.equal
        total.copied |= overlaps.copied
        total.hits += overlaps.hits[: LISTED - len(total.hits)]
    return total


def search_pieces(
    work: ShardWork, index: str, is_trained_on_copies: bool, pieces: Sequence[Piece]
) -> Overlaps:
    runs = load_runs(index)
    overlaps = Overlaps()
    for text, document in texts_of(work, pieces):
        if runs.is_own(text):  # held out, or a copy, which is dropped by hash
            overlaps.equal.append(xxh3_64_intdigest(text.encode()))
            continue
        overlaps.documents += 1
        overlap = runs.find(text)
        if overlap is None:
            continue
        if is_trained_on_copies or not overlap.is_contaminated:
            overlaps.copied.update(runs.copied(text))
        if not overlap.is_contaminated:
            overlaps.touched += 1
            continue
        overlaps.counts[overlap.set_name] += 1
        if len(overlaps.hits) < LISTED:
            hit = Hit(
                source=reported_name(work.source),
                where=document.where,
                set_name=overlap.set_name,
                evaluation_document=overlap.where,
                words=overlap.words,
                share=overlap.share,
                own_share=overlap.own_share,
            )
            overlaps.hits.append(hit)
    return overlaps
