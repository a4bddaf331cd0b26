"""What a DeepSpeed profile or `training.fsdp_config` may not say, and that the profiles we ship say nothing wrong."""

import json
from pathlib import Path

import pytest
from tiny import TINY_LLAMA, write_recipe

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.training.engine_profiles import (
    NOT_IN_A_PROFILE,
    check_fsdp,
    check_profile,
    profile_warnings,
    read_profile,
)

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "deepspeed_configs").glob("*.json"))
SOUND = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture
def recipe(tiny_recipe, tmp_path):
    return load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_profile_that_we_ship_follows_any_recipe_and_deepspeed_accepts_it(path, recipe):
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert check_profile(path, recipe) == [] and profile_warnings(path, recipe) == []
    profile = json.loads(path.read_text())
    zero = profile["zero_optimization"]
    assert zero["overlap_comm"] is (zero["stage"] == 3)
    DeepSpeedZeroConfig(strict=True, **zero)
    sizes = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    precision = {"gradient_clipping": 1.0, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    assert (
        DeepSpeedConfig({**profile, **sizes, **precision}).zero_optimization_stage == zero["stage"]
    )


@pytest.mark.parametrize("key", NOT_IN_A_PROFILE)
def test_a_key_that_cpt_replaces_is_refused_at_its_line(key, tmp_path, recipe):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**SOUND, key: {}}, indent=2))
    (complaint,) = check_profile(path, recipe)
    line = len(path.read_text().splitlines()) - 1
    assert complaint.startswith(f"{path}:{line}: `{key}`: ") and "Remove it" in complaint


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_comm_at_stages_1_and_2_is_a_warning_with_its_line(tmp_path, recipe, stage):
    """DeepSpeed's issue 5294: wrong gradients on several GPUs."""
    path, profile = (
        tmp_path / "zero.json",
        {**SOUND, "zero_optimization": {"stage": stage, "overlap_comm": True}},
    )
    path.write_text(json.dumps(profile, indent=2))
    line = path.read_text().splitlines().index('    "overlap_comm": true') + 1
    (warning,) = profile_warnings(path, recipe)
    assert warning.startswith(f"{path}:{line}: `zero_optimization.overlap_comm`")
    (in_recipe,) = profile_warnings(profile, recipe)
    assert in_recipe.startswith("`training.deepspeed`")


@pytest.mark.parametrize(
    ("zero", "extra", "training", "warned"),
    [
        ({"stage": 3}, {}, {}, True),
        ({"stage": 2}, {"data_types": {"grad_accum_dtype": "fp32"}}, {}, False),
        ({"stage": 2}, {}, {"bf16": False}, False),
        ({"stage": 2}, {}, {"per_device_train_batch_size": 4}, False),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, {}, False),
        ({"stage": 1}, {}, {}, False),
    ],
)
def test_micro_batches_that_accumulate_in_bfloat16_are_a_warning(
    recipe, zero, extra, training, warned
):
    recipe.training.update({"bf16": True, **training})
    found = profile_warnings({**SOUND, "zero_optimization": zero, **extra}, recipe)
    assert ["grad_accum_dtype" in warning for warning in found] == [True] * warned


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
COMPLAINTS = [
    ({"gradient_cliping": 1.0}, "`gradient_clipping`"),
    ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "`zero_optimization.overlap_com`"),
    ({"zero_optimization": {"stage": 7}}, "`zero_optimization.stage`"),
    ({"zero_optimization": None}, "`zero_optimization` is missing"),
    ({"zero_optimization": {"stage": 3}}, "stage3_gather_16bit_weights_on_model_save"),
    ({"zero_optimization": OFFLOADED}, "zero_force_ds_cpu_optimizer"),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        "on a disk",
    ),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memry": True}}}, "`pin_memory`"),
    ({"optimizer": {"type": "AdamW"}}, "`optimizer`"),
    ({"scheduler": {"type": "WarmupLR"}}, "`schedule`"),
    ({"sequence_parallel_size": 2}, "`training.parallelism_config.sp_size`"),
    ({"tensor_parallel": {"autotp_size": 2}}, "transformers/pull/48569"),
    ({"train_micro_batch_size_per_gpu": 4}, "`training.per_device_train_batch_size` is 2"),
    ({"gradient_accumulation_steps": 8}, "`budget.global_batch_tokens`"),
    ({"train_batch_size": 64}, "`train_batch_size`"),
    ({"gradient_clipping": 0.5}, "`training.max_grad_norm` is 1.0"),
    ({"bf16": {"enabled": True}}, "`training.bf16` is false"),
]


