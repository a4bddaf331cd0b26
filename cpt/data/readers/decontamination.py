"""Find training documents that share runs of 8 words with evaluation documents, and drop them:
docs/howto/evaluating.md.

Words are compared in lower case and without punctuation. A training document is contaminated where the shared runs
cover half of one evaluation document's words, or half of its own; 13 words at least, and all of a shorter evaluation
document. So copies and parts are found, also after light edits, while a phrase, an idiom of code or a quotation is not
enough. The length and the share are those of Tülu 3 (arxiv.org/abs/2411.15124, section 3.2). Runs in more than a
twentieth of the evaluation documents (in 10 at most, 2 at least), such as a licence's header, are ignored.

Memory: 16 bytes a word of the evaluation documents. A worker searches 35 MB of ASCII text a second, of other 15."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.data.readers.documents import DocumentView
from cpt.data.readers.sources import open_source
from cpt.errors import DataError
from cpt.files import write_atomic
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource

WORDS = 8  # of a run; a shorter evaluation document could be anywhere, and is ignored
LEAST_SHARE, LEAST_WORDS = 0.5, 13
COMMON_SHARE, COMMON_AT_LEAST, COMMON_AT_MOST = 0.05, 2, 10
FORMAT = 3  # of the stored index
NAME, REASON = "decontaminate", "contaminated: "  # of the filter; before the name of the set in its reason

# Chinese and Japanese do without spaces: each character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
ASCII_WORDS = bytes(
    ord(letter.lower()) if WORD.match(letter) else ord(" ") for letter in map(chr, range(128))
) + bytes(128)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no run's hash loses what an earlier word gave it
TABLE_BITS = 22

Hashes = NDArray[np.uint64]


class EvaluationDocument(NamedTuple):
    set_name: str
    where: str
    text: str
    is_held_out: bool = True  # then the run drops equal texts by their hash, and a copy is no contamination


@dataclass(frozen=True)
class Overlap:
    set_name: str
    where: str
    words: str
    share: float  # of the evaluation document's words, those in shared runs
    is_contaminated: bool


@dataclass(eq=False)
class Runs:
    """The runs of words of some evaluation documents, to look for in others."""

    hashes: Hashes  # of the runs, sorted; one that is in several documents is there for each
    owners: NDArray[np.int32]  # of each run, the number of its document
    places: NDArray[np.int32]  # of each run, where it begins in its document, in words
    documents: Sequence[tuple[str, str]]  # (set, place) of each
    own: Hashes  # of the texts that are held out, sorted
    too_short: int  # documents of too few words to be looked for

    def __post_init__(self) -> None:
        order = np.argsort(self.owners, kind="stable")
        bounds = np.searchsorted(self.owners[order], np.arange(1, len(self.documents)))
        by_document = np.split(self.places[order], bounds)
        self._words = [num_covered(found) for found in by_document]
        # Which last bits any hash has: most runs of a training document are ruled out by one look-up.
        self._table = np.zeros(1 << TABLE_BITS, bool)
        self._table[self.hashes & np.uint64((1 << TABLE_BITS) - 1)] = True

    def find(self, text: str) -> Overlap | None:
        """The overlap with an evaluation document; None if there is none, and for a held-out document itself."""
        words = words_of(text)
        if len(words) < WORDS:
            return None
        runs = runs_of(words)
        likely = np.flatnonzero(self._table[runs & np.uint64(len(self._table) - 1)])  # most runs end here
        if not len(likely):
            return None
        first = np.searchsorted(self.hashes, runs[likely])
        counts = np.searchsorted(self.hashes, runs[likely], side="right") - first
        if not counts.any() or self.is_own(text):
            return None
        known = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        begins, owners = np.repeat(likely, counts), self.owners[known]
        most = (-1.0, 0, 0.0, False)  # the evaluation document of which, or by which, the largest share is covered
        for owner in np.unique(owners).tolist():
            is_shared = owners == owner
            of_evaluation, of_training = num_covered(self.places[known[is_shared]]), num_covered(begins[is_shared])
            shares = of_evaluation / self._words[owner], of_training / len(words)
            is_enough = of_evaluation >= min(LEAST_WORDS, self._words[owner]) and max(shares) >= LEAST_SHARE
            most = max(most, (max(shares) + is_enough, owner, shares[0], is_enough))
        _, owner, share, is_enough = most
        begin = int(begins[owners == owner].min())
        set_name, where = self.documents[owner]
        return Overlap(set_name, where, b" ".join(words[begin : begin + WORDS]).decode(), share, is_enough)

    def is_own(self, text: str) -> bool:
        wanted = np.uint64(xxh3_64_intdigest(text.encode()))
        place = int(np.searchsorted(self.own, wanted))
        return place < len(self.own) and bool(self.own[place] == wanted)

    def save(self, folder: Path) -> Path:
        """Write them to a file for worker processes. The first part of its name is a hash of all that decides what the
        filter drops, the second of the places too."""
        arrays: dict[str, Any] = {"hashes": self.hashes, "owners": self.owners, "places": self.places, "own": self.own}
        set_names = json.dumps([FORMAT, [set_name for set_name, _ in self.documents]]).encode()
        decides = xxh3_128_hexdigest(b"".join([set_names, *(array.tobytes() for array in arrays.values())]))
        about = json.dumps([FORMAT, self.documents, self.too_short]).encode()
        path = folder / f"{decides}.{xxh3_128_hexdigest(about)[:8]}.npz"

        def write(unfinished: Path) -> None:
            with unfinished.open("wb") as file:
                np.savez(file, about=np.frombuffer(about, np.uint8), **arrays)  # type: ignore[arg-type]

        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, write)
        return path


def key_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A filter's options in the key of stored tokens: the content of an index, not its path."""
    index = options.get("index") if name == NAME else None
    return options if index is None else {**options, "index": Path(index).name.partition(".")[0]}


