"""The rows of a source, chunk by chunk: each chunk is packed and shuffled separately, shortly before its use.

Each chunk has an entry, a small file with the number of rows before the chunk, so any row of the source is found
quickly. A checkpoint has the entry of its chunk: the run can resume with an empty store."""

import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache, reduce
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from cpt.cache import has_intact_files, hold, key_of, publish_derived, write_once
from cpt.data.examples.encoder import fitting
from cpt.data.readers.account import TextBytes
from cpt.data.rows.packing import FORMAT, Layout, PackedRows
from cpt.data.rows.selection import AFTER_MAX_TOKENS, Chosen, Selection
from cpt.data.store.shards import seed_of
from cpt.data.store.token_files import Int64, StoredDocuments
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import CptError, DataError
from cpt.files import read_sealed, sealed
from cpt.recipe.rules import reported_name

OPENED = 2  # open chunks per source in a process
# Rows; below this, grain's shuffle is slow (measured: 10 ms for one of 2 rows, 0.03 of 1,000, 0.004 from 65,536 on).
SMALL = 2**16


@dataclass(frozen=True)
class ChunkEntry:
    first_row: int  # rows in the chunks before
    rows: int
    tokens_before: int  # trained tokens in the chunks before
    tokens: int
    tokens_in_rows: int  # more than `tokens` if sliding windows overlap
    positions: int  # in all rows, padding included
    documents: int
    held_out: int
    left_out: dict[str, int]  # reason -> documents, including those dropped by filters
    bad_rows: dict[str, int]
    lengths: dict[int, int]  # power of two n -> documents trained on with n to 2n - 1 tokens
    longest: tuple[str, int]  # its file and line, its tokens
    own_digest: str  # digest of the documents trained on
    digest: str  # digest of these and of all chunks before
    text: TextBytes | None = None  # None: an earlier version wrote the entry or the tokens

    @property
    def end(self) -> int:
        return self.first_row + self.rows


START = ChunkEntry(0, 0, 0, 0, 0, 0, 0, 0, {}, {}, {}, ("", 0), "", "", TextBytes(0, 0, {}))


def entry_of(content: Mapping[str, Any]) -> ChunkEntry:
    lengths = {int(length): count for length, count in content["lengths"].items()}
    text = content.get("text")
    read = {
        "lengths": lengths,
        "longest": tuple(content["longest"]),
        "text": None if text is None else TextBytes(**text),
    }
    return ChunkEntry(**{**content, **read})


def summed(entries: Sequence[ChunkEntry]) -> ChunkEntry:
    if not entries:
        return START
    sums: dict[str, Any] = {}
    for name in ("rows", "tokens", "tokens_in_rows", "positions", "documents", "held_out"):
        sums[name] = sum(vars(entry)[name] for entry in entries)
    for name in ("left_out", "bad_rows", "lengths"):
        sums[name] = added(vars(entry)[name] for entry in entries)
    longest = max((entry.longest for entry in entries), key=lambda place: place[1])
    texts = [entry.text for entry in entries if entry.text is not None]
    text = reduce(TextBytes.plus, texts) if len(texts) == len(entries) else None
    return replace(START, **sums, longest=longest, digest=entries[-1].digest, text=text)


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def by_power_of_two(lengths: Int64) -> dict[int, int]:
    """Count lengths by power of two: the key n counts lengths from n to 2n - 1. Lengths are at least 1."""
    exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)
    return {
        2**exponent: count
        for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True)
    }


@dataclass(frozen=True)
class Total:
    """The totals of one epoch of a source; two are None if a checkpoint was resumed in an empty store, which lacks the
    chunks before it."""

    rows: int
    chunks: int
    rows_of: list[int] | None  # rows of each chunk
    everything: ChunkEntry | None  # the sum over all chunks

    @cached_property
    def first_rows(self) -> list[int]:
        return list(accumulate(self.rows_of or [], initial=0))


def write_total(folder: Path, last: int, entries: Sequence[ChunkEntry]) -> None:
    """Write the totals of one epoch from the entries of all chunks, or of the known last ones."""
    content: dict[str, Any] = {
        "rows": entries[-1].end,
        "chunks": last + 1,
        "rows_of": None,
        "everything": None,
    }
    if len(entries) == last + 1:
        content |= {
            "rows_of": [entry.rows for entry in entries],
            "everything": asdict(summed(entries)),
        }
    write_once(folder / "total.json", sealed(content))


