"""What TRL's trainers of preferences get of our rows, and their reference."""

import pytest
import torch
from example_runs import build_run, example_rows

from cpt.stages.examples import renamed


def test_the_reference_is_not_trained(tmp_path):
    trainer = build_run("dpo", tmp_path, steps=3)
    before = {name: value.clone() for name, value in trainer.ref_model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.ref_model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in trainer.ref_model.parameters())


def test_with_an_adapter_the_reference_is_the_model_without_it(tmp_path):
    trainer = build_run("dpo", tmp_path, steps=3, lora={"r": 4})
    assert trainer.ref_model is None and [*trainer.model.peft_config] == ["default"]
    trainer.train()
    margins = [line["rewards/margins"] for line in trainer.state.log_history if "rewards/margins" in line]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0


def test_the_kl_term_is_taken_with_the_answer_of_the_row_before(tmp_path):
    trainer = build_run("kto", tmp_path)
    rows = example_rows("kto")[:3]
    batch = trainer.collate_examples()(rows)
    first = rows[0]["prompt_ids"] + rows[-1]["completion_ids"]
    assert batch["KL_input_ids"][0, : len(first)].tolist() == first


def test_an_answer_has_labels_and_its_prompt_has_none():
    row = renamed({"prompt_ids": [7, 8], "chosen_ids": [5, 2], "rejected_ids": [6]}, 3)
    assert row["prompt_input_ids"] == [7, 8] and row["rejected_input_ids"] == [7, 8, 6]
    assert (row["chosen_input_ids"], row["chosen_labels"]) == ([7, 8, 5], [-100, -100, 5])


def test_an_evaluation_leaves_the_figures_of_the_training_as_they_are(tmp_path):
    trainer = build_run("orpo", tmp_path, held_out=4)
    trainer.store_metrics({"rewards/margins": 7.0}, train_eval="train")
    trainer.evaluate()
    assert trainer._stored_metrics["train"] == {"rewards/margins": [7.0]}


def test_dialogues_are_cut_at_the_length_of_a_row(tmp_path):
    trainer = build_run("reward", tmp_path)
    long = {"prompt_ids": [9] * 60, "chosen_ids": [5] * 10, "rejected_ids": [6] * 2}
    assert trainer.collate_examples()([long])["input_ids"].shape == (2, 64)
