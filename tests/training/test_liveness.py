"""Heartbeats of a process, and what is known of the others when one fails."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from full_disk import disk_of_its_own, fill
from tiny_trainers import same, trainer_of, weights
from transformers import TrainerCallback, TrainerControl, TrainerState

from cpt.checkpoints.model_folder import load_data
from cpt.checkpoints.resume import published_checkpoints
from cpt.errors import Interrupted, LaunchError, UserCodeError
from cpt.runs.events import LastHeartbeat, read_events, read_heartbeats, write_heartbeat
from cpt.runs.record import Run
from cpt.training import contents, liveness
from cpt.training.liveness import (
    GroupTimeouts,
    Heartbeat,
    find_lost_ranks,
    lost_others,
    lost_ranks_named,
)
from cpt.training.resuming import saved_on_errors


def test_a_heartbeat_has_phase_step_and_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "SECONDS_BETWEEN_WRITES", 0.0)
    pulse = Heartbeat(tmp_path)
    (sign,) = read_heartbeats(tmp_path)
    assert (sign.phase, sign.step, sign.pid, sign.seconds_per_step) == (
        "starting",
        0,
        os.getpid(),
        None,
    )
    for step in range(1, 5):
        pulse.on_step_begin(None, TrainerState(global_step=step - 1), TrainerControl())
        time.sleep(0.01)
        pulse.on_step_end(None, TrainerState(global_step=step), TrainerControl())
    (sign,) = read_heartbeats(tmp_path)
    assert (sign.phase, sign.step, sign.beats) == (
        "training",
        4,
        9,
    ) and sign.seconds_per_step >= 0.01


def test_the_peak_is_that_of_the_gpu_in_use_whichever_thread_reads_it(tmp_path, monkeypatch):
    peaks = {0: 0, 1: 3 * 2**30}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    # 0 is the current device of a new thread
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=0: peaks[device])
    Heartbeat(tmp_path)
    assert read_heartbeats(tmp_path)[0].gpu_peak_gib == 3


def test_each_event_is_progress_and_a_new_phase_is_written_at_once(tmp_path):
    pulse, phases = Heartbeat(tmp_path), []
    begin, end, evaluate = pulse.on_step_begin, pulse.on_step_end, pulse.on_prediction_step
    for number, call in enumerate(
        (evaluate, begin, end, evaluate, begin, pulse.on_train_end, evaluate)
    ):
        before = pulse.beats
        call(None, TrainerState(global_step=3), TrainerControl(should_save=number == 2))
        phases.append(read_heartbeats(tmp_path)[0].phase)
        assert pulse.beats == before + 1
    assert phases == ["starting", "training", "between", "between", "training", "ending", "ending"]


def test_a_signal_writes_the_stacks(tmp_path):
    Heartbeat(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert "test_a_signal_writes_the_stacks" in (tmp_path / "stacks" / "rank-0.txt").read_text()


def test_heartbeats_continue_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "SECONDS_BETWEEN_WRITES", 0.0)
    with disk_of_its_own(tmp_path / "disk", "64k") as disk:
        pulse = Heartbeat(disk)
        fill(disk)
        pulse.beat("training", 12345)
        (sign,) = read_heartbeats(disk)
        assert (sign.step, sign.phase) == (12345, "training")


@pytest.fixture
def pulse(tmp_path, monkeypatch):
    """A heartbeat that looks at the processor's time often."""
    monkeypatch.setattr(liveness, "SECONDS_BETWEEN_CPU_LOOKS", 0.1)
    monkeypatch.setattr(liveness, "SECONDS_BETWEEN_PULSES", 0.05)
    monkeypatch.setattr(liveness, "LEAST_WORK", 0.15)  # the clock of a process ticks each 10 ms
    with Heartbeat(tmp_path) as pulse:
        yield pulse


def beats_while(pulse, work, seconds):
    """Whether it beats while something is done again and again, for so long at the most."""
    before, end = pulse.beats, time.monotonic() + seconds
    while pulse.beats == before and time.monotonic() < end:
        work()
    return pulse.beats > before


def compute():
    sum(range(1000))


def compute_in_a_child():
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10_000_000))"], check=True)


