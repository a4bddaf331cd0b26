import pytest
import torch
from tiny import TINY_LLAMA, write_recipe

from cpt.data.rows.build import build_data
from cpt.errors import ResourceError
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer

TINY_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}


def trainer_of(sections, folder):
    recipe = load_recipe(write_recipe(sections, folder / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    return build_trainer(recipe, build_model(recipe.model, tokenizer, seed=recipe.seed), tokenizer, data)


def train(sections, folder):
    """Losses of each step, and the trained weights."""
    folder.mkdir()
    sections = {**sections, "output_dir": str(folder / "runs")}
    trainer = trainer_of(sections, folder)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer.model.state_dict()


def test_the_loss_is_the_mean_over_the_predicted_tokens_of_the_whole_step(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    rows = [trainer.train_dataset[i] for i in range(trainer.length.rows_per_step)]
    with torch.no_grad():
        logits = trainer.model(
            input_ids=torch.stack([r["input_ids"] for r in rows]),
            position_ids=torch.stack([r["position_ids"] for r in rows]),
        ).logits
    labels = torch.stack([r["labels"] for r in rows])
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-6)


class FewerLabels(torch.utils.data.Dataset):
    """The rows, of which each has fewer labels than the one before."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, number):
        row = self.rows[number]
        return row | {"labels": row["labels"].where(torch.arange(64) >= 15 * (number % 4), -100)}


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_step_is_the_mean_over_its_labels_however_they_are_spread(tiny_recipe, tmp_path, config, micro_batch):
    """Of the auxiliary loss, which has no labels, it is the mean over the micro-batches."""
    tiny_recipe["model"]["config"] = config
    tiny_recipe["budget"] = {"tokens": 256, "global_batch_tokens": 256}
    tiny_recipe["training"]["per_device_train_batch_size"] = micro_batch
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer.rows = FewerLabels(trainer.rows)
    rows = [trainer.rows[number] for number in range(4)]
    batches = [
        {key: torch.stack([row[key] for row in rows[at : at + micro_batch]]) for key in rows[0]}
        for at in range(0, 4, micro_batch)
    ]
    summed, labels, balance = 0.0, 0, 0.0
    for batch in batches:
        targets = batch["labels"][:, 1:].flatten()
        with torch.no_grad():
            outputs = trainer.model(
                **{**batch, "labels": None}, **({"output_router_logits": True} if config is TINY_MOE else {})
            )
        summed += torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), targets, reduction="sum"
        ).item()
        labels += int((targets != -100).sum())
        balance += 0.5 * outputs.aux_loss.item() / len(batches) if config is TINY_MOE else 0.0
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(summed / labels + balance, rel=1e-5)


def test_the_loss_of_a_token_budget_is_the_mean_over_the_tokens_of_all_its_documents(tiny_recipe, tmp_path):
    tiny_recipe["data"] |= {"packing": "token_budget", "sequence_length": 128}
    tiny_recipe["budget"] = {"tokens": 4 * 512, "global_batch_tokens": 512}
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    trainer = trainer_of(tiny_recipe, tmp_path)
    assert trainer.length.rows_per_step == trainer.args.gradient_accumulation_steps == 4
    losses, num_tokens = 0.0, 0
    for row in (trainer.train_dataset[number] for number in range(4)):
        for ids, mask in zip(row["input_ids"], row["attention_mask"], strict=True):
            ids = ids[: int(mask.sum())]
            with torch.no_grad():
                logits = trainer.model(input_ids=ids[None]).logits[0]
            losses += torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
            num_tokens += len(ids) - 1
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses / num_tokens, rel=1e-6)


def test_evaluation_reports_each_held_out_set(tiny_recipe, tmp_path, corpus):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}], "held_out_share": 0.1}
    metrics = trainer_of(tiny_recipe, tmp_path).evaluate()
    assert {key for key in metrics if key.endswith("bits_per_byte")} == {
        f"eval_{name}_bits_per_byte" for name in ("held_out", "domain", "general")
    }


def test_held_out_figures_do_not_depend_on_the_packing(tiny_recipe, tmp_path, corpus):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}]}
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    tiny_recipe["data"]["sequence_length"] = 256
    figures = []
    for packing in ("best_fit", "token_budget"):
        tiny_recipe["data"]["packing"] = packing
        figures.append(trainer_of(tiny_recipe, tmp_path).evaluate())
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_the_run_goes_through_each_row_once_and_in_order(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    seen = torch.cat([batch["input_ids"] for batch in trainer.get_train_dataloader()])
    expected = torch.stack([trainer.train_dataset[i]["input_ids"] for i in range(trainer.length.rows)])
    assert torch.equal(seen, expected)


def test_a_resumed_run_reads_the_row_after_the_last_one_that_was_trained(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer.first_step = 3
    batch = next(iter(trainer.get_train_dataloader()))
    assert torch.equal(batch["input_ids"][0], trainer.rows[3 * trainer.length.rows_per_step]["input_ids"])


def test_memory_that_ends_in_an_evaluation_is_no_matter_of_the_micro_batch(tiny_recipe, tmp_path, corpus, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}]}
    trainer = trainer_of(tiny_recipe, tmp_path)
    monkeypatch.setattr("cpt.training.trainer.measure_and_keep", full)
    with pytest.raises(
        ResourceError,
        match="evaluation of step 0.*`training.per_device_eval_batch_size` lower",
    ):
        trainer.train()
