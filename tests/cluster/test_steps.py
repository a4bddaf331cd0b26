"""What one node does between the steps, and what is left of it afterwards."""

from pathlib import Path

import pytest

from cpt.cluster import steps as under_test
from cpt.cluster.complaint import Unfit
from cpt.cluster.place import place_of_node, place_of_process
from cpt.cluster.steps import Steps, usable_gpus
from cpt.hardware import Gpu

CARD = Gpu("NVIDIA H100", 80, 80, "580", "9.0")
PLACE = place_of_node(0, ["host-0", "host-1"], "127.0.0.1:29500")


@pytest.fixture
def steps(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/bash\nread first; read part\n")
    program.chmod(0o755)
    monkeypatch.setattr("cpt.cluster.timing.sys.executable", str(program))
    with Steps(PLACE, None, 10, on_cpu=True) as made:
        made.names = {0: "host-0", 1: "host-1"}
        yield made


def facts(**changes) -> dict:
    return {"name": "host-0", "gpus_used": 0, "network": {"error": "none"}, **changes}


def test_the_processes_of_the_all_reduce_end_with_it(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/bash\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("cpt.cluster.timing.sys.executable", str(program))
    with pytest.raises(KeyboardInterrupt), Steps(PLACE, None, 10, on_cpu=True) as made:
        raise KeyboardInterrupt
    assert all(child.poll() is not None for child in made.children.processes)


def test_one_process_a_gpu_takes_part_where_all_nodes_have_gpus(steps):
    answer = steps.judge_facts({0: facts(gpus_used=8), 1: facts(gpus_used=8, name="host-1")})
    assert answer == {"world_size": 16, "speakers": [0, 8], "backend": "nccl"}


def test_one_process_a_node_takes_part_where_one_has_none(steps):
    answer = steps.judge_facts({0: facts(gpus_used=8), 1: facts(name="host-1")})
    assert answer == {"world_size": 2, "speakers": [0, 1], "backend": "gloo"}


def test_nodes_of_one_name_are_told_apart(steps):
    steps.judge_facts({0: facts(name="localhost"), 1: facts(name="localhost")})
    assert list(steps.names.values()) == ["localhost (node 0)", "localhost (node 1)"]


def test_a_mistake_of_ours_ends_the_meeting_for_all(steps):
    class Meeting:
        clock_offset = 0.0
        has_hung_up = False

        def step(self, *_):
            raise KeyError("a mistake")

        def hang_up(self):
            self.has_hung_up = True

    meeting = Meeting()
    with pytest.raises(KeyError):
        steps.take(meeting)
    assert meeting.has_hung_up


def test_a_look_that_hangs_ends_the_check(steps):
    with pytest.raises(Unfit, match="host-1: hangs where it looks at data.sources"):
        steps.judge_facts({0: facts(), 1: facts(name="host-1", hangs="data.sources[0].path")})


def test_a_store_that_is_not_shared_costs_time_only(steps):
    written = {node: {"store": {"token": "t", "problem": None, "folder": "/cache"}} for node in ("0", "1")}
    steps.judge_tokens(written, {0: {"store": ["1"]}, 1: {"store": ["0"]}})
    (complaint,) = steps.complaints
    assert (
        complaint.host == "host-1"
        and "/cache, the store of tokens (CPT_CACHE), is not the folder" in complaint.cause
        and not complaint.fatal
    )


def test_a_full_disk_ends_it(steps):
    good = {"token": "t", "problem": None, "folder": "/runs"}
    written = {"0": {"output": good}, "1": {"output": {**good, "problem": "No space left on device"}}}
    with pytest.raises(Unfit, match="host-1: cannot write into /runs, the output folder .*: No space left on device"):
        steps.judge_tokens(written, {0: {"output": []}, 1: {"output": []}})


def test_gpus_that_are_hidden_take_no_part(monkeypatch):
    monkeypatch.setattr(under_test, "find_gpus", lambda: [CARD] * 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert usable_gpus(PLACE) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert usable_gpus(PLACE) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert usable_gpus(PLACE) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(under_test, "find_gpus", list)
    assert usable_gpus(PLACE) == 0  # DeepSpeed's launcher sets it where there is no GPU too


def test_a_launched_node_uses_as_many_gpus_as_processes(monkeypatch):
    monkeypatch.setattr(under_test, "find_gpus", lambda: [CARD] * 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place = place_of_process(
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    )
    assert usable_gpus(place) == 2


def test_what_a_node_leaves_behind_is_nothing(steps):
    folder = Path(steps.tokens["store"].write()["folder"])
    steps.__exit__(None, None, None)
    assert not list(folder.glob(".cpt-preflight*"))
