"""The check as the processes of a run make it, before they form their group: only where they are on several nodes."""

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from cpt.cluster.check import SECONDS, check_nodes, seconds_allowed
from cpt.cluster.complaint import Unfit, merged, refuse, sentence
from cpt.cluster.place import Place, place_of_process
from cpt.ranks import tell
from cpt.recipe.schema import Recipe

log = logging.getLogger(__name__)

SECONDS_FOR_THE_STORE = 10


def check_launched_nodes(recipe: Recipe, on_cpu: bool) -> None:
    """Compare the nodes of this run; nothing where it has one, or where CPT_PREFLIGHT_SECONDS is 0.

    Raises:
        LaunchError: they do not fit together, or some did not come.
    """
    place = place_of_process()
    if place is None or not seconds_allowed():
        return
    tell(f"Looking whether the {place.num_nodes} nodes fit together ({SECONDS}=0 leaves it out).")
    board = AgentStore(place) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None
    try:
        fit = check_nodes(
            place,
            recipe,
            on_cpu=on_cpu,
            publish=board.publish if board else None,
            address=board.address if board else None,
        )
    except Unfit as unfit:
        refuse(merged(unfit.complaints))
        raise
    if fit is not None:
        for complaint in merged(fit.complaints):
            tell(f"warning: {sentence(complaint)}")
        tell(str(fit))


class AgentStore:
    """The store that torchrun's agent holds at the master's port: where process 0 says at which other port the nodes
    meet."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.key = (
            f"cpt/preflight/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        )
        self.store: dist.Store | None = None

    def publish(self, port: int) -> None:
        """As process 0."""
        self.opened().set(self.key, str(port))

    def address(self) -> tuple[str, int] | None:
        """As all others; None as long as it was not said."""
        try:
            store = self.opened()
            return (self.place.master, int(store.get(self.key))) if store.check([self.key]) else None
        except dist.DistError:
            self.store = None
            return None

    def opened(self) -> dist.Store:
        """Connected once."""
        if self.store is None:
            timeout = timedelta(seconds=SECONDS_FOR_THE_STORE)
            self.store = dist.TCPStore(self.place.master, self.place.port, is_master=False, timeout=timeout)
        return self.store
