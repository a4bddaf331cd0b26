"""The first documents of a source as a run would see them: bad, dropped for which reason, or kept and packed into
rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cpt.data.checking.files import filters_of, transforms_of
from cpt.data.documents import BadRow, DocumentView
from cpt.data.filters import build_filters, reason_to_drop
from cpt.data.packing import pack
from cpt.data.sources import pieces_of, read_piece
from cpt.data.tokenization import DocumentEncoder, Ids
from cpt.data.transforms import apply_transforms, build_transforms
from cpt.recipe.schema import Data, DocumentSource
from cpt.recipe.sense_data import reported_name


@dataclass(frozen=True)
class Example:
    """A document or row, with its place."""

    where: str
    text: str


@dataclass
class Seen:
    """What became of the first documents of a source."""

    name: str
    kept: list[Example] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """Why it is not kept -> documents and rows; bad rows as `bad row: null`."""
    examples: dict[str, Example] = field(default_factory=dict)
    """Why it is not kept -> the first one."""

    def lose(self, reason: str, where: str, text: str) -> None:
        """Count one that is not kept."""
        self.lost[reason] += 1
        self.examples.setdefault(reason, Example(where, text))


@dataclass(frozen=True)
class RowPart:
    """What stands in a row, from one boundary to the next."""

    where: str
    ids: Ids


def see_source(
    data: Data, source: DocumentSource, key: str, num_documents: int, encoder: DocumentEncoder | None = None
) -> Seen:
    """Read the first documents and sort them; a bad row ends nothing here.

    Args:
        encoder: the source's; what it cannot encode is dropped too.
    """
    seen, encodable = Seen(reported_name(source)), {key: encoder.filters() if encoder else []}
    transforms, filters = (
        build_transforms(transforms_of(data, source, key)),
        build_filters({**filters_of(data, source, key), **encodable}),
    )
    items = (item for piece in pieces_of(source, key) for item in read_piece(source, piece, key))
    for _, item in zip(range(min(num_documents, source.max_documents or num_documents)), items, strict=False):
        if isinstance(item, BadRow):
            seen.lose(f"bad row: {item.reason}", item.where, item.detail)
            continue
        view: DocumentView = {"text": item.text, "source": seen.name, "where": item.where}
        emptied: Counter[str] = Counter()
        for made in apply_transforms(view, transforms, emptied):
            reason = reason_to_drop(made, filters)
            if reason is None:
                seen.kept.append(Example(item.where, made["text"]))
            else:
                seen.lose(reason, item.where, made["text"])
        for reason in emptied:
            seen.lose(reason, item.where, item.text)
    return seen


def packed_rows(
    kept: Sequence[Example], encoder: DocumentEncoder, data: Data, seed: int, num_rows: int
) -> Iterator[tuple[int, list[RowPart]]]:
    """Some of the rows that these documents are packed into, by number; the run's own rows hold documents of the whole
    source.

    The first rows are the pieces of long documents, the last ones what was left over: the chosen ones are spread
    evenly.
    """
    if not kept or not num_rows:
        return
    ids, lengths = encoder.encode([example.text for example in kept])
    begins = lengths.cumsum() - lengths
    packing = pack(begins, lengths, data.sequence_length, data.packing, seed, data.stride)
    for row in np.unique(np.linspace(0, packing.num_rows - 1, num_rows).round().astype(int)).tolist():
        starts, sizes = packing.pieces(row, epoch=0)
        documents = np.searchsorted(begins, starts, "right") - 1
        pieces = zip(documents.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        yield row, [RowPart(kept[number].where, ids[start : start + size]) for number, start, size in pieces]
