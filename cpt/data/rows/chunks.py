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
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from cpt.cache import has_intact_files, hold, key_of, publish_derived, write_once
from cpt.data.examples.encoder import Fitting, select_fitting
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


START = ChunkEntry(
    first_row=0,
    rows=0,
    tokens_before=0,
    tokens=0,
    tokens_in_rows=0,
    positions=0,
    documents=0,
    held_out=0,
    left_out={},
    bad_rows={},
    lengths={},
    longest=("", 0),
    own_digest="",
    digest="",
    text=TextBytes(0, 0, {}),
)


def entry_of(content: Mapping[str, Any]) -> ChunkEntry:
    """Undo what JSON did to `asdict(entry)`."""
    text = content.get("text")
    typed = {
        "lengths": {int(length): count for length, count in content["lengths"].items()},
        "longest": tuple(content["longest"]),
        "text": None if text is None else TextBytes(**text),
    }
    return ChunkEntry(**{**content, **typed})


def sum_entries(entries: Sequence[ChunkEntry]) -> ChunkEntry:
    if not entries:
        return START
    sums: dict[str, Any] = {}
    for name in ("rows", "tokens", "tokens_in_rows", "positions", "documents", "held_out"):
        sums[name] = sum(vars(entry)[name] for entry in entries)
    for name in ("left_out", "bad_rows", "lengths"):
        sums[name] = add_counts(vars(entry)[name] for entry in entries)
    texts = [entry.text for entry in entries if entry.text is not None]
    return replace(
        START,
        **sums,
        longest=max((entry.longest for entry in entries), key=itemgetter(1)),
        digest=entries[-1].digest,
        text=reduce(TextBytes.plus, texts) if len(texts) == len(entries) else None,
    )


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def by_power_of_two(lengths: Int64) -> dict[int, int]:
    """Count lengths by power of two: the key n counts lengths from n to 2n - 1. Lengths are at least 1."""
    exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)
    return dict(zip((2**exponents).tolist(), counts.tolist(), strict=True))


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
    """Write the totals of one epoch from the entries of all chunks, or of the last ones if others are missing."""
    is_complete = len(entries) == last + 1
    content = {
        "rows": entries[-1].end,
        "chunks": last + 1,
        "rows_of": [entry.rows for entry in entries] if is_complete else None,
        "everything": asdict(sum_entries(entries)) if is_complete else None,
    }
    write_once(folder / "total.json", sealed(content))


@dataclass(frozen=True)
class ChunkInUse:
    """The chunk of the last row that was read: most often the next row is in it, too."""

    turns: range
    caller_seed: str
    seed: int
    """The seed of the order inside the chunk."""
    epoch: int
    rows: PackedRows