@pytest.mark.heavy
def test_before_the_first_step_work_is_progress_and_waiting_is_none(pulse):
    assert beats_while(pulse, compute, 20) and beats_while(pulse, compute_in_a_child, 20)
    # On a busy machine the last work is counted late.
    assert any(not beats_while(pulse, lambda: time.sleep(0.1), 0.5) for _ in range(20))


@pytest.mark.heavy
def test_between_the_first_step_and_the_last_only_steps_are_progress(pulse):
    pulse.on_step_begin(None, TrainerState(global_step=4), TrainerControl())
    assert not beats_while(pulse, compute, 0.5)
    pulse.on_train_end(None, TrainerState(global_step=5), TrainerControl())
    assert beats_while(pulse, compute, 20) and (pulse.phase, pulse.step) == ("ending", 5)


def test_a_process_that_waits_has_a_pulse_and_no_progress_and_writes_what_ended_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(liveness, "SECONDS_BETWEEN_PULSES", 0.02)
    with pytest.raises(ValueError, match="no rows"), Heartbeat(tmp_path) as pulse:
        pulse.beat("training", 3)
        (before,) = read_heartbeats(tmp_path)
        while (after := read_heartbeats(tmp_path)[0]).pulse == before.pulse:
            time.sleep(0.01)
        assert after.beats == before.beats and after.ended is None
        raise ValueError("no rows")
    assert read_heartbeats(tmp_path)[0].ended == "ValueError: no rows"
    with Heartbeat(tmp_path):
        pass
    assert read_heartbeats(tmp_path)[0].ended == ""


# --- a process is gone ---

LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
)
HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("problem", "several"),
    [(LOST, True), (dist.DistBackendError("NCCL error"), True), (RuntimeError("shapes"), False)],
)
def test_only_several_processes_can_lose_each_other(monkeypatch, problem, several):
    assert not lost_others(problem)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_others(problem) is several


def sign(rank, host, **changed):
    fields = {"pid": 1, "phase": "training", "step": 7, "beats": 4, "seconds_per_step": 2.0}
    return LastHeartbeat(**{"rank": rank, "host": host, **fields, **changed})


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Lets others write heartbeats while the first of four processes waits; the last two are on another host."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, host in enumerate((HERE, HERE, "host-9", "host-9")):
        write_heartbeat(tmp_path, sign(rank, host, pid=os.getpid()))
    answers = []

    def sleep(_):
        for other in answers:
            write_heartbeat(tmp_path, other)

    seconds = itertools.count()
    monkeypatch.setattr(
        liveness, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=sleep)
    )
    return lambda *signs: answers.extend(signs)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([sign(1, HERE, pulse=1)], "host-9 (process 2, 3) is gone"),
        (
            [
                sign(1, HERE, ended=""),
                sign(2, "host-9", ended="DataError: no rows"),
                sign(3, "host-9", ended=""),
            ],
            "process 2 on host-9 ended with DataError: no rows",
        ),
        (
            [sign(1, HERE, pulse=1), sign(2, "host-9", pulse=1), sign(3, "host-9", pulse=1)],
            str(LOST),
        ),
    ],
    ids=["a host", "an error of its own", "the network"],
)
def test_what_was_lost_is_named(tmp_path, answer, answers, expected):
    answer(*answers)
    message = message_of(tmp_path)
    assert expected in message and "Nothing was saved yet" in message
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["message"]) == ("lost", message)


def message_of(folder):
    with pytest.raises(LaunchError) as lost, lost_ranks_named(Run(folder)):
        raise LOST
    return str(lost.value)


def test_a_process_that_a_signal_stopped_interrupts_the_others(tmp_path, answer):
    answer(
        sign(1, HERE, ended="Interrupted: SIGTERM"),
        sign(2, "host-9", ended=""),
        sign(3, "host-9", ended=""),
    )
    with pytest.raises(Interrupted), lost_ranks_named(Run(tmp_path)):
        raise LOST


def test_a_process_of_this_host_that_died_is_known_without_waiting(tmp_path, answer, monkeypatch):
    monkeypatch.setattr(liveness, "SECONDS_FOR_AN_ANSWER", float("inf"))
    dead = subprocess.Popen(["true"])
    dead.wait()
    write_heartbeat(tmp_path, sign(1, HERE, pid=dead.pid))
    answer(sign(2, "host-9", pulse=1), sign(3, "host-9", pulse=1))
    gone, _ = find_lost_ranks(tmp_path)
    assert [sign.rank for sign in gone] == [1]


