"""`training:` and `model.lora`: checked against Hugging Face's classes, one knob in one place."""

import dataclasses
import re

import pytest
from accelerate.utils import GradientAccumulationPlugin
from transformers.trainer_pt_utils import AcceleratorConfig

from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, keys_of_config
from cpt.recipe.keys import AUTOMATIC, annotation_at
from cpt.recipe.load import REPOSITORY, load_recipe, warn_of_former_keys
from cpt.recipe.training_keys import (
    MOVED,
    MOVED_OF_TRL,
    NO_EFFECT,
    NO_EFFECT_IN_STAGE,
    NO_EFFECT_OF_TRL,
    Fate,
    fate_of,
)
from cpt.recipe.tree import dotted, steps_of


def test_hugging_faces_keys_are_passed_on_unchanged(load):
    training = {
        "bf16": True,
        "logging_steps": 5,
        "debug": ["x"],
        "deepspeed": {"zero_optimization": {"stage": 2}},
    }
    assert load(f"training: {training}\n".replace("True", "true")).training == training
    steps = load("training: {gradient_accumulation_steps: 1e1}\n").training[
        "gradient_accumulation_steps"
    ]
    assert steps == 10 and isinstance(steps, int)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("bf61: true", "`bf16`"),
        ("bf16: yes", "true or false"),
        ("gradient_accumulation_steps: two", "a whole number or auto"),
        ("gradient_accumulation_steps: 1.5", "a whole number or auto"),
        ("max_grad_norm: [1]", "a number"),
        ("max_grad_norm: null", "a number"),
        ("max_grad_norm: auto", "a number"),
        ("logging_strategy: step", "`steps`"),
        ("trackio_space_id: 3", "quotes"),
        ("hub_model_id: me/model", "cpt export RUN --push-to-hub"),
        ("tokens: 3", "`budget.tokens`"),
        ("lerning_rate: 3", "`optimizer.learning_rate`"),
        ("warmup_ratio: 0.1", "`schedule.warmup_share`"),
        ("group_by_length: true", "no effect"),
        ("tp_size: 2", "tensor parallelism"),
        ("run_name: x", "`name`"),
        ("deepspeed: gone.json", "gone.json"),
    ],
)
def test_a_mistake_has_its_line_and_its_remedy(mistakes, entry, named):
    (line,) = mistakes(f"training:\n  {entry}\n")
    assert line.startswith("r.yaml:6: ") and named in line


@pytest.mark.parametrize(
    "entry",
    [
        "logging_steps: 0",
        "logging_steps: 1.5",
        "max_grad_norm: -1",
        "gradient_accumulation_steps: 0",
    ]
    + [
        "dataloader_num_workers: -1",
        "ddp_timeout: 0",
        "neftune_noise_alpha: -5",
        "label_smoothing_factor: 1.0",
    ]
    + ["max_completion_length: 0", "temperature: 0", "top_p: 1.5", "beta: -0.1"],
)
def test_a_number_out_of_its_bounds_is_refused(mistakes, entry):
    """Also one of a key that only the stage's class has."""
    key, _, value = entry.partition(": ")
    line = mistakes(f"stage: grpo\nrewards: [exact_match]\ntraining:\n  {entry}\n")[-1]
    assert line.startswith(f"r.yaml:8: `training.{key}`: ") and line.endswith(f"got {value}")


def test_the_bounds_themselves_pass(load):
    entries = "logging_steps: 0.05, max_grad_norm: 0, dataloader_num_workers: 0, torch_empty_cache_steps: null"
    assert (
        load(f"training: {{{entries}, label_smoothing_factor: 0.0}}\n").training["max_grad_norm"]
        == 0
    )


def test_one_knob_set_twice_is_reported_with_both_places(mistakes, here):
    (here / "o.yaml").write_text("\nlearning_rate: 1e-5\n")
    (line,) = mistakes("optimizer: o.yaml\ntraining:\n  learning_rate: 2e-5\n")
    assert line.startswith("r.yaml:7: ") and "`optimizer.learning_rate` (o.yaml:2)" in line


