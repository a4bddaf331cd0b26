"""The check of a cluster as one process of it makes it: meet, compare, look for the others' tokens, time one
all-reduce."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from cpt.cluster.complaint import Complaint
from cpt.cluster.joining import Address
from cpt.cluster.meeting import AtANode, AtTheMaster
from cpt.cluster.place import Place
from cpt.cluster.ports import listen_at
from cpt.cluster.steps import Steps
from cpt.errors import CptError, RecipeError
from cpt.recipe.schema import Recipe

SECONDS = "CPT_PREFLIGHT_SECONDS"
"""How long the whole check may take; 0 leaves it out where a run starts it by itself."""
DEFAULT_SECONDS = 45.0
TO_ARRIVE = 2 / 3
"""Share of it in which all have to come."""


@dataclass(frozen=True)
class Fit:
    """What was found of nodes that can train together."""

    names: list[str]
    complaints: list[Complaint]
    """None of them fatal."""
    backend: str = ""
    megabytes: float = 0.0
    gigabytes_per_second: float = 0.0
    milliseconds: float = 0.0
    seconds: float = 0.0
    """What the whole check took."""

    def __str__(self) -> str:
        over = f"an all-reduce of {self.megabytes:.0f} MB over {self.backend} takes {self.milliseconds:.1f} ms"
        names = ", ".join(self.names[:8]) + f" and {len(self.names) - 8} more" * (len(self.names) > 8)
        return (
            f"{len(self.names)} nodes fit together: {names}; {over} ({self.gigabytes_per_second:.2f} GB/s for each"
            " process)."
        )


def seconds_allowed() -> float:
    """For the whole check.

    Raises:
        RecipeError: the variable is no number.
    """
    text = os.environ.get(SECONDS, "")
    try:
        return float(text) if text else DEFAULT_SECONDS
    except ValueError as problem:
        raise RecipeError(
            f"{SECONDS}={text}: expected a number of seconds, such as {DEFAULT_SECONDS:.0f}."
        ) from problem


def check_nodes(
    place: Place,
    recipe: Recipe | CptError | None,
    *,
    on_cpu: bool = False,
    publish: Callable[[int], None] | None = None,
    address: Address | None = None,
) -> Fit | None:
    """Take part in the check of a cluster, in every process of it; one that is not the first of its node only waits.

    Args:
        recipe: or why it cannot be read on this node.
        on_cpu: the run uses no GPUs.
        publish: where the master's port is held by the launcher itself: process 0 takes another one, and makes it
            known with this.
        address: how the others learn of it.

    Returns:
        What was found; None to a process that only waited.

    Raises:
        Unfit: the nodes do not fit together, or did not meet in time.
    """
    began, seconds = time.monotonic(), seconds_allowed() or DEFAULT_SECONDS
    where = address or (lambda: (place.master, place.port))
    if place.local_rank:
        AtANode(place, where, TO_ARRIVE * seconds).wait(seconds)
        return None
    on_cpu = on_cpu or (isinstance(recipe, Recipe) and bool(recipe.training.get("use_cpu")))
    with Steps(place, recipe, seconds, on_cpu=on_cpu) as steps:
        if place.rank == 0:
            listening = listen_at(0 if publish else place.port, place.name)
            if publish is not None:
                publish(listening.getsockname()[1])
            meeting = AtTheMaster(place, listening)
            meeting.open(TO_ARRIVE * seconds)
            found = steps.take(meeting)
        else:
            found = steps.take(AtANode(place, where, TO_ARRIVE * seconds))
    told = found["measured"]
    return Fit(
        found["names"], [Complaint(**line) for line in found["complaints"]], **told, seconds=time.monotonic() - began
    )
