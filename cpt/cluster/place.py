"""Which node of a run this is, who the others are, and where all of them meet."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import psutil

from cpt.errors import LaunchError

NODES = "CPT_NODES"
"""The names of a run's hosts, separated by commas, in the order of their numbers; `cpt launch` writes it into its
scripts."""


@dataclass(frozen=True)
class Place:
    """Of one process among all that take part in the check."""

    rank: int
    world_size: int
    node: int
    """The number of its node."""
    num_nodes: int
    local_rank: int
    """0 speaks for its node, the others wait."""
    names: tuple[str, ...]
    """Of all nodes by their number; empty where nobody told them."""
    master: str
    port: int
    is_launched: bool = False
    """A launcher started this process, as one of a run's."""

    @cached_property
    def name(self) -> str:
        """What this node is called: as the list of nodes has it, where it stands there."""
        if self.names and not self.is_launched:
            return self.names[self.node]
        # torchrun numbers nodes in an order of its own, so a launched process looks for itself in the list.
        by_name = (name for name in self.names if name.partition(".")[0] == hostname())
        return next(by_name, None) or next((name for name in self.names if is_here(name)), hostname())

    def name_of(self, node: int) -> str:
        """As far as it can be known without having met it."""
        return self.names[node] if self.names else f"node {node}"


def place_of_node(node: int, names: Sequence[str], master: str) -> Place:
    """Of `cpt doctor --node-rank`: one process a node.

    Args:
        master: `host:port`; the host has number 0.

    Raises:
        LaunchError: the number or the address cannot be.
    """
    if not 0 <= node < len(names):
        raise LaunchError(
            f"--node-rank {node}: the {len(names)} nodes of --nodes have the numbers 0 to {len(names) - 1}."
        )
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise LaunchError(f"--master {master}: expected HOST:PORT, such as {names[0]}:29500.")
    return Place(node, len(names), node, len(names), 0, tuple(names), host.strip("[]"), int(port))


def place_of_process(environment: Mapping[str, str] = os.environ) -> Place | None:
    """As a launcher's variables tell it; None where the run has one node."""
    world_size = int(environment.get("WORLD_SIZE", "1"))
    rank = int(environment.get("RANK", "0"))
    here = processes_here(environment) or world_size
    nodes = first_number(environment, "GROUP_WORLD_SIZE", "CROSS_SIZE", "SLURM_NNODES")
    if (
        processes_here(environment) is None and nodes is not None and environment.get("SLURM_PROCID") == str(rank)
    ):  # started by srun itself
        here = -(-world_size // nodes)
    if world_size <= here or "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return None
    nodes = nodes or -(-world_size // here)
    node = first_number(environment, "GROUP_RANK", "CROSS_RANK", "SLURM_NODEID")
    local_rank = first_number(environment, "LOCAL_RANK", "SLURM_LOCALID")
    names = tuple(filter(None, environment.get(NODES, "").split(",")))
    return Place(
        rank=rank,
        world_size=world_size,
        node=rank // here if node is None else node,
        num_nodes=nodes,
        local_rank=rank % here if local_rank is None else local_rank,
        names=names if len(names) == nodes else (),
        master=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        is_launched=True,
    )


def processes_here(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many of the run are on this node, as its launcher says."""
    return first_number(environment, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def first_number(environment: Mapping[str, str], *names: str) -> int | None:
    """Of the variables, the first that is a number: SLURM writes `4(x2)` for unequal nodes."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)


def hostname() -> str:
    """Without its domain."""
    return socket.gethostname().partition(".")[0]


def is_here(name: str) -> bool:
    """Whether a host's name or address means this machine."""
    return name.partition(".")[0] == hostname() or not own_addresses().isdisjoint(addresses_of(name))


def addresses_of(name: str) -> list[str]:
    """What it resolves to; empty where it does not."""
    try:
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        )
    except (OSError, UnicodeError):
        return []


def own_addresses() -> set[str]:
    """Of all interfaces but the loopback one, which every machine has."""
    entries = [
        entry
        for found in psutil.net_if_addrs().values()
        for entry in found
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    found = {entry.address.partition("%")[0] for entry in entries}
    return {address for address in found if not address.startswith("127.") and address != "::1"}