CONFIGS = sorted({(config, stage) for stage, config in STAGE_CONFIGS.items()})
CONFIGS.append(("trl:SFTConfig", "sft"))  # what users of TRL write in this stage


def fates(config: str, stage: str) -> dict[str, Fate | None]:
    return {key: fate_of(key, stage) for key in keys_of_config(config)}


@pytest.mark.parametrize(("config", "stage"), CONFIGS, ids=[stage for _, stage in CONFIGS])
def test_every_key_of_the_installed_versions_is_in_the_table(config, stage):
    assert [key for key, fate in fates(config, stage).items() if fate is None] == []


def test_every_key_of_accelerate_that_the_trainer_takes_is_in_the_table():
    section = "accelerator_config"
    keys = {field.name for field in dataclasses.fields(AcceleratorConfig)}
    below = {field.name for field in dataclasses.fields(GradientAccumulationPlugin)}
    names = {f"{section}.{key}" for key in keys}
    names |= {f"{section}.gradient_accumulation_kwargs.{key}" for key in below}
    assert [name for name in names if fate_of(name, "cpt") is None] == []


@pytest.mark.parametrize(("config", "stage"), CONFIGS, ids=[stage for _, stage in CONFIGS])
def test_a_key_that_is_not_passed_on_is_refused_with_its_line_and_what_to_do(
    config, stage, mistakes
):
    refused = [key for key, fate in fates(config, stage).items() if fate in ("moved", "no effect")]
    lines = mistakes(f"stage: {stage}\ntraining:\n" + "".join(f"  {key}: 1\n" for key in refused))
    for number, key in enumerate(refused, start=7):
        (line,) = [line for line in lines if line.startswith(f"r.yaml:{number}: ")]
        assert f"`training.{key}`" in line
        assert re.search(r"write `[\w.\[\]]+`|Keep `[\w.]+`|Remove it$", line)


def test_a_file_of_accelerates_keys_is_refused_because_they_would_not_be_checked(mistakes):
    (line,) = mistakes("training: {accelerator_config: mine.json}\n")
    assert line.startswith("r.yaml:5: `training.accelerator_config`: write")


def test_a_key_within_the_section_for_accelerate_is_refused_at_its_line(mistakes):
    section = "training:\n  accelerator_config:\n    split_batches: true\n"
    below = "    gradient_accumulation_kwargs: {num_steps: 4}\n"
    first, second = mistakes(section + below)
    assert first.startswith("r.yaml:7: `training.accelerator_config.split_batches` would have no")
    assert second.startswith("r.yaml:8: ")
    assert "write `training.gradient_accumulation_steps`" in second


@pytest.mark.parametrize(
    ("refused", "remedy"),
    [
        ("accelerator_config.gradient_accumulation_kwargs.num_steps=4", "{key}=4"),
        ("trust_remote_code=true", "model.revision=" + "a" * 40 + " {key}=true"),
        ("logging_strategy=epoch", "{key}=7"),
        ("reward_weights=[1.0]", "{key}=0.5 stage=grpo rewards=[exact_match] {key}=0.5"),
        ("no_cuda=true", "{key}=true"),
        ("evaluation_strategy=steps", "{key}=1000 evaluation.held_out_share=0.1"),
    ],
    ids=lambda text: text.partition("=")[0],
)
def test_what_a_refusal_says_to_write_instead_works(load, refused, remedy):
    with pytest.raises(RecipeError) as problem:
        load("", f"training.{refused}")
    key = re.findall(r"[Ww]rite `([\w.\[\]]+)`", str(problem.value))[0]
    load("", *remedy.format(key=key).split(" "))


