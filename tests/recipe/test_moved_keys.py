"""Every key that is written elsewhere leads to a place that exists, and the remedy that an error names works."""

import re

import pytest

from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import PEFT_METHODS, keys_of_config
from cpt.recipe.keys import NOTES, PLACES, all_keys, format_new_key
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import LORA_QUANTIZATION

OPTIONS_OF_BUILT_INS = {
    ("optimizer", "weight_decay"),
    ("optimizer", "betas"),
    ("optimizer", "eps"),
    ("schedule", "warmup_tokens"),
    ("schedule", "warmup_share"),
    ("schedule", "floor"),
}


@pytest.mark.parametrize("key", PLACES)
def test_the_new_place_exists(key):
    place = PLACES[key]
    if place[0] == "training":
        assert place[1] in keys_of_config("transformers:TrainingArguments")
    elif place[:2] == ("model", "lora") and len(place) == 3:
        assert place[2] in {*keys_of_config(PEFT_METHODS["lora"]), *LORA_QUANTIZATION}
    else:
        assert place in {*all_keys(), *OPTIONS_OF_BUILT_INS}


def test_the_new_place_is_told_with_its_unit():
    assert format_new_key("max_steps") == "`budget.tokens` (in tokens: steps x tokens of a step)"
    assert format_new_key("warmup_ratio") == "`schedule.warmup_share`"
    assert {*NOTES} <= {*PLACES}


SOUND = """\
name: small
model: {path: some/model}
data: {sources: [{path: some/texts}], sequence_length: 128}
budget: {tokens: 1_024_000}
"""
WRITTEN = {  # what users of other tools write -> the remedy's value here
    "lr": "1e-5",
    "adam_beta1": "[0.9, 0.95]",
    "lr_scheduler_type": "cosine",
    "num_warmup_steps": "100k",
    "max_steps": "1024000",
    "batch_size": "4",
    "gradient_accumulation": "2",
    "global_batch_size": "8192",
    "grad_clip": "1.0",
    "cutoff_len": "128",
    "sample_packing": "best_fit",
    "base_model": "a/b",
    "torch_dtype": "float32",
    "deepspeed": "deepspeed_configs/ds_config_zero1.json",
    "report_to": "[wandb]",
    "lora_r": "8",
    "load_in_4bit": "nf4",
}
REMEDY = re.compile(r"(?:[Ww]rite it as|written as|: write|There is|It is|Keep) `([\w.\[\]]+)`")


@pytest.mark.parametrize("place", ["", "training."])
@pytest.mark.parametrize("word", WRITTEN)
def test_the_remedy_for_a_key_of_another_tool_works(tmp_path, word, place):
    """Type the key where the user would, then what the error says: that error is gone."""
    path = tmp_path / "r.yaml"
    path.write_text(SOUND)
    try:
        load_recipe(path, [f"{place}{word}={WRITTEN[word]}"])
    except RecipeError as problem:
        complaint = next(line for line in str(problem).splitlines() if f"{place}{word}`" in line)
        load_recipe(path, ["budget.tokens=1024000", f"{REMEDY.findall(complaint)[0]}={WRITTEN[word]}"])
