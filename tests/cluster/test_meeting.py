"""Nodes meet, answer step by step, and every way of not answering is named before the deadline."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cpt.cluster import meeting as meetings
from cpt.cluster.complaint import Complaint, Unfit
from cpt.cluster.connection import Connection
from cpt.cluster.meeting import AtANode, AtTheMaster
from cpt.cluster.place import Place
from cpt.cluster.ports import listen_at

NAMES = ("host-0", "host-1", "host-2")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(meetings, "LONGER_THAN_THE_MASTER", 0.5)


@pytest.fixture
def master():
    listening = listen_at(0, "host-0")
    place = Place(0, 2, 0, 2, 0, NAMES[:2], "127.0.0.1", listening.getsockname()[1])
    held = AtTheMaster(place, listening)
    yield held
    held.close()
    listening.close()


def place_of(master: AtTheMaster, rank: int = 1, **changes) -> Place:
    return replace(master.place, **{"rank": rank, "node": rank, **changes})


def arrive(master: AtTheMaster, rank: int = 1, seconds: float = 2.0, **changes) -> AtANode:
    place = place_of(master, rank, **changes)
    return AtANode(place, lambda: ("127.0.0.1", master.place.port), seconds)


def complaints_of(work) -> list[Complaint]:
    with pytest.raises(Unfit) as unfit:
        work()
    return unfit.value.complaints


def test_a_step_gives_all_nodes_the_answer_to_the_values_of_all(master):
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master)
        master.open(2)
        answer = pool.submit(lambda: guest.result().step("adding", 2, sum, 1))
        assert master.step("adding", 1, lambda values: sum(values.values()), 1) == 3
        assert answer.result() == 3
    assert abs(guest.result().clock_offset) < 1


def test_a_process_that_is_not_the_first_of_its_node_waits_for_the_verdict(master):
    master.place = replace(master.place, world_size=3)
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master, world_size=3)
        second = pool.submit(arrive, master, 2, world_size=3, node=1, local_rank=1)
        master.open(2)
        verdict = pool.submit(lambda: second.result().wait(1))
        stepped = pool.submit(lambda: guest.result().step("adding", 2, sum, 1))
        master.step("adding", 1, lambda values: None, 1)
        master.close()
        assert (stepped.result(), verdict.result()) == (None, None)


def test_a_node_that_never_comes_is_named(master):
    began = time.monotonic()
    (complaint,) = complaints_of(lambda: master.open(0.3))
    assert complaint.host == "host-1" and "did not come to the master at 127.0.0.1" in complaint.cause
    assert time.monotonic() - began < 1


def test_of_three_the_one_that_is_missing_is_named_by_its_name_or_number(master):
    for names, expected in ((NAMES, "host-2"), ((), "node 2")):
        listening = listen_at(0, "host-0")
        place = replace(master.place, world_size=3, num_nodes=3, names=names, port=listening.getsockname()[1])
        three = AtTheMaster(place, listening)
        with ThreadPoolExecutor() as pool:
            guest = pool.submit(arrive, three)
            (complaint,) = complaints_of(lambda three=three: three.open(0.4))
            guest.result().close()
        assert complaint.host == expected


def test_processes_that_are_missing_on_a_node_are_counted(master):
    master.place = replace(master.place, world_size=4)
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master, world_size=4)
        (complaint,) = complaints_of(lambda: master.open(0.4))
        guest.result().close()
    assert complaint.cause == "2 of 4 processes came in 0 s; without a sign: 2, 3"


def test_a_node_that_falls_silent_is_named(master):
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master)
        master.open(2)
        (complaint,) = complaints_of(lambda: master.step("the nodes are compared", 1, sum, 0.2))
        heard = complaints_of(lambda: guest.result().step("the nodes are compared", 1, sum, 1))
    assert complaint.host == "host-1" and complaint.cause == "did not answer within 0 s while the nodes are compared"
    assert heard == [complaint]


def test_a_node_that_dies_is_named(master):
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master)
        master.open(2)
        guest.result().close()
        (complaint,) = complaints_of(lambda: master.step("the nodes are compared", 1, sum, 2))
    assert complaint.host == "host-1" and "is gone while the nodes are compared" in complaint.cause


def test_a_master_that_dies_is_named_on_the_node(master):
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master)
        master.open(2)
        for connection in master.guests.values():
            connection.close()
        (complaint,) = complaints_of(lambda: guest.result().step("the nodes are compared", 1, sum, 1))
    assert complaint.host == "host-0" and "as seen from host-1" in complaint.cause


def test_what_a_judge_refuses_ends_it_for_all(master):
    wrong = Complaint("host-1", "torch is old")

    def judge(values):
        raise Unfit([wrong])

    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master)
        master.open(2)
        heard = pool.submit(complaints_of, lambda: guest.result().step("comparing", 1, sum, 1))
        assert complaints_of(lambda: master.step("comparing", 1, judge, 1)) == [wrong] == heard.result()


def test_two_nodes_with_one_number_are_told_apart(master):
    master.place = replace(master.place, world_size=3, num_nodes=3)
    with ThreadPoolExecutor() as pool:
        guests = [
            pool.submit(arrive, master, world_size=3, num_nodes=3, names=("host-0", name, "x"))
            for name in ("host-1", "host-9")
        ]
        (complaint,) = complaints_of(lambda: master.open(2))
        for guest in guests:
            guest.result().close()
    assert {complaint.host, complaint.cause.rpartition(" ")[2]} == {"host-1", "host-9"}


def test_a_start_with_other_numbers_is_refused(master):
    with ThreadPoolExecutor() as pool:
        guest = pool.submit(arrive, master, world_size=4)
        (complaint,) = complaints_of(lambda: master.open(2))
        guest.result().close()
    assert complaint.host == "host-1" and "was started for 4 processes on 2 nodes" in complaint.cause


def test_a_port_scanner_does_not_disturb(master):
    with socket.create_connection(("127.0.0.1", master.place.port)) as scanner, ThreadPoolExecutor() as pool:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
        guest = pool.submit(arrive, master)
        master.open(2)
        guest.result().close()
    assert set(master.guests) == {1}


def test_half_a_hello_is_waited_for(master):
    end = Connection(socket.create_connection(("127.0.0.1", master.place.port)))
    hello = (
        b'{"greeting": "cpt preflight 1", "rank": 1, "world_size": 2, "node": 1, "num_nodes": 2, "local_rank": 0,'
        b' "name": "host-1"}\n'
    )
    end.end.sendall(hello[:40])
    threading.Timer(0.2, end.end.sendall, [hello[40:]]).start()
    master.open(2)
    end.close()
    assert master.names == {0: "host-0", 1: "host-1"}
