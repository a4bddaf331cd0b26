"""A port is taken, or its holder is named."""

import os
import socket
import threading

import pytest

from cpt.cluster import ports
from cpt.cluster.complaint import Unfit


def test_a_free_port_is_listened_at():
    with (
        ports.listen_at(0, "host-0") as listening,
        socket.create_connection(("127.0.0.1", listening.getsockname()[1]), 1),
    ):
        assert listening.accept()


def test_the_holder_of_a_port_is_named(monkeypatch):
    monkeypatch.setattr(ports, "SECONDS_FOR_A_LEFTOVER", 0)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Unfit) as unfit:
        ports.listen_at(port := other.getsockname()[1], "host-0")
    (complaint,) = unfit.value.complaints
    assert (
        complaint.host == "host-0"
        and f"port {port} is taken on this node, the master: process {os.getpid()} of" in complaint.cause
    )


def test_a_port_that_is_given_back_meanwhile_is_taken():
    other = socket.create_server(("", 0))
    port = other.getsockname()[1]
    threading.Timer(0.3, other.close).start()
    ports.listen_at(port, "host-0").close()