REMEDIES = {  # the recipe's key of each refusal, with a value
    "optimizer.learning_rate": "1e-5",
    "optimizer.weight_decay": "0.1",
    "optimizer.betas": "[0.9, 0.95]",
    "optimizer.eps": "1e-8",
    "optimizer.name": "adamw",
    "optimizer": "{name: adamw}",
    "schedule.name": "cosine",
    "schedule": "{name: cosine}",
    "schedule.warmup_tokens": "100",
    "schedule.warmup_share": "0.01",
    "budget.tokens": "2048",
    "budget.epochs": "1",
    "seed": "1",
    "output_dir": "runs",
    "name": "other",
    "monitoring.trackers": "[tensorboard]",
    "checkpoints.every_tokens": "1000",
    "checkpoints.every_steps": "10",
    "checkpoints.keep": "2",
    "evaluation.every_tokens": "1000",
    "evaluation.every_steps": "10",
    "stage": "cpt",
    "data.sequence_length": "256",
    "data.packing": "best_fit",
    "model.attention": "sdpa",
    "model.dtype": "float32",
    "model.path": "other/model",
    "model.trust_remote_code": "true",
    "rewards[0].weight": "0.5",
    "training.per_device_train_batch_size": "4",
    "training.per_device_eval_batch_size": "4",
    "training.max_grad_norm": "1.0",
    "training.use_cpu": "true",
    "training.gradient_accumulation_steps": "2",
}


NEEDED = {  # what these keys need
    "budget.epochs": ["budget.tokens=null"],
    "checkpoints.keep": ["checkpoints.every_steps=10"],
    "evaluation.every_tokens": ["evaluation.held_out_share=0.1"],
    "evaluation.every_steps": ["evaluation.held_out_share=0.1"],
    "model.trust_remote_code": [f"model.revision={'a' * 40}"],
    "rewards[0].weight": ["stage=grpo", "rewards=[exact_match]"],
}


def test_every_key_that_a_refusal_names_instead_can_be_written(load):
    named = {dotted(place) for place in (MOVED | MOVED_OF_TRL).values()}
    assert named == REMEDIES.keys()
    for key, value in REMEDIES.items():
        load("", *NEEDED.get(key, ()), f"{key}={value}")


def test_every_key_that_a_reason_mentions_exists():
    reasons = {*NO_EFFECT.values(), *NO_EFFECT_OF_TRL.values(), *NO_EFFECT_IN_STAGE.values()}
    for reason in reasons:
        for key in re.findall(r"`([a-z_]+\.[\w.]+)", reason):
            section, _, name = key.partition(".")
            if section == "training":
                assert fate_of(name, "cpt") in ("ours", "passed on"), key
            else:
                assert annotation_at(steps_of(key)) is not None, key


def test_the_deepspeed_file_is_found_beside_the_recipe_and_in_the_repository(load, here):
    profile = "deepspeed_configs/ds_config_production.json"
    assert load(f"training: {{deepspeed: {profile}}}\n").training["deepspeed"] == str(
        REPOSITORY / profile
    )
    (here / "mine").mkdir()
    (here / "mine/d.json").write_text("{}")
    (here / "mine/t.yaml").write_text("deepspeed: d.json\n")
    assert load("training: mine/t.yaml\n").training["deepspeed"] == "mine/d.json"


def test_former_keys_are_accepted_in_a_run_that_began_with_them_only(load, mistakes, here, caplog):
    warn_of_former_keys.cache_clear()
    (here / "runs/run").mkdir(parents=True)
    former = "dataloader_drop_last: true, logging_strategy: epoch, hub_model_id: me/it, bf16: true"
    (here / "runs/run/recipe.yaml").write_text(f"stage: cpt\ntraining: {{{former}}}\n")
    own = "name=run", "output_dir=runs"
    recipe = load(f"training: {{{former}}}\n", *own)
    assert recipe.training == {"bf16": True} and len(caplog.messages) == 1
    assert len(mistakes(f"training: {{{former}}}\n", "name=another", "output_dir=runs")) == 3
    (line,) = mistakes("training: {dataloader_drop_last: false}\n", *own)
    assert "`training.dataloader_drop_last` would have no effect" in line


