import socket

from full_disk import disk_of_its_own, set_read_only

from cpt.launch.supervise import RunWatch
from cpt.runs.events import LastHeartbeat, write_heartbeat


def sign(**changed):
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


def test_a_process_without_progress_is_found_by_this_clock(tmp_path):
    watch = RunWatch(tmp_path)
    write_heartbeat(tmp_path, sign())
    write_heartbeat(tmp_path, sign(rank=1))
    assert watch.hung(0) is None
    write_heartbeat(tmp_path, sign(beats=5))
    assert watch.hung(25) is None
    found = watch.hung(31)
    assert found is not None and found.rank == 1, "rank 0 beat at 25"


def test_where_one_process_works_while_a_run_starts_the_others_may_wait_for_it(tmp_path):
    watch, hour = RunWatch(tmp_path), 3600
    for rank in (0, 1):
        write_heartbeat(tmp_path, sign(rank=rank, phase="starting"))
    assert watch.hung(0) is None
    write_heartbeat(tmp_path, sign(rank=0, phase="starting", beats=5))
    assert watch.hung(0.9 * hour) is None and watch.hung(1.8 * hour) is None
    assert watch.hung(2 * hour) is not None, "now nobody works"


def test_a_disk_that_takes_no_sign_of_life_proves_nothing(tmp_path):
    with disk_of_its_own(tmp_path / "disk", "64k") as disk:
        watch = RunWatch(disk)
        write_heartbeat(disk, sign())
        assert watch.hung(0) is None
        set_read_only(disk, True)
        assert watch.hung(1000) is None
        set_read_only(disk, False)
        assert watch.hung(1001) is None and watch.hung(1002 + 30) is not None


def test_a_finished_run_that_is_being_judged_is_not_ended(tmp_path):
    watch = RunWatch(tmp_path)
    write_heartbeat(tmp_path, sign(phase="ending"))
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert watch.hung(0) is None and watch.hung(100_000) is None
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert watch.hung(100_001) is not None


def test_each_host_answers_for_its_own_processes_and_a_login_node_for_all(tmp_path):
    watch = RunWatch(tmp_path)
    write_heartbeat(tmp_path, sign(rank=1, host="another"))
    assert watch.hung(0) is None and watch.hung(31) is not None, "nobody here"
    write_heartbeat(tmp_path, sign(rank=0, host=socket.gethostname()))
    assert watch.hung(32) is None and watch.hung(63).rank == 0


def test_who_only_waits_is_there_and_who_gives_no_pulse_is_gone(tmp_path):
    watch = RunWatch(tmp_path)
    for rank in range(3):
        write_heartbeat(tmp_path, sign(rank=rank, host=f"host-{rank}"))
    watch.hung(0)
    write_heartbeat(tmp_path, sign(rank=0, host="host-0", pulse=1))
    write_heartbeat(tmp_path, sign(rank=2, host="host-2", ended=""))
    watch.hung(11)
    assert [gone.host for gone in watch.gone(12)] == ["host-1"]
