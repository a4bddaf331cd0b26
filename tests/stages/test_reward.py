"""Reward models train on whole dialogues."""

from example_runs import build_run


def test_dialogues_are_cut_at_the_length_of_a_row(tmp_path):
    trainer = build_run("reward", tmp_path)
    long = {"prompt_ids": [9] * 60, "chosen_ids": [5] * 10, "rejected_ids": [6] * 2}
    assert trainer.collate_examples()([long])["input_ids"].shape == (2, 64)
