"""A source's tokens: a folder of shards. The process that needs a shard first makes it; others reuse it."""

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from shutil import rmtree
from typing import Any

from rich.progress import Progress

from cpt.cache import hold, key_of, write_once
from cpt.data.readers.documents import FILE_NAME, Listed, refuse_too_many, write_bad_rows
from cpt.data.readers.filters import Sieve, module_text
from cpt.data.readers.opening import is_url
from cpt.data.readers.sources import absolute, contents_of, files_of, kind_of, with_absolute_names
from cpt.data.store.file_states import (
    OtherPlace,
    StoredFiles,
    shard_name,
    signatures_of,
    states_of_files,
)
from cpt.data.store.parallel import map_in_order, workers_for
from cpt.data.store.shards import Plan, Shard, ShardWork, sample
from cpt.data.store.token_files import (
    DESCRIPTION,
    FORMAT,
    SourceDescription,
    StoredDocuments,
    TokenFiles,
    as_text,
    read_description,
)
from cpt.distributed import is_main_process
from cpt.errors import DataError
from cpt.files import json_lines, report_damage, signature_of
from cpt.formatting import open_console
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource, Source

FEW = 100  # above this, listing the folder is faster than a query per shard
TRIES = 2  # attempts to read an intact shard; it is made again after each
PROOF_BYTES = 2**20  # below this, verifying gigatoken takes longer than it saves
# These keys change how documents are used, but not their tokens.
NEUTRAL = {
    "path",
    "name",
    "weight",
    "filters",
    "transforms",
    "licence",
    "max_tokens",
    "max_epochs",
    "streaming",
    "replay_kl",
}


