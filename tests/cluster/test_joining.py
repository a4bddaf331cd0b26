"""What is there instead of the master is said: nothing, another program, or no such host."""

import socket

import pytest

from cpt.cluster import joining
from cpt.cluster.complaint import Unfit
from cpt.cluster.joining import join
from cpt.cluster.place import place_of_node


def cause_of(address, seconds=0.1) -> str:
    place = place_of_node(1, ["host-0", "host-1"], "host-0:29500")
    with pytest.raises(Unfit) as unfit:
        join(place, lambda: address, seconds)
    (complaint,) = unfit.value.complaints
    assert complaint.host == "host-1" and complaint.remedy
    return complaint.cause


def test_a_port_where_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert (
        cause_of(("127.0.0.1", port))
        == f"nothing listens at 127.0.0.1:{port}, where this node was told that the master is"
    )


def test_a_name_that_does_not_resolve():
    assert "cannot resolve no-such-host.invalid" in cause_of(("no-such-host.invalid", 29500))


def test_a_host_that_does_not_answer(monkeypatch):
    def no_answer(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(joining.socket, "create_connection", no_answer)
    assert cause_of(("10.255.255.1", 29500)) == "cannot reach the master at 10.255.255.1:29500: no answer"


def test_a_program_that_speaks_another_language(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        first.close()
        monkeypatch.setattr(joining, "SECONDS_TO_GREET", 0.1)  # it never greets
        assert "is not this run's master" in cause_of(server.getsockname()[:2])


def test_a_stranger_that_stays_is_not_waited_for_to_the_end(monkeypatch):
    monkeypatch.setattr(joining, "SECONDS_TO_GREET", 0.05)
    monkeypatch.setattr(joining, "SECONDS_FOR_A_STRANGER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "is not this run's master" in cause_of(server.getsockname()[:2], seconds=60)


def test_an_address_that_nobody_told():
    assert cause_of(None) == "process 0 did not say at host-0:29500 where the nodes meet"
