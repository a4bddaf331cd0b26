"""TRL's trainers without a reference: their names for our rows, and their figures kept apart."""

from example_runs import build_run

from cpt.stages.unreferenced import answer, prompt


def test_an_answer_has_labels_and_its_prompt_has_none():
    row = {"prompt_ids": [7, 8], "chosen_ids": [5, 2], "rejected_ids": [6]}
    assert prompt(row, 64) == {"prompt_input_ids": [7, 8], "prompt_attention_mask": [1, 1]}
    assert answer("chosen", row, 3) == {
        "chosen_input_ids": [7, 8, 5],
        "chosen_attention_mask": [1, 1, 1],
        "chosen_labels": [-100, -100, 5],
    }


def test_an_evaluation_leaves_the_figures_of_the_training_as_they_are(tmp_path):
    trainer = build_run("orpo", tmp_path, held_out=4)
    trainer.store_metrics({"rewards/margins": 7.0}, train_eval="train")
    trainer.evaluate()
    assert trainer._stored_metrics["train"] == {"rewards/margins": [7.0]}
