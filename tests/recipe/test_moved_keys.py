"""Every key that is written elsewhere leads to a place that exists, and the remedy that an error names works."""

import re

import pytest

from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import LORA_CONFIG, keys_of_config
from cpt.recipe.load import load_recipe
from cpt.recipe.moved_keys import MOVED, NOTES, OTHER_WORDS, new_home, place_of_key
from cpt.recipe.schema import LORA_QUANTIZATION
from cpt.recipe.sections import all_keys

OPTIONS_OF_BUILT_INS = {
    ("optimizer", "weight_decay"),
    ("optimizer", "betas"),
    ("optimizer", "eps"),
    ("schedule", "warmup_tokens"),
    ("schedule", "warmup_share"),
    ("schedule", "floor"),
}


@pytest.mark.parametrize("key", [*MOVED, *OTHER_WORDS])
def test_the_new_place_exists(key):
    place = place_of_key(key)
    if place[0] == "training":
        assert place[1] in keys_of_config("transformers:TrainingArguments")
    elif place[:2] == ("model", "lora") and len(place) == 3:
        assert place[2] in {*keys_of_config(LORA_CONFIG), *LORA_QUANTIZATION}
    else:
        assert place in {*all_keys(), *OPTIONS_OF_BUILT_INS}


def test_the_new_place_is_told_with_its_unit():
    assert new_home("max_steps") == "`budget.tokens` (in tokens: steps x tokens of a step)"
    assert new_home("warmup_ratio") == "`schedule.warmup_share`"
    assert {*NOTES} <= {*MOVED, *OTHER_WORDS}


SOUND = """\
name: small
stage: {stage}
model: {{path: some/model}}
data: {{sources: [{{path: some/texts}}], sequence_length: 128}}
budget: {{tokens: 1_024_000}}
"""
WRITTEN = {  # what users of other tools write -> (the value that they give, the remedy's value here)
    "learning_rate": "1e-5", "lr": "1e-5", "peak_lr": "1e-5", "optim": "adamw", "weight_decay": "0.1", "adam_beta1": ("0.9", "[0.9, 0.95]"),  # noqa: E501
    "beta2": ("0.95", "[0.9, 0.95]"), "adam_epsilon": "1e-8", "lr_scheduler_type": "cosine", "lr_scheduler": "cosine",
    "warmup_steps": ("100", "100k"), "warmup_ratio": "0.1", "num_warmup_steps": ("100", "100k"), "cosine_min_lr_ratio": "0.1",  # noqa: E501
    "max_steps": ("10", "1024000"), "max_train_steps": ("10", "1024000"), "max_tokens": "1024000", "num_train_epochs": None,  # noqa: E501
    "num_epochs": None, "epochs": None, "batch_size": "4", "micro_batch_size": "4", "per_device_batch_size": "4", "train_batch_size": "4",  # noqa: E501
    "per_device_train_batch_size": "4", "per_device_eval_batch_size": "4", "eval_batch_size": "4", "gradient_accumulation_steps": "2",  # noqa: E501
    "gradient_accumulation": "2", "global_batch_size": ("32", "8192"), "max_grad_norm": "1.0", "grad_clip": "1.0", "max_seq_length": "128",  # noqa: E501
    "max_length": "128", "sequence_len": "128", "cutoff_len": "128", "block_size": "128", "sequence_length": "128", "seq_len": "128",  # noqa: E501
    "packing": ("true", "best_fit"), "sample_packing": ("true", "best_fit"), "model_name_or_path": "a/b", "base_model": "a/b",  # noqa: E501
    "tokenizer_name": "a/b", "attn_implementation": "sdpa", "flash_attention": ("true", "auto"), "torch_dtype": "float32", "bf16": "true",  # noqa: E501
    "gradient_checkpointing": "true", "deepspeed": "deepspeed_configs/ds_config_zero1.json", "logging_steps": "10", "save_steps": "50",  # noqa: E501
    "save_total_limit": None, "eval_steps": None, "val_set_size": "0.1", "report_to": ("wandb", "[wandb]"), "wandb_project": None,  # noqa: E501
    "run_name": "x", "output_dir": "out", "seed": "1", "lora_r": "8", "lora_alpha": "16", "lora_dropout": "0.1",
    "lora_target_modules": ("[q_proj]", "[q_proj]"), "load_in_4bit": ("true", "nf4"), "trust_remote_code": None, "rank": "8", "alpha": "16",  # noqa: E501
    "target": ("[q_proj]", "[q_proj]"), "num_workers": "2", "neftune_noise_alpha": "5", "tf32": "true", "dataset": None, "datasets": None,  # noqa: E501
    "dataset_name": None, "dataset_text_field": "body",
}  # fmt: skip
"""None: the remedy needs another key beside it, so only the place is checked."""
PLACES = ["", "model.", "data.", "training.", "optimizer.", "schedule.", "budget.", "model.lora."]
REMEDY = re.compile(r"(?:[Ww]rite it as|written as|: write|There is|It is|Keep) `([\w.\[\]]+)`")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", WRITTEN)
def test_the_remedy_for_a_key_of_another_tool_works(tmp_path, word, place):
    """Type the key where the user would, then what the error says: that error is gone."""
    path = tmp_path / "r.yaml"
    path.write_text(SOUND.format(stage="cpt"))
    theirs, ours = WRITTEN[word] if isinstance(WRITTEN[word], tuple) else (WRITTEN[word] or "1", WRITTEN[word])
    try:
        load_recipe(path, [f"{place}{word}={theirs}"])
    except RecipeError as problem:
        complaint = next((line for line in str(problem).splitlines() if f"{place}{word}`" in line), "")
    else:
        return  # it is a key there
    if "would have no effect" in complaint:
        return  # the remedy is to remove it
    remedies = REMEDY.findall(complaint)
    assert remedies or place not in ("", "training.", "model.lora."), f"no remedy: {complaint}"
    if remedies and ours is not None:
        load_recipe(path, ["budget.tokens=1024000", f"{remedies[0]}={ours}"])
