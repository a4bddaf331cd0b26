"""The port that the nodes meet at: take it, or say who has it."""

import errno
import socket
import time

import psutil

from cpt.cluster.complaint import Complaint, Unfit

SECONDS_FOR_A_LEFTOVER = 4.0
"""A process of an earlier start may still be ending."""


def listen_at(port: int, name: str) -> socket.socket:
    """A listening socket on all addresses of this machine; 0 takes a port that is free.

    Args:
        name: of this node.

    Raises:
        Unfit: something else listens there.
    """
    until = time.monotonic() + SECONDS_FOR_A_LEFTOVER
    while True:
        try:
            return listener(port)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.25)
                continue
            raise Unfit([taken(port, name, problem)]) from problem


def listener(port: int) -> socket.socket:
    """For IPv4 and IPv6 where the machine has both, as torch's own."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        except OSError as problem:
            if problem.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=4096)


def taken(port: int, name: str, problem: OSError) -> Complaint:
    """What to say of a port that cannot be had."""
    if problem.errno == errno.EADDRINUSE:
        cause = f"port {port} is taken on this node, the master: {holder_of(port)} listens there"
        return Complaint(
            name, cause, "End it, or choose another port for the run (--port, MASTER_PORT), the same on all nodes."
        )
    return Complaint(
        name, f"cannot listen at port {port}: {problem.strerror}", "Choose a port from 1024 to 65535 for the run."
    )


def holder_of(port: int) -> str:
    """The process that listens there, as far as the system lets us see it."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            try:
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} of {process.username()} (`{' '.join(process.cmdline())[:120]}`)"
            except psutil.Error:
                return f"process {connection.pid}"
    return f"a process that only root may see (`ss -tlnp 'sport = :{port}'` names it)"