def test_the_first_process_left_writes_the_status_where_the_main_process_cannot(
    tmp_path, answer, monkeypatch
):
    monkeypatch.setenv("RANK", "2")
    write_heartbeat(tmp_path, sign(0, "host-8"))
    write_heartbeat(tmp_path, sign(1, "host-8"))
    answer(sign(3, "host-9", pulse=1))
    message, status = message_of(tmp_path), Run(tmp_path).status()
    assert message.startswith("host-8 (process 0, 1) is gone")
    assert (status["state"], status["error"], status["exit_code"]) == ("failed", "LaunchError", 2)


def seconds_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_groups_that_exist_after_the_first_step_have_the_recipes_timeout(tmp_path):
    arguments, callback = SimpleNamespace(ddp_timeout_delta=timedelta(seconds=77)), GroupTimeouts()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        engines = dist.new_group(backend="gloo")
        assert seconds_of(engines) == 1800
        callback.on_train_begin(arguments, None, None)
        assert seconds_of(engines) == seconds_of(dist.group.WORLD) == 77
        made_in_the_first_step = dist.new_group()
        callback.on_step_end(arguments, None, None)
        assert seconds_of(made_in_the_first_step) == 77
    finally:
        dist.destroy_process_group()


# --- this process fails ---


class Fails(TrainerCallback):
    """At step 3: before its update, in the middle of it, after it, or between it and the next."""

    def __init__(self, moment):
        self.moment = moment

    def fail(self, moment, is_now):
        if self.moment == moment and is_now:
            raise ValueError("a bug")

    def on_pre_optimizer_step(self, args, state, control, **more):
        self.fail("callback before the update", state.global_step == 2)
        if self.moment == "optimizer" and state.global_step == 2:
            first = next(more["model"].parameters())

            def half_a_step(*_):
                first.data += 1
                raise ValueError("a bug")

            more["optimizer"].optimizer.register_step_pre_hook(half_a_step)

    def on_optimizer_step(self, args, state, control, **_):
        self.fail("after the update", state.global_step == 2)

    def on_log(self, args, state, control, **_):
        self.fail("between", state.global_step == 3)


def fails_in(moment):
    """A loss function that fails at step 3, and has drawn random numbers before."""

    def faults(trainer, inputs, loss):
        if trainer.state.global_step == 2 and moment == "loss" and loss is not None:
            torch.rand(5)
            raise ValueError("a bug")
        return loss

    return faults


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("moment", "checkpoints", "saved", "resumes"),
    [
        ("between", {"every_steps": 2}, ["checkpoint-2", "checkpoint-3"], "checkpoint-3"),
        ("loss", {}, ["checkpoint-2"], "checkpoint-2"),
        ("callback before the update", {}, ["checkpoint-2"], "checkpoint-2"),
        ("optimizer", {"every_steps": 1}, ["checkpoint-1", "checkpoint-2"], "checkpoint-2"),
        ("optimizer", {}, [], "Nothing was saved yet"),
        ("after the update", {}, [], "Nothing was saved yet"),
    ],
)
def test_an_error_saves_the_last_whole_step_and_names_what_the_run_resumes_from(
    moment, checkpoints, saved, resumes, tiny_recipe, tmp_path
):
    trainer = trainer_of(
        tiny_recipe,
        tmp_path,
        callbacks=[Fails(moment)],
        faults=fails_in(moment),
        checkpoints=checkpoints,
    )
    with pytest.raises(ValueError, match="a bug"), saved_on_errors(trainer):
        trainer.train()
    assert [checkpoint.name for checkpoint in published_checkpoints(trainer.run_folder)] == saved
    message = read_events(trainer.run_folder)[-1]["message"]
    assert "ValueError: a bug" in message and resumes in message


