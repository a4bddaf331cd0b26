"""Keys in the words of other trainers: each is answered by a key that works as it is written."""

import pytest

from cpt.recipe.keys import NOT_NEEDED, RECIPE_KEYS
from cpt.recipe.tree import dotted

VALUES = {  # key -> a value; other keys take a number
    "budget.global_batch_tokens": "1024",
    "output_dir": "out",
    "name": "other",
    "stage": "cpt",
    "model.path": "some/model",
    "model.config.model_type": "llama",
    "model.dtype": "bfloat16",
    "model.attention": "flash_attention_2",
    "model.trust_remote_code": "false",
    "model.lora": "{}",
    "model.lora.target_modules": "[q_proj]",
    "model.lora.lora_dropout": "0.1",
    "model.lora.quantize": "nf4",
    "tokenizer.path": "some/model",
    "data.sources": "[{path: some/texts}]",
    "data.sources[0].text_column": "body",
    "data.packing": "none",
    "training": "{bf16: true}",
    "training.bf16": "true",
    "training.deepspeed": "deepspeed_configs/ds_config_zero1.json",
    "training.use_cpu": "true",
    "training.gradient_checkpointing": "true",
    "training.torch_compile": "true",
    "training.project": "mine",
    "optimizer": "{name: adamw}",
    "optimizer.name": "muon",
    "optimizer.betas": "[0.9, 0.95]",
    "optimizer.eps": "1.0e-8",
    "optimizer.learning_rate": "1.0e-5",
    "schedule": "{name: linear}",
    "schedule.name": "linear",
    "schedule.floor": "0.1",
    "schedule.warmup_share": "0.1",
    "rewards[0].weight": "0.5",
    "monitoring.trackers": "[wandb]",
    "evaluation.held_out_share": "0.1",
    "evaluation.perplexity": "[{name: domain, path: some/held_out}]",
    "evaluation.stop": "{set: texts, patience: 3}",
}
WITH = {  # what else a key needs
    "evaluation.stop": ["evaluation.held_out_share=0.1", "evaluation.every_steps=10"],
    "evaluation.every_tokens": ["evaluation.held_out_share=0.1"],
    "evaluation.every_steps": ["evaluation.held_out_share=0.1"],
    "checkpoints.keep": ["checkpoints.every_steps=10"],
    "budget.epochs": ["budget.tokens=null"],
    "training.dataloader_prefetch_factor": ["training.dataloader_num_workers=2"],
    "rewards[0].weight": ["stage=grpo", "rewards=[{name: length}]"],
}


@pytest.mark.parametrize("key", sorted({dotted(place) for place in RECIPE_KEYS.values()}))
def test_every_key_that_a_remedy_names_can_be_typed(load, key):
    added = [*WITH.get(key, ()), f"{key}={VALUES.get(key, 8)}"]
    if key.startswith("model.config."):  # as the note of these remedies says
        added.insert(0, "model.config={model_type: llama}")
    assert load("", *added)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("mixed_precision", "training.bf16"),
        ("precision", "training.bf16"),
        ("betas", "optimizer.betas"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("optimizer.type", "optimizer.name"),
        ("schedule.type", "schedule.name"),
        ("scheduler", "schedule.name"),
        ("weight_decay", "optimizer.weight_decay"),
        ("hidden_size", "model.config.hidden_size"),
        ("model.hidden_size", "model.config.hidden_size"),
        ("model.type", "model.config.model_type"),
        ("model.name", "model.path"),
        ("pretrained", "model.path"),
        ("checkpoint", "model.path"),
        ("io_queue_size", "training.dataloader_prefetch_factor"),
        ("evaluation.datasets", "evaluation.perplexity"),
        ("evaluation.batch_size", "training.per_device_eval_batch_size"),
        ("batch_size", "training.per_device_train_batch_size"),
        ("max_steps", "budget.tokens"),
        ("num_train_epochs", "budget.epochs"),
        ("block_size", "data.sequence_length"),
        ("context_length", "data.sequence_length"),
        ("grad_accum", "training.gradient_accumulation_steps"),
        ("warmup_ratio", "schedule.warmup_share"),
        ("save_steps", "checkpoints.every_steps"),
        ("eval_steps", "evaluation.every_steps"),
        ("strategy", "training.deepspeed"),
        ("deepspeed", "training.deepspeed"),
        ("gradient_checkpointing", "training.gradient_checkpointing"),
        ("training.mixed_precision", "training.bf16"),
        ("save_dir", "output_dir"),
        ("datasets", "data.sources"),
        ("train_data", "data.sources"),
        ("data_path", "data.sources"),
        ("lora_r", "model.lora.r"),
        ("flash_attention", "model.attention"),
        ("wandb_project", "training.project"),
        ("report_to", "monitoring.trackers"),
        ("use_ddp", "cpt train RECIPE --processes"),
        ("num_gpus", "cpt train RECIPE --processes"),
        ("resume_from", "cpt train RECIPE --resume"),
    ],
)
def test_a_word_of_another_trainer_is_answered_with_its_key(mistakes, word, key):
    (line,) = mistakes("", f"{word}=1")
    assert f"`{key}" in line


def test_a_key_has_one_answer():
    assert not RECIPE_KEYS.keys() & NOT_NEEDED.keys()
