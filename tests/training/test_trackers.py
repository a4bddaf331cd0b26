import pytest
from saved_runs import trainer_of
from transformers import TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

from cpt.runs.events import read_events
from cpt.training.callbacks import Tracker


class Recorder(TensorBoardCallback):
    """A tracker that keeps what it is told, and fails where it is to."""

    def __init__(self):
        self.told, self.calls, self.problem = {}, [], None

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.hear(name, state, **kwargs)
        return super().__getattribute__(name)

    def hear(self, call, state, logs=None, **_):
        self.calls.append((call, state.global_step))
        if self.problem is not None:
            raise self.problem
        if call == "on_log":
            self.told.setdefault(state.global_step, {}).update(logs)


@pytest.fixture
def recorder(monkeypatch):
    """What `monitoring.trackers: [tensorboard]` makes."""
    made = Recorder()
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda _: [made])
    return made


def test_trackers_are_told_what_other_callbacks_add_to_the_logs(tiny_recipe, tmp_path, recorder):
    trainer_of(tiny_recipe, tmp_path).train()
    assert {"tokens_per_second", "data_wait", "share_domain", "loss"} <= recorder.told[4].keys()
    assert {"on_train_begin", "on_log", "on_train_end"} <= {call for call, _ in recorder.calls}


def test_a_tracker_that_fails_costs_one_event_and_is_tried_again_later(tiny_recipe, tmp_path, recorder, monkeypatch):
    trainer = trainer_of(tiny_recipe, tmp_path)
    recorder.problem = ConnectionError("the service is away")
    trainer.train()
    (event,) = read_events(trainer.run_folder)
    assert event["kind"] == "tracker_failed" and "the service is away" in event["message"]
    assert recorder.calls[-2:] == [("on_train_begin", 0), ("on_train_end", 4)], "left alone in between"
    monkeypatch.setattr(Tracker, "pause_seconds", 0.0)
    tracker, state = Tracker(recorder, "tensorboard", tmp_path), TrainerState(global_step=1)
    tracker.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    recorder.problem = None
    tracker.on_log(None, state, TrainerControl(), logs={"loss": 2.0})
    assert recorder.told == {1: {"loss": 2.0}}
