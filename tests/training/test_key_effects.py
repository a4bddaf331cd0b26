"""Keys of `training:` that pass the check have the effect that Hugging Face documents, in our trainer."""

from dataclasses import MISSING, fields
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from example_runs import build_run
from threads_as_ranks import on_ranks
from tiny_rewards import bandit, quiet_trainer
from tiny_trainers import losses, metrics, trainer_of
from transformers import Trainer

from cpt.recipe.huggingface_keys import STAGE_CONFIGS, Key, find_stage, keys_of_config
from cpt.recipe.schema import Recipe
from cpt.recipe.training_keys import fate_of
from cpt.training.arguments import training_arguments
from cpt.training.trainer import CPTTrainer

SECTIONS = {
    "name": "run",
    "model": {"path": "some/model"},
    "data": {"sequence_length": 64, "sources": [{"path": "a.txt"}]},
    "budget": {"tokens": 4096},
}
WANTED = {  # values of keys for which any other value is refused
    "debug": ["underflow_overflow"],
    "pad_to_multiple_of": 8,
    "include_num_input_tokens_seen": "all",
    "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
}
NEEDS_MORE = {
    "tf32": "a GPU",
    "log_completions_hub_repo": "the Hub",
    "accelerator_config": "becomes an object",
}


def passed_on_keys() -> list[tuple[str, str]]:
    """Each key with the first stage that has it."""
    stages: dict[str, str] = {}
    for stage, config in STAGE_CONFIGS.items():
        for key in keys_of_config(config):
            if fate_of(key, stage) == "passed on" and key not in NEEDS_MORE:
                stages.setdefault(key, stage)
    return [(stage, key) for key, stage in stages.items()]


def another_value(name: str, key: Key, default: object) -> object:
    if name in WANTED:
        return WANTED[name]
    if key.choices:
        return next(choice for choice in key.choices if choice != default)
    if isinstance(default, bool) or (bool in key.kinds and int not in key.kinds):
        return not default
    if isinstance(default, str):
        return "x"
    if isinstance(default, float) or (float in key.kinds and int not in key.kinds):
        return (default or 1) / 2
    if isinstance(default, int) or int in key.kinds:
        return (default or 0) + 1
    if dict in key.kinds:
        return {"x": 1}
    return [1.0] if list in key.kinds else "x"


def test_every_key_that_is_passed_on_arrives_unchanged(tmp_path):
    data = SimpleNamespace(form="document", num_rows=100, held_out=())
    for stage, name in passed_on_keys():
        config = find_stage(stage).CONFIG
        (field,) = (field for field in fields(config) if field.name == name)
        default = None if field.default is MISSING else field.default
        key = keys_of_config(STAGE_CONFIGS[stage])[name]
        value = another_value(name, key, default)
        needs = {"teacher_model_name_or_path": "a"} if "distill" in stage else {}
        training = {"use_cpu": True, "per_device_train_batch_size": 8, **needs, name: value}
        recipe = Recipe.model_validate({**SECTIONS, "stage": stage, "training": training})
        assert vars(training_arguments(recipe, tmp_path, data))[name] == value, f"{stage}: {name}"


@pytest.fixture
def trained(tiny_recipe, tmp_path):
    """A run of four steps with these keys."""

    def run(**training):
        folder = tmp_path / "-".join(training or ["plain"])
        sections = {**tiny_recipe, "training": {**tiny_recipe["training"], **training}}
        trainer = trainer_of(sections, folder, evaluation={"held_out_share": 0.3})
        trainer.train()
        return trainer

    return run


@pytest.mark.heavy
def test_keys_of_logs_have_their_effect(trained):
    keys = {"logging_steps": 3, "logging_first_step": True, "skip_memory_metrics": False}
    trainer = trained(**keys, include_num_input_tokens_seen="all")
    lines = metrics(trainer)
    assert list(losses(trainer)) == [1, 3]
    seen = {line["step"]: line["num_input_tokens_seen"] for line in lines if "loss" in line}
    assert seen == {1: 256, 3: 768}
    assert "train_mem_cpu_alloc_delta" in lines[-1]


@pytest.mark.heavy
def test_noise_on_embeddings_is_in_training_only(trained):
    plain, noisy = trained(), trained(neftune_noise_alpha=5.0)
    assert losses(plain)[1] != losses(noisy)[1]
    first, last = (
        [line["eval_domain_loss"] for line in metrics(trainer) if "eval_domain_loss" in line]
        for trainer in (plain, noisy)
    )
    assert first[0] == last[0]


@pytest.mark.heavy
def test_full_determinism_is_turned_on(trained):
    try:
        trained(full_determinism=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.heavy
def test_the_loader_has_the_keys_of_a_data_loader(trained):
    keys = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = trained(**keys, dataloader_prefetch_factor=3)
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
    assert list(losses(trainer)) == [1, 2, 3, 4]


@pytest.mark.parametrize(("averages", "counts"), [(True, [8, 8]), (False, [3, 5])])
def test_labels_are_counted_over_all_processes_unless_the_recipe_says_otherwise(
    averages, counts, monkeypatch
):
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda _, batches, __: sum(batches))

    def count(rank):
        trainer = CPTTrainer.__new__(CPTTrainer)
        trainer.args = SimpleNamespace(
            n_gpu=0, world_size=2, average_tokens_across_devices=averages
        )
        trainer.shared_rows = SimpleNamespace(parts=1)
        batches = [1, 2] if rank == 0 else [2, 3]
        return int(trainer._get_num_items_in_batch(batches, torch.device("cpu")))

    assert on_ranks(2, count) == counts


@pytest.mark.heavy
@pytest.mark.parametrize("stage", ["dpo", "kto", "reward"])
def test_batches_of_examples_are_padded_to_a_multiple(stage, tmp_path):
    trainer = build_run(stage, tmp_path, training={"pad_to_multiple_of": 32})
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[1] == 32


@pytest.mark.heavy
def test_preference_pairs_are_cut_where_the_recipe_says(tmp_path):
    """`truncation_mode`: the prompt's beginning is cut instead of the answers' end."""
    training = {"truncation_mode": "keep_end"}
    trainer = build_run("dpo", tmp_path, training=training)
    row = {"prompt_ids": [11] * 60, "chosen_ids": [5] * 9, "rejected_ids": [6] * 9}
    ids = trainer.collate_examples()([row])["input_ids"]
    assert ids.shape == (2, 64) and ids[0].tolist() == [11] * 55 + [5] * 9


@pytest.mark.heavy
def test_completions_are_logged(tmp_path):
    training = {"log_completions": True, "num_completions_to_print": 1}
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=1, training=training))
    trainer.train()
    (file,) = trainer.run_folder.glob("completions/*.parquet")
    assert len(pd.read_parquet(file)) == trainer.args.generation_batch_size
