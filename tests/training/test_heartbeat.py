import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from full_disk import disk_of_its_own, fill
from transformers import TrainerControl, TrainerState

from cpt.runs.events import read_heartbeats
from cpt.training.liveness import Heartbeat


def test_progress_is_told_with_phase_step_and_speed(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.training.liveness.SECONDS_BETWEEN_WRITES", 0.0)
    pulse = Heartbeat(tmp_path)
    (sign,) = read_heartbeats(tmp_path)
    assert (sign.phase, sign.step, sign.pid, sign.seconds_per_step) == ("starting", 0, os.getpid(), None)
    for step in range(1, 5):
        pulse.on_step_begin(None, TrainerState(global_step=step - 1), TrainerControl())
        time.sleep(0.01)
        pulse.on_step_end(None, TrainerState(global_step=step), TrainerControl(should_save=step == 4))
        (after,) = read_heartbeats(tmp_path)
        assert after.beats > sign.beats
        sign = after
    assert sign.phase == "between" and sign.step == 4 and sign.seconds_per_step >= 0.01


def test_the_peak_is_that_of_the_gpu_in_use_whichever_thread_reads_it(tmp_path, monkeypatch):
    peaks = {0: 0, 1: 3 * 2**30}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device=0: peaks[device]
    )  # 0: the current device of a new thread
    Heartbeat(tmp_path)
    assert read_heartbeats(tmp_path)[0].gpu_peak_gib == 3


def test_another_phase_is_told_at_once(tmp_path):
    pulse = Heartbeat(tmp_path)
    phases = []
    for step, saves in ((0, False), (1, True), (2, False), (3, False)):
        pulse.on_step_begin(None, TrainerState(global_step=step), TrainerControl())
        phases.append(read_heartbeats(tmp_path)[0].phase)
        pulse.on_step_end(None, TrainerState(global_step=step + 1), TrainerControl(should_log=True, should_save=saves))
        phases.append(read_heartbeats(tmp_path)[0].phase)
    assert phases == ["training"] * 3 + ["between"] + ["training"] * 4


def test_a_signal_writes_the_stacks(tmp_path):
    Heartbeat(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert "test_a_signal_writes_the_stacks" in (tmp_path / "stacks" / "rank-0.txt").read_text()


def test_on_a_full_disk_the_pulse_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.training.liveness.SECONDS_BETWEEN_WRITES", 0.0)
    with disk_of_its_own(tmp_path / "disk", "64k") as disk:
        pulse = Heartbeat(disk)
        fill(disk)
        pulse.beat("training", 12345)
        (sign,) = read_heartbeats(disk)
        assert (sign.step, sign.phase) == (12345, "training")


def test_a_long_evaluation_shows_that_it_goes_on(tmp_path):
    pulse, phases = Heartbeat(tmp_path), []
    for call in (
        pulse.on_prediction_step,
        pulse.on_step_begin,
        pulse.on_prediction_step,
        pulse.on_train_end,
        pulse.on_prediction_step,
    ):
        before = pulse.beats
        call(None, TrainerState(global_step=3), TrainerControl())
        phases.append(read_heartbeats(tmp_path)[0].phase)
        assert pulse.beats == before + 1
    assert phases == ["starting", "training", "between", "ending", "ending"]


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A pulse whose watcher looks often, and what tells whether it beat in the next half second."""
    monkeypatch.setattr("cpt.training.liveness.SECONDS_BETWEEN_CPU_LOOKS", 0.1)
    monkeypatch.setattr("cpt.training.liveness.SECONDS_BETWEEN_PULSES", 0.05)
    monkeypatch.setattr("cpt.training.liveness.LEAST_WORK", 0.15)  # the clock of a process ticks each 10 ms
    with Heartbeat(tmp_path) as pulse:

        def beats_while(work):
            before = pulse.beats
            work()
            return pulse.beats > before

        yield pulse, beats_while


def busy():
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        sum(range(1000))


def busy_below():
    subprocess.run(
        [sys.executable, "-c", "import time\nt = time.time() + 1.5\nwhile time.time() < t: pass"], check=True
    )


def test_before_the_first_step_work_is_a_sign_of_life_and_waiting_is_none(watched):
    _, beats_while = watched
    assert beats_while(busy) and beats_while(busy_below)
    time.sleep(0.3)  # what was done last is looked at
    assert not beats_while(lambda: time.sleep(1.0))


def test_while_steps_are_made_only_they_count_and_after_the_last_work_does_again(watched):
    pulse, beats_while = watched
    pulse.on_step_begin(None, TrainerState(global_step=4), TrainerControl())
    assert not beats_while(busy)
    pulse.on_train_end(None, TrainerState(global_step=5), TrainerControl())
    assert beats_while(busy) and (pulse.phase, pulse.step) == ("ending", 5)


def test_a_process_that_waits_gives_a_pulse_and_no_beat_and_says_what_ended_it(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.training.liveness.SECONDS_BETWEEN_PULSES", 0.05)
    with pytest.raises(ValueError, match="no rows"), Heartbeat(tmp_path) as pulse:
        pulse.beat("training", 3)
        (before,) = read_heartbeats(tmp_path)
        time.sleep(0.3)
        (after,) = read_heartbeats(tmp_path)
        assert after.pulse > before.pulse and after.beats == before.beats and after.ended is None
        raise ValueError("no rows")
    assert read_heartbeats(tmp_path)[0].ended == "ValueError: no rows"
    with Heartbeat(tmp_path):
        pass
    assert read_heartbeats(tmp_path)[0].ended == ""
