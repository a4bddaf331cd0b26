import json

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from cpt.evaluation.scoring import StopWhenForgetting, read_course
from cpt.runs.record import Run


def metrics(**sets):
    return {f"eval_{name}_bits_per_byte": value for name, value in sets.items()} | {"eval_domain_loss": 1.0}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def evaluate(guard, step, **sets):
    control = TrainerControl()
    guard.on_evaluate(
        TrainingArguments(), TrainerState(global_step=step, max_steps=100), control, metrics=metrics(**sets)
    )
    return control.should_training_stop


def test_the_run_stops_at_the_evaluation_at_which_too_much_is_forgotten(run, caplog):
    guard = StopWhenForgetting(run, {"general": 0.02})
    assert not evaluate(guard, 0, domain=2.0, general=1.0)
    assert not evaluate(guard, 10, domain=1.5, general=1.019)
    assert evaluate(guard, 20, domain=1.2, general=1.03)
    assert (
        "stopped at step 20: bits per byte of `general` rose from 1.0000 to 1.0300 (+3.0%), more than the 2.0%"
        in caplog.text
    )
    assert "`evaluation.retain`" in run.status()["stopped"]


def test_the_status_keeps_why_it_stopped_when_the_run_ends(run):
    guard = StopWhenForgetting(run, {"general": 0.02})
    with run.reporting():
        evaluate(guard, 0, general=1.0)
        evaluate(guard, 20, general=1.5)
    assert run.status()["state"] == "finished" and run.status()["stopped"].startswith("stopped at step 20")


def test_a_resumed_run_compares_with_the_values_before_its_first_step(run, tmp_path):
    lines = [{"step": 0, "tokens": 0, **metrics(general=1.0)}, {"step": 5, "tokens": 50, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    guard = StopWhenForgetting(run, {"general": 0.02})
    guard.on_train_begin(TrainingArguments(), TrainerState(global_step=5), TrainerControl())
    assert evaluate(guard, 10, general=1.03)


def test_the_course_is_every_evaluation_in_order(tmp_path):
    lines = [
        {"step": 0, "tokens": 0, **metrics(domain=2.0, general=1.0)},
        {"step": 5, "tokens": 50, "loss": 3.0},
        {"step": 10, "tokens": 100, **metrics(domain=1.0, general=1.5)},
        {"step": 10, "tokens": 100, **metrics(domain=1.1, general=1.5)},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    course = read_course(tmp_path / "metrics.jsonl")
    assert [(point.step, point.tokens, point.bits_per_byte["domain"]) for point in course] == [
        (0, 0, 2.0),
        (10, 100, 1.1),
    ]
    assert read_course(tmp_path / "none.jsonl") == []
