"""Find training documents that share runs of 8 words with evaluation documents, and drop them:
docs/howto/evaluating.md.

Words are compared without punctuation, and without the differences that `comparing.py` removes. A training document
is contaminated if the shared runs cover half of one evaluation document's words, or half of the training document; at
least 13 words, or all words of a shorter evaluation document. This finds copies and parts, also after light edits, but
not a phrase, a code idiom or a quotation. The length and the share are those of Tülu 3 (arxiv.org/abs/2411.15124,
section 3.2). Runs in more than a twentieth of the evaluation documents (limit between 2 and 10), such as a licence's
header, are ignored.

Memory: 16 bytes per word of the evaluation documents. A worker searches 35 MB/s of ASCII text, 15 MB/s of other."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from cpt.data.readers.comparing import ASCII_WORDS, COMPARISON, FIRST_COMPARISON, words_of
from cpt.data.readers.documents import DocumentView, File
from cpt.data.readers.sources import contents_of, files_of, open_source
from cpt.errors import DataError
from cpt.files import write_atomic
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource

WORDS = 8  # in a run; shorter evaluation documents would match by chance and are ignored
LEAST_SHARE = 0.5
LEAST_WORDS = 13
COMMON_SHARE = 0.05
COMMON_AT_LEAST = 2
COMMON_AT_MOST = 10
AGAINST = "filters.decontaminate.against"
NAME = "decontaminate"  # of the filter
REASON = "contaminated: "  # prefix of its reasons

# As in the first version; Chinese and Japanese have no spaces, so each character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: multiplication keeps all bits of earlier words
TABLE_BITS = 22

Hashes = NDArray[np.uint64]


class EvaluationDocument(NamedTuple):
    set_name: str
    where: str
    text: str
    is_held_out: bool = True  # equal texts are then dropped by hash and are not contamination


@dataclass(frozen=True)
class Overlap:
    set_name: str
    where: str
    words: str
    share: float  # part of the evaluation document's words in shared runs
    own_share: float  # part of the training document's words in shared runs
    is_contaminated: bool


@dataclass(eq=False)
class Runs:
    """An index of the runs of words of evaluation documents."""

    hashes: Hashes  # of the runs, sorted; one entry per document that has the run
    owners: NDArray[np.int32]  # the document of each run
    places: NDArray[np.int32]  # the start of each run in its document, as a word number
    documents: Sequence[tuple[str, str]]  # (set, place) of each
    own: Hashes  # hashes of the held-out texts, sorted
    too_short: int  # documents with too few words to search for
    comparison: int = COMPARISON

    def __post_init__(self) -> None:
        order = np.argsort(self.owners, kind="stable")
        bounds = np.searchsorted(self.owners[order], np.arange(1, len(self.documents)))
        self._words = list(map(num_covered, np.split(self.places[order], bounds)))
        # A table of the last bits of all hashes: one look-up rules out most runs of a training document.
        self._table = np.zeros(1 << TABLE_BITS, bool)
        self._table[self.hashes & np.uint64((1 << TABLE_BITS) - 1)] = True

    def find(self, text: str) -> Overlap | None:
        """The overlap with an evaluation document; None without an overlap, or if `text` is held out."""
        words = COMPARISONS[self.comparison](text)
        if len(words) < WORDS:
            return None
        runs = runs_of(words)
        likely = np.flatnonzero(self._table[runs & np.uint64(len(self._table) - 1)])
        if not len(likely):  # most texts end here
            return None
        firsts = np.searchsorted(self.hashes, runs[likely])
        counts = np.searchsorted(self.hashes, runs[likely], side="right") - firsts
        if not counts.any() or self.is_own(text):
            return None
        entries = concatenated_ranges(firsts, counts)
        begins = np.repeat(likely, counts)
        owners = self.owners[entries]
        covered = []
        for owner in np.unique(owners).tolist():
            of_owner = owners == owner
            coverage = Coverage(
                owner=owner,
                evaluation_words=num_covered(self.places[entries[of_owner]]),
                all_evaluation_words=self._words[owner],
                share_of_training=num_covered(begins[of_owner]) / len(words),
            )
            covered.append(coverage)
        best = max(covered, key=Coverage.rank)
        begin = int(begins[owners == best.owner].min())
        set_name, where = self.documents[best.owner]
        return Overlap(
            set_name=set_name,
            where=where,
            words=unicodedata.normalize("NFC", b" ".join(words[begin : begin + WORDS]).decode()),
            share=best.share_of_evaluation,
            own_share=best.share_of_training,
            is_contaminated=best.is_contaminated,
        )

    def copied(self, text: str) -> list[int]:
        """The hashes of a text's runs that an evaluation document has; for a text with an overlap."""
        runs = np.unique(runs_of(COMPARISONS[self.comparison](text)))
        entries = np.searchsorted(self.hashes, runs)
        is_shared = self.hashes[np.minimum(entries, len(self.hashes) - 1)] == runs
        return list(map(int, runs[is_shared]))

    def is_own(self, text: str) -> bool:
        digest = np.uint64(xxh3_64_intdigest(text.encode()))
        index = int(np.searchsorted(self.own, digest))
        return index < len(self.own) and bool(self.own[index] == digest)

    def save(self, folder: Path) -> Path:
        """Write the index to a file for worker processes. The first part of the file name hashes everything that
        decides what the filter drops; the second part includes the places."""
        arrays: dict[str, Any] = {
            "hashes": self.hashes,
            "owners": self.owners,
            "places": self.places,
            "own": self.own,
        }
        set_names = [set_name for set_name, _ in self.documents]
        decides = xxh3_128(json.dumps([self.comparison, set_names]).encode())
        for array in arrays.values():
            decides.update(array.tobytes())
        about = json.dumps([self.comparison, self.documents, self.too_short]).encode()
        path = folder / f"{decides.hexdigest()}.{xxh3_128_hexdigest(about)[:8]}.npz"

        def write(unfinished: Path) -> None:
            with unfinished.open("wb") as file:
                np.savez(file, about=np.frombuffer(about, np.uint8), **arrays)  # type: ignore[arg-type]

        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, write)
        return path


