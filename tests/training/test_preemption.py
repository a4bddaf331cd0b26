import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from threads_as_ranks import on_ranks
from transformers import TrainerControl, TrainerState

from cpt.errors import Interrupted
from cpt.interrupts import EndAtOnce
from cpt.training import preemption as module
from cpt.training.preemption import SIGNALS, Preemption


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def training(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.05)
    with Preemption() as preemption:
        preemption.on_train_begin(None, TrainerState(), TrainerControl())
        yield preemption


def test_a_signal_in_an_evaluation_ends_it_after_the_batch(training):
    training.on_prediction_step(None, TrainerState(), TrainerControl())
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: training.received)
    for _ in range(2):  # samples that come after it end as well
        with pytest.raises(Interrupted, match="SIGTERM"):
            training.on_prediction_step(None, TrainerState(), TrainerControl())


@pytest.fixture(autouse=True)
def own_handlers():
    """Those of Python, and not of a command that another test ran in this process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if isinstance(before[number], EndAtOnce):
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_while_nothing_is_trained_ends_the_process_at_once():
    with Preemption(), pytest.raises(Interrupted, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_a_second_interrupt_ends_the_process_on_the_spot(monkeypatch):
    """One Ctrl-C may come twice within a second: a launcher passes on what its processes have got already."""
    codes, times = [], iter([100.0, 100.6, 101.7])
    monkeypatch.setattr(module, "exit_now", codes.append)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    preemption = Preemption()
    for expected in ([], [], [130]):
        preemption.note(signal.SIGINT)
        assert codes == expected


def test_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with Preemption() as preemption:
        heard = {number for number in SIGNALS if signal.getsignal(number) != before[number]}
        is_under_nohup = before[signal.SIGHUP] == signal.SIG_IGN
        assert heard == set(SIGNALS) - ({signal.SIGHUP} if is_under_nohup else set())
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert not [thread for thread in threading.enumerate() if thread.name == "cpt-signals"]
    for descriptor in (preemption.reading, preemption.writing):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_in_another_thread_than_the_main_one_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with Preemption() as preemption:
            seen.append(signal.getsignal(signal.SIGTERM))
            preemption.end_training(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_forked_worker_ends_on_sigterm_and_ignores_ctrl_c(training):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"ready")
        time.sleep(30)
        os._exit(0)
    os.read(reading, 5)
    os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the whole group; the main process ends its workers
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not training.received


def test_a_signal_stops_the_training_after_a_save_and_names_it(training):
    control = TrainerControl(should_evaluate=True)
    training.on_step_end(None, TrainerState(), control)
    assert (control.should_save, control.should_evaluate) == (False, True)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: training.received)
    training.on_step_end(None, TrainerState(), control)
    assert control.should_save and control.should_training_stop and not control.should_evaluate
    with pytest.raises(Interrupted, match=r"^stopped by SIGUSR1: checkpoint-3 is saved\."):
        training.end_training("checkpoint-3")
    with pytest.raises(Interrupted, match=r"^stopped by SIGUSR1: nothing is saved yet\."):
        training.end_training(None)


def test_a_signal_while_the_last_save_is_written_waits_for_it(training):
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Interrupted, match=r"^stopped by SIGUSR1: checkpoint-8 is saved\."):
        training.end_training("checkpoint-8")


def test_after_the_training_a_signal_is_an_error_at_once(training):
    training.end_training("checkpoint-3")
    with pytest.raises(Interrupted, match="SIGUSR1 arrived outside of training"):
        signal.raise_signal(signal.SIGUSR1)
    training.on_prediction_step(None, TrainerState(), TrainerControl())


@pytest.mark.parametrize(("seconds", "between"), [(1.0, 1), (0.02, 5), (0.0001, 50)])
def test_processes_agree_every_tenth_of_a_second_in_calls(seconds, between, monkeypatch):
    """Another process is slower, and gets the signal."""
    now, agreements, calls = [50.0], [], 0
    preemption, pace = Preemption(), module.Pace(asked_at=50.0)
    preemption.group = "of both"
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def all_reduce(tensor, op, group):
        assert group == "of both" and tensor[1] == pytest.approx(seconds / 2)
        agreements.append(calls)
        tensor[1] *= 2
        tensor[0] = max(tensor[0], signal.SIGTERM if len(agreements) == 4 else 0)

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    is_stopped = False
    while not is_stopped:
        calls += 1
        now[0] += seconds / 2
        is_stopped = preemption.is_told_to_stop(pace)
    assert agreements == [1, 1 + between, 1 + 2 * between, 1 + 3 * between]
    assert preemption.stopped_by == "SIGTERM"


def test_a_launcher_that_is_gone_counts_as_a_signal(training):
    training.launcher = 1  # this process has another parent
    wait_until(lambda: training.received == signal.SIGHUP)


def test_the_descriptor_that_signals_woke_before_is_restored():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        with Preemption():
            pass
        assert signal.set_wakeup_fd(-1) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def test_a_command_ends_at_once_before_and_after_its_training(monkeypatch):
    ended = []
    recorded = []
    monkeypatch.setattr(EndAtOnce, "__call__", lambda self, number, frame: ended.append(number))
    signal.signal(signal.SIGTERM, EndAtOnce(os.getpid()))
    with Preemption() as preemption:
        preemption.record_with(recorded.append)
        for begins in (False, True):
            if begins:
                preemption.on_train_begin(None, TrainerState(), TrainerControl())
                preemption.end_training(None)
            with pytest.raises(Interrupted, match="SIGTERM arrived outside of training"):
                preemption.at_signal(signal.SIGTERM, None)
        assert ended == [signal.SIGTERM] * 2 and len(recorded) == 2
        preemption.is_training = True
        preemption.at_signal(signal.SIGTERM, None)
        preemption.is_training, preemption.stopped_by = False, "SIGTERM"
        preemption.at_signal(signal.SIGTERM, None)


@pytest.mark.parametrize("received", [0, signal.SIGUSR1])
def test_a_signal_to_one_of_three_processes_stops_all(received, monkeypatch):
    monkeypatch.setattr(module, "world_size", lambda: dist.get_world_size())

    def work(rank):
        preemption = Preemption()
        preemption.on_train_begin(None, TrainerState(), TrainerControl())
        preemption.received = received if rank == 1 else 0
        control = TrainerControl(should_evaluate=True)
        preemption.on_step_end(None, TrainerState(), control)
        flags = (control.should_save, control.should_training_stop, control.should_evaluate)
        return preemption.stopped_by, flags, preemption.steps.calls_between

    answers = on_ranks(3, work)
    stopped = ("SIGUSR1", (True, True, False)) if received else (None, (False, False, True))
    assert [answer[:2] for answer in answers] == [stopped] * 3
    assert len({answer[2] for answer in answers}) == 1, "they agree when they agree next"