@dataclass(frozen=True)
class OpenChunk:
    turns: range
    order: str  # seed of the caller
    seed: int  # seed of the order inside the chunk
    epoch: int
    rows: PackedRows


class ChunkedRows:
    """The rows of one source by turn, and the entries of its chunks. In the first epoch the chunks come in the order
    of the plan. Each later epoch has another order of chunks, and puts the pieces of a chunk into other rows."""

    def __init__(
        self,
        tokenized: TokenizedSource,
        selection: Selection,
        layout: Layout,
        seed: int,
        cache_dir: Path,
        max_epochs: float | None = None,
    ) -> None:
        self.tokenized, self.selection, self.layout, self.seed = tokenized, selection, layout, seed
        self.cache_dir, self.max_epochs = cache_dir, max_epochs
        content = {
            "format": FORMAT,
            "tokens": tokenized.name,
            "plan": tokenized.plan.chunks,
            "seed": seed,
        }
        self.folder = (
            cache_dir / "rows" / key_of({**content, **layout.content(), **selection.content()})
        )
        hold(self.folder, self)
        self._lock = threading.RLock()  # several threads may read rows
        self._opened: OrderedDict[int, PackedRows] = OrderedDict()
        self._here: OpenChunk | None = None
        self._entries: dict[int, ChunkEntry] = {}
        self._near = 0  # a chunk with a known entry, to search from
        self._total: Total | None = None
        self._sum: ChunkEntry | None = None  # sum over the known chunks, once this process made one
        self._orders: dict[int, tuple[list[int], list[int]]] = {}

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # worker processes and the read-ahead thread reopen the files
        what = (
            self.tokenized,
            self.selection,
            self.layout,
            self.seed,
            self.cache_dir,
            self.max_epochs,
        )
        return ChunkedRows, what

    @property
    def name(self) -> str:
        return reported_name(self.tokenized.work.source)

    @property
    def fingerprint(self) -> str:
        """A hash of the documents and of their packing; moving files does not change it. With several chunks, it
        covers the first chunk, the plan and the rules that select documents; later chunks are compared with the
        entry in the checkpoint."""
        is_whole = self.tokenized.plan.is_whole
        return key_of(
            {
                "format": FORMAT,
                "documents": self.entry(0).own_digest,
                "seed": self.seed,
                "plan": "" if is_whole else self.tokenized.plan.fingerprint,
                "rules": {} if is_whole else self.selection.content(),
            }
        )

    @property
    def filled(self) -> float:
        """Share of `sequence_length` filled with tokens, in the first chunk with rows: known early, and constant."""
        if self.layout.is_one_a_row:
            return 1.0  # shares count examples
        entry = next(entry for chunk in count() if (entry := self.entry(chunk)).rows)
        return entry.tokens_in_rows / (entry.rows * self.layout.sequence_length)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk was made and all are on disk."""
        return self.total is not None and self.tokenized.description is not None

    def row_at(self, turn: int, seed: str) -> tuple[PackedRows, int, int]:
        """The rows of a turn's chunk, its row number there and the epoch, in an order drawn from the seed."""
        here = self._here
        if here is None or turn not in here.turns or here.order != seed:
            with self._lock:
                epoch, chunk, place = self.find(turn)
                rows = self.chunk(chunk)
                of_order = (
                    seed_of(seed, epoch)
                    if self.tokenized.plan.is_whole
                    else seed_of(seed, epoch, chunk)
                )
                turns = range(turn - place, turn - place + len(rows))
                here = self._here = OpenChunk(turns, seed, of_order, epoch, rows)
        return here.rows, shuffled(turn - here.turns.start, len(here.rows), here.seed), here.epoch

    def chunk(self, chunk: int) -> PackedRows:
        if chunk not in self._opened:
            self.prepare(chunk)
            for rows in self._opened.values():  # only slower threads still read from these
                rows.documents.free_memory()
            documents = self.tokenized.documents(self.tokenized.plan.chunks[chunk])
            self._opened[chunk] = self.layout.open(documents, self.chunk_folder(chunk))
            if len(self._opened) > OPENED:
                self._opened.popitem(last=False)
        self._opened.move_to_end(chunk)
        return self._opened[chunk]

    def find(self, turn: int) -> tuple[int, int, int]:
        """The epoch of a turn, its chunk and its row there."""
        if self.total is None and (chunk := self.chunk_of(turn)) is not None:
            return 0, chunk, turn - self.entry(chunk).first_row
        assert self.total is not None
        epoch, place = divmod(turn, self.total.rows)
        if self.max_epochs is not None and turn >= self.max_epochs * self.total.rows:
            source, key = self.tokenized.work.source, self.tokenized.work.key
            raise DataError(
                f"{source.path}: all rows are used up after {self.max_epochs:g} epoch(s). Lower its weight or"
                f" the budget, add documents, or raise `{key}.max_epochs`."
            )
        if epoch == 0:
            chunk = self.chunk_of(place)
            assert chunk is not None, turn
            return 0, chunk, place - self.entry(chunk).first_row
        chunks, bounds = self.order(epoch)
        position = bisect_right(bounds, place) - 1
        return epoch, chunks[position], place - bounds[position]

    def chunk_of(self, row: int) -> int | None:
        """The chunk of a row of the first epoch, made now if it is missing; None after the last chunk."""
        if self.total is not None and self.total.rows_of is not None:
            return bisect_right(self.total.first_rows, row) - 1 if row < self.total.rows else None
        # Step from the last known chunk: bisection would probe chunks not made yet.
        chunk = self._near if self.entry(self._near).first_row <= row else 0
        while row >= self.entry(chunk).end:
            if self.total is not None and chunk + 1 >= self.total.chunks:
                return None
            chunk += 1
        self._near = chunk
        return chunk

    def order(self, epoch: int) -> tuple[list[int], list[int]]:
        """The order of the chunks in a later epoch, and the number of rows before each."""
        assert self.total is not None
        if epoch not in self._orders:
            draw = np.random.default_rng(seed_of(self.seed, "windows", epoch))
            chunks = draw.permutation(self.total.chunks).tolist()
            rows_of = self.total.rows_of or [
                self.entry(chunk).rows for chunk in range(self.total.chunks)
            ]
            before = accumulate((rows_of[chunk] for chunk in chunks[:-1]), initial=0)
            self._orders = {epoch: (chunks, list(before))}
        return self._orders[epoch]

    def chunks_from(self, turn: int) -> list[int]:
        """The chunk of a turn and those after it in its epoch, in training order."""
        epoch, chunk, _ = self.find(turn)
        chunks = (
            list(range(len(self.tokenized.plan.chunks))) if epoch == 0 else self.order(epoch)[0]
        )
        return chunks[chunks.index(chunk) :]

    @property
    def total(self) -> Total | None:
        """The totals of one epoch; None until its last chunk is made, or if their file is damaged."""
        if self._total is None:
            file = self.folder / "total.json"
            if (content := read_sealed(file)) is not None:
                everything = content.pop("everything")
                self._total = Total(
                    **content, everything=None if everything is None else entry_of(everything)
                )
            else:
                with suppress(OSError):
                    file.unlink()  # otherwise every read would report the damage
        return self._total

    def entry_file(self, chunk: int) -> Path:
        return self.folder / f"{chunk:06}.json"

    def known_entry(self, chunk: int) -> ChunkEntry | None:
        if chunk in self._entries:
            return self._entries[chunk]
        content = read_sealed(self.entry_file(chunk))
        if content is None:
            return None
        entry = entry_of(content)
        if (
            self.total is None
            and self.is_last(chunk, entry)
            and (not chunk or self.entry_file(chunk - 1).exists())
        ):
            return None  # the total is lost and is rewritten with the last chunk
        self._entries[chunk] = entry
        return entry

    def is_last(self, chunk: int, entry: ChunkEntry) -> bool:
        return AFTER_MAX_TOKENS in entry.left_out or chunk + 1 == len(self.tokenized.plan.chunks)

    def entry(self, chunk: int) -> ChunkEntry:
        """The entry of a chunk. If it is missing, the chunk and those before it are made now."""
        first = chunk
        while first >= 0 and self.known_entry(first) is None:
            first -= 1
        for number in range(first + 1, chunk + 1):
            self.make(number)
        entry = self.known_entry(chunk)
        assert entry is not None, chunk
        return entry

    def known_so_far(self) -> tuple[ChunkEntry, int]:
        """The sum of the entries from the first chunk to the first gap, and the number of these chunks."""
        if self.total is not None and self.total.everything is not None:
            return self.total.everything, self.total.chunks
        entries: list[ChunkEntry] = []
        while (entry := self.known_entry(len(entries))) is not None:
            entries.append(entry)
        return summed(entries), len(entries)

    def keep(self, chunk: int, entry: ChunkEntry) -> None:
        """Write the entry of a chunk, and the totals after the last one; raises DataError for an unusable chunk."""
        is_last = self.is_last(chunk, entry)
        if self.total is None:
            self._sum = summed([self._sum or self.known_so_far()[0], entry])
            refuse_bad_chunks(self.tokenized, self._sum, chunk)
            if is_last and not entry.end:
                raise DataError(nothing_to_train_on(self.tokenized, self._sum))
        elif (
            self.total.rows_of is not None and self.total.rows_of[chunk] != entry.rows
        ):  # the entry file was lost
            raise DataError(other_documents(self.tokenized))
        self._entries[chunk] = entry
        write_once(self.entry_file(chunk), sealed(asdict(entry)))
        if is_last and self.total is None:
            entries = [
                one for number in range(chunk + 1) if (one := self.known_entry(number)) is not None
            ]
            write_total(self.folder, chunk, entries)

    def state(self, turn: int) -> dict[str, Any]:
        """The chunk of a turn and its entry, for a checkpoint; enough to resume with an empty store."""
        try:
            _, chunk, _ = self.find(turn)
        except (
            CptError,
            OSError,
        ):  # a transform or a disk failed: the run ends, and is saved without this chunk
            chunk = self._near
            while self.known_entry(chunk + 1) is not None:
                chunk += 1
        return {"chunk": chunk, "entry": asdict(self.entry(chunk))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write the entry of a checkpoint's chunk to an empty store; raises DataError if the documents changed."""
        chunk, content = int(state["chunk"]), state["entry"]
        known = self.known_entry(chunk)
        if known is None:
            write_once(self.entry_file(chunk), sealed(content))
        elif known.digest != content["digest"]:
            raise DataError(other_documents(self.tokenized))
        if self.total is None and self.is_last(chunk, entry_of(content)):
            write_total(
                self.folder, chunk, [entry_of(content)]
            )  # otherwise rows of later epochs would be sought here
        self._near = chunk

    def begin(self, *, all_chunks: bool) -> None:
        """Make chunks until there is a row, or all chunks."""
        chunk = 0
        while self.total is None and (all_chunks or not self.entry(chunk).rows):
            self.entry(chunk)
            chunk += 1

    def prepare(self, chunk: int) -> None:
        """Make a chunk that is missing or damaged."""
        entry = self.entry(chunk)
        if entry.rows and not has_intact_files(self.chunk_folder(chunk)):
            self.make(chunk)

    def make(self, chunk: int) -> None:
        """Pack a chunk and write its entry; the entries of all chunks before it must exist."""
        known, layout = self.known_entry(chunk), self.layout
        if known is not None:  # made before; its files were damaged or removed
            tokens_before = known.tokens_before
        else:
            before = self.entry(chunk - 1) if chunk else START
            tokens_before = before.tokens_before + before.tokens
        shards = self.tokenized.plan.chunks[chunk]
        documents = self.tokenized.documents(shards)
        for part in documents.parts:
            part.sync()
        chosen = self.selection.choose(documents, shards, tokens_before)
        numbers, lengths, read, unfit = fitting(
            documents, chosen.documents, layout.form, layout.sequence_length
        )
        starts = documents.offsets[numbers]
        own_digest = key_of(
            {"documents": documents.digest, "starts": xxh3_128_hexdigest(starts.tobytes())}
        )
        if known is not None and known.own_digest != own_digest:
            raise DataError(other_documents(self.tokenized))
        positions = tokens_in_rows = rows = 0
        if len(starts):
            folder = publish_derived(
                self.chunk_folder(chunk), layout.packer(starts, lengths, self.seed)
            )
            packed = layout.open(documents, folder)
            positions, tokens_in_rows, rows = (
                layout.num_positions(packed.packing),
                packed.num_tokens,
                len(packed),
            )
        if known is not None:
            return
        parts = [part.description for part in documents.parts]
        entry = ChunkEntry(
            first_row=before.end,
            rows=rows,
            tokens_before=tokens_before,
            tokens=int(read.sum()),
            tokens_in_rows=tokens_in_rows,
            positions=positions,
            documents=len(starts),
            held_out=chosen.held_out,
            left_out=added([*(part.dropped for part in parts), chosen.left_out, unfit]),
            bad_rows=added(part.bad_rows for part in parts),
            lengths=by_power_of_two(read),
            longest=max(
                (part.longest for part in parts), key=lambda place: place[1], default=("", 0)
            ),
            own_digest=own_digest,
            digest=key_of({"before": before.digest, "own": own_digest}),
            text=text_bytes(documents, chosen, numbers, unfit),
        )
        self.keep(chunk, entry)

    def chunk_folder(self, chunk: int) -> Path:
        return self.folder / f"{chunk:06}"


def shuffled(place: int, size: int, seed: int) -> int:
    """The position of `place` in a permutation of `size` rows drawn from the seed; a large one is not stored."""
    if size < SMALL:
        return int(permutation(size, seed)[place])
    return index_shuffle()(place, max_index=size - 1, seed=seed, rounds=4)


@lru_cache(maxsize=64)
def permutation(size: int, seed: int) -> Int64:
    return np.random.default_rng(seed).permutation(size)


@cache
def index_shuffle() -> Callable[..., int]:
    from absl import logging

    logging.set_verbosity(logging.ERROR)  # importing grain warns if jax is missing
    from grain.experimental import index_shuffle

    return index_shuffle


def text_bytes(
    documents: StoredDocuments, chosen: Chosen, trained: Int64, unfit: Mapping[str, int]
) -> TextBytes | None:
    """Where the bytes of a chunk's texts went; None if an earlier version stored its tokens."""
    dropped = Counter[str]()
    for part in documents.parts:
        if part.description.dropped_bytes is None:
            return None
        dropped.update(part.description.dropped_bytes)
    dropped.update(chosen.left_out_bytes)
    sizes = documents.num_bytes
    num_trained = int(sizes[trained].sum())
    for reason in unfit:  # at most one
        dropped[reason] += int(sizes[chosen.documents].sum()) - num_trained
    return TextBytes(num_trained, chosen.held_out_bytes, dict(dropped))


def refuse_bad_chunks(tokenized: TokenizedSource, known: ChunkEntry, chunk: int) -> None:
    """Stop if the chunks so far (`known` is their sum) have more bad rows than the recipe allows."""
    plan, bad = tokenized.plan, sum(known.bad_rows.values())
    if plan.is_whole or not bad:
        return
    rows = bad + known.documents + known.held_out + sum(known.left_out.values())
    if bad > tokenized.max_bad_share * rows * plan.scale_from(chunk + 1):
        raise DataError(
            f"{tokenized.work.source.path}: {bad:,} of the first {rows:,} rows are bad, more than"
            f" `data.max_bad_share` ({tokenized.max_bad_share:.2%}) allows. List them: cpt data check."
            f" Fix the files ({tokenized.work.key}.path), or raise the share."
        )


def nothing_to_train_on(tokenized: TokenizedSource, known: ChunkEntry) -> str:
    counts = {"kept for evaluation": known.held_out, **known.left_out}
    why = ", ".join(f"{reason}: {count:,}" for reason, count in counts.items() if count)
    key = tokenized.work.key
    return (
        f"{tokenized.work.source.path}: no document is left to train on ({why}). Add some (`{key}.path`), hold less"
        " out (`evaluation.held_out_share`, `evaluation.perplexity`), or set a higher `data.sequence_length` or"
        f" `{key}.max_tokens`."
    )


def other_documents(tokenized: TokenizedSource) -> str:
    return (
        f"{tokenized.work.source.path}: the documents differ from those at the start of the run, so it cannot"
        f" continue. Restore the files ({tokenized.work.key}.path), or start a new run: another `name`."
    )
