"""What connects GPUs: the links within a machine and between machines, how fast they are and how much of that
collectives reach."""

import re
from dataclasses import dataclass

from cpt.errors import ResourceError
from cpt.extend import closest

# Microseconds of a hop, as NCCL itself counts them for its ring with large buffers (`hwLat` of src/graph/tuning.cc).
HOP_NVLINK, HOP_PCIE, HOP_NETWORK = 3.4, 5.7, 14.0
RDMA = 0.9
SOCKETS = {
    1: 0.8,
    10: 0.8,
    25: 0.6,
    100: 0.5,
}  # over TCP: half of 100 Gb/s, 60 % of 32 (NVIDIA/nccl issues 450 and 209)
GIGABIT = 1 / 8


@dataclass(frozen=True)
class Link:
    """One way of connecting GPUs or machines."""

    name: str
    gigabytes: float
    """A second and each way, by the data sheet: of one GPU, or between machines of one adapter."""
    reached: float
    """Share of it that collectives with large buffers reach."""
    hop: float
    """Microseconds."""
    is_between: bool
    """Of machines; else of GPUs in one machine."""

    @property
    def speed(self) -> float:
        """Bytes a second each way that are reached."""
        return self.gigabytes * 1e9 * self.reached


def network(name: str, gigabits: int, reached: float) -> Link:
    """One adapter of a machine."""
    return Link(f"{name} {gigabits}", gigabits * GIGABIT, reached, HOP_NETWORK, True)


WITHIN = (
    # Each way and GPU: half of what data sheets print for both ways together (600, 900 and 1,800 GB/s).
    Link("NVLink 3", 300, 0.77, HOP_NVLINK, False),
    Link("NVLink 4", 450, 0.8, HOP_NVLINK, False),
    Link("NVLink 5", 900, 0.8, HOP_NVLINK, False),
    # 16 lanes. NCCL itself counts 24 GB/s between GPUs of one PCIe 4.0 root that reach each other.
    Link("PCIe 4", 31.5, 0.76, HOP_PCIE, False),
    Link("PCIe 5", 63, 0.76, HOP_PCIE, False),
)
BETWEEN = (
    *(network("InfiniBand", gigabits, RDMA) for gigabits in (100, 200, 400)),
    *(network("RoCE", gigabits, RDMA) for gigabits in (100, 200, 400)),
    *(network("Ethernet", gigabits, reached) for gigabits, reached in SOCKETS.items()),
)
# where GPUs copy through the host's memory: NCCL counts 10 GB/s there (NVIDIA/nccl-tests issue 307, RTX 4090)
WITHOUT_PEERS = 0.32
NO_PEERS = ("RTX 3090", "RTX 4080", "RTX 4090", "RTX 5090")  # their driver does not let them reach each other
OF_GPU = {
    "A100-40GB": ("NVLink 3", 8, "InfiniBand 200"),
    "A100-80GB": ("NVLink 3", 8, "InfiniBand 200"),
    "H100": ("NVLink 4", 8, "InfiniBand 400"),
    "H200": ("NVLink 4", 8, "InfiniBand 400"),
    "B200": ("NVLink 5", 8, "InfiniBand 400"),
    "RTX 5090": ("PCIe 5", 1, "Ethernet 10"),
    "H100 PCIe": ("PCIe 5", 1, "InfiniBand 200"),
    **dict.fromkeys(("A10G", "L4", "L40S", "RTX A6000", "RTX 6000 Ada"), ("PCIe 4", 1, "Ethernet 100")),
}
"""What machines with such GPUs mostly have: DGX-like ones an adapter for each GPU; desktops a cable."""
OF_OTHERS = ("PCIe 4", 1, "Ethernet 10")
OTHER_NAMES = {
    "ib": "infiniband",
    "eth": "ethernet",
    "edr": "infiniband100",
    "hdr": "infiniband200",
    "ndr": "infiniband400",
}


@dataclass(frozen=True)
class Links:
    """Those of a job."""

    within: Link
    between: Link
    adapters: int
    """Of each machine."""
    is_given: bool = False
    """The user said so; else it is what such machines mostly have."""

    @property
    def speed_of_node(self) -> float:
        """Bytes a second each way between one machine and the others."""
        return self.adapters * self.between.speed

    @property
    def between_in_words(self) -> str:
        """`8 x InfiniBand 400`."""
        return f"{self.adapters} x {self.between.name}" if self.adapters > 1 else self.between.name


def links_of(gpu: str, gpus_per_node: int = 8, written: str | None = None) -> Links:
    """What the user wrote, and for the rest what machines with these GPUs mostly have.

    Args:
        gpu: its name in the table of GPUs.
        written: of `--links`: `nvlink4, 8 x infiniband 400`, or one of the two.

    Raises:
        ResourceError: a link that is not known, or two of one kind.
    """
    within, adapters, between = OF_GPU.get(gpu, OF_OTHERS)
    found = Links(by_name(within), by_name(between), min(adapters, max(1, gpus_per_node)))
    pieces = [piece.strip() for piece in re.split(r"[,+]", written)] if written is not None else []
    links = [read_link(piece) for piece in pieces]
    for place in (False, True):
        given = [(count, link) for count, link in links if link.is_between == place]
        if len(given) > 1:
            where = "between machines" if place else "within a machine"
            names = " and ".join(link.name for _, link in given)
            raise ResourceError(
                f"--links: {names} are both {where}; give one link within a machine and one between machines."
            )
        for count, link in given:
            within_now, between_now = (found.within, link) if place else (link, found.between)
            found = Links(within_now, between_now, count if place else found.adapters, is_given=True)
    if gpu in NO_PEERS and found.within.name.startswith("PCIe"):
        slow = Link(
            f"{found.within.name} through the host", found.within.gigabytes, WITHOUT_PEERS, found.within.hop, False
        )
        found = Links(slow, found.between, found.adapters, found.is_given)
    return found


def read_link(piece: str) -> tuple[int, Link]:
    """`8 x InfiniBand 400`: how many adapters, and which link.

    Raises:
        ResourceError: see `links_of`.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.*)", piece.strip(), re.I)
    assert match is not None, "everything matches"
    count, link = int(match[1] or 1), by_name(match[2])
    if match[1] is not None and (not link.is_between or count < 1):
        raise ResourceError(
            f"--links: `{piece}`: a number of adapters stands before a link between machines, such as 8 x"
            " infiniband400."
        )
    return count, link


def by_name(name: str) -> Link:
    """However it is written: `InfiniBand 400`, `ib400`, `NDR`, `10GbE`, `nvlink-4`.

    Raises:
        ResourceError: see `links_of`.
    """
    known = {simplified(link.name): link for link in (*WITHIN, *BETWEEN)}
    word = simplified(name)
    if word in known:
        return known[word]
    near = closest(word, known)
    hint = f" Did you mean `{known[near].name}`?" if near else ""
    raise ResourceError(
        f"--links: no link called `{name}` is known.{hint} Known:"
        f" {', '.join(link.name for link in (*WITHIN, *BETWEEN))}."
    )


def simplified(name: str) -> str:
    """Letters and digits, with the field's short names written out."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    word = (
        re.sub(r"(?<=\d)(?:gbps|gbits?|gbe|gb|g)s?$", "", word)
        if not word.endswith("gbe")
        else f"ethernet{word.removesuffix('gbe')}"
    )
    if word in OTHER_NAMES:
        return OTHER_NAMES[word]
    letters = word.rstrip("0123456789")
    return OTHER_NAMES.get(letters, letters) + word[len(letters) :]
