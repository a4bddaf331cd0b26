import json

import pytest
from saved_runs import trainer_of
from tiny import write_recipe
from tiny_watchers import CALLS, SEEN

from cpt.errors import DataError, RecipeError
from cpt.monitoring.own import build_callbacks, check_callbacks
from cpt.preflight.gate import report
from cpt.recipe.load import load_with_places
from cpt.recipe.schema import Monitoring
from cpt.runs.events import read_events
from cpt.runs.folder import read_metrics


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


@pytest.mark.slow
def test_a_short_name_is_enough(trained):
    assert alerts(trained("tiny_watchers:note")) == [] and len(SEEN) == 5


def test_a_class_may_add_figures_and_end_the_run(trained):
    trainer = trained({"name": "tiny_watchers:Adds", "figure": "seven", "stop_at": 2})
    assert read_metrics(trainer.run_folder).curve("seven")[1].tolist()[:2] == [7.0, 7.0]
    assert trainer.state.global_step == 2 and CALLS == ["step", "step"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "failed in on_log and is silent from here on: KeyError: 'x'."),
        pytest.param(
            "answers_a_number", "it returned int, where a sentence or None is wanted", marks=pytest.mark.slow
        ),
        pytest.param("AddsTensor", "the figure `odd` is a Tensor", marks=pytest.mark.slow),
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
    with pytest.raises(RecipeError, match="CannotBeMade cannot be made: OSError: no such channel"):
        trained("tiny_watchers:CannotBeMade")


@pytest.mark.parametrize(
    ("callback", "complaint"),
    [
        ("costs", "`monitoring.callbacks[0].name`: no callback called `costs`. Did you mean `cost`?"),
        ("cost", "`monitoring.callbacks[0]` needs `dollars_per_gpu_hour`"),
        (
            {"name": "cost", "dollars_per_gpu_hour": "2"},
            "`monitoring.callbacks[0].dollars_per_gpu_hour`: expected a number",
        ),
        ({"name": "cost", "dollars_per_gpu_hour": 2, "run": "x"}, "`monitoring.callbacks[0].run` is not an option"),
        (
            {"name": "alert", "figure": "loss"},
            "`monitoring.callbacks[0]`: an alert on `loss` needs `above` or `below`",
        ),
        (
            {"name": "tiny_watchers:note", "abov": 1},
            "`monitoring.callbacks[0].abov` is not an option of note. Did you mean `above`?",
        ),
        ({"name": "tiny_watchers:Adds"}, "`monitoring.callbacks[0]` needs `figure`"),
        ("tiny_watchers:NoCallback", "is a class, and no transformers.TrainerCallback"),
        ("tiny_watchers:missing", "`tiny_watchers` has no `missing`"),
    ],
)
def test_mistakes_are_found_before_the_run(callback, complaint):
    with pytest.raises(RecipeError) as refused:
        check_callbacks(Monitoring.model_validate({"callbacks": [callback]}).callbacks)
    assert complaint in str(refused.value)


def test_the_check_shows_the_line(tiny_recipe, tmp_path, capsys):
    path = write_recipe({**tiny_recipe, "monitoring": {"callbacks": [{"name": "cost"}]}}, tmp_path / "r.yaml")
    assert report(path, *load_with_places(path)).exit_code == 2
    said = capsys.readouterr().out
    lines = path.read_text().splitlines()
    number = next(place for place, line in enumerate(lines, start=1) if "- name: cost" in line)
    assert f"r.yaml:{number}: `monitoring.callbacks[0]` needs `dollars_per_gpu_hour`" in said


def test_two_of_them_are_of_two_classes_so_that_transformers_does_not_warn(tmp_path):
    sections = Monitoring.model_validate(
        {"callbacks": ["tiny_watchers:note", {"name": "tiny_watchers:Adds", "figure": "x"}]}
    ).callbacks
    one, other = build_callbacks(sections, tmp_path, 1)
    assert type(one) is not type(other) and one.has_failed is False
