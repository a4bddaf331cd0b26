import json
import socket

from cpt.runs.events import (
    LastHeartbeat,
    name_processes,
    pids_here,
    read_heartbeats,
    remove_heartbeats,
    write_heartbeat,
)


def heartbeat(**changed):
    return LastHeartbeat(
        **{
            "rank": 0,
            "pid": 1,
            "host": "h",
            "phase": "training",
            "step": 3,
            "beats": 4,
            "seconds_per_step": 2.0,
            **changed,
        }
    )


def test_signs_come_back_by_rank_until_they_are_forgotten(tmp_path):
    for rank in (10, 2):
        write_heartbeat(tmp_path, heartbeat(rank=rank))
    assert read_heartbeats(tmp_path) == [heartbeat(rank=2), heartbeat(rank=10)]
    remove_heartbeats(tmp_path)
    assert read_heartbeats(tmp_path) == []


def test_what_another_version_or_a_crash_left_is_left_out(tmp_path):
    write_heartbeat(tmp_path, heartbeat())
    (tmp_path / "heartbeats" / "rank-1.json").write_text(json.dumps({"rank": 1, "other": 2}))
    (tmp_path / "heartbeats" / "rank-2.json").write_text("{")
    assert read_heartbeats(tmp_path) == [heartbeat()]


def test_only_processes_of_this_host_can_be_told_anything(tmp_path):
    write_heartbeat(tmp_path, heartbeat(rank=0, pid=11, host=socket.gethostname()))
    write_heartbeat(tmp_path, heartbeat(rank=1, pid=11, host="another"))
    write_heartbeat(tmp_path, heartbeat(rank=2, pid=12, host="another"))
    assert pids_here(tmp_path) == [11]


def test_processes_are_named_by_their_host_where_all_of_it_is_meant():
    everyone = [heartbeat(rank=rank, host=f"host-{rank // 2}") for rank in range(4)]
    assert name_processes(everyone[2:], everyone) == "host-1 (process 2, 3)"
    assert name_processes(everyone[1:3], everyone) == "process 1 on host-0 and process 2 on host-1"
