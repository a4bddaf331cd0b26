"""What a DeepSpeed profile or `training.fsdp_config` may not say, and that the profiles we ship say nothing wrong."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tiny import TINY_LLAMA, write_recipe

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.training.deepspeed_keys import DEFAULTS, REFUSED, REMOVED, fate_of_key
from cpt.training.engine_profiles import (
    changes_in_memory,
    check_fsdp,
    check_profile,
    located,
    offloads,
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
    "fp16": {"enabled": "auto"},
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


def with_key(key, value):
    """The sound profile with a key, such as `bf16.bf16_optimizer_states`."""
    profile = json.loads(json.dumps(SOUND))
    *sections, name = key.split(".")
    section = profile
    for step in sections:
        section = section.setdefault(step, {})
    section[name] = value
    return profile


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_cpt_replaces_is_refused_at_its_line(key, tmp_path, recipe):
    path = tmp_path / "zero.json"
    value = not DEFAULTS[key] if key in DEFAULTS else True
    path.write_text(json.dumps(with_key(key, value), indent=2))
    complaint = next(line for line in check_profile(path, recipe) if f"`{key}`: " in line)
    name = key.rpartition(".")[2]
    number = next(
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if f'"{name}"' in line
    )
    assert complaint.startswith(f"{path}:{number}: ") and "Remove it" in complaint


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_key_that_is_off_is_accepted_unless_deepspeed_stops_at_it(key, recipe):
    lines = check_profile(with_key(key, DEFAULTS.get(key, False)), recipe)
    assert any(f"`{key}`: " in line for line in lines) == (key in REMOVED)


class Recorder(dict):
    """Notes the keys that are asked for, below `prefix`."""

    def __init__(self, asked, prefix="", **sections):
        super().__init__(sections)
        self.asked, self.prefix = asked, prefix

    def note(self, key):
        self.asked.add(f"{self.prefix}{key}")

    def __contains__(self, key):
        self.note(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.note(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.note(key)
        return super().__getitem__(key)

    def keys(self):
        return self


def keys_of_deepspeed():
    """The keys that the installed DeepSpeed reads; of sections without fields in a class those that it asks for."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.zero import config as zero

    asked = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    asked |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    sections = {
        name: Recorder(asked, f"{name}.") for name in ("aio", "data_types", "flops_profiler")
    }
    numbers = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
    config.DeepSpeedConfig(Recorder(asked, **sections, **numbers))
    classes = {
        "bf16": precision_config.DeepSpeedBF16Config,
        "fp16": precision_config.DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "csv_monitor": CSVConfig,
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": zero.DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
    }
    for section, kind in classes.items():
        names = (field.alias or name for name, field in kind.model_fields.items())
        asked |= {f"{section}.{name}" for name in names}
    return asked


def test_every_key_that_the_installed_deepspeed_reads_is_in_the_table():
    keys = keys_of_deepspeed()
    assert {"zero_optimization", "flops_profiler.profile_step", "checkpoint", "aio.use_gds"} <= keys
    assert sorted(key for key in keys if fate_of_key(key) is None) == []


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


