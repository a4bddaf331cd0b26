"""A source's tokens: a folder of shards. The process that needs a shard first makes it; others reuse it."""

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
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
}
NEUTRAL |= {"replay_kl"}


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
        self.work, self.plan, self.stored = work, plan, stored
        self.states = with_absolute_names(stored.files)
        self.max_bad_share = max_bad_share
        self.passed_over = dict(
            passed_over or {}
        )  # files of the folder that are not read, by reason
        self.folder = work.folder
        self._state_of = states_of_files(stored.files)
        hold(self.folder, self)
        self._description: SourceDescription | None = None
        self._verified = set[
            tuple[int, int]
        ]()  # (shard, modification time) of shards verified by this process

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
        folder, is_made_again = self.shard_folder(number), False
        for _ in range(TRIES):
            with suppress(DataError):
                files = TokenFiles(folder)
                if not self.work.accepts(files.description):
                    rmtree(folder, ignore_errors=True)
                elif not verified or (number, files.written) in self._verified or files.is_intact():
                    break
            shard = self.plan.shards[number]
            self.proven_work(shard, folder.name, self.stored.at_other_place(shard))
            self.check_files(number)
            is_made_again = True
        else:
            raise DataError(
                f"{folder}: data written there reads back differently. Check the disk, or set CPT_CACHE to another"
                " disk."
            )
        digest = files.description.digest
        if (
            is_made_again
            and self.description is not None
            and self.digests.get(folder.name, digest) != digest
        ):
            rmtree(folder, ignore_errors=True)
            raise DataError(
                f"{self.work.source.path}: damaged stored tokens were rebuilt, but differ from those before."
                f" Libraries or your code for `{self.work.key}` have changed since. Restore them, or delete"
                f" {self.folder} and start a new run: another `name`."
            )
        if verified:
            self._verified.add((number, files.written))
        return files

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
            try:
                found = read_description(self.folder)
                names = [
                    self.shard_folder(number).name for number in (0, len(self.plan.shards) - 1)
                ]
                is_cut_so = len(found.shards) == len(self.plan.shards) and all(
                    name in found.shards for name in names
                )
                if found.name == self.name and is_cut_so and self.work.accepts(found):
                    self._description = replace(found, shards={})
            except FileNotFoundError:
                pass
            except (
                DataError,
                OSError,
                ValueError,
                TypeError,
            ):  # damaged: the folder's name is that of this version
                report_damage(self.folder / DESCRIPTION)
                with suppress(OSError):
                    (
                        self.folder / DESCRIPTION
                    ).unlink()  # otherwise every read would report the damage
        return self._description

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
        bad = sum(description.bad_rows.values())
        good, path = (
            description.documents + sum(description.dropped.values()),
            self.work.source.path,
        )
        refuse_too_many(
            bad, good, self.max_bad_share, path, self.work.key, listed_rows(self.folder)
        )
        return description

    def describe(self) -> SourceDescription:
        source, key = self.work.source, self.work.key
        dropped, bad_rows, bad = Counter[str](), Counter[str](), list[Listed]()
        longest, engines = ("", 0), dict[str, None]()
        documents, tokens, texts, shards = 0, 0, "", dict[str, str]()
        for number in self.plan.numbers:
            part = self.shard(number).description
            documents, tokens, texts = documents + part.documents, tokens + part.tokens, part.texts
            dropped.update(part.dropped)
            bad_rows.update(part.bad_rows)
            longest = max(longest, part.longest, key=lambda place: place[1])
            bad += listed_rows(self.shard_folder(number))
            engines[part.engine] = None
            shards[self.shard_folder(number).name] = part.digest
        if not documents:
            raise nothing_kept(source, key, dropped)
        if signatures_of(files_of(source, key)) != self.stored.signatures:
            raise changed(self.work)
        write_bad_rows(bad, self.folder)
        files = contents_of(self.states) or {f"{source.path}@{source.revision or 'main'}": texts}
        engine = ", ".join(filter(None, engines))
        made_from = {"source": source.path, "tokenizer": self.work.encoder.name, "engine": engine}
        counts = documents, tokens, shards, dict(dropped), dict(bad_rows)
        description = SourceDescription(self.name, *counts, longest, files, made_from)
        write_once(self.folder / DESCRIPTION, as_text(description))
        for lock in self.folder.glob("*.lock"):  # only needed while making shards
            lock.unlink(missing_ok=True)
        for left in self.folder.glob("*.unfinished"):
            rmtree(left, ignore_errors=True)
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
    described = source.model_dump(exclude=NEUTRAL)
    if isinstance(source, Source):
        described["order_by"] = (
            None  # like `order`, a key that is gone: stores of earlier versions keep their names
        )
    return {
        "format": FORMAT,
        "path": absolute(source.path) if kind in ("local", "url") else source.path,
        "code": module_text("source", source.path) if kind == "function" else None,
        "source": described,
        "order": None,
        **sieve.code(),
    }


WORKERS_IMPORT = ("cpt.data.store.shards", "gigatoken")

SourceShard = tuple[TokenizedSource, int]  # a shard of a source
Task = tuple[
    str, Shard, str, OtherPlace | None
]  # name of the source, and the arguments of its work


def make_shards(wanted: Sequence[SourceShard]) -> None:
    """Make the missing ones of these shards.

    CPT_WORKERS or all cores share the work, if there is enough of it.
    """
    missing = [
        (source, number) for source, number in dict.fromkeys(wanted) if source.missing([number])
    ]
    sizes = Counter[TokenizedSource]()
    for source, number in missing:
        sizes[source] += source.plan.num_bytes[number]
    workers = workers_for(sizes.total(), len(missing))
    console = open_console(stderr=True)
    hidden = not (is_main_process() and console.is_interactive)
    with Progress(console=console, transient=True, disable=hidden) as progress:
        bars = {
            source: progress.add_task(
                f"tokenising {reported_name(source.work.source)}", total=size or None
            )
            for source, size in sizes.items()
        }
        for source, number in make_in_order(missing, min(workers, len(missing)), list(sizes)):
            progress.advance(bars[source], source.plan.num_bytes[number])


def make_in_order(
    wanted: Iterable[SourceShard], workers: int, sources: Sequence[TokenizedSource]
) -> Generator[SourceShard, None, None]:
    taken: list[SourceShard] = []

    def tasks() -> Iterator[Task]:
        for source, number in wanted:
            taken.append((source, number))
            shard = source.plan.shards[number]
            folder, there = source.shard_folder(number), source.stored.at_other_place(shard)
            yield source.name, shard, folder.name, there

    def prepare() -> Callable[[Task], None]:
        return partial(make_shard, {source.name: source.proven_work for source in sources})

    for _ in map_in_order(prepare, tasks(), workers, WORKERS_IMPORT):
        source, number = taken.pop(0)
        source.check_files(number)
        yield source, number


def make_shard(works: dict[str, ShardWork], task: Task) -> None:
    source, shard, name, other_place = task
    works[source](shard, name, other_place)
