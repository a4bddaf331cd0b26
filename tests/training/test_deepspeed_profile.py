"""What a DeepSpeed profile may not say, and that the ones we ship say nothing wrong."""

import json
from pathlib import Path

import pytest
from tiny import write_recipe

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.training.engine_profiles import DEEPSPEED_KEYS, check_profile, profile_warnings, read_profile

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
def test_every_profile_that_we_ship_follows_any_recipe(path, recipe):
    assert check_profile(path, recipe) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_profile_that_we_ship_reduces_gradients_during_the_backward_pass_of_stages_1_and_2(path, recipe):
    zero = json.loads(path.read_text())["zero_optimization"]
    assert zero["overlap_comm"] is (zero["stage"] == 3)
    assert profile_warnings(path, recipe) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_comm_at_stages_1_and_2_is_a_warning_with_its_line(tmp_path, recipe, stage):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**SOUND, "zero_optimization": {"stage": stage, "overlap_comm": True}}, indent=2))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "overlap_comm" in text)
    (warning,) = profile_warnings(path, recipe)
    assert warning.startswith(f"{path}:{line}: `zero_optimization.overlap_comm`")
    (in_recipe,) = profile_warnings(json.loads(path.read_text()), recipe)
    assert in_recipe.startswith("`training.deepspeed`")


IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("zero", "extra", "training", "warned"),
    [
        ({"stage": 3}, {}, {}, True),
        ({"stage": 2}, {}, {}, True),
        ({"stage": 2}, {"data_types": {"grad_accum_dtype": "bf16"}}, {}, True),
        ({"stage": 2}, IN_FP32, {}, False),
        ({"stage": 2}, {}, {"bf16": False}, False),
        ({"stage": 2}, {}, {"per_device_train_batch_size": 4}, False),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, {}, False),
        ({"stage": 1}, {}, {}, False),
    ],
)
def test_micro_batches_that_accumulate_in_bfloat16_are_a_warning(recipe, zero, extra, training, warned):
    recipe.training.update({"bf16": True, **training})
    found = profile_warnings({**SOUND, "zero_optimization": zero, **extra}, recipe)
    assert ["grad_accum_dtype" in warning for warning in found] == [True] * warned


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_deepspeed_accepts_every_profile_that_we_ship(path):
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    profile = json.loads(path.read_text())
    DeepSpeedZeroConfig(strict=True, **profile["zero_optimization"])
    filled = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    config = DeepSpeedConfig({**profile, **filled, "bf16": {"enabled": True}, "fp16": {"enabled": False}})
    assert config.zero_optimization_stage == profile["zero_optimization"]["stage"]


def test_deepspeed_reads_no_key_at_the_top_that_we_would_refuse():
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = set()

    class Asked(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            asked.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

    DeepSpeedConfig(Asked(train_batch_size=1, train_micro_batch_size_per_gpu=1))
    assert "zero_optimization" in asked
    assert asked - DEEPSPEED_KEYS <= set()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gradient_cliping": 1.0}, "which would ignore it. Did you mean `gradient_clipping`?"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "`zero_optimization.overlap_com` is not a key of DeepSpeed."),  # noqa: E501
        ({"zero_optimization": {"stage": 7}}, "`zero_optimization.stage` - Input should be 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": 3, "stage3_prefetch_buket_size": 5}}, "Did you mean `stage3_prefetch_bucket_size`?"),  # noqa: E501
        ({"zero_optimization": None}, "`zero_optimization` is missing"),
        ({"optimizer": {"type": "AdamW"}}, "the recipe has it, as `optimizer`. Remove it here"),
        ({"scheduler": {"type": "WarmupLR"}}, "the recipe has it, as `schedule`"),
        ({"sequence_parallel_size": 2}, "as `training.parallelism_config.sp_size`. Remove it here"),
        ({"tensor_parallel": {"autotp_size": 2}}, "as `training.parallelism_config.tp_size`"),
        ({"pipeline": {"stages": 2}}, "has no schedule for stages of layers"),
        ({"train_micro_batch_size_per_gpu": 4}, 'is 4, but `training.per_device_train_batch_size` is 2 in the recipe. Write "auto"'),  # noqa: E501
        ({"gradient_accumulation_steps": 8}, "is 8, but `budget.global_batch_tokens` decides that in the recipe"),
        ({"train_batch_size": 64}, "`train_batch_size` follows from the recipe and the number of processes"),
        ({"gradient_clipping": 0.5}, "`gradient_clipping` is 0.5, but `training.max_grad_norm` is 1.0 in the recipe"),
        ({"bf16": {"enabled": True}}, "`bf16.enabled` is true, but `training.bf16` is false"),
        ({"fp16": {"enabled": True}}, "`fp16.enabled` is true, but `training.fp16` is false"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, '"zero_force_ds_cpu_optimizer": false'),  # noqa: E501
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memry": True}}}, "Did you mean `pin_memory`?"),  # noqa: E501
        ({"zero_optimization": {"stage": 3}}, '"stage3_gather_16bit_weights_on_model_save": true'),
    ],
)  # fmt: skip
def test_each_contradiction_is_one_complaint(recipe, change, complaint):
    found = check_profile({**SOUND, **change}, recipe)
    assert any(complaint in line for line in found), found
    assert check_profile(SOUND, recipe) == []


def test_a_profile_without_clipping_does_not_clip(recipe):
    profile = {key: value for key, value in SOUND.items() if key != "gradient_clipping"}
    assert "`gradient_clipping` is missing" in check_profile(profile, recipe)[0]
    unclipped = recipe.model_copy(update={"training": {**recipe.training, "max_grad_norm": 0}})
    assert check_profile(profile, unclipped) == []


def test_precision_must_be_named_when_the_recipe_wants_it(recipe):
    profile = {key: value for key, value in SOUND.items() if key != "bf16"}
    wanted = recipe.model_copy(update={"training": {**recipe.training, "bf16": True}})
    assert "`bf16` is missing" in check_profile(profile, wanted)[0]


def test_complaints_name_file_and_line(recipe, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**SOUND, "zero_optimization": {"stage": 2, "overlap_com": True}}, indent=2))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "overlap_com" in text)
    assert check_profile(path, recipe)[0].startswith(f"{path}:{line}: `zero_optimization.overlap_com`")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "cannot be read as JSON"), ("[]", "is a mapping")],
)
def test_what_is_no_profile_is_refused(tmp_path, text, reason):
    (tmp_path / "zero.json").write_text(text)
    with pytest.raises(RecipeError, match=reason):
        read_profile(tmp_path / "zero.json")
