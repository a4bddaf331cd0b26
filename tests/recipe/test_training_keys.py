"""`training:` and `model.lora`: checked against Hugging Face's classes, one knob in one place."""

import dataclasses

import pytest
from transformers import TrainingArguments

from cpt.recipe.huggingface_keys import PEFT_METHODS, STAGE_CONFIGS, keys_of_config
from cpt.recipe.keys import MOVED, NO_EFFECT
from cpt.recipe.load import REPOSITORY
from cpt.recipe.shape import BOUNDS


def test_hugging_faces_keys_are_passed_on_unchanged(load):
    training = {
        "bf16": True,
        "logging_steps": 5,
        "max_grad_norm": 1,
        "fsdp": True,
        "fsdp_config": {"version": 2},
        "debug": ["x"],
    }
    assert load(f"training: {training}\n".replace("True", "true")).training == training


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("bf61: true", "`bf16`"),
        ("bf16: yes", "true or false"),
        ("gradient_accumulation_steps: two", "a whole number or auto"),
        ("gradient_accumulation_steps: 1.5", "a whole number or auto"),
        ("max_grad_norm: [1]", "a number"),
        ("logging_strategy: step", "`steps`"),
        ("hub_model_id: 3", "quotes"),
        ("max_grad_norm: null", "a number"),
        ("tokens: 3", "`budget.tokens`"),
        ("lerning_rate: 3", "`optimizer.learning_rate`"),
        ("warmup_ratio: 0.1", "`schedule.warmup_share`"),
        ("group_by_length: true", "no effect"),
        ("logging_nan_inf_filter: true", "no effect"),
        ("run_name: x", "`name`"),
        ("deepspeed: gone.json", "gone.json"),
    ],
)
def test_a_mistake_has_its_line_and_its_remedy(mistakes, entry, named):
    (line,) = mistakes(f"training:\n  {entry}\n")
    assert line.startswith("r.yaml:6: ") and named in line


@pytest.mark.parametrize(
    "entry",
    ["logging_steps: 0", "logging_steps: 1.5", "max_grad_norm: -1", "per_device_train_batch_size: 0"]
    + ["gradient_accumulation_steps: 0", "dataloader_num_workers: -1", "ddp_timeout: 0", "neftune_noise_alpha: -5"]
    + ["label_smoothing_factor: 1.0"],
)
def test_a_number_out_of_its_bounds_is_refused(mistakes, entry):
    key = entry.partition(":")[0]
    (line,) = mistakes(f"training:\n  {entry}\n")
    assert line.startswith(f"r.yaml:6: `training.{key}`: ") and line.endswith(f"got {entry.partition(': ')[2]}")


@pytest.mark.parametrize("entry", ["max_completion_length: 0", "temperature: 0", "top_p: 1.5", "beta: -0.1"])
def test_numbers_of_a_stages_own_class_have_bounds_too(mistakes, entry):
    (line,) = mistakes(f"stage: grpo\nrewards: [exact_match]\ntraining: {{{entry}}}\n")
    assert f"`training.{entry.partition(':')[0]}`: " in line


def test_the_bounds_themselves_pass(load):
    entries = (
        "logging_steps: 0.05, max_grad_norm: 0, dataloader_num_workers: 0, label_smoothing_factor: 0.0,"
        " torch_empty_cache_steps: null"
    )
    assert load(f"training: {{{entries}}}\n").training["max_grad_norm"] == 0


def test_every_bound_is_of_a_key_that_a_class_has():
    keys = {key for config in {*STAGE_CONFIGS.values(), PEFT_METHODS["lora"]} for key in keys_of_config(config)}
    assert keys >= set(BOUNDS)


def test_one_knob_set_twice_is_told_with_both_lines(mistakes):
    assert mistakes("optimizer:\n  learning_rate: 1e-5\n\ntraining:\n  learning_rate: 2e-5\n") == [
        "r.yaml:9: one knob is set twice: `training.learning_rate` and `optimizer.learning_rate` (line 6). "
        "Keep `optimizer.learning_rate`"
    ]


def test_one_knob_set_twice_in_two_files_is_told_with_both_places(mistakes, here):
    (here / "o.yaml").write_text("\nlearning_rate: 1e-5\n")
    (line,) = mistakes("optimizer: o.yaml\n", "training.learning_rate=2e-5")
    assert line.endswith(
        "`training.learning_rate` and `optimizer.learning_rate` (o.yaml:2). Keep `optimizer.learning_rate`"
    )


def test_a_whole_number_is_passed_on_as_one(load):
    steps = load("training: {gradient_accumulation_steps: 1e1}\n").training["gradient_accumulation_steps"]
    assert steps == 10 and isinstance(steps, int)


def test_every_key_is_passed_on_or_has_its_place(load, mistakes):
    """No key of the installed TrainingArguments is overlooked: ours, without effect, or passed on."""
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = fields & {*MOVED, *NO_EFFECT}
    assert {"learning_rate", "seed", "output_dir", "save_steps", "eval_steps", "max_steps", "optim"} <= ours
    lines = mistakes("training:\n" + "".join(f"  {key}: 1\n" for key in sorted(ours)))
    assert len(lines) == len(ours)


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        ("{rank: 8}", "`model.lora.rank` `model.lora.r`"),
        ("{lora_alhpa: 8}", "`model.lora.lora_alhpa` `lora_alpha`"),
        ('{r: "8"}', "`model.lora.r` quotes"),
        ("{r: 0}", "`model.lora.r` 1"),
        ("{task_type: CAUSAL_LM}", "`model.lora.task_type` remove"),
        ("true", "`model.lora` true"),
        ("{quantize: nf5}", "`model.lora.quantize` `nf4`"),
        ("{quantize: nf4, double_quantize: twice}", "`model.lora.double_quantize` true, false"),
    ],
)
def test_lora_options_are_checked_against_peft(mistakes, lora, named):
    assert all(word in mistakes("", f"model.lora={lora}")[0] for word in named.split(" "))


def test_the_frozen_weights_can_be_in_4_bit(load):
    assert load("", "model.lora={r: 8, quantize: nf4, double_quantize: false}").model.lora == {
        "r": 8,
        "quantize": "nf4",
        "double_quantize": False,
    }


def test_the_deepspeed_file_is_found_beside_the_recipe_and_in_the_repository(load, here, monkeypatch):
    assert load("training: {deepspeed: deepspeed_configs/ds_config_production.json}\n").training["deepspeed"] == str(
        REPOSITORY / "deepspeed_configs/ds_config_production.json"
    )
    (here / "mine").mkdir()
    (here / "mine/d.json").write_text("{}")
    (here / "mine/t.yaml").write_text("deepspeed: d.json\n")
    assert load("training: mine/t.yaml\n").training["deepspeed"] == "mine/d.json"


def test_deepspeed_may_be_written_in_place(load):
    assert load("training: {deepspeed: {zero_optimization: {stage: 2}}}\n").training["deepspeed"] == {
        "zero_optimization": {"stage": 2}
    }


def test_keys_of_a_users_stage_are_left_to_its_class(load):
    assert load("stage: dynamic.stage\ntraining: {anything: 1}\n").training == {"anything": 1}
