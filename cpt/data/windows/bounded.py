"""What a bounded disk has room for: some windows of each large source, and nothing that needs all of one before the
first row."""

from collections.abc import Sequence

from cpt.data.store.cache_limit import VARIABLE, cache_limit
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import RecipeError, ResourceError
from cpt.recipe.schema import Budget, Data

WINDOWS_ON_DISK = 4  # of each source: read, made next, kept for slower readers, and a rest


def disk_limit(data: Data, sources: Sequence[TokenizedSource]) -> int | None:
    """Bytes that large sources may take on this machine's disk: as the recipe says, and what a bucket has, as
    $CPT_CACHE_LIMIT says."""
    limit = cache_limit() if any(source.is_kept for source in sources) else None
    given = [number for number in (data.disk_bytes, limit) if number is not None]
    return min(given, default=None)


def why_all(data: Data, budget: Budget | None) -> str | None:
    """The key that needs the whole of every source before the first row."""
    if data.deduplicate is not None:
        return "data.deduplicate"
    if data.temperature is not None:
        return "data.temperature"
    return "budget.epochs" if budget is not None and budget.epochs is not None else None


def is_ready(data: Data, source: TokenizedSource) -> bool:
    """Whether a bucket knows of a source all that is needed before the first row, so that its windows are fetched one
    by one."""
    return source.is_kept and source.plan.is_streamed and data.deduplicate is None


def refuse_small_disk(
    data: Data, budget: Budget | None, sources: Sequence[TokenizedSource], limit: int | None, *, needs_all: bool
) -> None:
    """A bounded disk needs room for some windows, and has none for all of a source.

    Raises:
        RecipeError, ResourceError: with what to change.
    """
    large = [source for source in sources if source.plan.is_streamed]
    if limit is None or not large:
        return
    bound = "`data.disk_bytes`" if limit == data.disk_bytes else VARIABLE
    error = RecipeError if limit == data.disk_bytes else ResourceError
    if needs_all and not all(is_ready(data, source) for source in large):
        reason = why_all(data, budget)
        what = f"`{reason}` needs" if reason else "preparing needs"
        raise error(f"{bound}: {what} the whole of each source on the disk. Leave one of the two out.")
    least = WINDOWS_ON_DISK * len(large) * data.window_bytes
    if limit < least:
        raise error(
            f"{bound} is {limit:,}, but {len(large)} source(s), read in windows of {data.window_bytes:,} bytes, need"
            f" {least:,}. Raise it, or lower `data.window_bytes`."
        )
