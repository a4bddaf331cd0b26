import pytest
from transformers import TrainerControl, TrainerState

from cpt.errors import RecipeError
from cpt.monitoring.alert import Alert
from cpt.runs.events import read_events


def told(folder, values, *, figure="grad_norm", is_main=True, **options):
    """The steps of the alerts that a run with these values gives."""
    alert = Alert(folder, figure=figure, **options)
    for step, value in enumerate(values, start=1):
        state = TrainerState(global_step=step, is_world_process_zero=is_main)
        alert.on_log(None, state, TrainerControl(), logs={"grad_norm": value} if value is not None else {"other": 1.0})
    alert.on_train_end(None, TrainerState(global_step=9, is_world_process_zero=is_main), TrainerControl())
    return [(event["kind"], event["step"]) for event in read_events(folder)]


def test_each_crossing_is_told_once(tmp_path):
    assert told(tmp_path, [1, 11, 12, None, 13, 2, 14], above=10) == [("alert", 2), ("alert", 7)]
    assert read_events(tmp_path)[0]["message"] == "Step 2: grad_norm is 11, above 10."


def test_it_may_take_some_logs(tmp_path):
    assert told(tmp_path, [1, 11, 2, 11, 12, 13, 14], above=10, logs=3) == [("alert", 6)]


@pytest.mark.parametrize(("value", "alerts"), [(0.5, 1), (1.0, 0), (5.0, 0), (5.1, 1), (float("nan"), 1), ("text", 0)])
def test_bounds_are_within(value, alerts, tmp_path):
    assert len(told(tmp_path, [value], above=5.0, below=1.0)) == alerts


def test_a_figure_that_never_came_is_told_at_the_end(tmp_path):
    assert told(tmp_path, [1.0], figure="grad_nrom", above=1) == [("alert_without_figure", 9)]
    assert "This run logged: grad_norm." in read_events(tmp_path)[0]["message"]


def test_only_the_main_process_tells(tmp_path):
    assert told(tmp_path, [11], above=10, is_main=False) == []


@pytest.mark.parametrize("options", [{}, {"above": 1.0, "logs": 0}])
def test_what_cannot_be_crossed_is_refused(options, tmp_path):
    with pytest.raises(RecipeError, match="alert"):
        Alert(tmp_path, figure="loss", **options)