def read_runs(documents: Iterable[EvaluationDocument]) -> Runs:
    """The runs of these documents; of equal texts the first counts."""
    seen, own, too_short = set[int](), set[int](), 0
    places, runs = list[tuple[str, str]](), list[Hashes]()
    for judged in documents:
        digest = xxh3_64_intdigest(judged.text.encode())
        if judged.is_held_out:
            own.add(digest)
        if digest in seen:
            continue
        seen.add(digest)
        words = words_of(judged.text)
        if len(words) < WORDS:
            too_short += 1
            continue
        runs.append(runs_of(words))
        places.append((judged.set_name, judged.where))
    common = max(COMMON_AT_LEAST, min(COMMON_AT_MOST, int(COMMON_SHARE * len(places))))
    firsts = [np.unique(found, return_index=True) for found in runs]
    every = np.concatenate([np.empty(0, np.uint64), *(found for found, _ in firsts)])
    begins = np.concatenate([np.empty(0, np.int32), *(begin.astype(np.int32) for _, begin in firsts)])
    owners = np.repeat(np.arange(len(runs), dtype=np.int32), [len(found) for found, _ in firsts])
    _, which, counts = np.unique(every, return_inverse=True, return_counts=True)
    is_rare = counts[which] <= common
    order = np.argsort(every[is_rare], kind="stable")
    kept = np.flatnonzero(is_rare)[order]
    return Runs(every[kept], owners[kept], begins[kept], places, np.sort(np.array(list(own), np.uint64)), too_short)


@lru_cache(maxsize=4)
def load_runs(path: str) -> Runs:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            form, documents, too_short = json.loads(arrays["about"].tobytes())
            if form != FORMAT:
                raise ValueError("it is of another version")
            places = [tuple(document) for document in documents]
            return Runs(arrays["hashes"], arrays["owners"], arrays["places"], places, arrays["own"], too_short)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
        raise DataError(f"{path}: cannot be read ({problem}). Delete the file; it is made again.") from problem


def decontaminate(
    document: DocumentView, *, index: str | None = None, against: Sequence[str] = (), own_evaluation: bool = True
) -> str | None:
    """Drop a document that contains half of an evaluation document, or is half made of it.

    Args:
        index: a file of `Runs.save`, of the recipe's own evaluation: see `contamination.with_decontamination`.
        against: files, folders and globs of further evaluation documents, read like held-out sets.
        own_evaluation: false ignores the recipe's own evaluation.
    """
    for runs in (load_runs(index) if index is not None else None, runs_of_files(tuple(against)) if against else None):
        overlap = runs.find(document["text"]) if runs is not None else None
        if overlap is not None and overlap.is_contaminated:
            return f"{REASON}{overlap.set_name}"
    return None


@lru_cache(maxsize=4)
def runs_of_files(paths: tuple[str, ...]) -> Runs:
    return read_runs(
        EvaluationDocument(reported_name(source), document.where, document.text, is_held_out=False)
        for source in (DocumentSource(path=path) for path in paths)
        for document in open_source(source, "filters.decontaminate.against")
    )


def words_of(text: str) -> list[bytes]:
    if text.isascii():  # three times as fast
        return text.encode().translate(ASCII_WORDS).split()
    words: list[str] = WORD.findall(text.lower())
    return [word.encode() for word in words]


def runs_of(words: Sequence[bytes]) -> Hashes:
    """The hash of each run of so many words; the order of the words counts."""
    number, hashes = len(words) - WORDS + 1, np.fromiter(map(xxh3_64_intdigest, words), np.uint64, len(words))
    runs = np.zeros(number, np.uint64)
    for place in range(WORDS):
        runs = runs * FACTOR + hashes[place : place + number]  # modulo 2^64
    return runs ^ (runs >> np.uint64(32))


def num_covered(begins: NDArray[Any]) -> int:
    if not len(begins):
        return 0
    return WORDS + int(np.minimum(np.diff(np.unique(begins)), WORDS).sum())
