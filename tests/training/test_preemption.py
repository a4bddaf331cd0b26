import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from transformers import TrainerControl, TrainerState

from cpt.errors import Interrupted
from cpt.training.preemption import SIGNALS, Preemption


def step(preemption, control):
    preemption.on_step_end(None, TrainerState(), control)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def training():
    with Preemption() as preemption:
        preemption.on_train_begin(None, TrainerState(), TrainerControl())
        yield preemption


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training_saves_and_stops_at_the_end_of_the_step(training, number):
    control = TrainerControl(should_evaluate=True)
    step(training, control)
    assert not control.should_training_stop
    os.kill(os.getpid(), number)
    wait_until(lambda: training.received)
    step(training, control)
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (True, False, True)
    with pytest.raises(Interrupted, match=rf"{signal.Signals(number).name}: checkpoint-7 is saved"):
        training.raise_if_stopped("checkpoint-7")


def batch(preemption):
    preemption.on_prediction_step(None, TrainerState(), TrainerControl())


def test_a_signal_in_an_evaluation_ends_it_after_the_batch(training):
    batch(training)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: training.received)
    for _ in range(2):  # samples that come after it end as well
        with pytest.raises(Interrupted, match="stopped by SIGTERM in an evaluation"):
            batch(training)
    with pytest.raises(Interrupted, match="SIGTERM: checkpoint-7 is saved"):
        training.raise_if_stopped("checkpoint-7")


def test_a_signal_where_nothing_is_trained_ends_at_once():
    with Preemption(), pytest.raises(Interrupted, match="SIGTERM came while nothing was being trained"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_handlers_are_given_back():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with Preemption():
        assert all(signal.getsignal(number) != before[number] for number in SIGNALS)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert not [thread for thread in threading.enumerate() if thread.name == "cpt-signals"]


def test_another_thread_than_the_main_one_leaves_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run():
        with Preemption() as preemption:
            seen.append(signal.getsignal(signal.SIGTERM))
            preemption.raise_if_stopped(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


BLOCKED = """
import os, signal, sys, threading, time
from transformers import TrainerControl, TrainerState
from cpt.training.preemption import Preemption
with Preemption() as preemption:
    preemption.on_train_begin(None, TrainerState(), TrainerControl())
    print("ready", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


@pytest.mark.long
def test_a_second_interrupt_ends_a_process_that_hangs():
    hung = subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, text=True)
    assert hung.stdout is not None and hung.stdout.readline() == "ready\n"
    for _ in range(2):  # a launcher passes on what its process has got already
        hung.send_signal(signal.SIGINT)
        time.sleep(0.6)
    assert hung.poll() is None
    time.sleep(0.5)
    hung.send_signal(signal.SIGINT)
    assert hung.wait(10) == 130


def test_a_forked_worker_ends_when_it_is_told_to_and_speaks_for_nobody(training):
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.5)
    os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the whole group; the main process ends its workers
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not training.received


def test_a_launcher_that_is_gone_counts_as_a_signal(training, monkeypatch):
    training.launcher = 1  # this process has another parent
    os.kill(os.getpid(), 0)
    wait_until(lambda: training.received == signal.SIGHUP)