@pytest.mark.parametrize(
    ("change", "complaint"), COMPLAINTS, ids=[complaint for _, complaint in COMPLAINTS]
)
def test_a_profile_that_contradicts_the_recipe_is_a_complaint_with_the_key(
    recipe, change, complaint
):
    found = check_profile({**SOUND, **change}, recipe)
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize(
    ("key", "training"), [("gradient_clipping", {"max_grad_norm": 0}), ("bf16", {}), ("fp16", {})]
)
def test_a_key_may_be_missing_only_where_the_recipe_does_not_want_it(recipe, key, training):
    profile = {name: value for name, value in SOUND.items() if name != key}
    unwanted = recipe.model_copy(update={"training": {**recipe.training, **training}})
    wanted = recipe.model_copy(
        update={"training": {**recipe.training, "bf16": key == "bf16", "fp16": key == "fp16"}}
    )
    assert check_profile(SOUND, recipe) == check_profile(profile, unwanted) == []
    assert f"`{key}` is missing" in " ".join(check_profile(profile, wanted))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_not_a_profile_is_refused(tmp_path, text):
    (tmp_path / "zero.json").write_text(text)
    with pytest.raises(RecipeError, match="training.deepspeed"):
        read_profile(tmp_path / "zero.json")


# --- FSDP2 ---


def fsdp_complaints(config=None, *, here=True, **sections):
    """What is wrong with a recipe with these sections."""
    fsdp_config = {} if config is None else {"fsdp_config": config}
    recipe = {
        "name": "x",
        "stage": "pretrain",
        "model": {"from_scratch": True, "config": TINY_LLAMA},
        "tokenizer": {"path": "x"},
        "data": {"sources": [{"path": "x"}]},
        "budget": {"tokens": 1000},
        **sections,
        "training": {"fsdp": True, **fsdp_config, **sections.get("training", {})},
    }
    return check_fsdp(Recipe.model_validate(recipe), here=here)


ADAPTER = {"model": {"path": "x", "lora": {"r": 4}}, "stage": "cpt"}


@pytest.mark.parametrize(
    ("config", "sections"),
    [
        (None, {}),
        ({"version": 2, "reshard_after_forward": False, "fsdp_auto_wrap_policy": "NO_WRAP"}, {}),
        ({"cpu_offload": True}, {"training": {"bf16": True}}),
        (None, {"training": {"fsdp": False}}),
        (None, {**ADAPTER, "training": {"bf16": True, "gradient_checkpointing": True}}),
    ],
)
def test_what_is_tested_with_fsdp_is_accepted(config, sections):
    assert fsdp_complaints(config, **sections) == []


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"version": 1}, "version: 1"),
        ({"activation_checkpointing": True}, "training.gradient_checkpointing: true"),
        ({"cpu_ram_efficient_loading": True}, "main process"),
        ({"reshard_after_foward": True}, "Did you mean `reshard_after_forward`"),
        ({"reshard_after_forward": "full_shard"}, "reshard_after_forward"),
        ({"min_num_params": 10}, "auto_wrap_policy"),
    ],
)
def test_a_key_without_effect_under_fsdp_is_a_complaint(config, named):
    (complaint,) = fsdp_complaints(config)
    assert named in complaint and "`training.fsdp_config`" in complaint


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"optimizer": {"name": "muon", "learning_rate": 1e-3}}, "optimizer.name"),
        (
            {"optimizer": {"learning_rate": 1e-3, "release_gradients": True}},
            "optimizer.release_gradients",
        ),
        ({"training": {"fp16": True}}, "training.fp16"),
        ({"training": {"fsdp": "full_shard"}}, "training.fsdp"),
        ({"model": {"path": "x", "dtype": "bfloat16"}, "stage": "cpt"}, "model.dtype"),
        (
            {"model": {"path": "x", "lora": {"r": 4, "quantize": "nf4"}}, "stage": "cpt"},
            "model.lora.quantize",
        ),
        ({"stage": "grpo", "rewards": ["exact_match"]}, "stage: grpo"),
    ],
)
def test_what_fsdp_does_not_train_is_a_complaint_with_its_key(sections, named):
    (complaint,) = fsdp_complaints(**sections)
    assert named in complaint


def test_a_plan_is_refused_only_for_what_no_machine_trains():
    offloaded, without_fsdp = {"cpu_offload": True}, {"fsdp": False}
    assert len(fsdp_complaints(offloaded)) == 1 and fsdp_complaints(offloaded, here=False) == []
    assert len(fsdp_complaints({"version": 2}, training=without_fsdp)) == 1
    assert fsdp_complaints({"version": 2}, training=without_fsdp, here=False) == []
    assert len(fsdp_complaints(here=False, training={"fsdp": "shard"})) == 1