def key_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A filter's options for the key of stored tokens: an index is keyed by content, not by path; so are files."""
    if name != NAME:
        return options
    options = dict(options)
    if "index" in options:
        options["index"] = Path(options["index"]).name.partition(".")[0]
    if options.pop("comparison", COMPARISON) == COMPARISON and "against" in options:
        files: list[File] = []
        for path in options["against"]:
            files += files_of(DocumentSource(path=path), AGAINST)
        options["files"] = list(contents_of(files).values())
    return options


@dataclass(frozen=True)
class Coverage:
    """How much a training document and an evaluation document have in common."""

    owner: int  # the number of the evaluation document
    evaluation_words: int  # of the evaluation document, in shared runs
    all_evaluation_words: int
    share_of_training: float

    @property
    def share_of_evaluation(self) -> float:
        return self.evaluation_words / self.all_evaluation_words

    @property
    def is_contaminated(self) -> bool:
        enough_words = min(LEAST_WORDS, self.all_evaluation_words)
        return self.evaluation_words >= enough_words and self.larger_share >= LEAST_SHARE

    @property
    def larger_share(self) -> float:
        return max(self.share_of_evaluation, self.share_of_training)

    def rank(self) -> tuple[float, int]:
        """Contamination first, then the larger share, then the later document."""
        return self.larger_share + (1 if self.is_contaminated else 0), self.owner