@dataclass(frozen=True)
class TrainedDocuments:
    """The documents of a chunk, and which of them are trained on."""

    documents: StoredDocuments
    chosen: Chosen
    fitting: Fitting
    starts: Int64  # the first token of each document trained on
    digest: str  # of the documents trained on


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
        self.tokenized = tokenized
        self.selection = selection
        self.layout = layout
        self.seed = seed
        self.cache_dir = cache_dir
        self.max_epochs = max_epochs
        content = {
            "format": FORMAT,
            "tokens": tokenized.name,
            "plan": tokenized.plan.chunks,
            "seed": seed,
            **layout.content(),
            **selection.content(),
        }
        self.folder = cache_dir / "rows" / key_of(content)
        hold(self.folder, self)
        self._lock = threading.RLock()  # several threads may read rows
        self._opened: OrderedDict[int, PackedRows] = OrderedDict()
        self._in_use: ChunkInUse | None = None
        self._entries: dict[int, ChunkEntry] = {}
        self._near = 0  # a chunk with an entry, to search from
        self._total: Total | None = None
        self._sum: ChunkEntry | None = None  # of the chunks so far, once this process made one
        self._orders: dict[int, tuple[list[int], list[int]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes and the read-ahead thread open the files again."""
        return ChunkedRows, (
            self.tokenized,
            self.selection,
            self.layout,
            self.seed,
            self.cache_dir,
            self.max_epochs,
        )

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
        chunk = 0
        while not self.entry(chunk).rows:
            chunk += 1
        entry = self.entry(chunk)
        return entry.tokens_in_rows / (entry.rows * self.layout.sequence_length)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk was made and all are on disk."""
        return self.total is not None and self.tokenized.description is not None

    def row_at(self, turn: int, seed: str) -> tuple[PackedRows, int, int]:
        """The rows of a turn's chunk, its row number there and the epoch, in an order drawn from the seed."""
        in_use = self._in_use
        if in_use is None or turn not in in_use.turns or in_use.caller_seed != seed:
            with self._lock:
                in_use = self._in_use = self.open_chunk_of(turn, seed)
        row = shuffled(turn - in_use.turns.start, len(in_use.rows), in_use.seed)
        return in_use.rows, row, in_use.epoch

    def open_chunk_of(self, turn: int, seed: str) -> ChunkInUse:
        epoch, chunk, row = self.find(turn)
        rows = self.chunk(chunk)
        first_turn = turn - row
        is_whole = self.tokenized.plan.is_whole
        return ChunkInUse(
            turns=range(first_turn, first_turn + len(rows)),
            caller_seed=seed,
            seed=seed_of(seed, epoch) if is_whole else seed_of(seed, epoch, chunk),
            epoch=epoch,
            rows=rows,
        )

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
        if self.total is None:
            chunk = self.chunk_of(turn)
            if chunk is not None:
                return 0, chunk, turn - self.entry(chunk).first_row
        assert self.total is not None  # `chunk_of` made the last chunk
        epoch, row = divmod(turn, self.total.rows)
        if self.max_epochs is not None and turn >= self.max_epochs * self.total.rows:
            work = self.tokenized.work
            raise DataError(
                f"{work.source.path}: all rows are used up after {self.max_epochs:g} epoch(s). Lower its weight or"
                f" the budget, add documents, or raise `{work.key}.max_epochs`."
            )
        if epoch == 0:
            chunk = self.chunk_of(row)
            assert chunk is not None, turn
            return 0, chunk, row - self.entry(chunk).first_row
        chunks, first_rows = self.order(epoch)
        position = bisect_right(first_rows, row) - 1
        return epoch, chunks[position], row - first_rows[position]

    def chunk_of(self, row: int) -> int | None:
        """The chunk of a row of the first epoch, made now if it is missing; None after the last chunk."""
        if self.total is not None and self.total.rows_of is not None:
            if row >= self.total.rows:
                return None
            return bisect_right(self.total.first_rows, row) - 1
        # Step from a chunk with an entry: bisection would probe chunks not made yet.
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
            rows_of = self.total.rows_of
            if rows_of is None:
                rows_of = [self.entry(chunk).rows for chunk in range(self.total.chunks)]
            first_rows = accumulate((rows_of[chunk] for chunk in chunks[:-1]), initial=0)
            self._orders = {epoch: (chunks, list(first_rows))}
        return self._orders[epoch]

    def chunks_from(self, turn: int) -> list[int]:
        """The chunk of a turn and those after it in its epoch, in training order."""
        epoch, chunk, _ = self.find(turn)
        if epoch == 0:
            return list(range(chunk, len(self.tokenized.plan.chunks)))
        chunks, _ = self.order(epoch)
        return chunks[chunks.index(chunk) :]

    @property
    def total(self) -> Total | None:
        """The totals of one epoch; None until its last chunk is made, or if their file is damaged."""
        if self._total is None:
            file = self.folder / "total.json"
            content = read_sealed(file)
            if content is None:
                with suppress(OSError):
                    file.unlink()  # otherwise every read would report the damage
                return None
            if content["everything"] is not None:
                content["everything"] = entry_of(content["everything"])
            self._total = Total(**content)
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
        has_entry_before = chunk == 0 or self.entry_file(chunk - 1).exists()
        if self.total is None and self.is_last(chunk, entry) and has_entry_before:
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

    def sum_so_far(self) -> tuple[ChunkEntry, int]:
        """The sum of the entries from the first chunk to the first gap, and the number of these chunks."""
        if self.total is not None and self.total.everything is not None:
            return self.total.everything, self.total.chunks
        entries: list[ChunkEntry] = []
        entry = self.known_entry(0)
        while entry is not None:
            entries.append(entry)
            entry = self.known_entry(len(entries))
        return sum_entries(entries), len(entries)

    def state(self, turn: int) -> dict[str, Any]:
        """The chunk of a turn and its entry, for a checkpoint; enough to resume with an empty store."""
        try:
            _, chunk, _ = self.find(turn)
        except (CptError, OSError):
            # A transform or a disk failed: the run ends, and is saved without this chunk.
            chunk = self._near
            while self.known_entry(chunk + 1) is not None:
                chunk += 1
        return {"chunk": chunk, "entry": asdict(self.entry(chunk))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write the entry of a checkpoint's chunk to an empty store; raises DataError if the documents changed."""
        chunk = int(state["chunk"])
        content = state["entry"]
        entry = self.known_entry(chunk)
        if entry is None:
            write_once(self.entry_file(chunk), sealed(content))
        elif entry.digest != content["digest"]:
            raise DataError(other_documents(self.tokenized))
        restored = entry_of(content)
        if self.total is None and self.is_last(chunk, restored):
            # Without a total, rows of later epochs would be sought in the first one.
            write_total(self.folder, chunk, [restored])
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
        entry = self.known_entry(chunk)
        if entry is None:
            self.append(chunk)
        else:
            self.repair(chunk, entry)

    def repair(self, chunk: int, entry: ChunkEntry) -> None:
        """Pack a chunk again, whose files were damaged or removed."""
        trained = self.trained_documents(chunk, entry.tokens_before)
        if trained.digest != entry.own_digest:
            raise DataError(other_documents(self.tokenized))
        self.pack(chunk, trained)

    def append(self, chunk: int) -> None:
        """Pack a new chunk, and write its entry."""
        previous = self.entry(chunk - 1) if chunk else START
        tokens_before = previous.tokens_before + previous.tokens
        trained = self.trained_documents(chunk, tokens_before)
        packed = self.pack(chunk, trained)
        chosen = trained.chosen
        fitting = trained.fitting
        shards = [part.description for part in trained.documents.parts]
        dropped = [shard.dropped for shard in shards]
        longest_documents = [shard.longest for shard in shards]
        entry = ChunkEntry(
            first_row=previous.end,
            rows=0 if packed is None else len(packed),
            tokens_before=tokens_before,
            tokens=int(fitting.tokens.sum()),
            tokens_in_rows=0 if packed is None else packed.num_tokens,
            positions=0 if packed is None else self.layout.num_positions(packed.packing),
            documents=len(trained.starts),
            held_out=chosen.held_out,
            left_out=add_counts([*dropped, chosen.left_out, fitting.left_out]),
            bad_rows=add_counts(shard.bad_rows for shard in shards),
            lengths=by_power_of_two(fitting.tokens),
            longest=max(longest_documents, key=itemgetter(1), default=("", 0)),
            own_digest=trained.digest,
            digest=key_of({"before": previous.digest, "own": trained.digest}),
            text=text_bytes(trained),
        )
        self.write_entry(chunk, entry)

    def trained_documents(self, chunk: int, tokens_before: int) -> TrainedDocuments:
        shards = self.tokenized.plan.chunks[chunk]
        documents = self.tokenized.documents(shards)
        for part in documents.parts:
            part.sync()
        chosen = self.selection.choose(documents, shards, tokens_before)
        fitting = select_fitting(
            documents, chosen.documents, self.layout.form, self.layout.sequence_length
        )
        starts = documents.offsets[fitting.numbers]
        starts_digest = xxh3_128_hexdigest(starts.tobytes())
        digest = key_of({"documents": documents.digest, "starts": starts_digest})
        return TrainedDocuments(documents, chosen, fitting, starts, digest)

    def pack(self, chunk: int, trained: TrainedDocuments) -> PackedRows | None:
        """Write the rows of a chunk, and open them; None if no document is trained on."""
        if not len(trained.starts):
            return None
        packer = self.layout.packer(trained.starts, trained.fitting.lengths, self.seed)
        folder = publish_derived(self.chunk_folder(chunk), packer)
        return self.layout.open(trained.documents, folder)

    def write_entry(self, chunk: int, entry: ChunkEntry) -> None:
        """Write the entry of a chunk, and the totals after the last one; raises DataError for an unusable chunk."""
        is_last = self.is_last(chunk, entry)
        if self.total is None:
            sum_before = self._sum
            if sum_before is None:
                sum_before, _ = self.sum_so_far()
            self._sum = sum_entries([sum_before, entry])
            refuse_bad_chunks(self.tokenized, self._sum, chunk)
            if is_last and not entry.end:
                raise DataError(nothing_to_train_on(self.tokenized, self._sum))
        elif self.total.rows_of is not None and self.total.rows_of[chunk] != entry.rows:
            raise DataError(other_documents(self.tokenized))  # the file of the entry was lost
        self._entries[chunk] = entry
        write_once(self.entry_file(chunk), sealed(asdict(entry)))
        if is_last and self.total is None:
            entries = map(self.known_entry, range(chunk + 1))
            write_total(self.folder, chunk, [entry for entry in entries if entry is not None])

    def chunk_folder(self, chunk: int) -> Path:
        return self.folder / f"{chunk:06}"


def shuffled(index: int, size: int, seed: int) -> int:
    """The position of `index` in a permutation of `size` rows drawn from the seed; a large one is not stored."""
    if size < SMALL:
        return int(permutation(size, seed)[index])
    return index_shuffle()(index, max_index=size - 1, seed=seed, rounds=4)


@lru_cache(maxsize=64)
def permutation(size: int, seed: int) -> Int64:
    return np.random.default_rng(seed).permutation(size)


@cache
def index_shuffle() -> Callable[..., int]:
    from absl import logging

    logging.set_verbosity(logging.ERROR)  # importing grain warns if jax is missing
    from grain.experimental import index_shuffle

    return index_shuffle


def text_bytes(trained: TrainedDocuments) -> TextBytes | None:
    """The bytes of a chunk's texts, by what became of them; None if an earlier version stored its tokens."""
    documents = trained.documents
    chosen = trained.chosen
    dropped_bytes = Counter[str]()
    for part in documents.parts:
        if part.description.dropped_bytes is None:
            return None
        dropped_bytes.update(part.description.dropped_bytes)
    dropped_bytes.update(chosen.left_out_bytes)
    sizes = documents.num_bytes
    trained_bytes = int(sizes[trained.fitting.numbers].sum())
    for reason in trained.fitting.left_out:  # at most one
        dropped_bytes[reason] += int(sizes[chosen.documents].sum()) - trained_bytes
    return TextBytes(trained_bytes, chosen.held_out_bytes, dict(dropped_bytes))


def refuse_bad_chunks(tokenized: TokenizedSource, so_far: ChunkEntry, chunk: int) -> None:
    """Stop if the chunks so far (`so_far` is their sum) have more bad rows than the recipe allows."""
    plan = tokenized.plan
    bad = sum(so_far.bad_rows.values())
    if plan.is_whole or not bad:
        return
    rows = bad + so_far.documents + so_far.held_out + sum(so_far.left_out.values())
    if bad > tokenized.max_bad_share * rows * plan.scale_from(chunk + 1):
        raise DataError(
            f"{tokenized.work.source.path}: {bad:,} of the first {rows:,} rows are bad, more than"
            f" `data.max_bad_share` ({tokenized.max_bad_share:.2%}) allows. List them: cpt data check."
            f" Fix the files ({tokenized.work.key}.path), or raise the share."
        )


def nothing_to_train_on(tokenized: TokenizedSource, so_far: ChunkEntry) -> str:
    counts = {"kept for evaluation": so_far.held_out, **so_far.left_out}
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in counts.items() if count)
    key = tokenized.work.key
    return (
        f"{tokenized.work.source.path}: no document is left to train on ({reasons}). Add some (`{key}.path`), hold"
        " less out (`evaluation.held_out_share`, `evaluation.perplexity`), or set a higher `data.sequence_length` or"
        f" `{key}.max_tokens`."
    )


def other_documents(tokenized: TokenizedSource) -> str:
    return (
        f"{tokenized.work.source.path}: the documents differ from those at the start of the run, so it cannot"
        f" continue. Restore the files ({tokenized.work.key}.path), or start a new run: another `name`."
    )
