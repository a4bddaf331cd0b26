"""The three lists: what was carried over, what otherwise, and what not."""

import textwrap
from collections.abc import Sequence

from cpt.importing.ledger import EMPTY, OFF, Entry, Ledger

TITLES = {"carried": "Carried over", "otherwise": "Carried over otherwise", "not": "Not carried over"}
WIDTH = 118
WIDEST = 34


def table_of(ledger: Ledger) -> str:
    """The lists as text; keys that ask for nothing share a line."""
    parts = [
        list_of(title, [entry for entry in ledger.entries if entry.verdict == verdict])
        for verdict, title in TITLES.items()
    ]
    if ledger.defaults:
        title = f"Taken from {ledger.called}'s defaults, which the recipe says"
        parts.append("\n".join([title, *(f"  {default}" for default in ledger.defaults)]))
    return "\n\n".join(part for part in parts if part)


def list_of(title: str, entries: Sequence[Entry]) -> str:
    """One list."""
    if not entries:
        return ""
    told = [entry for entry in entries if entry.told not in (EMPTY, OFF)]
    width = min(WIDEST, max((len(entry.key) for entry in told), default=0))
    lines = [f"{title} ({len(entries)})", *(row(entry, width) for entry in told)]
    for quiet in (EMPTY, OFF):
        keys = [entry.key for entry in entries if entry.told == quiet]
        if keys:
            lines.append(
                textwrap.fill(f"{quiet}: {', '.join(keys)}", WIDTH, initial_indent="  ", subsequent_indent="    ")
            )
    return "\n".join(lines)


def row(entry: Entry, width: int) -> str:
    """A key, and behind it what became of it."""
    lead = f"  {entry.key:<{width}}  "
    behind = " " * (width + 4)
    first = behind if len(entry.key) > width else lead
    told = textwrap.fill(
        entry.told,
        WIDTH,
        initial_indent=first,
        subsequent_indent=behind,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"  {entry.key}\n{told}" if first == behind else told
