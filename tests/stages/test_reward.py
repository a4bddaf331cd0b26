"""Reward models: the Bradley-Terry loss on whole dialogues, and held-out pairs that are told apart."""

import pytest
import torch
from example_runs import build_run, example_rows
from torch.nn.functional import logsigmoid


def score(model, ids):
    """What the head says at the last token."""
    return model(input_ids=torch.tensor([ids])).logits[0, 0]


def test_the_loss_is_that_of_bradley_and_terry(tmp_path):
    trainer = build_run("reward", tmp_path)
    rows = example_rows("reward")[:4]
    model = trainer.model
    pairs = [[score(model, row["prompt_ids"] + row[name]) for name in ("chosen_ids", "rejected_ids")] for row in rows]
    wanted = torch.stack([-logsigmoid(better - worse) for better, worse in pairs]).mean()
    loss = trainer.compute_loss(model, trainer._prepare_inputs(trainer.collate_examples()(rows)))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_held_out_pairs_are_told_apart_in_the_end(tmp_path, lora):
    trainer = build_run("reward", tmp_path, steps=20, held_out=6, lora=lora)
    trainer.train()
    accuracies = [line["eval_pairs_accuracy"] for line in trainer.state.log_history if "eval_pairs_accuracy" in line]
    assert len(accuracies) == 2 and accuracies[-1] == 1.0


def test_dialogues_are_cut_at_the_length_of_a_row(tmp_path):
    trainer = build_run("reward", tmp_path)
    long = {"prompt_ids": [9] * 60, "chosen_ids": [5] * 10, "rejected_ids": [6] * 2}
    assert trainer.collate_examples()([long])["input_ids"].shape == (2, 64)
