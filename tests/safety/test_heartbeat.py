import json
import os
import signal
import time

from transformers import TrainerControl, TrainerState

from cpt.safety.heartbeat import Heartbeat, forget_signs, read_signs


def test_progress_is_told_with_phase_step_and_speed(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.safety.heartbeat.SECONDS_BETWEEN_WRITES", 0.0)
    pulse = Heartbeat(tmp_path)
    (sign,) = read_signs(tmp_path)
    assert (sign.phase, sign.step, sign.pid, sign.seconds_per_step) == ("starting", 0, os.getpid(), None)
    for step in range(1, 5):
        pulse.on_step_begin(None, TrainerState(global_step=step - 1), TrainerControl())
        time.sleep(0.01)
        pulse.on_step_end(None, TrainerState(global_step=step), TrainerControl(should_save=step == 4))
        (after,) = read_signs(tmp_path)
        assert after.beats > sign.beats
        sign = after
    assert sign.phase == "between" and sign.step == 4 and sign.seconds_per_step >= 0.01


def test_steps_that_are_shorter_than_a_second_write_once_in_a_second(tmp_path):
    pulse = Heartbeat(tmp_path)
    for step in range(100):
        pulse.on_step_end(None, TrainerState(global_step=step), TrainerControl())
    assert read_signs(tmp_path)[0].beats < 100


def test_another_phase_is_told_at_once(tmp_path):
    pulse = Heartbeat(tmp_path)
    phases = []
    for step, saves in ((0, False), (1, True), (2, False), (3, False)):
        pulse.on_step_begin(None, TrainerState(global_step=step), TrainerControl())
        phases.append(read_signs(tmp_path)[0].phase)
        pulse.on_step_end(None, TrainerState(global_step=step + 1), TrainerControl(should_log=True, should_save=saves))
        phases.append(read_signs(tmp_path)[0].phase)
    assert phases == ["training"] * 3 + ["between"] + ["training"] * 4


def test_a_signal_writes_the_stacks(tmp_path):
    Heartbeat(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert "test_a_signal_writes_the_stacks" in (tmp_path / "stacks" / "rank-0.txt").read_text()


def test_what_cannot_be_read_is_left_out(tmp_path):
    Heartbeat(tmp_path)
    (tmp_path / "heartbeats" / "rank-1.json").write_text(json.dumps({"rank": 1, "other": 2}))
    (tmp_path / "heartbeats" / "rank-2.json").write_text("{")
    assert [sign.rank for sign in read_signs(tmp_path)] == [0]
    forget_signs(tmp_path)
    assert read_signs(tmp_path) == []


def test_a_full_disk_ends_nothing(tmp_path):
    pulse = Heartbeat(tmp_path)
    forget_signs(tmp_path)
    (tmp_path / "heartbeats").rmdir()
    (tmp_path / "heartbeats").write_text("in the way")
    pulse.beat("training", 1)
    assert (tmp_path / "heartbeats").read_text() == "in the way"