def test_keys_of_a_users_stage_are_left_to_its_class(load):
    assert load("stage: dynamic.stage\ntraining: {anything: 1}\n").training == {"anything": 1}


def test_auto_is_taken_by_the_keys_that_a_plan_can_fill(load):
    keys = [
        key for key in AUTOMATIC if key != "activation_checkpointing"
    ]  # the new name of the same switch
    overrides = [f"training.{key}=auto" for key in keys]
    assert load("", "budget.global_batch_tokens=1024", *overrides).training == dict.fromkeys(
        keys, "auto"
    )


@pytest.mark.parametrize("key", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_the_tokens_of_a_step_do_not_depend_on_what_fits(mistakes, key):
    (line,) = mistakes(f"training: {{{key}: auto}}\n")
    assert "`budget.global_batch_tokens`" in line


# Adapters


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
        ("{method: lohaa}", "`loha`"),
        ("{method: ia3, r: 8}", "`model.lora.r`"),
        ("{method: boft, boft_block_sise: 4}", "`boft_block_size`"),
        ("{method: oft, preset: cpt}", "`model.lora.preset`"),
        ("{method: oft, quantize: nf4}", "`model.lora.quantize`"),
        ("{method: p_tuning}", "`model.lora.method`"),
        ("cptt", "keys values .yaml"),
        ("{preset: full}", "cpt"),
    ],
)
def test_options_are_checked_against_the_methods_own_class(mistakes, lora, named):
    line = mistakes("", f"model.lora={lora}")[0]
    assert all(word in line.replace(f"model.lora={lora}", "") for word in named.split(" "))


@pytest.mark.parametrize(
    ("written", "lora"),
    [
        ("cpt", {"preset": "cpt"}),
        ("{preset: cpt, r: 8}", {"preset": "cpt", "r": 8}),
        (
            "{r: 8, quantize: nf4, double_quantize: false}",
            {"r": 8, "quantize": "nf4", "double_quantize": False},
        ),
    ],
)
def test_adapters_are_a_preset_or_options_or_both(load, written, lora):
    assert load("", f"model.lora={written}").model.lora == lora


# Keys that have another place here


REMEDY = re.compile(r"(?:[Ww]rite it as|written as|: write|Use|It is|Keep) `([\w.\[\]]+)`")


@pytest.mark.parametrize("place", ["", "training."])
@pytest.mark.parametrize(
    "written",  # what users of other tools write, with the value of the remedy here
    [
        "lr=1e-5",
        "adam_beta1=[0.9, 0.95]",
        "lr_scheduler_type=cosine",
        "num_warmup_steps=100k",
        "max_steps=1024000",
    ]
    + [
        "batch_size=4",
        "gradient_accumulation=2",
        "global_batch_size=8192",
        "grad_clip=1.0",
        "cutoff_len=128",
    ]
    + [
        "sample_packing=best_fit",
        "base_model=a/b",
        "torch_dtype=float32",
        "report_to=[wandb]",
        "lora_r=8",
    ]
    + ["deepspeed=deepspeed_configs/ds_config_zero1.json", "load_in_4bit=nf4"]
    + ["early_stopping_patience={set: texts, patience: 3}"],
)
def test_the_remedy_for_a_key_of_another_tool_works(load, written, place):
    """Type the key where the user would, then what the error says: that error is gone."""
    word, _, value = written.partition("=")
    try:
        load("", f"{place}{written}")
    except RecipeError as problem:
        complaint = next(line for line in str(problem).splitlines() if f"{place}{word}`" in line)
        needed = ["budget.tokens=1024000", "evaluation={held_out_share: 0.1, every_steps: 9}"]
        load_recipe("r.yaml", [*needed, f"{REMEDY.findall(complaint)[0]}={value}"])
