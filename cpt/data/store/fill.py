"""Make many shards of many sources at once, on all cores, and show how far it is."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cpt.console import open_console
from cpt.data.parallel import map_in_order, num_workers
from cpt.data.plan import Shard
from cpt.data.store.shards import ShardWork
from cpt.data.store.tokenized import TokenizedSource
from cpt.ranks import is_main_process
from cpt.recipe.sense_data import reported_name

POOL_BYTES = 32 * 2**20  # of files; below, starting processes takes longer than the work
WORKERS_IMPORT = ("cpt.data.store.shards", "gigatoken")

Wanted = tuple[TokenizedSource, int]  # a shard of a source


@dataclass(frozen=True)
class ShardMaker:
    """Makes shards of any of some sources; travels to worker processes."""

    works: dict[str, ShardWork]

    def __call__(self, task: tuple[str, Shard, str]) -> None:
        """Make a shard of a source, in a folder of its own."""
        source, shard, name = task
        self.works[source](shard, name)


def make_shards(wanted: Sequence[Wanted], workers: int | None = None) -> None:
    """Make those of the shards that are not there yet.

    Args:
        workers: processes that share the work; 0 for none but this one. By default CPT_WORKERS or the number of cores,
            where there is enough to do. What is stored does not depend on it.

    Raises:
        DataError: a row is bad, or a file cannot be read.
        RecipeError: a filter or transform fails.
        ResourceError: the store cannot be written, or a worker died.
    """
    missing = [(source, number) for source, number in dict.fromkeys(wanted) if source.missing([number])]
    if workers is None:
        size = sum(source.plan.num_bytes[number] for source, number in missing)
        workers = num_workers() if size >= POOL_BYTES and len(missing) > 1 else 0
    workers = min(workers, len(missing))
    sizes = {source: 0 for source, _ in missing}
    for source, number in missing:
        sizes[source] += source.plan.num_bytes[number]
    with progress_bars(sizes) as (progress, tasks):
        for source, number in made(missing, workers, list(sizes)):
            progress.advance(tasks[source], source.plan.num_bytes[number])


def made(wanted: Iterable[Wanted], workers: int, sources: Sequence[TokenizedSource]) -> Generator[Wanted, None, None]:
    """Each of the shards, in order, once it is there.

    Args:
        wanted: asked for the next one whenever a worker has nothing to do.
        sources: whose shards these are.
    """
    taken: list[Wanted] = []

    def tasks() -> Iterator[tuple[str, Shard, str]]:
        for source, number in wanted:
            taken.append((source, number))
            yield source.name, source.plan.shards[number], source.shard_folder(number).name

    def prepare() -> ShardMaker:
        return ShardMaker({source.name: source.proven_work for source in sources})

    for _ in map_in_order(prepare, tasks(), workers, WORKERS_IMPORT):
        source, number = taken.pop(0)
        source.check_files(number)
        yield source, number


@contextmanager
def progress_bars(sizes: dict[TokenizedSource, int]) -> Iterator[tuple[Progress, dict[TokenizedSource, TaskID]]]:
    """How far it is, on the terminal of the main process only.

    Args:
        sizes: bytes of each source's files.
    """
    columns: list[Any] = [
        TextColumn("tokenising {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    console = open_console(stderr=True)
    hidden = not (is_main_process() and console.is_interactive)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield (
            progress,
            {
                source: progress.add_task(reported_name(source.work.source), total=size or None)
                for source, size in sizes.items()
            },
        )
