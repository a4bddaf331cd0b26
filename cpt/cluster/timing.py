"""Start the timed all-reduce on this node, and say what its figures mean."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from cpt.cluster.complaint import Complaint

OF_LAUNCHERS = (
    "RANK",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "WORLD_SIZE",
    "MASTER_",
    "CROSS_",
    "TORCHELASTIC_",
    "ACCELERATE_",
    "OMP_NUM_THREADS",
)
SLOW_SHARE = 0.25
"""Of what the link carries: an all-reduce below that is worth a look."""
GLOO_GBPS = 1.0
"""A process of gloo on one core reaches about that; a faster link is not its measure."""
SLOW_PAIR = 0.33
"""Of what the faster pairs reach."""
FASTER_PAIRS = 0.75
"""A slow node makes two pairs slow, which are two thirds of three."""


class Children:
    """The processes of this node that take part, one for each GPU, or one on the CPU."""

    def __init__(self, count: int, *, holds_store: bool, seconds: float) -> None:
        self.errors: list[str] = []
        self.answers: list[SimpleQueue[str]] = [SimpleQueue() for _ in range(count)]
        """The lines that each of them prints; an empty one at its end."""
        self.processes = [self.start(number, holds_store and number == 0, seconds) for number in range(count)]

    def start(self, number: int, holds_store: bool, seconds: float) -> subprocess.Popen[str]:
        """It imports torch while the nodes still compare what they are."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        here = str(Path(__file__).resolve().parents[2])
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")]))
        pipe = subprocess.PIPE
        words = [sys.executable, "-m", "cpt.cluster.all_reduce"]
        child = subprocess.Popen(
            words, env={**kept, "OMP_NUM_THREADS": "1"}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        threading.Thread(target=self.collect, args=(child,), daemon=True).start()
        threading.Thread(target=self.listen, args=(number, child), daemon=True).start()
        tell(child, {"holds_store": holds_store, "seconds": seconds})
        return child

    def collect(self, child: subprocess.Popen[str]) -> None:
        """What libraries print, kept for the case that nothing else tells the cause."""
        assert child.stderr is not None, "it was started with a pipe"
        with suppress(ValueError):  # it was closed
            for line in child.stderr:
                self.errors = [*self.errors, line.rstrip()][-5:]

    def listen(self, number: int, child: subprocess.Popen[str]) -> None:
        """Pass on what it answers."""
        assert child.stdout is not None, "it was started with a pipe"
        with suppress(ValueError):
            for line in child.stdout:
                self.answers[number].put(line)
        self.answers[number].put("")

    def next_answer(self, number: int, until: float) -> dict[str, Any] | None:
        """Of one of them; None where none comes."""
        with suppress(Empty):
            while line := self.answers[number].get(timeout=max(until - time.monotonic(), 0)):
                if line.startswith("{"):  # libraries print other things
                    value: dict[str, Any] = json.loads(line)
                    return value
            with suppress(subprocess.TimeoutExpired):
                self.processes[number].wait(1)
        return None

    def begin(self, part: Mapping[str, Any], first_rank: int) -> None:
        """Tell all of them what to do."""
        for number, child in enumerate(self.processes):
            tell(child, {**part, "rank": first_rank + number, "local_rank": number})

    def answer(self, seconds: float) -> dict[str, Any]:
        """What the first of them says, or what went wrong in any."""
        until = time.monotonic() + seconds
        answers = [self.next_answer(number, until) for number in range(len(self.processes))]
        for child, answer in zip(self.processes, answers, strict=True):
            if answer is None:
                ended = child.poll() is not None
                return {
                    "error": (
                        f"its process ended: {' '.join(self.errors[-2:])}"
                        if ended
                        else f"no end within {seconds:.0f} s"
                    )
                }
        wrong = [answer for answer in answers if answer is not None and "error" in answer]
        return wrong[0] if wrong else answers[0] or {}

    def kill(self) -> None:
        """Whatever they do."""
        for child in self.processes:
            child.kill()
            child.wait()


def tell(child: subprocess.Popen[str], value: Mapping[str, Any]) -> None:
    """One line; a child that is gone is found when it should answer."""
    assert child.stdin is not None, "it was started with a pipe"
    with suppress(OSError):
        child.stdin.write(json.dumps(value) + "\n")
        child.stdin.flush()


def gigabytes_per_second(measured: Mapping[str, Any]) -> float:
    """What each process sent and received in it (nccl-tests calls it bus bandwidth): 2 (n - 1) / n of the bytes."""
    world = measured["world_size"]
    return float(2 * (world - 1) / world * measured["bytes"] / measured["seconds"] / 1e9)


def judge_speeds(
    measured: Mapping[str, Mapping[str, Any]], links: Mapping[str, Mapping[str, float]], backend: str
) -> list[Complaint]:
    """Nodes that are slow beside the others, or all of them beside their links.

    Args:
        measured: host -> what its first process said.
        links: host -> GB/s by kind of link.
    """
    names = list(measured)
    slow = slow_nodes(
        {name: {names[int(other)]: speed for other, speed in said["pairs"].items()} for name, said in measured.items()}
    )
    if slow:
        return slow
    known = [max(found.values()) for found in links.values() if found]
    if len(known) < len(names):
        return []
    carries = min(known) if backend == "nccl" else min(*known, GLOO_GBPS)
    reached = min(map(gigabytes_per_second, measured.values()))
    if reached >= SLOW_SHARE * carries:
        return []
    cause = (
        f"an all-reduce over {backend} reaches {reached:.2f} GB/s, where the slowest link carries {min(known):.2f}"
        " GB/s"
    )
    remedy = (
        "NCCL_DEBUG=INFO tells which link NCCL took; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it. Look for a cable at"
        " a lower speed."
    )
    return [Complaint(", ".join(names), cause, remedy, fatal=False)]


def slow_nodes(pairs: Mapping[str, Mapping[str, float]]) -> list[Complaint]:
    """A node all of whose pairs are slow, or the pairs themselves.

    Args:
        pairs: host -> neighbour -> GB/s.
    """
    speeds = [speed for found in pairs.values() for speed in found.values()]
    if not speeds:
        return []
    usual = sorted(speeds)[int(FASTER_PAIRS * len(speeds))]
    slow = {
        host: [other for other, speed in found.items() if speed < SLOW_PAIR * usual] for host, found in pairs.items()
    }
    nodes = [host for host, others in slow.items() if others and len(others) == len(pairs[host])]
    remedy = "Its cable, its switch port, or what else runs there."
    if nodes:
        told = "{:.2f} GB/s with its neighbours, where others reach {:.2f}"
        return [Complaint(host, told.format(max(pairs[host].values()), usual), remedy, fatal=False) for host in nodes]
    links = sorted({tuple(sorted((host, other))) for host, others in slow.items() for other in others})
    return [
        Complaint(f"{a}, {b}", f"{pairs[a][b]:.2f} GB/s between them, others reach {usual:.2f}", remedy, False)
        for a, b in links
    ]