COMPLAINTS = [
    ({"gradient_cliping": 1.0}, "`gradient_clipping`"),
    ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "`zero_optimization.overlap_com`"),
    ({"zero_optimization": {"stage": 7}}, "`zero_optimization.stage`"),
    ({"zero_optimization": {"stage": 0}}, "`zero_optimization.stage` is 0"),
    ({"zero_optimization": {}}, "`zero_optimization.stage` is 0"),
    ({"data_types": {"grad_accum_type": "fp32"}}, "`grad_accum_dtype`"),
    ({"flops_profiler": {"enable": True}}, "`flops_profiler.enable` is not a key"),
    ({"bf16": {"enabled": "auto", "enabld": True}}, "Did you mean `enabled`"),
    ({"prescale_gradients": True}, '"reduce_scatter": false'),
    ({"gradient_predivide_factor": 2}, '"reduce_scatter": false'),
    ({"zero_optimization": None}, "`zero_optimization` is missing"),
    ({"zero_optimization": {"stage": "auto"}}, "`zero_optimization.stage`"),
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
    ({"optimizer": {"type": "Lamb"}}, "`optimizer.type` is Lamb"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode"),
    ({"optimizer": {"params": {"lr": 0.5}}}, "`optimizer.params.lr` is 0.5"),
    ({"optimizer": {"params": {"betas": [0.8, 0.999]}}}, "`optimizer.betas`"),
    ({"scheduler": {"params": {"warmup_num_steps": 100}}}, "`scheduler.params.warmup_num_steps`"),
    ({"amp": {"enabled": True}}, "`training.bf16: true`"),
    ({"sequence_parallel_size": 2}, "`training.parallelism_config.sp_size`"),
    ({"tensor_parallel": {"autotp_size": 2}}, "transformers/pull/48569"),
    ({"train_micro_batch_size_per_gpu": 4}, "`training.per_device_train_batch_size` means 2"),
    ({"gradient_accumulation_steps": 8}, "`budget.global_batch_tokens`"),
    ({"train_batch_size": 64}, "`train_batch_size`"),
    ({"gradient_clipping": 0.5}, "`training.max_grad_norm` means 1.0"),
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


WILD = Path(__file__).parent / "wild_profiles"
OF_THE_RECIPE = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
OF_THE_RECIPE |= {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}


def precision_of(name):
    return "fp16" if "fp16" in name else "bf16"


def trained_in(precision, recipe):
    optimizer = recipe.optimizer.model_copy(update={"learning_rate": 2e-5})
    training = {**recipe.training, precision: True}
    return recipe.model_copy(update={"training": training, "optimizer": optimizer})


@pytest.mark.parametrize("path", sorted(WILD.glob("*.json")), ids=lambda path: path.stem)
def test_a_profile_of_another_project_is_used_with_one_line_about_its_changes(path, recipe):
    from deepspeed.runtime.config import DeepSpeedConfig

    precision = precision_of(path.stem)
    assert check_profile(path, trained_in(precision, recipe)) == []
    (line,) = changes_in_memory(path)
    assert "\n" not in line
    profile = read_profile(path)
    zero = profile["zero_optimization"]
    assert not {"optimizer", "scheduler", "amp"} & profile.keys()
    if offloads(profile, "optimizer"):
        assert profile["zero_force_ds_cpu_optimizer"] is False
    assert zero["stage"] < 3 or zero["stage3_gather_16bit_weights_on_model_save"]
    filled = {name: {**profile[name], "enabled": name == precision} for name in ("bf16", "fp16")}
    engine = DeepSpeedConfig({**profile, **filled, **OF_THE_RECIPE})
    assert engine.zero_optimization_stage == zero["stage"]


@pytest.mark.parametrize(
    ("path", "change", "complaint"),
    [
        ("deepspeed_chat_fp16.json", {"train_batch_size": 64}, "`train_batch_size` is 64"),
        ("fastchat_offload_param.json", {"bf16": {"enabled": False}}, "`training.bf16` is true"),
        ("hf_zero3_old_fp16.json", {"gradient_clipping": 0.3}, "`training.max_grad_norm`"),
        ("megatron_numbers.json", {"gradient_accumulation_steps": 8}, "means 2"),
    ],
)
def test_a_number_of_another_project_that_differs_from_the_recipes_is_refused(
    path, change, complaint, recipe
):
    profile = json.loads((WILD / path).read_text()) | change
    (line,) = check_profile(profile, trained_in(precision_of(path), recipe))
    assert complaint in line


@pytest.mark.parametrize("key", [key for key in SOUND if key != "zero_optimization"])
def test_a_missing_key_becomes_auto(recipe, key):
    profile = {name: value for name, value in SOUND.items() if name != key}
    assert check_profile(profile, recipe) == [] and read_profile(profile) == SOUND
    (line,) = changes_in_memory(profile)
    assert f"`{key}" in line


def test_the_old_names_of_offloading_are_read(recipe):
    profile = {**SOUND, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert check_profile(profile, recipe) == [] and offloads(read_profile(profile), "optimizer")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_not_a_profile_is_refused(tmp_path, text):
    (tmp_path / "zero.json").write_text(text)
    with pytest.raises(RecipeError, match="training.deepspeed"):
        read_profile(tmp_path / "zero.json")


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"deepspeed_config": {"zero_stage": 3}}, 'deepspeed: {"zero_optimization": {"stage": 3}}'),
        ({"deepspeed_config": {"deepspeed_config_file": "z.json"}}, "training.deepspeed: z.json"),
        ({"distributed_type": "MULTI_GPU"}, "zero_optimization"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "training.fsdp: true"),
    ],
)
def test_the_config_of_accelerate_launch_is_refused_with_what_to_write(tmp_path, config, instead):
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **config}))
    for given in (path, {"compute_environment": "LOCAL_MACHINE", **config}):
        with pytest.raises(RecipeError, match=r"`accelerate launch`") as refusal:
            read_profile(given)
        assert instead in str(refusal.value)
    (complaint,) = fsdp_complaints_of_file(path)
    assert "`training.fsdp_config`" in complaint and instead in complaint


def fsdp_complaints_of_file(path):
    try:
        return fsdp_complaints(str(path))
    except RecipeError as problem:
        return [str(problem)]


# --- FSDP2 ---


def fsdp_complaints(config=None, *, on_this_machine=True, **sections):
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
    return check_fsdp(Recipe.model_validate(recipe), on_this_machine=on_this_machine)


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
    assert (
        len(fsdp_complaints(offloaded)) == 1
        and fsdp_complaints(offloaded, on_this_machine=False) == []
    )
    assert len(fsdp_complaints({"version": 2}, training=without_fsdp)) == 1
    assert fsdp_complaints({"version": 2}, training=without_fsdp, on_this_machine=False) == []
    assert len(fsdp_complaints(on_this_machine=False, training={"fsdp": "shard"})) == 1


@pytest.mark.parametrize(
    ("has_gpu", "on_this_machine", "use_cpu", "is_refused"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
def test_a_run_on_the_cpu_of_a_machine_with_gpus_is_not_sharded(
    has_gpu, on_this_machine, use_cpu, is_refused, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    complaints = fsdp_complaints(on_this_machine=on_this_machine, training={"use_cpu": use_cpu})
    keys = [text.partition(" ")[0] for text in complaints]
    assert keys == (["`training.use_cpu`"] if is_refused else [])


def test_a_whole_profile_is_used_as_it_is(tmp_path):
    assert changes_in_memory(read_profile(SOUND)) == []
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(read_profile(SOUND)))
    assert changes_in_memory(path) == []


def test_a_complaint_has_the_first_line_of_its_key_or_else_the_file(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{\n "a": 1,\n "b": {"c": 2},\n "c": 3\n}\n')
    complaints = [("b.c", "one"), ("a", "two")], [("d.missing", "three")]
    assert located(path, *complaints) == [f"{path}:3: one", f"{path}:2: two", f"{path}: three"]
    assert located({}, *complaints) == [
        f"`training.deepspeed`: {text}" for text in ("one", "two", "three")
    ]
