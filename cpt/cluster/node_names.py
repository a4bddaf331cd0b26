"""The nodes that `--nodes` names: separated by commas, or the lines of a hostfile."""

import re
from pathlib import Path

from cpt.errors import LaunchError

NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:-]*[A-Za-z0-9_])?")


def read_nodes(written: str) -> tuple[str, ...]:
    """Their names in the order of their numbers; of a hostfile's lines (`NAME slots=8`) the first word.

    Raises:
        LaunchError: no nodes, one twice, or something that is no name.
    """
    file = Path(written)
    is_file = "," not in written and file.is_file()
    if is_file:
        lines = [
            line.split("#", 1)[0].split() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
        names = tuple(words[0] for words in lines if words)
    else:
        names = tuple(name.strip() for name in written.split(","))
    where = written if is_file else f"--nodes {written}"
    for name in names:
        if not NAME.fullmatch(name):
            raise LaunchError(
                f"{where}: `{name}` is not the name of a host. Write names separated by commas, or the path of a"
                " hostfile."
            )
        if names.count(name) > 1:
            raise LaunchError(f"{where}: {name} is there twice.")
    if len(names) < 2:
        raise LaunchError(
            f"{where}: one node has nothing to be compared with. Name two at least; for this machine alone: cpt doctor"
        )
    return names
