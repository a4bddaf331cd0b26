"""Read every row of a source and count what is in it: what `cpt data check` shows before a run finds it out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from cpt.data.checking.bad_rows import Listed, count_reasons, listed
from cpt.data.documents import Document, Piece
from cpt.data.parallel import map_in_order, num_workers
from cpt.data.sources import files_with_sizes, pieces_of, read_piece
from cpt.recipe.schema import DocumentSource

POOL_BYTES = 32 * 2**20  # of files; below, starting processes takes longer than the work
PIECE_BYTES = 16 * 2**20


@dataclass
class FileCounts:
    """What is in a file, or in a part of it."""

    path: str
    documents: int = 0
    empty: int = 0
    """Documents without any visible character, among the others."""
    num_characters: int = 0
    longest: tuple[str, int] = ("", 0)
    """Where the longest document stands, and its characters."""
    bad: list[Listed] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        """Rows that are lost."""
        return sum(row["rows"] for row in self.bad)


def count_source(source: DocumentSource, key: str) -> Iterator[FileCounts]:
    """The counts of each file, in order, each as soon as it is read.

    Raises:
        CptError: nothing is there, or a file cannot be read at all.
    """
    pieces = pieces_of(source, key, PIECE_BYTES)
    if source.max_documents is None:
        parts = map_in_order(lambda: partial(count_piece, source, key), pieces, workers_for(source, key, pieces))
    else:
        parts = count_first(source, key, pieces, source.max_documents)
    for path, of_file in groupby(parts, key=lambda part: part.path):
        yield sum_up(path, of_file)


def count_first(source: DocumentSource, key: str, pieces: Sequence[Piece], num_documents: int) -> Iterator[FileCounts]:
    """One piece after the other, until there are as many documents as the source takes."""
    for piece in pieces:
        part = count_piece(source.model_copy(update={"max_documents": num_documents}), key, piece)
        yield part
        num_documents -= part.documents
        if num_documents <= 0:
            return


def workers_for(source: DocumentSource, key: str, pieces: Sequence[Piece]) -> int:
    """How many processes pay."""
    num_bytes = sum(size for _, size in files_with_sizes(source, key))
    return num_workers() if len(pieces) > 1 and num_bytes >= POOL_BYTES else 0


def count_piece(source: DocumentSource, key: str, piece: Piece) -> FileCounts:
    """Read a piece to its end."""
    counts, longest = FileCounts(piece.path), 0
    for item in read_piece(source, piece, key):
        if not isinstance(item, Document):
            counts.bad.append(listed(item, with_raw=False))
            continue
        counts.documents += 1
        counts.empty += not item.text or item.text.isspace()
        counts.num_characters += len(item.text)
        if len(item.text) > longest:
            longest, longest_document = len(item.text), item
    if longest:
        counts.longest = longest_document.where, longest
    return counts


def sum_up(path: str, parts: Iterator[FileCounts]) -> FileCounts:
    """The parts of a file as one."""
    whole = FileCounts(path)
    for part in parts:
        whole.documents += part.documents
        whole.empty += part.empty
        whole.num_characters += part.num_characters
        whole.longest = max(whole.longest, part.longest, key=lambda longest: longest[1])
        whole.bad += part.bad
    return whole


def reasons(bad: Sequence[Listed]) -> str:
    """`null: 3, cut off: 1`."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in Counter(count_reasons(bad)).most_common())
