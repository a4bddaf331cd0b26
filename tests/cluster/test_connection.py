"""Lines go both ways, whole, and nobody waits longer than he said."""

import socket

import pytest

from cpt.cluster.connection import Connection


@pytest.fixture
def ends():
    left, right = map(Connection, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_values_arrive_one_by_one(ends):
    left, right = ends
    left.send({"rank": 1}, 1)
    left.send(["ä", 2], 1)
    assert [right.receive(1), right.receive(1)] == [{"rank": 1}, ["ä", 2]]


def test_silence_ends_at_the_deadline(ends):
    with pytest.raises(TimeoutError):
        ends[0].receive(0.05)


def test_an_end_that_is_closed_is_told(ends):
    ends[1].close()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        ends[0].receive(1)


def test_what_is_no_line_of_ours_is_refused(ends):
    ends[1].end.sendall(b"HTTP/1.0 400 Bad request\r\n")
    with pytest.raises(ValueError, match="Expecting value"):
        ends[0].receive(1)


def test_a_line_without_end_is_refused(ends, monkeypatch):
    monkeypatch.setattr("cpt.cluster.connection.LONGEST_LINE", 100)
    ends[1].end.sendall(b"x" * 200)
    with pytest.raises(ValueError, match="without an end"):
        ends[0].receive(1)
