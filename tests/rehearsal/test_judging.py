import json

import pytest
from tiny import write_recipe
from tiny_run import damage, save_checkpoint

from cpt.recipe.load import load_recipe
from cpt.rehearsal import judging
from cpt.rehearsal.starting import Ended
from cpt.rehearsal.watching import HELD_OUT, LENGTH, Failure, Memory
from cpt.runs.events import record_event

STEPS = [
    {"what": what, "step": step, "time": step + (what == "step ends") * 0.5}
    for step in (1, 2)
    for what in ("begins", "step ends")
]
ONE_GIB = Memory(2**30)
LENGTH_OF_RUN = {
    "steps": 8,
    "rows_per_step": 4,
    "gradient_accumulation_steps": 2,
    "tokens_per_step": 256,
    "micro_batch": 2,
}


@pytest.fixture
def recipe(tiny_recipe, tmp_path):
    return load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))


@pytest.fixture
def run(tmp_path):
    """Of a rehearsed run, with two steps made."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.5}\n{"step": 2, "eval_loss": 4.0}\n'
    )
    return folder


@pytest.fixture
def ended(tmp_path):
    """How a part ended."""
    (tmp_path / LENGTH).write_text(json.dumps(LENGTH_OF_RUN))

    def end(failure=None, code=0, killed=False, still=None, moments=STEPS, memory=ONE_GIB):
        code = code or int(failure is not None or killed)
        return Ended(code, failure, killed, still, memory, moments, tmp_path, tmp_path / "part.log")

    return end


def failure(error="ValueError", message="bad", place=None, expected=False):
    return Failure(0, error, message, expected, place, 1.0)


def test_memory_and_time_of_the_longest_rows_are_told(ended, run, recipe, tmp_path):
    (tmp_path / LENGTH).write_text(json.dumps({**LENGTH_OF_RUN, "rows_per_step": 8, "tokens_per_step": 512}))
    memory = Memory(2**30, allocated=20 * 2**30, reserved=22 * 2**30, of_gpu=24 * 2**30)
    found = judging.judge_longest_rows(ended(memory=memory), run, recipe)
    assert found.verdict == "ok" and found.figure.startswith(
        "GPU 20.0 GiB (22.0 GiB reserved) of 24.0 GiB, host 1.0 GiB of "
    )
    assert found.figure.endswith("0.50 s for a step of 2 x 2 rows of 64 tokens on each of 2 processes")


def test_memory_that_only_sufficed_for_a_smaller_micro_batch_is_a_failure_that_says_what_to_write(ended, run, recipe):
    for before, fits in ((8, 4), (4, 2)):
        record_event(run, "out_of_memory", "Out.", step=2, micro_batch=fits, before=before, restart=False)
    found = judging.judge_longest_rows(ended(), run, recipe)
    assert (
        found.error == "ResourceError" and "micro-batches of 8 full rows, in step 2; 2 at a time fit" in found.figure
    )
    assert "`training.per_device_train_batch_size: 2`:" in found.figure
    budget = recipe.budget.model_copy(update={"global_batch_tokens": None})
    own = recipe.model_copy(update={"budget": budget, "training": {"gradient_accumulation_steps": 3}})
    assert "`training.gradient_accumulation_steps: 12`" in judging.judge_longest_rows(ended(), run, own).figure


def test_a_killed_process_is_one_whose_host_had_no_memory_left(ended, run, recipe):
    found = judging.judge_longest_rows(ended(killed=True, code=-9), run, recipe)
    assert found.error == "ResourceError" and "SIGKILL" in found.figure and "1.0 GiB of the host's" in found.figure


@pytest.mark.parametrize(
    ("problem", "step"),
    [
        (
            failure("DataError", "`evaluation.perplexity[0].split`: there is no split `test`", "data", True),
            "evaluation",
        ),
        (failure("RecipeError", "cannot load a tokenizer", "model", True), "model"),
        (failure("LaunchError", "ports", "start", True), "start"),
    ],
)
def test_what_fails_before_the_first_row_has_a_row_of_its_own(ended, run, recipe, tmp_path, problem, step):
    (tmp_path / LENGTH).unlink()
    found = judging.judge_longest_rows(ended(problem), run, recipe)
    assert (found.step, found.verdict, found.error, found.figure) == (step, "FAILED", problem.error, problem.message)


def test_an_unexpected_error_names_the_log_and_one_that_stood_still_its_process(ended, run):
    found = judging.judge_first_steps(ended(failure(message="bad.\nmore")), run)
    assert (
        found.error == "ValueError"
        and found.figure.startswith("bad. The run would end there")
        and "part.log" in found.figure
    )
    assert judging.failed("x", ended(still="process 1 made no progress")).error == "LaunchError"
    assert "without a word" in judging.failed("x", ended(code=1)).figure


def test_losses_of_the_first_steps_are_told_unless_they_are_none(ended, run):
    assert judging.judge_first_steps(ended(), run).figure.startswith("loss 5.0000, 4.5000; 0.50 s for a step")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert judging.judge_first_steps(ended(), run).error == "TrainingError"


def test_a_skipped_step_or_memory_that_ended_is_a_failure_of_the_first_steps(ended, run):
    record_event(run, "out_of_memory", "Out of memory in step 2.", step=2)
    assert judging.judge_first_steps(ended(), run).error == "ResourceError"
    record_event(run, "nan_skipped", "Step 1 was skipped.", step=1)
    assert judging.judge_first_steps(ended(), run).error == "TrainingError"


def test_an_evaluation_that_fails_is_told_and_one_without_memory_what_to_write(ended, recipe):
    assert judging.judge_evaluation(ended(failure("KeyError", "'bleu'", "evaluation")), recipe).error == "KeyError"
    restart = failure("RestartNeeded", "Out of memory in step 3 ...: from now on 2", "evaluation", True)
    found = judging.judge_evaluation(ended(restart), recipe)
    assert found.error == "ResourceError" and "`training.per_device_eval_batch_size`" in found.figure


def test_an_evaluation_says_what_it_measured_and_a_recipe_without_one_what_would(ended, recipe, tmp_path):
    moments = [{"what": "evaluated", "step": 0, "time": 0.0}, {"what": "evaluated", "step": 2, "time": 0.0}]
    assert judging.judge_evaluation(ended(), recipe).verdict == "not run"
    (tmp_path / HELD_OUT).write_text('{"domain": [30, 812], "general": [40, 40]}')
    assert (
        judging.judge_evaluation(ended(moments=moments), recipe).figure
        == "domain 30 of 812, general 40 documents, in steps 0, 2"
    )
    (tmp_path / HELD_OUT).write_text("{}")
    assert "`evaluation.held_out_share" in judging.judge_evaluation(ended(), recipe).figure


def test_a_save_is_judged_by_what_was_published(ended, run):
    assert judging.judge_save(ended(), run, None).verdict == "not run"
    record_event(run, "save_failed", "checkpoint-2 was not saved: no space.", step=2, reason="storage")
    found = judging.judge_save(ended(), run, None)
    assert found.error == "ResourceError" and "another disk" in found.figure
    nothing = failure(
        "CheckpointError",
        "the checkpoint's weights are 0 numbers of 9: no model could be loaded from it",
        "save",
        True,
    )
    assert "stage3_gather_16bit_weights_on_model_save" in judging.judge_save(ended(nothing), run, None).figure
    moments = [{"what": "logged", "step": 2, "time": 1.0}, {"what": "saved", "step": 2, "time": 1.25}]
    assert "still for 0.25 s" in judging.judge_save(ended(moments=moments), run, save_checkpoint(run, 2)).figure


def test_every_file_is_read_back(run):
    checkpoint = save_checkpoint(run, 2)
    assert judging.judge_files([checkpoint]).verdict == "ok"
    damage(checkpoint / "optimizer.pt", "bit flip")
    assert "checkpoint-2/optimizer.pt: hash" in judging.judge_files([checkpoint]).figure


def test_an_export_that_plain_transformers_cannot_load_is_a_failure(ended, recipe, tmp_path):
    assert judging.judge_export(ended(), tmp_path / "final", recipe).verdict == "not run"
    assert judging.judge_export(ended(failure(place="export")), tmp_path / "final", recipe).verdict == "FAILED"
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text('{"model_type": "nosuch"}')
    assert judging.judge_export(ended(), tmp_path / "final", recipe).error == "CheckpointError"


def test_a_resumed_run_has_to_begin_where_the_checkpoint_is(ended, run, tmp_path):
    checkpoint, exports = save_checkpoint(run, 2), (tmp_path / "a", tmp_path / "b")

    def judged(part):
        return judging.judge_resume(part, {1: 5.0, 2: 4.5}, run, checkpoint, exports, half=False)

    assert judged(ended(moments=[{"what": "train begins", "step": 2, "time": 0.0}])).verdict == "ok"
    assert "began at step 0" in judged(ended(moments=[{"what": "train begins", "step": 0, "time": 0.0}])).figure
    pickle = failure("CheckpointError", "optimizer.pt: a file holds more than tensors and numbers", "resume", True)
    assert "keep tensors, numbers" in judged(ended(pickle)).figure
