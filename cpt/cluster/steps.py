"""What the nodes do once they have met: compare what they are, look for each other's tokens, time one all-reduce."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cpt.cache import default_cache_dir
from cpt.cluster.comparing import compare
from cpt.cluster.complaint import Complaint, Unfit, as_lines
from cpt.cluster.facts import Gathering
from cpt.cluster.meeting import AtANode, AtTheMaster
from cpt.cluster.place import Place, processes_here
from cpt.cluster.shared_folders import Token, unshared, unwritable
from cpt.cluster.timing import Children, gigabytes_per_second, judge_speeds
from cpt.errors import CptError
from cpt.hardware import find_gpus
from cpt.recipe.schema import Recipe

TO_LOOK = 0.3
"""Share of the whole time that facts, and folders, may take; what they leave over is for the all-reduce."""
FEWEST_SECONDS = 5.0
IMPORT_TIME = "A file system that is slow the first time needs more: CPT_PREFLIGHT_SECONDS=300."
FOLDERS = {  # name -> (what it is, what to do, whether a run without it fails)
    "output": (
        "the output folder (`output_dir`)",
        (
            "Mount one shared folder there on all nodes, or set `output_dir` to one: a run goes on from checkpoints"
            " that all nodes can read."
        ),
        True,
    ),
    "store": (
        "the store of tokens (CPT_CACHE)",
        "Every node would tokenise for itself: set CPT_CACHE to a shared folder, the same on all nodes.",
        False,
    ),
}


class Steps:
    """One node's part of the check."""

    def __init__(self, place: Place, recipe: Recipe | CptError | None, seconds: float, *, on_cpu: bool) -> None:
        self.place, self.seconds, self.until = place, seconds, time.monotonic() + seconds
        self.gpus = 0 if on_cpu else usable_gpus(place)
        self.children = Children(
            max(1, self.gpus), holds_store=place.rank == 0, seconds=seconds
        )  # they import torch meanwhile
        self.gathering = Gathering(place, recipe)
        folders = {"store": default_cache_dir().absolute()}
        if isinstance(recipe, Recipe):
            folders["output"] = Path(recipe.output_dir).absolute()
        self.tokens = {name: Token(folder, place.node) for name, folder in folders.items()}
        self.complaints: list[Complaint] = []
        """What the master has found so far."""
        self.names: dict[int, str] = {}

    def __enter__(self) -> "Steps":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.children.kill()
        for token in self.tokens.values():
            token.remove()
        for token in self.tokens.values():
            token.remove_folders()

    def take(self, meeting: AtTheMaster | AtANode) -> dict[str, Any]:
        """All steps, and what the master found.

        Raises:
            Unfit: the nodes do not fit together.
        """
        try:
            facts = self.gathering.result(self.look())
            facts["gpus_used"] = self.gpus
            if isinstance(meeting, AtANode):
                facts["clock"] = meeting.clock_offset
            facts["name"] = self.place.name
            start = meeting.step("the nodes are compared", facts, self.judge_facts, self.look())
            self.look_for_tokens(meeting)
            found = self.time_all_reduce(meeting, start)
        except BaseException:
            meeting.hang_up()
            raise
        meeting.close()
        return found

    def look(self) -> float:
        """Seconds that a step may take."""
        return max(min(TO_LOOK * self.seconds, self.until - time.monotonic()), FEWEST_SECONDS)

    def judge_facts(self, facts: dict[int, Any]) -> dict[str, Any]:
        """Compare them; what is wrong with folders shall be told together with it."""
        self.names = without_twins({node: found["name"] for node, found in sorted(facts.items())})
        for found in facts.values():
            if isinstance(found.get("network"), dict):
                found["network"]["meets_at"] = None if self.place.is_launched else self.place.port
        self.complaints = compare(self.by_name(facts))
        if any("hangs" in found for found in facts.values()):
            raise Unfit(self.complaints)
        self.links = self.by_name({node: found["network"].get("links", {}) for node, found in facts.items()})
        counts = [max(1, facts[node]["gpus_used"]) for node in sorted(facts)]
        on_gpus = all(found["gpus_used"] for found in facts.values())
        counts = counts if on_gpus else [1] * len(counts)
        return {
            "world_size": sum(counts),
            "speakers": [sum(counts[:index]) for index in range(len(counts))],
            "backend": "nccl" if on_gpus else "gloo",
        }

    def by_name(self, values: Mapping[int, Any]) -> dict[str, Any]:
        """Node's number -> node's name, in the order of the numbers."""
        return {self.names[node]: values[node] for node in sorted(values)}

    def look_for_tokens(self, meeting: AtTheMaster | AtANode) -> None:
        """Each node's tokens in each folder, as all others see them.

        Raises:
            Unfit: with everything that was found so far.
        """
        written = {name: token.write() for name, token in self.tokens.items()}
        everywhere = meeting.step(
            "tokens are written",
            written,
            lambda values: {str(node): found for node, found in values.items()},
            self.look(),
        )
        unseen = {
            name: token.unseen(
                {node: found[name]["token"] for node, found in everywhere.items() if could_write(found, name)}
            )
            for name, token in self.tokens.items()
        }
        meeting.step("tokens are read", unseen, lambda values: self.judge_tokens(everywhere, values), self.look())

    def judge_tokens(self, written: Mapping[str, Any], unseen: Mapping[int, Mapping[str, list[str]]]) -> None:
        """What the folders are, with all other complaints where one is fatal."""
        for name, (what, remedy, fatal) in FOLDERS.items():
            wrote = {self.names[int(node)]: found[name] for node, found in written.items() if name in found}
            self.complaints += unwritable(what, wrote, fatal=fatal)
            folders = {
                self.names[int(node)]: found[name]["folder"]
                for node, found in written.items()
                if could_write(found, name)
            }
            sees = {
                self.names[node]: [self.names[int(other)] for other in found.get(name, [])]
                for node, found in unseen.items()
            }
            self.complaints += unshared(what, remedy, folders, {host: sees[host] for host in folders}, fatal=fatal)
        if any(complaint.fatal for complaint in self.complaints):
            raise Unfit(self.complaints)

    def time_all_reduce(self, meeting: AtTheMaster | AtANode, start: dict[str, Any]) -> dict[str, Any]:
        """Let the children do it.

        Raises:
            Unfit: it came to no end on some node.
        """
        port = None
        if isinstance(meeting, AtTheMaster):
            port = (self.children.next_answer(0, time.monotonic() + self.left()) or {}).get("port")
        told = meeting.step("the all-reduce is prepared", port, self.judge_port, self.left())
        seconds = self.left()
        part = {**start, "host": self.place.master, "port": told, "seconds": max(seconds - 1, 1)}
        self.children.begin(part, start["speakers"][self.place.node])
        found: dict[str, Any] = meeting.step(
            "an all-reduce is timed",
            self.children.answer(seconds),
            lambda values: self.judge_all_reduce(values, start["backend"]),
            FEWEST_SECONDS,
        )
        return found

    def judge_port(self, values: Mapping[int, Any]) -> int:
        """Where the processes of the all-reduce meet, as the master's own told it."""
        if values[0] is None:
            why = " ".join(self.children.errors[-2:])
            slow = Complaint(self.names[0], f"has not imported torch within {self.seconds:.0f} s", IMPORT_TIME)
            raise Unfit([*self.complaints, Complaint(self.names[0], f"cannot import torch: {why}") if why else slow])
        return int(values[0])

    def left(self) -> float:
        """Seconds until the whole check has to be over."""
        return max(self.until - time.monotonic(), FEWEST_SECONDS)

    def judge_all_reduce(self, said: dict[int, Any], backend: str) -> dict[str, Any]:
        """The figures, or who did not get through."""
        answers = self.by_name(said)
        failed = {host: answer["error"] for host, answer in answers.items() if "error" in answer}
        if failed:
            remedy = (
                "Open all ports between the nodes, and name the interface that joins them: GLOO_SOCKET_IFNAME,"
                " NCCL_SOCKET_IFNAME."
            )
            causes = [
                Complaint(host, f"an all-reduce over {backend} fails: {error}", remedy)
                for host, error in failed.items()
            ]
            raise Unfit([*self.complaints, *causes])
        self.complaints += judge_speeds(answers, self.links, backend)
        slowest = max(answers.values(), key=lambda answer: float(answer["seconds"]))
        return {
            "names": list(answers),
            "complaints": as_lines(self.complaints),
            "measured": {
                "backend": backend,
                "megabytes": slowest["bytes"] / 1e6,
                "gigabytes_per_second": gigabytes_per_second(slowest),
                "milliseconds": 1000 * slowest["seconds"],
            },
        }


def without_twins(names: Mapping[int, str]) -> dict[int, str]:
    """Containers may all have one name: then the node's number goes with it."""
    counts = Counter(names.values())
    return {node: f"{name} (node {node})" if counts[name] > 1 else name for node, name in names.items()}


def could_write(written: Mapping[str, Any], name: str) -> bool:
    """Whether a node's token lies in that folder; a node whose recipe cannot be read has none for the output."""
    return name in written and written[name]["problem"] is None


def usable_gpus(place: Place) -> int:
    """Those of the node's GPUs that the run's processes will use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(find_gpus())
    if visible is not None:
        count = min(count, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    return min(count, processes_here() or count) if place.is_launched else count
