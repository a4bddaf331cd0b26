import os
import signal
import sys
import threading
import time

import psutil
import pytest

from cpt.errors import LaunchError
from cpt.process import Child, ReceivedSignals, marked_processes

# A launcher like torchrun: its worker is in a session of its own and ignores SIGTERM.
LAUNCHER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"
worker += "; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
time.sleep(60)
"""
pytestmark = pytest.mark.heavy


def test_a_signal_is_forwarded_and_nothing_is_left(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        child = Child([sys.executable, "-c", LAUNCHER], output=log)

    def send_when_ready():
        while b"ready" not in (tmp_path / "log").read_bytes():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_ready).start()
    assert child.wait_for_end() == (75, signal.SIGTERM)
    assert not marked_processes(child.mark)


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup: the end of the session neither stops a supervised run nor its supervisor."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received = ReceivedSignals()
    reads = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    try:
        with received.noted():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            is_ignored, _ = Child([sys.executable, "-c", reads]).wait_for_end()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received.first == signal.SIGUSR1 and is_ignored


def test_a_child_that_hangs_is_killed_with_its_family_and_others_are_not(tmp_path):
    other = Child([sys.executable, "-c", "import time; time.sleep(60)"])
    log = (tmp_path / "log").open("wb")
    child = Child([sys.executable, "-c", LAUNCHER], output=log)
    code, _ = child.wait_for_end(look=lambda: b"ready" in (tmp_path / "log").read_bytes())
    assert code == -signal.SIGKILL and not marked_processes(child.mark)
    assert other.poll() is None
    other.kill_family()
    assert other.wait() == -signal.SIGKILL


def test_a_signal_during_a_fork_ends_the_parent_and_the_child():
    usual = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # shells start background jobs without it
    armed = [signal.SIGINT]
    os.register_at_fork(after_in_parent=lambda: armed and signal.raise_signal(armed.pop()))
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt):
        Child(["sleep", "60"])
    signal.signal(signal.SIGINT, usual)
    assert not armed and {child.pid for child in psutil.Process().children()} <= before


def test_a_child_ends_when_its_parent_is_killed():
    code = "from cpt.process import Child; import time; print(Child(['sleep', '60']).pid, flush=True); time.sleep(60)"
    parent = psutil.Popen([sys.executable, "-c", code], stdout=-1)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_command_that_does_not_exist_is_a_launch_error():
    with pytest.raises(LaunchError, match="no-such-command"):
        Child(["no-such-command"])
