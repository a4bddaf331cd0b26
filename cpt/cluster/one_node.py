"""One node's part of `cpt doctor --nodes`, started there by ssh or by the line before a launch."""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from cpt.cluster.check import check_nodes
from cpt.cluster.complaint import Complaint, Unfit, as_lines, merged
from cpt.cluster.place import Place
from cpt.cluster.showing import show_complaints
from cpt.errors import CptError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe


def check_this_node(place: Place, recipe: Path | None, overrides: Sequence[str], *, report: bool) -> int:
    """Meet the other nodes and tell what was found; the exit code is 2 when they do not fit together.

    Args:
        report: as one line for the machine that asked, whose end ends this.
    """
    if report:
        threading.Thread(target=end_with_input, daemon=True).start()
    fits, complaints = "", []
    try:
        fit = check_nodes(place, loaded(recipe, overrides))
        if fit is not None:
            fits, complaints = str(fit), fit.complaints
    except Unfit as unfit:
        complaints = unfit.complaints
    if report:
        sys.stdout.write(json.dumps({"complaints": as_lines(complaints), "fits": fits}) + "\n")
        return 2 if any(complaint.fatal for complaint in complaints) else 0
    return tell(place, fits, complaints)


def loaded(path: Path | None, overrides: Sequence[str]) -> Recipe | CptError | None:
    """A recipe that cannot be read on one node is that node's complaint: the others shall hear of it."""
    try:
        return None if path is None else load_recipe(path, overrides)
    except CptError as problem:
        return problem


def tell(place: Place, fits: str, complaints: Sequence[Complaint]) -> int:
    """All of it on the master; on the others what concerns them."""
    if place.node:
        own = [complaint for complaint in merged(complaints) if place.name in complaint.host.split(", ")]
        code = 2 if any(complaint.fatal for complaint in complaints) else 0
        if code and not own:
            sys.stdout.write(
                f"{place.name}: the nodes do not fit together; the output of {place.name_of(0)} says why.\n"
            )
        show_complaints(own, place.num_nodes)
        return code
    code = show_complaints(complaints, place.num_nodes)
    if not code:
        sys.stdout.write(f"{fits}\n")
    return code


def end_with_input() -> None:
    """The machine that asked is gone, or has heard enough."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)
