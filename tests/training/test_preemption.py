import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from tiny import TINY_LLAMA
from tiny_trainers import metrics, same, trainer_of, weights
from transformers import TrainerCallback, TrainerControl, TrainerState

from cpt.checkpoints.resume import published_checkpoints
from cpt.errors import Interrupted
from cpt.training import preemption as module
from cpt.training.preemption import SIGNALS, Preemption


def step(preemption, control):
    preemption.on_step_end(None, TrainerState(), control)


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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training_saves_and_stops_at_the_end_of_the_step(training, number):
    control = TrainerControl(should_evaluate=True)
    step(training, control)
    assert not control.should_training_stop
    os.kill(os.getpid(), number)
    wait_until(lambda: training.received)
    step(training, control)
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (True, False, True)
    with pytest.raises(Interrupted, match=rf"{signal.Signals(number).name}.*checkpoint-7"):
        training.raise_if_stopped("checkpoint-7")


def test_a_signal_in_an_evaluation_ends_it_after_the_batch(training):
    training.on_prediction_step(None, TrainerState(), TrainerControl())
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: training.received)
    for _ in range(2):  # samples that come after it end as well
        with pytest.raises(Interrupted, match="SIGTERM"):
            training.on_prediction_step(None, TrainerState(), TrainerControl())


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
    with Preemption():
        assert all(signal.getsignal(number) != before[number] for number in SIGNALS)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert not [thread for thread in threading.enumerate() if thread.name == "cpt-signals"]


def test_in_another_thread_than_the_main_one_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with Preemption() as preemption:
            seen.append(signal.getsignal(signal.SIGTERM))
            preemption.raise_if_stopped(None)

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


def test_a_launcher_that_is_gone_counts_as_a_signal(training):
    training.launcher = 1  # this process has another parent
    wait_until(lambda: training.received == signal.SIGHUP)


# --- an evaluation that a signal stopped ---


class Signal(TrainerCallback):
    """Arrives after so many batches of the evaluation of step 2."""

    def __init__(self, preemption, batch):
        self.preemption, self.batch, self.batches = preemption, batch, 0

    def on_prediction_step(self, args, state, control, **_):
        self.batches += state.global_step == 2
        if self.batches == self.batch:
            self.preemption.received = signal.SIGTERM


@pytest.fixture
def start(tiny_recipe, tmp_path, corpus):
    """One start of a run of 4 steps that evaluates at each second one."""
    tiny_recipe["model"]["config"] = {**TINY_LLAMA, "attention_dropout": 0.1}
    evaluation = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}], "every_steps": 2, "prompts": ["the model"]}
    tiny_recipe["training"]["per_device_eval_batch_size"] = 1

    def run(name, *, stop_at_batch=None):
        preemption = Preemption()
        watchers = (Signal(preemption, stop_at_batch), preemption)
        trainer = trainer_of(tiny_recipe, tmp_path / name, callbacks=watchers, evaluation=evaluation)
        known = published_checkpoints(trainer.run_folder) if trainer.run_folder.exists() else []
        trainer.train(known[-1] if known else None)
        assert (preemption.stopped_by is None) is (stop_at_batch is None)
        return trainer

    return run


def evaluated(trainer):
    """The losses of the held-out set, by step."""
    lines = [line for line in metrics(trainer) if "eval_held_out_loss" in line]
    return {line["step"]: line["eval_held_out_loss"] for line in lines}


@pytest.mark.heavy
def test_an_evaluation_that_a_signal_stopped_is_made_up_and_nothing_else_changes(start):
    straight = start("straight")
    stopped = start("stopped", stop_at_batch=2)
    assert [path.name for path in published_checkpoints(stopped.run_folder)] == ["checkpoint-2"]
    assert [*evaluated(stopped)] == [0] == [line["step"] for line in metrics(stopped, "samples.jsonl")]
    resumed = start("stopped")
    assert evaluated(resumed) == evaluated(straight) and [*evaluated(straight)] == [0, 2, 4]
    assert metrics(resumed, "samples.jsonl") == metrics(straight, "samples.jsonl")
    assert same(weights(resumed), weights(straight))
