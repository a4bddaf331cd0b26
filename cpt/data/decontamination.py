"""Find training documents that hold what the model is judged by, and leave them out: runs of the same words, whatever stands around them.

A document is contaminated where 13 words in a row, in lower case and without punctuation, stand in an evaluation document too, as GPT-3's
authors did it (arxiv.org/abs/2005.14165, appendix C; Llama 2 counts such runs by tokens, arxiv.org/abs/2307.09288, appendix A.6). Of an
evaluation document of 8 to 12 words, runs of 8 are looked for; a shorter one could stand anywhere, and is not looked for.

Runs that many evaluation documents share (a licence's header, a phrase of the trade) tell nothing about any of them. GPT-3's authors left
out what stood in more than ten training documents; here it is what stands in more than a twentieth of the evaluation documents, in ten at
most and two at least, which is known before any training document was read.

Memory is that of the evaluation documents: 16 bytes a word. A worker process searches some 10 MB of text a second.
"""

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

from cpt.data.documents import DocumentView
from cpt.data.sources import open_source
from cpt.errors import DataError
from cpt.recipe.schema import DocumentSource
from cpt.recipe.sense_data import reported_name

WORDS, FEWEST_WORDS = 13, 8
COMMON_SHARE, COMMON_AT_LEAST, COMMON_AT_MOST = 0.05, 2, 10
FORMAT = 1  # of the stored index
NAME, REASON = "decontaminate", "contaminated: "  # of the filter, and what it says in front of the set's name

# Chinese and Japanese do without spaces: each character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no run's hash loses what an earlier word gave it
TABLE_BITS = 22

Hashes = NDArray[np.uint64]


class Judged(NamedTuple):
    """An evaluation document."""

    set_name: str
    """The held-out set or task."""
    where: str
    text: str


@dataclass(frozen=True)
class Overlap:
    """What a training document shares with an evaluation document."""

    set_name: str
    where: str
    """The evaluation document's place."""
    words: str
    """The first run of words that both have."""


class Runs:
    """The runs of words of some evaluation documents, to look for in others.

    Args:
        hashes: of the runs, sorted; by the number of words in a run.
        owners: of each run, the document that it stands in first.
        documents: (set, place) of each.
        own: hashes of the documents' whole texts, sorted.
        too_short: documents of too few words to be looked for.
    """

    def __init__(
        self,
        hashes: dict[int, Hashes],
        owners: dict[int, NDArray[np.int32]],
        documents: Sequence[tuple[str, str]],
        own: Hashes,
        too_short: int,
    ) -> None:
        self.hashes, self.owners, self.documents, self.own, self.too_short = hashes, owners, list(documents), own, too_short
        self._tables = {length: table_of(found) for length, found in hashes.items() if len(found)}

    def find(self, text: str) -> Overlap | None:
        """The first run that the text shares with an evaluation document; None for the evaluation documents themselves.

        Those are kept from training by the hash of their text, and may stand among the training sources to be held out.
        """
        words: list[str] = WORD.findall(text.lower())
        by_word: Hashes | None = None
        for length, table in self._tables.items():
            if len(words) < length:
                continue
            by_word = hashes_of(words) if by_word is None else by_word
            found = runs_of(by_word, length)
            likely = np.flatnonzero(table[found & np.uint64(len(table) - 1)])  # most runs end here
            if not len(likely):
                continue
            known = self.hashes[length]
            places = np.searchsorted(known, found[likely])
            is_known = known[np.minimum(places, len(known) - 1)] == found[likely]
            if is_known.any() and not self.is_own(text):
                first = int(np.argmax(is_known))
                set_name, where = self.documents[self.owners[length][places[first]]]
                begin = int(likely[first])
                return Overlap(set_name, where, " ".join(words[begin : begin + length]))
        return None

    def is_own(self, text: str) -> bool:
        """Whether the text is one of the evaluation documents."""
        wanted = np.uint64(xxh3_64_intdigest(text.encode()))
        place = int(np.searchsorted(self.own, wanted))
        return place < len(self.own) and bool(self.own[place] == wanted)

    def save(self, folder: Path) -> Path:
        """Write them to a file whose name tells what is in it, for worker processes; a file that is there is left alone."""
        content = json.dumps([FORMAT, self.documents, self.too_short]).encode()
        arrays: dict[str, Any] = {f"hashes{n}": found for n, found in self.hashes.items()} | {
            f"owners{n}": found for n, found in self.owners.items()
        }
        digest = xxh3_128_hexdigest(b"".join([content, self.own.tobytes(), *(array.tobytes() for array in arrays.values())]))
        path = folder / f"{digest}.npz"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{id(self)}")
            with beside.open("wb") as file:
                np.savez(file, about=np.frombuffer(content, np.uint8), own=self.own, **arrays)
            beside.replace(path)
        return path


