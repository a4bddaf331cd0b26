"""Which link a node has to the others, and what it can carry, as the system tells it."""

import re
import socket
from pathlib import Path

import psutil

NETWORK = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


def interface_to(host: str) -> str | None:
    """The interface whose address this machine would send from; no packet is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None
    entries = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in entries if any(entry.address.partition("%")[0] == own for entry in addresses)),
        None,
    )


def link_speeds(interface: str | None, network: Path = NETWORK, infiniband: Path = INFINIBAND) -> dict[str, float]:
    """GB/s of the interface, where it is a card and not a virtual one, and of all InfiniBand (or RoCE) ports
    together."""
    speeds = {}
    if (
        interface is not None
        and (network / interface / "device").exists()
        and (speed := number_in(network / interface / "speed")) > 0
    ):
        speeds["ethernet"] = speed / 8000
    rates = [RATE.search(text_of(rate)) for rate in sorted(infiniband.glob("*/ports/*/rate")) if is_up(rate.parent)]
    if ports := [float(rate[1]) / 8 for rate in rates if rate]:
        speeds["infiniband"] = sum(ports)
    return speeds


def is_up(port: Path) -> bool:
    """`4: ACTIVE`."""
    return "ACTIVE" in text_of(port / "state")


def number_in(file: Path) -> float:
    """0 where the driver does not tell; -1 is a driver's own word for that."""
    text = text_of(file).strip()
    return float(text) if text.isdigit() else 0.0


def text_of(file: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
