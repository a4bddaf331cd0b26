import json
import shutil

import pytest
from tiny_faults import STEPS, events, in_rows, losses, same, trainer_of, weights

from cpt.checkpoints.resume import published_checkpoints
from cpt.errors import TrainingError
from cpt.runs.events import read_events
from cpt.stages.steps.rolling_back import read_safety

EVERY = {"checkpoints": {"every_steps": 2, "keep": None}}
BAD_ROWS = (24, 28, 32)  # of steps 7, 8 and 9
TOLERANT = {"loss_guard": {"name": "robust", "skips": 2, "rollbacks": 1}}


def rolled_back(tiny_recipe, folder, **changes):
    return trainer_of(tiny_recipe, folder, faults=in_rows(*BAD_ROWS), **{**EVERY, "safety": TOLERANT, **changes})


def test_after_too_many_bad_steps_the_run_goes_back_and_leaves_their_rows_out(tiny_recipe, tmp_path):
    trainer = rolled_back(tiny_recipe, tmp_path)
    trainer.train()
    assert events(trainer, "nan_skipped", "rolled_back") == [
        ("nan_skipped", 7),
        ("nan_skipped", 8),
        ("nan_skipped", 9),
        ("rolled_back", 9),
    ]
    (back,) = [event for event in read_events(trainer.run_folder) if event["kind"] == "rolled_back"]
    assert back["to_step"] == 6 and trainer.rows_of_steps.left_out == [(24, 36)]
    assert len(losses(trainer)) == STEPS and trainer.state.global_step == STEPS
    lines = [json.loads(line) for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, STEPS + 1)), "no step stands there twice"


@pytest.mark.slow
def test_it_is_the_run_that_never_had_these_rows(tiny_recipe, tmp_path):
    back, never = rolled_back(tiny_recipe, tmp_path / "back"), trainer_of(tiny_recipe, tmp_path / "never", **EVERY)
    never.rows_of_steps.leave_out([(24, 36)])
    for trainer in (back, never):
        trainer.train()
    assert losses(back) == losses(never) and same(weights(back), weights(never))


@pytest.mark.slow
def test_the_checkpoints_of_the_way_not_taken_are_kept_apart(tiny_recipe, tmp_path):
    trainer = rolled_back(tiny_recipe, tmp_path)
    trainer.train()
    assert [path.name for path in (trainer.run_folder / "set-aside").iterdir()] == ["checkpoint-8"]
    after = read_safety(trainer.run_folder / "checkpoint-8")
    assert after["left_out"] == [[24, 36]] and after["budget"] == {"recent": [], "total": 3, "rollbacks": 1}
    assert json.loads((trainer.run_folder / "checkpoint-8" / "manifest.json").read_text())["rows"] == 8 * 4 + 12
    assert json.loads((trainer.run_folder / "checkpoint-8" / "data_position.json").read_text())["row"] == 8 * 4 + 12


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, *(pytest.param(step, marks=pytest.mark.long) for step in (4, 6, 12))])
def test_resumed_before_or_after_the_decision_the_run_is_the_same(tiny_recipe, tmp_path, step):
    straight = rolled_back(tiny_recipe, tmp_path)
    straight.train()
    expected, found = weights(straight), losses(straight)
    for checkpoint in published_checkpoints(straight.run_folder):
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)
    resumed = rolled_back(tiny_recipe, tmp_path)
    resumed.train(resume_from_checkpoint=straight.run_folder / f"checkpoint-{step}")
    assert same(weights(resumed), expected) and losses(resumed) == found
    assert resumed.rows_of_steps.left_out == [(24, 36)] and resumed.budget.total == 3


@pytest.mark.long
def test_resumed_in_the_middle_of_bad_steps_the_run_decides_the_same(tiny_recipe, tmp_path):
    straight = rolled_back(tiny_recipe, tmp_path)
    straight.train()
    between = straight.run_folder / "set-aside" / "checkpoint-8"  # steps 7 and 8 were skipped, 9 comes
    resumed = rolled_back(tiny_recipe, tmp_path / "again")
    for checkpoint in [*published_checkpoints(straight.run_folder)[:3], between]:
        shutil.copytree(checkpoint, resumed.run_folder / checkpoint.name)
    resumed.train(resume_from_checkpoint=resumed.run_folder / "checkpoint-8")
    assert events(resumed, "nan_skipped", "rolled_back") == [("nan_skipped", 9), ("rolled_back", 9)]
    assert same(weights(resumed), weights(straight)) and losses(resumed) == losses(straight)


@pytest.mark.slow
def test_a_run_that_goes_wrong_for_ever_stops_with_a_clear_word(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, faults=in_rows(*range(24, 200, 4)), **EVERY, safety=TOLERANT)
    with pytest.raises(
        TrainingError, match=r"diverged: steps 7, 8, 9 .* 1 roll-back.*6 skipped .*checkpoint-8.*learning_rate"
    ):
        trainer.train()
    assert len(events(trainer, "rolled_back")) == 1


@pytest.mark.slow
def test_without_a_checkpoint_from_before_it_goes_on_without_the_rows(tiny_recipe, tmp_path):
    trainer = rolled_back(tiny_recipe, tmp_path, checkpoints={})
    trainer.train()
    (back,) = [event for event in read_events(trainer.run_folder) if event["kind"] == "rolled_back"]
    assert back["to_step"] is None and "no checkpoint" in back["message"]
    assert trainer.state.global_step == STEPS and len(losses(trainer)) == STEPS


@pytest.mark.slow
def test_a_run_may_go_back_at_its_last_step(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, faults=in_rows(52, 56, 60), **EVERY, safety=TOLERANT)
    trainer.train()
    assert events(trainer, "rolled_back") == [("rolled_back", STEPS)]
    assert trainer.state.global_step == STEPS and trainer.rows_of_steps.left_out == [(52, 64)]


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_is_not_gone_back_to(tiny_recipe, tmp_path):
    trainer = rolled_back(tiny_recipe, tmp_path)
    save, folder = trainer._save_checkpoint, trainer.run_folder

    def damaging(*arguments):
        save(*arguments)
        if trainer.state.global_step == 6:
            weights = folder / "checkpoint-6" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1])

    trainer._save_checkpoint = damaging
    trainer.train()
    (back,) = [event for event in read_events(folder) if event["kind"] == "rolled_back"]
    assert back["to_step"] == 4 and (folder / "bad-checkpoint-6").exists()


def test_a_save_after_an_error_counts_what_nobody_has_read_yet(tiny_recipe, tmp_path):
    def fault(trainer, inputs, loss):
        if trainer.state.global_step == 7:
            raise ValueError("between a step and its verdict")
        return in_rows(*BAD_ROWS)(trainer, inputs, loss)

    trainer = trainer_of(
        tiny_recipe, tmp_path, faults=fault, training={**tiny_recipe["training"], "logging_steps": 100}
    )
    with pytest.raises(ValueError, match="verdict"):
        trainer.train()
    assert trainer.budget.total == 0 and trainer.safety_state()["budget"]["recent"] == [[7, 24, 28]]
