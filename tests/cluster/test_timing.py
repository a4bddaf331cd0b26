"""The all-reduce's processes are started, told what to do, and killed; their figures say who is slow."""

import time

import pytest

from cpt.cluster.timing import Children, gigabytes_per_second, judge_speeds, slow_nodes


def said(seconds: float, pairs=None, world_size: int = 2) -> dict:
    return {"bytes": 64 * 2**20, "seconds": seconds, "pairs": pairs or {}, "world_size": world_size}


def test_bandwidth_is_what_each_process_sent():
    assert gigabytes_per_second({"bytes": 1e9, "seconds": 0.5, "world_size": 2}) == 2.0
    assert gigabytes_per_second({"bytes": 1e9, "seconds": 0.5, "world_size": 8}) == 3.5


def test_a_slow_node_is_named_by_its_neighbours():
    fast, slow = 10.0, 1.0
    (complaint,) = slow_nodes({"a": {"b": fast, "c": slow}, "b": {"a": fast, "c": slow}, "c": {"a": slow, "b": slow}})
    assert (
        complaint.host == "c"
        and "1.00 GB/s with its neighbours, where others reach 10.00" in complaint.cause
        and not complaint.fatal
    )


def test_a_slow_link_between_two_good_nodes_is_named():
    ring = {
        "a": {"b": 9.0, "d": 10.0},
        "b": {"a": 9.0, "c": 1.0},
        "c": {"b": 1.0, "d": 10.0},
        "d": {"c": 10.0, "a": 10.0},
    }
    (complaint,) = slow_nodes(ring)
    assert complaint.host == "b, c"


def test_equal_pairs_say_nothing():
    assert slow_nodes({"a": {"b": 9.0, "c": 8.0}, "b": {"a": 9.0, "c": 10.0}, "c": {"a": 8.0, "b": 10.0}}) == []
    assert slow_nodes({"a": {}, "b": {}}) == []


def test_an_all_reduce_far_below_the_link_is_told():
    links = {"a": {"infiniband": 50.0, "ethernet": 3.0}, "b": {"infiniband": 50.0}}
    (complaint,) = judge_speeds({"a": said(0.05), "b": said(0.05)}, links, "nccl")
    assert "reaches 1.34 GB/s, where the slowest link carries 50.00" in complaint.cause
    assert judge_speeds({"a": said(0.002), "b": said(0.002)}, links, "nccl") == []


def test_gloo_is_not_measured_by_a_link_that_no_core_can_fill():
    links = {"a": {"ethernet": 12.5}, "b": {"ethernet": 12.5}}
    assert judge_speeds({"a": said(0.1), "b": said(0.1)}, links, "gloo") == []
    assert (
        judge_speeds({"a": said(1.0), "b": said(1.0)}, {"a": {}, "b": {}}, "gloo") == []
    )  # nothing is known of virtual links


@pytest.fixture
def python_that_hangs(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/bash\nread line; echo 'some noise'; echo '{\"port\": 7}'; read line; sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("cpt.cluster.timing.sys.executable", str(program))


def test_a_process_that_hangs_is_killed(python_that_hangs):
    children = Children(1, holds_store=True, seconds=5)
    assert children.next_answer(0, time.monotonic() + 5) == {"port": 7}
    children.begin({"world_size": 1}, 0)
    assert children.answer(0.2) == {"error": "no end within 0 s"}
    children.kill()
    assert children.processes[0].poll() is not None


def test_a_process_that_dies_says_why(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/bash\necho 'ImportError: libtorch.so' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("cpt.cluster.timing.sys.executable", str(program))
    children = Children(1, holds_store=False, seconds=5)
    time.sleep(0.2)
    assert "its process ended" in children.answer(5)["error"] and children.errors == ["ImportError: libtorch.so"]
    children.kill()
