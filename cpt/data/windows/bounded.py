"""What a bounded disk has room for: some windows of each large source, and nothing that needs all of one before the
first row."""

from collections.abc import Sequence

from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import RecipeError
from cpt.recipe.schema import Budget, Data

WINDOWS_ON_DISK = 4  # of each source: read, made next, kept for slower readers, and a rest


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
    data: Data, budget: Budget | None, sources: Sequence[TokenizedSource], *, needs_all: bool
) -> None:
    """Check that `data.disk_bytes` holds some windows of each source, and that nothing needs all of one.

    Raises:
        RecipeError: with what to change.
    """
    large = [source for source in sources if source.plan.is_streamed]
    if data.disk_bytes is None or not large:
        return
    if needs_all and not all(is_ready(data, source) for source in large):
        reason = why_all(data, budget)
        what = f"`{reason}` needs" if reason else "preparing needs"
        raise RecipeError(f"`data.disk_bytes`: {what} the whole of each source on the disk. Remove one of the two.")
    least = WINDOWS_ON_DISK * len(large) * data.window_bytes
    if data.disk_bytes < least:
        raise RecipeError(
            f"`data.disk_bytes` is {data.disk_bytes:,}, but {len(large)} source(s) in windows of"
            f" {data.window_bytes:,} bytes need {least:,}. Raise it, or lower `data.window_bytes`."
        )
