"""What keeps nodes from training together: which host, why, and what to do."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cpt.errors import LaunchError


@dataclass(frozen=True)
class Complaint:
    """One cause, and the host that it was found on."""

    host: str
    cause: str
    remedy: str = ""
    fatal: bool = True
    """The run would fail, hang or train something else; the others cost time only."""


class Unfit(Exception):  # noqa: N818 - a verdict, carried to where it is told
    """The check cannot go on: the complaints say why."""

    def __init__(self, complaints: Iterable[Complaint]) -> None:
        super().__init__()
        self.complaints = list(complaints)

    def __str__(self) -> str:
        return "\n".join(map(sentence, self.complaints))


def sentence(complaint: Complaint) -> str:
    """`host-1: torch is 2.11.0, elsewhere 2.13.0. Install the same version everywhere.`"""
    return " ".join(filter(None, [f"{complaint.host}: {complaint.cause.rstrip('.')}.", complaint.remedy]))


def refuse(complaints: Iterable[Complaint]) -> None:
    """Stop where one of them is fatal.

    Raises:
        LaunchError: all fatal ones, a line each.
    """
    fatal = [complaint for complaint in complaints if complaint.fatal]
    if fatal:
        raise LaunchError("the nodes do not fit together:\n" + "\n".join(map(sentence, fatal)))


def merged(complaints: Iterable[Complaint]) -> Iterator[Complaint]:
    """Each cause once, with all of its hosts; fatal ones first."""
    hosts: dict[tuple[str, str, bool], list[str]] = {}
    for complaint in complaints:
        hosts.setdefault((complaint.cause, complaint.remedy, complaint.fatal), []).append(complaint.host)
    for (cause, remedy, fatal), names in sorted(hosts.items(), key=lambda item: not item[0][2]):
        yield Complaint(", ".join(dict.fromkeys(names)), cause, remedy, fatal)


def as_lines(complaints: Iterable[Complaint]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(complaint) for complaint in complaints]


def from_lines(lines: Iterable[dict[str, Any]]) -> list[Complaint]:
    """Back from JSON."""
    return [Complaint(**line) for line in lines]
