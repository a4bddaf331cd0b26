import json
import signal
import subprocess
import sys
import textwrap
import threading
import time

from full_disk import disk_of_its_own, set_read_only

from cpt.launchers.supervise import Supervisor, Watch, command_of_attempt, patience
from cpt.runs.events import read_events
from cpt.runs.record import Run
from cpt.safety.heartbeat import Sign, write_sign


def sign(**changed):
    return Sign(**{"rank": 0, "pid": 1, "host": "h", "phase": "training", "step": 3, "beats": 4, "seconds_per_step": 2.0, **changed})


def test_patience_follows_the_steps():
    assert patience(sign()) == 30 and patience(sign(seconds_per_step=20.0)) == 100
    assert patience(sign(seconds_per_step=None)) > 100 and patience(sign(phase="between")) > 1000


def test_a_process_without_progress_is_found_by_this_clock(tmp_path):
    watch = Watch(tmp_path)
    write_sign(tmp_path, sign())
    write_sign(tmp_path, sign(rank=1))
    assert watch.hung(0) is None
    write_sign(tmp_path, sign(beats=5))
    assert watch.hung(25) is None
    found = watch.hung(31)
    assert found is not None and found.rank == 1, "rank 0 beat at 25"


def test_where_one_process_works_while_a_run_starts_the_others_may_wait_for_it(tmp_path):
    watch, hour = Watch(tmp_path), 3600
    for rank in (0, 1):
        write_sign(tmp_path, sign(rank=rank, phase="starting"))
    assert watch.hung(0) is None
    write_sign(tmp_path, sign(rank=0, phase="starting", beats=5))
    assert watch.hung(0.9 * hour) is None and watch.hung(1.8 * hour) is None
    assert watch.hung(2 * hour) is not None, "now nobody works"


def test_a_disk_that_takes_no_sign_of_life_proves_nothing(tmp_path):
    with disk_of_its_own(tmp_path / "disk", "64k") as disk:
        watch = Watch(disk)
        write_sign(disk, sign())
        assert watch.hung(0) is None
        set_read_only(disk, True)
        assert watch.hung(1000) is None
        set_read_only(disk, False)
        assert watch.hung(1001) is None and watch.hung(1002 + 30) is not None


def test_a_finished_run_that_is_being_judged_is_not_ended(tmp_path):
    watch = Watch(tmp_path)
    write_sign(tmp_path, sign(phase="ending"))
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert watch.hung(0) is None and watch.hung(100_000) is None
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert watch.hung(100_001) is not None


RUN = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
tries = len(list(folder.glob("try-*")))
(folder / f"try-{tries}").touch()
def status(**s): (folder / "status.json").write_text(json.dumps({"updated": f"{tries}-{time.time()}", **s}))
status(state="running")
"""


def supervised(tmp_path, body, **options):
    """A stand-in for a run, whose `tries` is the number of earlier attempts."""
    program = tmp_path / "run.py"
    program.write_text(RUN + textwrap.dedent(body))
    return Supervisor(Run(tmp_path), [sys.executable, str(program), str(tmp_path)], **options)


def test_a_run_that_dies_is_started_again_until_it_is_done(tmp_path):
    body = """
        if tries < 2: os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body).supervise().what == "done"
    assert len(list(tmp_path.glob("try-*"))) == 3
    assert [event["kind"] for event in read_events(tmp_path)] == ["restart", "restart"]


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path):
    body = """
        status(state="failed", error="RecipeError", exit_code=2, message="no such key")
        sys.exit(2)
    """
    decision = supervised(tmp_path, body).supervise()
    assert (decision.what, decision.code) == ("give up", 2) and len(list(tmp_path.glob("try-*"))) == 1


def test_a_process_that_stands_still_is_ended_with_its_stacks_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.launchers.supervise.LEAST_PATIENCE", 1.0)
    monkeypatch.setattr("cpt.launchers.supervise.SECONDS_FOR_STACKS", 0.3)
    body = """
        import signal, dataclasses
        signal.signal(signal.SIGUSR2, lambda *_: (folder / "asked").touch())
        (folder / "heartbeats").mkdir(exist_ok=True)
        if tries == 0:
            sign = dict(rank=0, pid=os.getpid(), host="h", phase="training", step=4, beats=9, seconds_per_step=0.1)
            (folder / "heartbeats" / "rank-0.json").write_text(json.dumps(sign))
            time.sleep(60)
            time.sleep(60)
        status(state="finished", exit_code=0)
    """
    began = time.monotonic()
    assert supervised(tmp_path, body).supervise().what == "done"
    assert time.monotonic() - began < 20 and (tmp_path / "asked").exists()
    assert [event["kind"] for event in read_events(tmp_path)] == ["hang", "restart"]


def test_a_signal_is_passed_on_and_ends_the_supervision(tmp_path):
    body = """
        import signal
        def stop(*_):
            status(state="interrupted", error="Interrupted", exit_code=75, message="stopped by SIGTERM")
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        (folder / "ready").touch()
        time.sleep(60)
    """
    supervisor = supervised(tmp_path, body)

    def send():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    sender = threading.Timer(0, send)
    sender.start()
    decision = supervisor.supervise()
    assert (decision.what, decision.code) == ("stop", 75)


def test_running_out_of_memory_is_learned_from_and_no_failure(tmp_path):
    body = """
        if tries < 4:  # the same step more often than a failure may
            with (folder / "events.jsonl").open("a") as events:
                events.write(json.dumps({"kind": "out_of_memory", "restart": True, "message": "halved"}) + chr(10))
            os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body, restarts=2).supervise().what == "done"


def test_what_a_killed_launcher_leaves_behind_is_ended_before_the_next_start(tmp_path):
    body = """
        import subprocess
        if tries == 0:
            orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            (folder / "orphan").write_text(str(orphan.pid))
            os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body).supervise().what == "done"
    pid = (tmp_path / "orphan").read_text()
    assert subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip() in ("", "Z")


def test_the_command_of_an_attempt():
    assert command_of_attempt(["r.yaml"], 1, None)[-1] == "r.yaml"
    assert "--nproc_per_node=4" in command_of_attempt(["r.yaml"], 4, None)
    words = command_of_attempt(["r.yaml", "seed=2"], 4, "accelerate launch --config_file 'my file.yaml'")
    assert words[:4] == ["accelerate", "launch", "--config_file", "my file.yaml"] and words[-2:] == ["r.yaml", "seed=2"]
    assert json.dumps(words)