def concatenated_ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranges with these first numbers and counts, concatenated: [5, 8] and [2, 3] give [5, 6, 8, 9, 10]."""
    counts_before = np.cumsum(counts) - counts
    return np.repeat(firsts - counts_before, counts) + np.arange(counts.sum())


def read_runs(documents: Iterable[EvaluationDocument], comparison: int = COMPARISON) -> Runs:
    """Build the index of these documents; of equal texts the first counts."""
    digests: set[int] = set()
    own: set[int] = set()
    too_short = 0
    searched: list[tuple[str, str]] = []  # set and place of each document in the index
    hashes = [np.empty(0, np.uint64)]
    begins = [np.empty(0, np.int32)]
    for document in documents:
        digest = xxh3_64_intdigest(document.text.encode())
        if document.is_held_out:
            own.add(digest)
        if digest in digests:
            continue
        digests.add(digest)
        words = COMPARISONS[comparison](document.text)
        if len(words) < WORDS:
            too_short += 1
            continue
        runs, first = np.unique(runs_of(words), return_index=True)
        hashes.append(runs)
        begins.append(first.astype(np.int32))
        searched.append((document.set_name, document.where))
    numbers = np.arange(len(searched), dtype=np.int32)
    owners = np.repeat(numbers, list(map(len, hashes[1:])))
    all_hashes = np.concatenate(hashes)
    entries = rare_in_order(all_hashes, len(searched))
    return Runs(
        hashes=all_hashes[entries],
        owners=owners[entries],
        places=np.concatenate(begins)[entries],
        documents=searched,
        own=np.sort(np.array(list(own), np.uint64)),
        too_short=too_short,
        comparison=comparison,
    )


def rare_in_order(hashes: Hashes, num_documents: int) -> NDArray[np.int64]:
    """The runs that are not in too many documents, by their hash."""
    max_documents = max(COMMON_AT_LEAST, min(COMMON_AT_MOST, int(COMMON_SHARE * num_documents)))
    _, number_of_hash, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    rare = np.flatnonzero(counts[number_of_hash] <= max_documents)
    return rare[np.argsort(hashes[rare], kind="stable")]


@lru_cache(maxsize=4)
def load_runs(path: str) -> Runs:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            comparison, documents, too_short = json.loads(arrays["about"].tobytes())
            if comparison not in COMPARISONS:
                raise ValueError("it has another version")
            return Runs(
                hashes=arrays["hashes"],
                owners=arrays["owners"],
                places=arrays["places"],
                documents=list(map(tuple, documents)),
                own=arrays["own"],
                too_short=too_short,
                comparison=comparison,
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
        raise DataError(
            f"{path}: cannot be read ({problem}). Delete the file; it is built again."
        ) from problem


def decontaminate(
    document: DocumentView,
    *,
    index: str | None = None,
    against: Sequence[str] = (),
    own_evaluation: bool = True,
    comparison: int = COMPARISON,
) -> str | None:
    """Drop a document if it contains half of an evaluation document, or if half of it is from one.

    Args:
        index: a file written by `Runs.save` for the recipe's evaluation: see `contamination.with_decontamination`.
        against: files, folders and globs of further evaluation documents, read like held-out sets.
        own_evaluation: false ignores the recipe's `evaluation` section.
        comparison: 3 compares accents, format characters and line hyphens too, as runs before version 4 did.
    """
    indexes = []
    if index is not None:
        indexes.append(load_runs(index))
    if against:
        indexes.append(runs_of_files(tuple(against), comparison))
    for runs in indexes:
        overlap = runs.find(document["text"])
        if overlap is not None and overlap.is_contaminated:
            return f"{REASON}{overlap.set_name}"
    return None


@lru_cache(maxsize=4)
def runs_of_files(paths: tuple[str, ...], comparison: int) -> Runs:
    return read_runs(documents_of_files(paths), comparison)


def documents_of_files(paths: Sequence[str]) -> Iterator[EvaluationDocument]:
    for path in paths:
        source = DocumentSource(path=path)
        for document in open_source(source, AGAINST):
            yield EvaluationDocument(
                reported_name(source), document.where, document.text, is_held_out=False
            )


def words_of_first_comparison(text: str) -> list[bytes]:
    if text.isascii():  # three times as fast
        return text.encode().translate(ASCII_WORDS).split()
    words: list[str] = WORD.findall(text.lower())
    return [word.encode() for word in words]


COMPARISONS: dict[int, Callable[[str], list[bytes]]] = {
    FIRST_COMPARISON: words_of_first_comparison,
    COMPARISON: words_of,
}


def runs_of(words: Sequence[bytes]) -> Hashes:
    """A hash of each run of `WORDS` words; the order of the words matters."""
    hashes = np.fromiter(map(xxh3_64_intdigest, words), np.uint64, len(words))
    count = len(words) - WORDS + 1
    runs = np.zeros(count, np.uint64)
    for first in range(WORDS):
        runs = runs * FACTOR + hashes[first : first + count]  # modulo 2^64
    return runs ^ (runs >> np.uint64(32))


def num_covered(begins: NDArray[Any]) -> int:
    if not len(begins):
        return 0
    return WORDS + int(np.minimum(np.diff(np.unique(begins)), WORDS).sum())