class TokenizedSource:
    """The shards of a source, by number.

    Any process may read a shard. The process that first requests a missing one makes it, while others wait.
    `stored`: the files when the plan was made.
    """

    def __init__(
        self,
        work: ShardWork,
        plan: Plan,
        stored: StoredFiles,
        max_bad_share: float,
        passed_over: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.work = work
        self.plan = plan
        self.stored = stored
        self.states = with_absolute_names(stored.files)
        self.max_bad_share = max_bad_share
        # files of the folder that are not read, by reason
        self.passed_over = dict(passed_over or {})
        self.folder = work.folder
        self._state_of = states_of_files(stored.files)
        hold(self.folder, self)
        self._description: SourceDescription | None = None
        # (shard, modification time) of shards verified by this process
        self._verified: set[tuple[int, int]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenizedSource, (self.work, self.plan, self.stored, self.max_bad_share)

    @cached_property
    def name(self) -> str:
        """A hash of everything that decides the tokens: the processing (the folder's name) and the files."""
        return key_of({"folder": self.folder.name, "files": self.states})

    def shard_folder(self, number: int) -> Path:
        return self.folder / shard_name(self.plan.shards[number], self._state_of)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """The shards among these that are not on this disk; none if the source is complete."""
        if self.description is not None:
            return []
        if len(numbers) < FEW:
            return [number for number in numbers if not self.shard_folder(number).exists()]
        present = set(os.listdir(self.folder))
        return [number for number in numbers if self.shard_folder(number).name not in present]

    def shard(self, number: int, *, verified: bool = False) -> TokenFiles:
        """A shard; it is made now if it is missing.

        `verified`: compare it with its digest, once per process, and make a damaged shard again.
        """
        folder = self.shard_folder(number)
        files = self.stored_files(number, folder, verified=verified)
        is_made_now = files is None
        tries = 0
        while files is None:
            if tries == TRIES:
                raise DataError(
                    f"{folder}: data written there reads back differently. Check the disk, or set CPT_CACHE to another"
                    " disk."
                )
            tries += 1
            shard = self.plan.shards[number]
            self.proven_work(shard, folder.name, self.stored.at_other_place(shard))
            self.check_files(number)
            files = self.stored_files(number, folder, verified=verified)
        if is_made_now:
            self.refuse_other_digest(folder, files.description.digest)
        if verified:
            self._verified.add((number, files.written))
        return files

    def stored_files(self, number: int, folder: Path, *, verified: bool) -> TokenFiles | None:
        """A shard's stored files; None if they are missing, made in another way, or (`verified`) damaged."""
        with suppress(DataError):
            files = TokenFiles(folder)
            if not self.work.accepts(files.description):
                rmtree(folder, ignore_errors=True)
                return None
            if not verified or (number, files.written) in self._verified or files.is_intact():
                return files
        return None

    def refuse_other_digest(self, folder: Path, digest: str) -> None:
        """Reject a shard that was made again and differs from the one that the source was described with."""
        if self.description is None or self.digests.get(folder.name, digest) == digest:
            return
        rmtree(folder, ignore_errors=True)
        raise DataError(
            f"{self.work.source.path}: damaged stored tokens were rebuilt, but differ from those before."
            f" Libraries or your code for `{self.work.key}` have changed since. Restore them, or delete"
            f" {self.folder} and start a new run: another `name`."
        )

    def documents(self, numbers: Sequence[int], *, verified: bool = True) -> StoredDocuments:
        return StoredDocuments([self.shard(number, verified=verified) for number in numbers])

    @cached_property
    def proven_work(self) -> ShardWork:
        """The work with the fastest encoder that gives the same ids; a small source does not need the check."""
        if not self.states:
            return replace(self.work, prove_on_the_way=True)
        if sum(self.plan.num_bytes) < PROOF_BYTES:
            return self.work
        texts = sample(self.work.source, self.plan.shards, self.work.key)
        return replace(self.work, encoder=self.work.encoder.proven_for(texts))

    def check_files(self, number: int) -> None:
        """Reject a shard whose files changed since the plan was made."""
        for path in {piece.path for piece in self.plan.shards[number]}:
            if is_url(path) or path not in self._state_of:
                continue  # it would need a request each time
            if signature_of(path) != self.stored.signatures[path]:
                rmtree(self.shard_folder(number), ignore_errors=True)
                raise changed(self.work)

    @property
    def description(self) -> SourceDescription | None:
        """The description of the whole source, once all shards exist, without their list, which may be very long."""
        if self._description is None:
            file = self.folder / DESCRIPTION
            try:
                description = read_description(self.folder)
                if self.is_described_by(description):
                    self._description = replace(description, shards={})
            except FileNotFoundError:
                pass
            except (DataError, OSError, ValueError, TypeError):
                report_damage(file)  # the folder's name is that of this version
                with suppress(OSError):
                    file.unlink()  # otherwise every read would report the damage
        return self._description

    def is_described_by(self, description: SourceDescription) -> bool:
        """Whether a description is of these files, cut into these shards, and acceptable to this run."""
        if len(description.shards) != len(self.plan.shards) or description.name != self.name:
            return False
        for number in (0, len(self.plan.shards) - 1):
            if self.shard_folder(number).name not in description.shards:
                return False
        return self.work.accepts(description)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Shard -> digest; empty if another process has removed shards since."""
        try:
            return read_description(self.folder).shards
        except FileNotFoundError:
            return {}

    def finish(self) -> SourceDescription:
        """Write the description of the source, all of whose shards exist."""
        description = self.description or self.describe()
        refuse_too_many(
            num_bad=sum(description.bad_rows.values()),
            num_good=description.documents + sum(description.dropped.values()),
            max_share=self.max_bad_share,
            path=self.work.source.path,
            key=self.work.key,
            listed=listed_rows(self.folder),
        )
        return description

    def describe(self) -> SourceDescription:
        source = self.work.source
        key = self.work.key
        digests: dict[str, str] = {}  # by the name of the shard's folder
        engines: dict[str, None] = {}  # in order, each once
        bad_rows: list[Listed] = []
        dropped = Counter[str]()
        num_bad_rows = Counter[str]()
        longest = ("", 0)
        num_documents = 0
        num_tokens = 0
        for number in self.plan.numbers:
            folder = self.shard_folder(number)
            shard = self.shard(number).description
            digests[folder.name] = shard.digest
            engines[shard.engine] = None
            bad_rows += listed_rows(folder)
            dropped.update(shard.dropped)
            num_bad_rows.update(shard.bad_rows)
            longest = max(longest, shard.longest, key=itemgetter(1))
            num_documents += shard.documents
            num_tokens += shard.tokens
        if not num_documents:
            raise nothing_kept(source, key, dropped)
        if signatures_of(files_of(source, key)) != self.stored.signatures:
            raise changed(self.work)
        write_bad_rows(bad_rows, self.folder)
        files = contents_of(self.states)
        if not files:  # a stream of rows is one shard
            files = {f"{source.path}@{source.revision or 'main'}": shard.texts}
        description = SourceDescription(
            name=self.name,
            documents=num_documents,
            tokens=num_tokens,
            shards=digests,
            dropped=dict(dropped),
            bad_rows=dict(num_bad_rows),
            longest=longest,
            files=files,
            made_from={
                "source": source.path,
                "tokenizer": self.work.encoder.name,
                "engine": ", ".join(filter(None, engines)),
            },
        )
        write_once(self.folder / DESCRIPTION, as_text(description))
        for lock in self.folder.glob("*.lock"):  # only needed while making shards
            lock.unlink(missing_ok=True)
        for unfinished in self.folder.glob("*.unfinished"):
            rmtree(unfinished, ignore_errors=True)
        return description


def nothing_kept(source: DocumentSource, key: str, dropped: Counter[str]) -> DataError:
    if not dropped:
        return DataError(f"{source.path}: no documents. Set `{key}.path`.")
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
    return DataError(
        f"{source.path}: all {dropped.total():,} documents were dropped ({reasons}). Loosen `data.filters` or"
        f" `{key}.filters`, or set another `{key}.path`."
    )


def listed_rows(folder: Path) -> list[Listed]:
    """The bad rows of a source or shard; without bad rows there is no file."""
    path = folder / FILE_NAME
    return [row for row in json_lines(path) if row is not None] if path.exists() else []


def changed(work: ShardWork) -> DataError:
    return DataError(
        f"{work.source.path}: files changed while they were being read. Run it again when they are complete"
        f" ({work.key}.path)."
    )


def reading_content(source: DocumentSource, sieve: Sieve) -> dict[str, Any]:
    """Everything that decides the tokens, except the files and the tokenizer; workers and gigatoken do not."""
    kind = kind_of(source.path)
    keys = source.model_dump(exclude=NEUTRAL)
    # `order_by` and `order` are gone: with them, stores of earlier versions keep their names.
    if isinstance(source, Source):
        keys["order_by"] = None
    return {
        "format": FORMAT,
        "path": absolute(source.path) if kind in ("local", "url") else source.path,
        "code": module_text("source", source.path) if kind == "function" else None,
        "source": keys,
        "order": None,
        **sieve.code(),
    }


WORKERS_IMPORT = ("cpt.data.store.shards", "gigatoken")

SourceShard = tuple[TokenizedSource, int]  # a shard of a source


@dataclass(frozen=True)
class ShardTask:
    """The work on one shard, for a worker process."""

    source_name: str
    shard: Shard
    folder_name: str
    other_place: OtherPlace | None


def make_shards(shards: Sequence[SourceShard]) -> None:
    """Make the missing ones of these shards.

    CPT_WORKERS or all cores share the work, if there is enough of it.
    """
    missing = []
    for source, number in dict.fromkeys(shards):
        if source.missing([number]):
            missing.append((source, number))
    sizes = Counter[TokenizedSource]()
    for source, number in missing:
        sizes[source] += source.plan.num_bytes[number]
    workers = min(workers_for(sizes.total(), len(missing)), len(missing))
    console = open_console(stderr=True)
    is_hidden = not (is_main_process() and console.is_interactive)
    with Progress(console=console, transient=True, disable=is_hidden) as progress:
        bars = {}
        for source, size in sizes.items():
            name = reported_name(source.work.source)
            bars[source] = progress.add_task(f"tokenising {name}", total=size or None)
        for source, number in make_in_order(missing, workers, list(sizes)):
            progress.advance(bars[source], source.plan.num_bytes[number])


def make_in_order(
    shards: Iterable[SourceShard], workers: int, sources: Sequence[TokenizedSource]
) -> Generator[SourceShard, None, None]:
    """Make shards of these sources; yields each when it is made, in the given order."""
    in_progress: deque[SourceShard] = deque()

    def tasks() -> Iterator[ShardTask]:
        for source, number in shards:
            in_progress.append((source, number))
            shard = source.plan.shards[number]
            yield ShardTask(
                source_name=source.name,
                shard=shard,
                folder_name=source.shard_folder(number).name,
                other_place=source.stored.at_other_place(shard),
            )

    def prepare() -> Callable[[ShardTask], None]:
        return partial(make_shard, {source.name: source.proven_work for source in sources})

    for _ in map_in_order(prepare, tasks(), workers, WORKERS_IMPORT):
        source, number = in_progress.popleft()
        source.check_files(number)
        yield source, number


def make_shard(works: dict[str, ShardWork], task: ShardTask) -> None:
    works[task.source_name](task.shard, task.folder_name, task.other_place)
