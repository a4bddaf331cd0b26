"""What to say of a source that turns out bad, changed, empty or used up while it is read window by window."""

from cpt.data.examples.segments import LONG_PROMPT, NOTHING_LEARNED
from cpt.data.store.tokenized import TokenizedSource
from cpt.data.windows.entry import WindowEntry
from cpt.errors import DataError


def refuse_bad_windows(tokenized: TokenizedSource, known: WindowEntry, window: int) -> None:
    """Stop where more rows of the windows so far are bad than the recipe allows for as many as the whole source is
    estimated to have.

    Args:
        known: the sum of what is known of them.

    Raises:
        DataError: with what to do.
    """
    plan, bad = tokenized.plan, sum(known.bad_rows.values())
    if plan.is_whole or not bad:
        return
    rows = bad + known.documents + known.held_out + sum(known.left_out.values())
    read = plan.bytes_upto[window + 1]
    if bad > tokenized.max_bad_share * rows * sum(plan.num_bytes) / max(1, read):
        source, key = tokenized.work.source, tokenized.work.key
        raise DataError(
            f"{source.path}: {bad:,} of the first {rows:,} rows are bad, more than `data.max_bad_share`"
            f" ({tokenized.max_bad_share:.2%}) allows for all of it. Look at them: cpt data check. Fix the files"
            f" ({key}.path), or raise the share."
        )


def all_held_out(tokenized: TokenizedSource, entry: WindowEntry) -> str:
    """Why nothing of a source is left to train on."""
    if long := {
        reason: entry.left_out[reason] for reason in (NOTHING_LEARNED, LONG_PROMPT) if entry.left_out.get(reason)
    }:
        told = ", ".join(f"{count:,}: {reason}" for reason, count in long.items())
        return (
            f"{tokenized.work.source.path}: none of its examples is left to train on ({told}; {entry.held_out:,} are"
            " kept for evaluation). Set a higher `data.sequence_length`, or bring shorter examples."
        )
    if not entry.held_out:
        return (
            f"{tokenized.work.source.path}: `{tokenized.work.key}.max_tokens` is less than its first document has:"
            " none is left to train on. Set it higher."
        )
    return (
        f"{tokenized.work.source.path}: all {entry.held_out:,} documents are kept for evaluation, none is left to"
        f" train on. Set `{tokenized.work.key}.path` to more documents, a smaller `evaluation.held_out_share`, other"
        " files in `evaluation.perplexity`."
    )


def other_documents(tokenized: TokenizedSource) -> str:
    """What to say where a window is not what it was."""
    return (
        f"{tokenized.work.source.path}: its documents are not those that the run began with, so it cannot go on as it"
        f" would have. Bring the files back ({tokenized.work.key}.path), or begin a new run: another `name`."
    )


def used_up(tokenized: TokenizedSource, max_epochs: float) -> str:
    """What to say where a source may not be repeated (again)."""
    return (
        f"{tokenized.work.source.path}: used up after {max_epochs:g} time(s) through it. Lower its weight or the"
        f" budget, add documents, set `data.when_exhausted: wrap` or a higher `{tokenized.work.key}.max_epochs`."
    )
