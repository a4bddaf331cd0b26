"""All nodes meet at the master: each step gathers a value of every node there, and gives the answer back to all,
before its deadline."""

import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from cpt.cluster.complaint import Complaint, Unfit, as_lines, from_lines
from cpt.cluster.connection import Connection
from cpt.cluster.joining import GREETING, Address, join
from cpt.cluster.place import Place, addresses_of, hostname, own_addresses

Judge = Callable[[dict[int, Any]], Any]
"""Makes the answer of the values of all nodes; raises Unfit to end the meeting for all."""
SECONDS_TO_SEND = 5.0
LONGER_THAN_THE_MASTER = 5.0
"""The others wait a little longer than the master does, so that its verdict reaches them."""
MORE_TIME = "Where nodes start that far apart, give them more: CPT_PREFLIGHT_SECONDS=300"


class AtTheMaster:
    """The meeting as process 0 holds it."""

    def __init__(self, place: Place, listening: socket.socket) -> None:
        self.place, self.listening = place, listening
        self.guests: dict[int, Connection] = {}
        """By rank."""
        self.speakers: dict[int, int] = {0: 0}
        """Node -> the rank that speaks for it."""
        self.names = {0: place.name}

    def open(self, seconds: float) -> None:
        """Wait until everybody is there.

        Raises:
            Unfit: somebody did not come, or does not belong here.
        """
        until = time.monotonic() + seconds
        arriving: dict[int, Connection] = {}
        with selectors.DefaultSelector() as selector, self.listening:
            selector.register(self.listening, selectors.EVENT_READ)
            while len(self.guests) + 1 < self.place.world_size and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is self.listening:
                        connection = self.greet(until)
                        if connection is not None:
                            arriving[connection.fileno()] = connection
                            selector.register(connection.fileno(), selectors.EVENT_READ)
                    elif (hello := hello_of(connection := arriving[key.fd])) is not None:
                        selector.unregister(key.fd)
                        del arriving[key.fd]
                        self.seat(connection, hello)
        for connection in arriving.values():
            connection.close()
        if missing := list(self.missing(seconds)):
            self.end(missing)

    def greet(self, until: float) -> Connection | None:
        """Say who we are to whoever knocked; None where it is gone."""
        with suppress(OSError):
            end, _ = self.listening.accept()
            connection = Connection(end)
            left = max(until - time.monotonic(), 0)
            connection.send(
                {"greeting": GREETING, "time": time.time(), "seconds": left + LONGER_THAN_THE_MASTER}, SECONDS_TO_SEND
            )
            return connection
        return None

    def seat(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Take in who said who it is.

        Raises:
            Unfit: it belongs to another start.
        """
        if not hello:  # a port scanner, or a connection that broke
            connection.close()
            return
        rank, node, name = hello["rank"], hello["node"], hello["name"]
        here = (self.place.world_size, self.place.num_nodes)
        theirs = (hello["world_size"], hello["num_nodes"])
        again = rank in self.guests and self.names.get(node) != name
        self.guests[rank] = connection
        if theirs != here:
            told = "{} processes on {} nodes"
            cause = f"was started for {told.format(*theirs)}, the master ({self.place.name}) for {told.format(*here)}"
            self.end([Complaint(name, cause, "Start all nodes with the same numbers.")])
        if again or rank == 0 or (hello["local_rank"] == 0 and self.names.get(node, name) != name):
            cause = (
                f"says that it is process {rank} on node {node}, and so does {self.names.get(node, self.place.name)}"
            )
            self.end(
                [Complaint(name, cause, "Give each node its own number (--node-rank), and each run its own port.")]
            )
        self.names[node] = name
        if hello["local_rank"] == 0:
            self.speakers[node] = rank

    def missing(self, seconds: float) -> Iterable[Complaint]:
        """Those who did not come, as far as one can know them."""
        absent = [node for node in range(self.place.num_nodes) if node not in self.names]
        expected = [name for name in self.place.names if name not in self.names.values()]
        named = expected if len(expected) == len(absent) else [self.place.name_of(node) for node in absent]
        where = f"{self.place.master}:{self.place.port}"
        remedy = "It was not started, ended before, or was told another master or port: its own output says which"
        for name in named:
            yield Complaint(
                name,
                f"did not come to the master at {where} in {seconds:.0f} s",
                f"{remedy}. {self.hint()}{MORE_TIME}.",
            )
        came = 1 + len(self.guests)
        if not absent and came < self.place.world_size:
            processes = sorted(set(range(1, self.place.world_size)) - self.guests.keys())
            shown = ", ".join(map(str, processes[:8])) + ", ..." * (len(processes) > 8)
            cause = f"{came} of {self.place.world_size} processes came in {seconds:.0f} s; without a sign: {shown}"
            yield Complaint(self.place.name, cause, f"Their own output says why. {MORE_TIME}.")

    def hint(self) -> str:
        """The master's name may mean another machine, or only this one."""
        meant = addresses_of(self.place.master)
        if meant and own_addresses().isdisjoint(meant):
            return (
                f"On the master itself ({hostname()}), {self.place.master} means {', '.join(meant)}: not an address"
                " that others see. "
            )
        return ""

    def step(self, what: str, value: Any, judge: Judge, seconds: float) -> Any:
        """Gather a value of every node, judge them, and tell all the answer.

        Raises:
            Unfit: the judge ended it, or a node did not answer.
        """
        values, until = {0: value}, time.monotonic() + seconds
        waiting = {rank: node for node, rank in self.speakers.items() if node}
        with selectors.DefaultSelector() as selector:
            for rank in waiting:
                selector.register(self.guests[rank], selectors.EVENT_READ, rank)
            while waiting:
                for rank in list(waiting):  # what lies in a connection already wakes no selector
                    self.take(rank, waiting, values, what)
                ready = selector.select(max(until - time.monotonic(), 0)) if waiting else []
                if waiting and not ready:
                    absent = [self.names[node] for node in waiting.values()]
                    cause = f"did not answer within {seconds:.0f} s while {what}"
                    self.end([Complaint(name, cause, "Its processes, link or file system hang.") for name in absent])
                for key, _ in ready:
                    if key.data in waiting:
                        self.hear(key.data, waiting[key.data], what)
        try:
            answer = judge(values)
        except Unfit as unfit:
            self.end(unfit.complaints)
        self.tell({"answer": answer}, [self.speakers[node] for node in self.speakers if node])
        return answer

    def hear(self, rank: int, node: int, what: str) -> None:
        """Read what a node says.

        Raises:
            Unfit: it is gone.
        """
        try:
            self.guests[rank].read()
        except (OSError, ValueError) as problem:
            self.end(
                [Complaint(self.names[node], f"is gone while {what}: {reason(problem)}", "Its own output says why.")]
            )

    def take(self, rank: int, waiting: dict[int, int], values: dict[int, Any], what: str) -> None:
        """Note a value that is complete.

        Raises:
            Unfit: the node says that it cannot go on.
        """
        try:
            message = self.guests[rank].next_value()
        except ValueError as problem:
            self.end([Complaint(self.names[waiting[rank]], f"speaks another language while {what}: {problem}", "")])
        if message is None:
            return
        values[waiting.pop(rank)] = message["value"]

    def tell(self, message: dict[str, Any], ranks: Iterable[int]) -> None:
        """Send it; who is gone by now is found in the next step."""
        for rank in ranks:
            with suppress(OSError):
                self.guests[rank].send(message, SECONDS_TO_SEND)

    def end(self, complaints: list[Complaint]) -> None:
        """Send everybody home with the cause.

        Raises:
            Unfit: always.
        """
        self.close({"unfit": as_lines(complaints)})
        raise Unfit(complaints)

    def close(self, last: dict[str, Any] | None = None) -> None:
        """Tell everybody the last word, also those who only waited."""
        self.tell(last or {"answer": None}, list(self.guests))
        self.hang_up()

    def hang_up(self) -> None:
        """Without a word, as where this process fails by itself: the others see that it is gone."""
        for connection in self.guests.values():
            connection.close()
        self.guests = {}


class AtANode:
    """The meeting as every other process sees it."""

    def __init__(self, place: Place, address: Address, seconds: float) -> None:
        self.place = place
        self.connection, greeting = join(place, address, seconds)
        self.clock_offset = float(greeting["time"]) - time.time()
        """Seconds that the master's clock is ahead."""
        self.until_all_came = float(greeting["seconds"])

    def step(self, what: str, value: Any, judge: Judge, seconds: float) -> Any:
        """Give a value, and wait for the answer to those of all nodes.

        Raises:
            Unfit: the meeting was ended, or the master is gone.
        """
        waited = seconds + LONGER_THAN_THE_MASTER + self.until_all_came
        self.until_all_came = 0.0
        return self.talk({"value": value}, what, waited)

    def wait(self, seconds: float) -> None:
        """For the verdict, without a say in it.

        Raises:
            Unfit: it is that the nodes do not fit, or the master is gone.
        """
        self.talk(None, "the check runs", seconds + LONGER_THAN_THE_MASTER + self.until_all_came)

    def talk(self, message: dict[str, Any] | None, what: str, seconds: float) -> Any:
        """Say something, where there is something to say, and hear the answer."""
        try:
            if message is not None:
                self.connection.send(message, SECONDS_TO_SEND)
            answer = self.connection.receive(seconds)
        except (OSError, ValueError) as problem:
            name = self.place.names[0] if self.place.names else self.place.master
            cause = f"the master ({name}) is gone while {what}, as seen from {self.place.name}: {reason(problem)}"
            raise Unfit(
                [Complaint(name, cause, "Its own output says why; else its link, or a host that stands still.")]
            ) from problem
        if "unfit" in answer:
            raise Unfit(from_lines(answer["unfit"]))
        return answer["answer"]

    def close(self) -> None:
        """Leave."""
        self.connection.close()

    hang_up = close


def hello_of(connection: Connection) -> dict[str, Any] | None:
    """Who an arriving process says that it is; empty: nobody of ours; None: it has not said it all."""
    try:
        connection.read()
        hello = connection.next_value()
    except (OSError, ValueError):
        return {}
    return {} if hello is not None and (not isinstance(hello, dict) or hello.get("greeting") != GREETING) else hello


def reason(problem: Exception) -> str:
    """In few words."""
    if isinstance(problem, TimeoutError):
        return "no answer"
    return problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
