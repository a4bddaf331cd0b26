"""Show what the check of a cluster found: a row for each complaint."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from cpt.cluster.complaint import Complaint, merged
from cpt.console import open_console


def show_complaints(complaints: Sequence[Complaint], nodes: int) -> int:
    """Print the table, where there is something to tell; the exit code is 2 when the nodes do not fit together."""
    rows = list(merged(complaints))
    if rows:
        table = Table("host", "what is wrong", "remedy", title=f"{nodes} nodes")
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*map(escape, (row.host, row.cause, row.remedy)), style="red" if row.fatal else "yellow")
        open_console().print(table)
    return 2 if any(row.fatal for row in rows) else 0
