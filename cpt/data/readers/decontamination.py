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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.data.readers.comparing import ASCII_WORDS, COMPARISON, FIRST_COMPARISON, words_of
from cpt.data.readers.documents import DocumentView
from cpt.data.readers.sources import contents_of, files_of, open_source
from cpt.errors import DataError
from cpt.files import write_atomic
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource

WORDS = 8  # in a run; shorter evaluation documents would match by chance and are ignored
LEAST_SHARE, LEAST_WORDS = 0.5, 13
COMMON_SHARE, COMMON_AT_LEAST, COMMON_AT_MOST = 0.05, 2, 10
AGAINST = "filters.decontaminate.against"
NAME, REASON = "decontaminate", "contaminated: "  # name of the filter; prefix of its reasons

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
        by_document = np.split(self.places[order], bounds)
        self._words = [num_covered(found) for found in by_document]
        # A table of the last bits of all hashes: one look-up rules out most runs of a training document.
        self._table = np.zeros(1 << TABLE_BITS, bool)
        self._table[self.hashes & np.uint64((1 << TABLE_BITS) - 1)] = True

    def find(self, text: str) -> Overlap | None:
        """The overlap with an evaluation document; None without an overlap, or if `text` is held out."""
        words = COMPARISONS[self.comparison](text)
        if len(words) < WORDS:
            return None
        runs = runs_of(words)
        likely = np.flatnonzero(
            self._table[runs & np.uint64(len(self._table) - 1)]
        )  # most runs end here
        if not len(likely):
            return None
        first = np.searchsorted(self.hashes, runs[likely])
        counts = np.searchsorted(self.hashes, runs[likely], side="right") - first
        if not counts.any() or self.is_own(text):
            return None
        known = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        begins, owners = np.repeat(likely, counts), self.owners[known]
        most = (-1.0, 0, 0.0, 0.0, False)  # the evaluation document with the largest covered share
        for owner in np.unique(owners).tolist():
            is_shared = owners == owner
            of_evaluation, of_training = (
                num_covered(self.places[known[is_shared]]),
                num_covered(begins[is_shared]),
            )
            shares = of_evaluation / self._words[owner], of_training / len(words)
            is_enough = (
                of_evaluation >= min(LEAST_WORDS, self._words[owner]) and max(shares) >= LEAST_SHARE
            )
            most = max(most, (max(shares) + is_enough, owner, *shares, is_enough))
        _, owner, share, own_share, is_enough = most
        begin = int(begins[owners == owner].min())
        set_name, where = self.documents[owner]
        shared = unicodedata.normalize("NFC", b" ".join(words[begin : begin + WORDS]).decode())
        return Overlap(set_name, where, shared, share, own_share, is_enough)

    def copied(self, text: str) -> list[int]:
        """The hashes of a text's runs that an evaluation document has; for a text with an overlap."""
        runs = np.unique(runs_of(COMPARISONS[self.comparison](text)))
        places = np.searchsorted(self.hashes, runs)
        known = self.hashes[np.minimum(places, len(self.hashes) - 1)] == runs
        return [int(run) for run in runs[known]]

    def is_own(self, text: str) -> bool:
        wanted = np.uint64(xxh3_64_intdigest(text.encode()))
        place = int(np.searchsorted(self.own, wanted))
        return place < len(self.own) and bool(self.own[place] == wanted)

    def save(self, folder: Path) -> Path:
        """Write the index to a file for worker processes. The first part of the file name hashes everything that
        decides what the filter drops; the second part includes the places."""
        arrays: dict[str, Any] = {
            "hashes": self.hashes,
            "owners": self.owners,
            "places": self.places,
            "own": self.own,
        }
        set_names = json.dumps(
            [self.comparison, [set_name for set_name, _ in self.documents]]
        ).encode()
        decides = xxh3_128_hexdigest(
            b"".join([set_names, *(array.tobytes() for array in arrays.values())])
        )
        about = json.dumps([self.comparison, self.documents, self.too_short]).encode()
        path = folder / f"{decides}.{xxh3_128_hexdigest(about)[:8]}.npz"

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
        sources = [DocumentSource(path=path) for path in options["against"]]
        files = [file for source in sources for file in files_of(source, AGAINST)]
        options["files"] = list(contents_of(files).values())
    return options


def read_runs(documents: Iterable[EvaluationDocument], comparison: int = COMPARISON) -> Runs:
    """Build the index of these documents; of equal texts the first counts."""
    seen, own, too_short = set[int](), set[int](), 0
    places, runs = list[tuple[str, str]](), list[Hashes]()
    for document in documents:
        digest = xxh3_64_intdigest(document.text.encode())
        if document.is_held_out:
            own.add(digest)
        if digest in seen:
            continue
        seen.add(digest)
        words = COMPARISONS[comparison](document.text)
        if len(words) < WORDS:
            too_short += 1
            continue
        runs.append(runs_of(words))
        places.append((document.set_name, document.where))
    common = max(COMMON_AT_LEAST, min(COMMON_AT_MOST, int(COMMON_SHARE * len(places))))
    firsts = [np.unique(found, return_index=True) for found in runs]
    every = np.concatenate([np.empty(0, np.uint64), *(found for found, _ in firsts)])
    begins = np.concatenate(
        [np.empty(0, np.int32), *(begin.astype(np.int32) for _, begin in firsts)]
    )
    owners = np.repeat(np.arange(len(runs), dtype=np.int32), [len(found) for found, _ in firsts])
    _, which, counts = np.unique(every, return_inverse=True, return_counts=True)
    is_rare = counts[which] <= common
    order = np.argsort(every[is_rare], kind="stable")
    kept = np.flatnonzero(is_rare)[order]
    return Runs(
        every[kept],
        owners[kept],
        begins[kept],
        places,
        np.sort(np.array(list(own), np.uint64)),
        too_short,
        comparison,
    )


@lru_cache(maxsize=4)
def load_runs(path: str) -> Runs:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            comparison, documents, too_short = json.loads(arrays["about"].tobytes())
            if comparison not in COMPARISONS:
                raise ValueError("it has another version")
            places = [tuple(document) for document in documents]
            return Runs(
                arrays["hashes"],
                arrays["owners"],
                arrays["places"],
                places,
                arrays["own"],
                too_short,
                comparison,
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
    for runs in (
        load_runs(index) if index is not None else None,
        runs_of_files(tuple(against), comparison) if against else None,
    ):
        overlap = runs.find(document["text"]) if runs is not None else None
        if overlap is not None and overlap.is_contaminated:
            return f"{REASON}{overlap.set_name}"
    return None


@lru_cache(maxsize=4)
def runs_of_files(paths: tuple[str, ...], comparison: int) -> Runs:
    documents = (
        EvaluationDocument(reported_name(source), document.where, document.text, is_held_out=False)
        for source in (DocumentSource(path=path) for path in paths)
        for document in open_source(source, AGAINST)
    )
    return read_runs(documents, comparison)


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
    number, hashes = (
        len(words) - WORDS + 1,
        np.fromiter(map(xxh3_64_intdigest, words), np.uint64, len(words)),
    )
    runs = np.zeros(number, np.uint64)
    for place in range(WORDS):
        runs = runs * FACTOR + hashes[place : place + number]  # modulo 2^64
    return runs ^ (runs >> np.uint64(32))


def num_covered(begins: NDArray[Any]) -> int:
    if not len(begins):
        return 0
    return WORDS + int(np.minimum(np.diff(np.unique(begins)), WORDS).sum())