def read_runs(documents: Iterable[Judged]) -> Runs:
    """The runs of these documents; of equal texts the first counts."""
    own: dict[int, None] = {}
    places: list[tuple[str, str]] = []
    by_length: dict[int, list[tuple[int, Hashes]]] = {WORDS: [], FEWEST_WORDS: []}
    too_short = 0
    for judged in documents:
        digest = xxh3_64_intdigest(judged.text.encode())
        if digest in own:
            continue
        own[digest] = None
        words = WORD.findall(judged.text.lower())
        if len(words) < FEWEST_WORDS:
            too_short += 1
            continue
        length = WORDS if len(words) >= WORDS else FEWEST_WORDS
        by_length[length].append((len(places), np.unique(runs_of(hashes_of(words), length))))
        places.append((judged.set_name, judged.where))
    common = max(COMMON_AT_LEAST, min(COMMON_AT_MOST, int(COMMON_SHARE * len(places))))
    hashes, owners = {}, {}
    for length, runs in by_length.items():
        every = np.concatenate([np.empty(0, np.uint64), *(found for _, found in runs)])
        owner = np.repeat(np.array([number for number, _ in runs], np.int32), [len(found) for _, found in runs])
        unique, first, counts = np.unique(every, return_index=True, return_counts=True)
        is_rare = counts <= common
        hashes[length], owners[length] = unique[is_rare], owner[first[is_rare]]
    return Runs(hashes, owners, places, np.sort(np.array(list(own), np.uint64)), too_short)


@lru_cache(maxsize=4)
def load_runs(path: str) -> Runs:
    """What `Runs.save` wrote; kept for the next document.

    Raises:
        DataError: the file is not there, or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            form, documents, too_short = json.loads(arrays["about"].tobytes())
            if form != FORMAT:
                raise ValueError("it is of another version")
            hashes, owners = ({n: arrays[f"{name}{n}"] for n in (WORDS, FEWEST_WORDS)} for name in ("hashes", "owners"))
            return Runs(hashes, owners, [tuple(document) for document in documents], arrays["own"], too_short)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
        raise DataError(
            f"{path}: the runs of words to look for cannot be read ({problem}). Delete the file; it is made again."
        ) from problem


def decontaminate(
    document: DocumentView, *, index: str | None = None, against: Sequence[str] = (), own_evaluation: bool = True
) -> str | None:
    """The filter: a document that shares a run of words with what the model is judged by.

    Args:
        index: a file of `Runs.save`, of the recipe's own evaluation: see `contamination.with_decontamination`.
        against: files, folders and globs of further evaluation documents, read as held-out sets are.
        own_evaluation: false leaves the recipe's own evaluation out, which is looked for by default.
    """
    for runs in (load_runs(index) if index is not None else None, runs_of_files(tuple(against)) if against else None):
        overlap = runs.find(document["text"]) if runs is not None else None
        if overlap is not None:
            return f"{REASON}{overlap.set_name}"
    return None


@lru_cache(maxsize=4)
def runs_of_files(paths: tuple[str, ...]) -> Runs:
    """The runs of the documents in some files."""
    sources = [DocumentSource(path=path) for path in paths]
    named = ((reported_name(source), document) for source in sources for document in open_source(source, "filters.decontaminate.against"))
    return read_runs(Judged(name, document.where, document.text) for name, document in named)


def hashes_of(words: Sequence[str]) -> Hashes:
    """Of each word."""
    return np.fromiter((xxh3_64_intdigest(word.encode()) for word in words), np.uint64, len(words))


def runs_of(words: Hashes, length: int) -> Hashes:
    """The hash of each run of so many words; the order of the words counts."""
    number = len(words) - length + 1
    runs = np.zeros(number, np.uint64)
    for place in range(length):
        runs = runs * FACTOR + words[place : place + number]  # modulo 2^64
    return runs ^ (runs >> np.uint64(32))


def table_of(hashes: Hashes) -> NDArray[np.bool_]:
    """Which last bits any of them has: a look into it answers for most runs of a training document that they are not among them."""
    table = np.zeros(1 << TABLE_BITS, bool)
    table[hashes & np.uint64((1 << TABLE_BITS) - 1)] = True
    return table
