"""TRL's trainers without a reference: their names for our rows, and their figures kept apart."""

from example_runs import build_run

from cpt.stages.preferences import renamed


def test_an_answer_has_labels_and_its_prompt_has_none():
    row = renamed({"prompt_ids": [7, 8], "chosen_ids": [5, 2], "rejected_ids": [6]}, 3)
    assert row["prompt_input_ids"] == [7, 8] and row["rejected_input_ids"] == [7, 8, 6]
    assert (row["chosen_input_ids"], row["chosen_labels"]) == ([7, 8, 5], [-100, -100, 5])


def test_an_evaluation_leaves_the_figures_of_the_training_as_they_are(tmp_path):
    trainer = build_run("orpo", tmp_path, held_out=4)
    trainer.store_metrics({"rewards/margins": 7.0}, train_eval="train")
    trainer.evaluate()
    assert trainer._stored_metrics["train"] == {"rewards/margins": [7.0]}
