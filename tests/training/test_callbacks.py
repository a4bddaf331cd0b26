import json

import pytest
from saved_runs import trainer_of
from tiny_watchers import CALLS, SEEN
from transformers import TrainerControl, TrainerState

from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Monitoring
from cpt.runs.events import read_events
from cpt.runs.folder import read_metrics
from cpt.training.callbacks import Alert, check_callbacks


@pytest.fixture
def trained(tiny_recipe, tmp_path):
    """The folder of a run of four steps with these callbacks."""
    SEEN.clear()
    CALLS.clear()

    def run(*callbacks):
        trainer = trainer_of({**tiny_recipe, "monitoring": {"callbacks": list(callbacks)}}, tmp_path)
        trainer.train()
        return trainer

    return run


def alerts(trainer, kind="alert"):
    return [event["message"] for event in read_events(trainer.run_folder) if event["kind"] == kind]


def test_a_function_is_shown_all_figures_and_its_sentences_are_alerts(trained):
    trainer = trained({"name": "tiny_watchers:note", "above": 0.0})
    lines = [json.loads(line) for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert SEEN[:4] == [{name: float(value) for name, value in line.items()} for line in lines[:4]]
    assert alerts(trainer) == [f"The loss is {line['loss']:.3f}." for line in lines[:4]]


def test_a_class_may_add_figures_and_end_the_run(trained):
    trainer = trained({"name": "tiny_watchers:Adds", "figure": "seven", "stop_at": 2})
    assert read_metrics(trainer.run_folder).curve("seven")[1].tolist()[:2] == [7.0, 7.0]
    assert trainer.state.global_step == 2 and CALLS == ["step", "step"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "KeyError: 'x'"),
        pytest.param("answers_a_number", "got int", marks=pytest.mark.slow),
        pytest.param("AddsTensor", "`odd`", marks=pytest.mark.slow),
    ],
)
def test_one_that_fails_costs_an_event_and_is_silent(name, reason, trained):
    trainer = trained(f"tiny_watchers:{name}", "tiny_watchers:note")
    (message,) = alerts(trainer, "callback_failed")
    assert reason in message and f"`tiny_watchers:{name}`" in message
    assert trainer.state.global_step == 4 and len(SEEN) == 5 and CALLS.count("fails") == (name == "fails")
    assert "odd" not in read_metrics(trainer.run_folder).names


def test_an_error_that_is_meant_for_the_user_ends_the_run(trained):
    with pytest.raises(DataError, match="this is meant"):
        trained("tiny_watchers:refuses")


def test_one_that_cannot_be_made_is_a_mistake_of_the_recipe(trained):
    with pytest.raises(RecipeError, match="CannotBeMade.*no such channel"):
        trained("tiny_watchers:CannotBeMade")


@pytest.mark.parametrize(
    ("callback", "complaint"),
    [
        ("costs", "`cost`"),
        ("cost", "`dollars_per_gpu_hour`"),
        ({"name": "cost", "dollars_per_gpu_hour": "2"}, "dollars_per_gpu_hour`: expected a number"),
        ({"name": "alert", "figure": "loss"}, "`above`"),
        ({"name": "tiny_watchers:note", "abov": 1}, "`above`"),
        ({"name": "tiny_watchers:Adds"}, "`figure`"),
        ("tiny_watchers:NoCallback", "TrainerCallback"),
    ],
)
def test_mistakes_are_found_before_the_run(callback, complaint):
    with pytest.raises(RecipeError) as refused:
        check_callbacks(Monitoring.model_validate({"callbacks": [callback]}).callbacks)
    assert complaint in str(refused.value) and "monitoring.callbacks[0]" in str(refused.value)


def alerts_of(folder, values, *, figure="grad_norm", is_main=True, **options):
    """(kind, step) of the events that these values cause."""
    alert = Alert(folder, figure=figure, **options)
    for step, value in enumerate(values, start=1):
        state = TrainerState(global_step=step, is_world_process_zero=is_main)
        alert.on_log(None, state, TrainerControl(), logs={"other": 1.0} if value is None else {"grad_norm": value})
    alert.on_train_end(None, TrainerState(global_step=9, is_world_process_zero=is_main), TrainerControl())
    return [(event["kind"], event["step"]) for event in read_events(folder)]


def test_each_crossing_is_one_alert(tmp_path):
    assert alerts_of(tmp_path, [1, 11, 12, None, 13, 2, 14], above=10) == [("alert", 2), ("alert", 7)]


@pytest.mark.parametrize(("value", "alerts"), [(0.5, 1), (1.0, 0), (5.0, 0), (5.1, 1), (float("nan"), 1), ("text", 0)])
def test_bounds_are_inclusive_and_nan_is_beyond_them(value, alerts, tmp_path):
    assert len(alerts_of(tmp_path, [value], above=5.0, below=1.0)) == alerts
