import json

import pytest
from tiny import write_documents
from tiny_faults import trainer_of

from cpt.checkpoints.resume import published_checkpoints
from cpt.rehearsal.part import EnoughRehearsed, prepare
from cpt.rehearsal.watching import HELD_OUT, LENGTH, MOMENTS


def made(reports, what):
    lines = [json.loads(line) for line in (reports / MOMENTS).read_text().splitlines()]
    return [line["step"] for line in lines if line["what"] == what]


def trainer(sections, folder, part, **changes):
    """A run of 16 steps, and the part's reports."""
    write_documents(folder / "judged.jsonl", 40, seed=9)
    evaluation = {"perplexity": [{"path": str(folder / "judged.jsonl"), "name": "judged"}], "prompts": ["the model"]}
    built = trainer_of(sections, folder / "run", **{"evaluation": evaluation, **changes})
    reports = folder / "reports"
    reports.mkdir()
    prepare(part, reports, built)
    return built, reports


def test_the_first_steps_are_evaluated_saved_in_their_middle_and_stopped(tiny_recipe, tmp_path):
    built, reports = trainer(tiny_recipe, tmp_path, "first_steps")
    built.train()
    assert built.state.global_step == 4 and [path.name for path in published_checkpoints(built.run_folder)] == [
        "checkpoint-2"
    ]
    assert (made(reports, "step ends"), made(reports, "evaluated"), made(reports, "saved")) == (
        [1, 2, 3, 4],
        [0, 2],
        [2],
    )
    assert json.loads((reports / LENGTH).read_text())["steps"] == 16
    assert json.loads((reports / HELD_OUT).read_text())["judged"][1] == 40


def test_without_evaluation_they_only_save(tiny_recipe, tmp_path):
    built, reports = trainer(tiny_recipe, tmp_path, "first_steps_unjudged")
    built.train()
    assert (made(reports, "evaluated"), made(reports, "saved")) == ([], [2])
    assert not (built.run_folder / "samples.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_shorter_than_a_rehearsal_is_rehearsed_to_its_end(tiny_recipe, tmp_path, steps):
    budget = {"tokens": steps * 256, "global_batch_tokens": 256}
    built, reports = trainer(tiny_recipe, tmp_path, "first_steps", budget=budget)
    built.train()
    assert made(reports, "step ends")[-1] == steps
    assert published_checkpoints(built.run_folder)[0].name == f"checkpoint-{min(2, max(1, steps - 1))}"


def test_the_longest_rows_are_trained_on_and_nothing_else_is_done(tiny_recipe, tmp_path):
    seen = []
    built, reports = trainer(tiny_recipe, tmp_path, "longest_rows")
    compute = built.compute_loss
    built.compute_loss = lambda model, inputs, *rest, **options: (
        seen.append(int((inputs["labels"] == -100).sum())),
        compute(model, inputs, *rest, **options),
    )[1]
    with pytest.raises(EnoughRehearsed):
        built.train()
    assert seen == [2, 4] * 3  # micro-batches of 2 rows: one document in each, then two
    assert made(reports, "step ends") == [1, 2, 3] and not made(reports, "evaluated")
    assert not published_checkpoints(built.run_folder) and not (built.run_folder / "samples.jsonl").exists()
