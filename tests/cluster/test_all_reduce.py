"""Processes of their own meet at a store, and time what goes between them."""

import threading
import time

import pytest

from cpt.cluster.all_reduce import rounds
from cpt.cluster.timing import Children, gigabytes_per_second


@pytest.mark.parametrize("count", range(3, 10))
def test_each_node_meets_both_neighbours_and_never_two_at_once(count):
    found = rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == [(node, (node + 1) % count) for node in range(count)]
    for pairs in found:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))


@pytest.mark.slow
def test_three_processes_time_an_all_reduce_and_their_pairs():
    children = Children(3, holds_store=True, seconds=60)
    try:
        port = children.next_answer(0, deadline(60))["port"]
        part = {
            "world_size": 3,
            "host": "127.0.0.1",
            "port": port,
            "backend": "gloo",
            "seconds": 60,
            "speakers": [0, 1, 2],
        }
        children.begin(part, 0)
        answers = [children.next_answer(number, deadline(60)) for number in range(3)]
    finally:
        children.kill()
    assert all(gigabytes_per_second(answer) > 0.001 for answer in answers)
    assert [sorted(answer["pairs"]) for answer in answers] == [["1", "2"], ["0", "2"], ["0", "1"]]


@pytest.mark.long
@pytest.mark.slow
def test_one_that_is_alone_says_so_before_its_deadline():
    children = Children(1, holds_store=True, seconds=3)
    try:
        port = children.next_answer(0, deadline(60))["port"]
        part = {
            "world_size": 2,
            "host": "127.0.0.1",
            "port": port,
            "backend": "gloo",
            "seconds": 3,
            "speakers": [0, 1],
        }
        children.begin(part, 0)
        assert "error" in children.answer(30)
    finally:
        children.kill()


@pytest.mark.long
@pytest.mark.slow
def test_it_ends_with_whoever_asked_for_it():
    children = Children(1, holds_store=True, seconds=60)
    children.next_answer(0, deadline(60))
    threading.Timer(0.1, children.processes[0].stdin.close).start()
    assert children.processes[0].wait(10) == 0
    children.kill()


def deadline(seconds: float) -> float:
    return time.monotonic() + seconds
