import pytest
import torch
from example_runs import build_run, example_rows
from launching import ROOT
from rehearsing import rehearse
from stage_steps import full_rows

from cpt.data.rows.rows import IGNORED
from cpt.rehearsal.full_examples import FullExamples, LastTokenLearned, LongestPrompts, longest_examples
from cpt.rehearsal.full_rows import FullRows


def test_pairs_are_as_long_as_they_may_be_and_all_of_them_is_scored():
    example = FullExamples(example_rows("dpo"), 64)[3]
    assert len(example["prompt_ids"]) == 1 and len(example["chosen_ids"]) == len(example["rejected_ids"]) == 63


def test_judgements_stay_with_judged_answers():
    rows = example_rows("kto")
    full = FullExamples(rows, 16)
    assert [full[number]["label"] for number in range(4)] == [row["label"] for row in rows[:4]]
    assert len(full[0]["completion_ids"]) == 15 and "chosen_ids" not in full[0]


def test_the_longest_prompt_comes_again_and_again():
    rows = [{"prompt": "a b"}, {"prompt": [{"role": "user", "content": "long " * 9}], "answer": "x"}, {"prompt": "c"}]
    assert LongestPrompts(rows, 3)[7] is rows[1] and LongestPrompts(rows, 1)[7] is rows[0]


def test_a_student_goes_on_from_all_but_the_last_token():
    _, rows = full_rows("sft")
    row = LastTokenLearned(FullRows(rows * 3, 128, rows_at_once=1))[1]
    assert (row["labels"] != IGNORED).nonzero().tolist() == [[127]]
    assert torch.equal(row["position_ids"], torch.arange(128))


def test_a_trainer_of_pairs_takes_them(tmp_path):
    trainer = build_run("dpo", tmp_path)
    trainer.rows = longest_examples(trainer, 4)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (8, 64)


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.long) for stage in ("dpo", "sft", "grpo", "reward")]
)
def test_tiny_recipes_are_rehearsed_to_their_end(stage, tmp_path):
    ended = rehearse(ROOT / "recipes" / "tiny" / f"{stage}.yaml", f"output_dir={tmp_path / 'runs'}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "longest rows ok" in ended.stdout and "bit for bit" in ended.stdout