@pytest.mark.heavy
def test_the_step_saved_after_an_error_continues_as_without_it(tiny_recipe, tmp_path):
    config = {**tiny_recipe["model"]["config"], "attention_dropout": 0.3}
    recipe = {**tiny_recipe, "model": {**tiny_recipe["model"], "config": config}}
    whole = trainer_of(recipe, tmp_path / "whole")
    whole.train()
    failing = trainer_of(recipe, tmp_path / "failed", faults=fails_in("loss"))
    with pytest.raises(ValueError, match="a bug"), saved_on_errors(failing):
        failing.train()
    resumed = trainer_of(recipe, tmp_path / "failed")
    resumed.train(resume_from_checkpoint=str(resumed.run_folder / "checkpoint-2"))
    assert same(weights(resumed), weights(whole))


@pytest.mark.heavy
def test_a_devices_generator_is_saved_as_before_the_step_of_the_error(
    tiny_recipe, tmp_path, monkeypatch
):
    """A device whose generator draws in each micro-batch, also in that of the error."""
    generator, drawn_by_step = torch.Generator(), {}
    device = SimpleNamespace(
        get_rng_state=generator.get_state, set_rng_state=generator.set_state, current_device=int
    )
    monkeypatch.setattr(contents, "devices_with_random_states", lambda trainer: {"cuda": device})

    def faults(trainer, inputs, loss):
        torch.rand(3, generator=generator)
        drawn_by_step[trainer.state.global_step + 1] = generator.get_state()
        return fails_in("loss")(trainer, inputs, loss)

    trainer = trainer_of(tiny_recipe, tmp_path, faults=faults)
    with pytest.raises(ValueError, match="a bug"), saved_on_errors(trainer):
        trainer.train()
    states = load_data(trainer.run_folder / "checkpoint-2" / "rng_state.pth")
    assert torch.equal(states["cuda"], drawn_by_step[2])
    assert not torch.equal(drawn_by_step[3], drawn_by_step[2])


@pytest.mark.heavy
def test_a_save_that_fails_too_does_not_hide_the_first_error(tiny_recipe, tmp_path, monkeypatch):
    trainer = trainer_of(tiny_recipe, tmp_path, faults=fails_in("loss"))
    broken = OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", lambda *_, **__: (_ for _ in ()).throw(broken))
    with pytest.raises(ValueError, match="a bug"), saved_on_errors(trainer):
        trainer.train()
    assert not published_checkpoints(trainer.run_folder)


@pytest.mark.heavy
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_transform_that_fails_in_the_middle_of_a_run_is_named_and_the_steps_before_saved(
    workers, tiny_recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 2_000)
    monkeypatch.setenv("CPT_WORKERS", "0")
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "store"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"brittle{workers}.py").write_text(
        "from pathlib import Path\n"
        "def shout(document):\n"
        f"    if Path({str(tmp_path / 'broken')!r}).exists():\n"
        "        raise KeyError('title')\n"
        "    return {**document, 'text': document['text'].upper()}\n"
    )
    # Nothing is read ahead, so that the run meets the error itself.
    monkeypatch.setattr("cpt.data.rows.build.PreparedData.read_ahead", lambda *_: None)
    data = {**tiny_recipe["data"], "chunk_bytes": 6_000, "transforms": [f"brittle{workers}:shout"]}

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                (tmp_path / "broken").touch()

    def run(folder, **options):
        training = {**tiny_recipe["training"], "dataloader_num_workers": workers}
        return trainer_of(tiny_recipe, folder, steps=16, data=data, training=training, **options)

    failing = run(tmp_path / "run", callbacks=[Breaks()])
    with pytest.raises(UserCodeError) as problem, saved_on_errors(failing):
        failing.train()
    message = str(problem.value)
    expected = rf"\S+(domain|general)\.jsonl:\d+: the transform `brittle{workers}:shout` raised"
    assert re.match(expected, message) and f'{tmp_path}/brittle{workers}.py", line 4' in message
    saved = published_checkpoints(failing.run_folder)[-1]
    assert saved.name == f"checkpoint-{failing.state.global_step}" and failing.state.global_step > 2
    (tmp_path / "broken").unlink()
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "empty"))
    whole, resumed = run(tmp_path / "whole"), run(tmp_path / "run")
    whole.train()
    resumed.prepared_data.restore(json.loads((saved / "data_position.json").read_text()))
    resumed.train(resume_from_checkpoint=str(saved))
    assert same(weights(resumed), weights(whole))
