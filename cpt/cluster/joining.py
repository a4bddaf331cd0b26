"""Find the meeting at the master, or say what is there instead."""

import socket
import time
from collections.abc import Callable
from typing import Any

from cpt.cluster.complaint import Complaint, Unfit
from cpt.cluster.connection import Connection
from cpt.cluster.place import Place

GREETING = "cpt preflight 1"
SECONDS_TO_CONNECT = 3.0
SECONDS_TO_GREET = 4.0
SECONDS_BETWEEN = 0.2
SECONDS_FOR_A_STRANGER = 12.0
"""Another program at the master's port may still be ending; one that stays will keep the master away too."""
STRANGER = "is not this run's master"
Address = Callable[[], tuple[str, int] | None]
"""Where the meeting is; None as long as nobody said."""


def join(place: Place, address: Address, seconds: float) -> tuple[Connection, dict[str, Any]]:
    """Try until the master answers.

    Returns:
        The connection and the master's greeting.

    Raises:
        Unfit: it did not answer in time.
    """
    until, stranger_until = time.monotonic() + seconds, float("inf")
    while True:
        found = attempt(place, address())
        if isinstance(found, tuple):
            return found
        now = time.monotonic()
        is_stranger = STRANGER in found.cause
        stranger_until = min(stranger_until, now + SECONDS_FOR_A_STRANGER) if is_stranger else float("inf")
        if now > min(until, stranger_until):
            raise Unfit([found])
        time.sleep(SECONDS_BETWEEN)


def attempt(place: Place, address: tuple[str, int] | None) -> tuple[Connection, dict[str, Any]] | Complaint:
    """Connect once, or say why it did not work."""
    same = "The master and its port must be the same on all nodes (--master, MASTER_ADDR, MASTER_PORT)."
    if address is None:
        cause = f"process 0 did not say at {place.master}:{place.port} where the nodes meet"
        return Complaint(place.name, cause, "It has not come so far: the output of node 0 says why.")
    host, port = address
    try:
        end = socket.create_connection(address, timeout=SECONDS_TO_CONNECT)
    except (socket.gaierror, UnicodeError) as problem:
        remedy = (
            f"Write it into /etc/hosts, mend the DNS, or name the master by its address: `getent hosts {host}` must"
            " know it."
        )
        return Complaint(place.name, f"cannot resolve {host}, the name of the master: {problem}", remedy)
    except ConnectionRefusedError:
        cause = f"nothing listens at {host}:{port}, where this node was told that the master is"
        return Complaint(
            place.name, cause, f"{same} If they are, node 0 was not started or has ended: its output says why."
        )
    except OSError as problem:
        why = "no answer" if isinstance(problem, TimeoutError) else problem.strerror
        remedy = f"A link, a route or a firewall between the two: `ping {host}`, then `nc -zv {host} {port}`."
        return Complaint(place.name, f"cannot reach the master at {host}:{port}: {why}", remedy)
    return introduced(place, Connection(end), f"{host}:{port}", same)


def introduced(
    place: Place, connection: Connection, where: str, same: str
) -> tuple[Connection, dict[str, Any]] | Complaint:
    """Hear the greeting and say who we are."""
    hello = {
        "greeting": GREETING,
        "rank": place.rank,
        "world_size": place.world_size,
        "node": place.node,
        "num_nodes": place.num_nodes,
        "local_rank": place.local_rank,
        "name": place.name,
    }
    try:
        greeting = connection.receive(SECONDS_TO_GREET)
        if not isinstance(greeting, dict) or greeting.get("greeting") != GREETING:
            raise ValueError("it speaks another language")
        connection.send(hello, SECONDS_TO_GREET)
    except (OSError, ValueError):
        connection.close()
        cause = f"what listens at {where} {STRANGER}: another program holds that port"
        return Complaint(place.name, cause, f"{same} On the master, `ss -tlnp` names what holds the port.")
    return connection, greeting
