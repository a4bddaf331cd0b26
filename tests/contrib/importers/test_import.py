"""A config of another tool becomes a recipe; what it does not become is listed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpt.contrib.importers.command import command, translated
from cpt.contrib.importers.translation import Translation
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe

CONFIGS = Path(__file__).parent / "configs"
EXAMPLES = [path for path in sorted(CONFIGS.rglob("*.*")) if not path.name.startswith("dataset")]
AXOLOTL = {
    "base_model": "example/base",
    "datasets": [{"path": "example/texts", "type": "completion"}],
}
LLAMAFACTORY = {"model_name_or_path": "example/base", "stage": "pt", "finetuning_type": "full"}
LLAMAFACTORY |= {"dataset": "example/texts", "dataset_dir": "ONLINE"}
SWIFT = {"model": "example/base", "dataset": "example/chats", "max_length": 1024}


@pytest.fixture
def translate(tmp_path):
    """Translate the smallest config with these keys on top; the recipe is loaded too."""

    def run(smallest: dict[str, Any], gpus: int = 1, **values: Any) -> Translation:
        path = tmp_path / "config.yml"
        path.write_text(yaml.safe_dump({**smallest, **values}, sort_keys=False))
        found = translated(path, gpus=gpus)
        (tmp_path / "recipe.yaml").write_text(found.text())
        load_recipe(tmp_path / "recipe.yaml")
        return found

    return run


def keys_not_translated(found: Translation) -> set[str]:
    return {line.partition(":")[0] for line in found.not_translated()}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_example_config_becomes_a_recipe(path, tmp_path, capsys):
    command(path, output=tmp_path / "r.yaml")
    load_recipe(tmp_path / "r.yaml")
    missing = [
        line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")
    ]
    written = (tmp_path / "r.yaml").read_text().splitlines()
    assert [f"#   {line}" for line in missing] == [
        line for line in written if line.startswith("#   ")
    ]


def test_every_key_is_in_the_recipe_or_listed_with_its_value(translate):
    found = translate(
        AXOLOTL, wandb_watch="all", datasets=[{"path": "a/b", "type": "completion", "shards": 3}]
    )
    assert found.not_translated() == ["datasets[0].shards: 3", "wandb_watch: all"]
    assert "# base_model" in found.text() and "#   wandb_watch: all" in found.text()


def test_steps_become_tokens_of_all_gpus(translate):
    keys = {
        "sequence_len": 1000,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 10,
    }
    recipe = translate(AXOLOTL, gpus=4, warmup_steps=2, **keys).recipe
    assert recipe["budget"] == {"tokens": 240_000} and recipe["schedule"]["warmup_tokens"] == 48_000


def test_epochs_and_a_share_of_warm_up_stay(translate):
    recipe = translate(LLAMAFACTORY, num_train_epochs=2, warmup_ratio=0.1, cutoff_len=512).recipe
    assert recipe["budget"] == {"epochs": 2} and recipe["schedule"]["warmup_share"] == 0.1


def test_defaults_that_differ_are_written(translate):
    recipe = translate(LLAMAFACTORY).recipe
    assert (
        recipe["budget"]["epochs"] == 3 and recipe["training"]["per_device_train_batch_size"] == 8
    )
    assert recipe["training"]["gradient_checkpointing"] and recipe["checkpoints"] == {
        "every_steps": 500,
        "keep": None,
    }
    assert recipe["optimizer"] == {
        "name": "adamw",
        "learning_rate": 5e-5,
        "weight_decay": 0,
        "betas": [0.9, 0.999],
    }
    assert recipe["schedule"] == {"name": "linear", "floor": 0}
    assert translate(AXOLOTL, num_epochs=4).recipe["checkpoints"] == {
        "every_steps": 0.25,
        "keep": 4,
    }
    assert translate(AXOLOTL).recipe["schedule"] == {
        "name": "cosine",
        "floor": 0,
        "warmup_share": 0.03,
    }


@pytest.mark.parametrize(
    ("values", "every"),
    [
        ({"save_steps": 50, "eval_steps": 50}, 50),
        ({"saves_per_epoch": 4, "evals_per_epoch": 4, "num_epochs": 2}, 0.125),
        ({"save_strategy": "epoch", "eval_strategy": "epoch", "num_epochs": 2}, 0.5),
        ({"save_strategy": "no", "eval_strategy": "no"}, None),
    ],
)
def test_intervals_of_checkpoints_and_evaluation(translate, values, every):
    recipe = translate(AXOLOTL, val_set_size=0.1, **values).recipe
    assert (
        recipe.get("checkpoints", {}).get("every_steps")
        == every
        == recipe["evaluation"].get("every_steps")
    )


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("adamw_torch_8bit", "adamw_8bit"),
        ("paged_adamw_32bit", "paged_adamw_32bit"),
        ("galore_adamw", "adamw"),
    ],
)
def test_an_optimizer(translate, asked, name):
    found = translate(AXOLOTL, optimizer=asked, learning_rate="1e-4")
    assert (
        found.recipe["optimizer"]["name"] == name
        and found.recipe["optimizer"]["learning_rate"] == 1e-4
    )
    assert ("optimizer" in keys_not_translated(found)) == (asked == "galore_adamw")


def test_a_schedule_with_a_floor(translate):
    recipe = translate(AXOLOTL, lr_scheduler="cosine", cosine_min_lr_ratio=0.2).recipe
    assert recipe["schedule"] == {"name": "cosine", "floor": 0.2, "warmup_share": 0.03}
    found = translate(
        LLAMAFACTORY,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.2},
    )
    assert found.recipe["schedule"] == {"name": "cosine", "floor": 0}
    assert keys_not_translated(found) == {"lr_scheduler_kwargs.min_lr_rate"}


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ({"bf16": "auto"}, {"bf16": True}),
        ({"bf16": "auto", "fp16": True}, {"fp16": True}),
        ({"liger_rope": True}, {"use_liger_kernel": True}),
        (
            {"fsdp_config": {"fsdp_offload_params": True, "activation_checkpointing": True}},
            {
                "fsdp": True,
                "fsdp_config": {"version": 2, "cpu_offload": True},
                "gradient_checkpointing": True,
            },
        ),
        (
            {"deepspeed": "elsewhere/zero3_bf16.json"},
            {"deepspeed": "deepspeed_configs/ds_config_production.json"},
        ),
        ({"max_grad_norm": 0.5, "logging_steps": 3}, {"max_grad_norm": 0.5, "logging_steps": 3}),
    ],
)
def test_what_goes_to_training(translate, values, written):
    training = translate(AXOLOTL, **values).recipe["training"]
    assert written.items() <= training.items()


@pytest.mark.parametrize(
    ("given", "profile"),
    [
        ("/home/zero3/configs/zero1.json", "zero1"),
        ("/home/z2/offload/ds_z3_config.json", "production"),
        ("examples/deepspeed/ds_z3_offload_config.json", "8b_24gb"),
        ("zero2", "zero1"),
        ("configs/zero3_bf16_cpuoffload_all.json", "8b_24gb"),
        ("stage-3.json", "production"),
    ],
)
def test_the_zero_stage_is_read_from_the_name_of_a_file_only(translate, given, profile):
    training = translate(AXOLOTL, deepspeed=given).recipe["training"]
    assert training["deepspeed"] == f"deepspeed_configs/ds_config_{profile}.json"


@pytest.mark.parametrize("given", ["/home/zero3/ds.json", "z2/config.json", "fizz3.json"])
def test_a_name_without_a_stage_is_not_translated(translate, given):
    found = translate(AXOLOTL, deepspeed=given)
    assert "deepspeed" not in found.recipe["training"]
    assert keys_not_translated(found) == {"deepspeed"}


@pytest.mark.parametrize(
    ("smallest", "key"),
    [
        (LLAMAFACTORY, "adapter_name_or_path"),
        (AXOLOTL, "lora_model_dir"),
        (SWIFT, "adapters"),
    ],
)
def test_an_adapter_to_continue_has_a_hint(translate, smallest, key):
    lines = translate(smallest, **{key: "saves/lora"}).not_translated()
    assert any(line.startswith(f"{key}: saves/lora") and "merge" in line for line in lines)


@pytest.mark.parametrize("model", ["google/gemma-3-4b-pt", "vl/revision-7b", "tele/television"])
def test_a_text_model_with_a_similar_name_is_translated(translate, model):
    assert translate(AXOLOTL, base_model=model).recipe["model"]["path"] == model


def test_a_deepspeed_file_that_is_here_is_kept(translate, tmp_path):
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    training = translate(AXOLOTL, deepspeed=str(tmp_path / "mine.json")).recipe["training"]
    assert training["deepspeed"] == str(tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("dataset", "stage", "source"),
    [
        ({"type": "completion", "field": "body"}, "cpt", {"text_column": "body"}),
        ({"type": "chat_template", "field_messages": "talk"}, "sft", {"chat": "talk"}),
        ({"type": "sharegpt"}, "sft", {"chat": "conversations"}),
        ({"split": "train[:10%]", "name": "en"}, "cpt", {"split": "train[:10%]", "subset": "en"}),
    ],
)
def test_a_dataset_of_axolotl(translate, dataset, stage, source):
    recipe = translate(AXOLOTL, datasets=[{"path": "a/b", **dataset}]).recipe
    assert recipe["stage"] == stage and recipe["data"]["sources"] == [{"path": "a/b", **source}]


def test_local_files_of_axolotl_are_sources_of_their_own(translate):
    files = {
        "path": "json",
        "data_files": ["one.jsonl", "two.jsonl"],
        "ds_type": "json",
        "type": "completion",
    }
    data = translate(AXOLOTL, datasets=[files]).recipe["data"]
    assert (
        data["sources"] == [{"path": "one.jsonl"}, {"path": "two.jsonl"}]
        and data["temperature"] == 1
    )


@pytest.mark.parametrize("key", ["ds_type", "ds_tool"])
@pytest.mark.parametrize(("kind", "files"), [("json", ["d/a.jsonl"]), ("parquet", "a.parquet")])
def test_files_of_axolotl_need_no_path(translate, key, kind, files):
    entry = {key: kind, "data_files": files, "type": "completion"}
    found = translate(AXOLOTL, datasets=[entry])
    names = [files] if isinstance(files, str) else files
    assert found.recipe["data"]["sources"] == [{"path": name} for name in names]
    assert not keys_not_translated(found)


@pytest.mark.parametrize(
    ("rl", "kind", "stage", "chat"),
    [
        (
            "dpo",
            "chatml.intel",
            "dpo",
            {"user": "question", "chosen": "chosen", "rejected": "rejected"},
        ),
        ("orpo", "llama3.ultra", "orpo", {"user": "prompt", "chosen": "chosen"}),
        (
            "dpo",
            "chat_template.default",
            "dpo",
            {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            "kto",
            "llama3.ultra",
            "kto",
            {"user": "prompt", "assistant": "completion", "label": "label"},
        ),
    ],
)
def test_preferences_of_axolotl(translate, rl, kind, stage, chat):
    recipe = translate(AXOLOTL, rl=rl, datasets=[{"path": "a/b", "type": kind}]).recipe
    assert recipe["stage"] == stage and chat.items() <= recipe["data"]["sources"][0]["chat"].items()


@pytest.mark.parametrize(
    ("entry", "stage", "chat"),
    [
        ({}, "sft", {"user": "{instruction}\n{input}", "assistant": "output"}),
        (
            {"columns": {"response": "a", "history": "h"}},
            "sft",
            {"user": "instruction", "assistant": "a", "history": "h"},
        ),
        (
            {"columns": {"prompt": "q"}},
            "dpo",
            {"user": "q", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            {"columns": {"prompt": "q"}},
            "kto",
            {"user": "q", "assistant": "output", "label": "kto_tag"},
        ),
        ({"formatting": "sharegpt"}, "sft", {"messages": "conversations"}),
        (
            {"formatting": "sharegpt"},
            "rm",
            {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        ),
    ],
)
def test_a_dataset_of_llamafactory(translate, tmp_path, entry, stage, chat):
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"d": {"hf_hub_url": "a/b", "num_samples": 9, **entry}})
    )
    found = translate(LLAMAFACTORY, stage=stage, dataset="d", dataset_dir=str(tmp_path))
    assert found.recipe["data"]["sources"] == [
        {"path": "a/b", "name": "d", "chat": chat, "max_documents": 9}
    ]


def test_a_text_of_llamafactory_may_be_in_any_column(translate, tmp_path):
    (tmp_path / "dataset_info.json").write_text(
        '{"d": {"hf_hub_url": "a/b", "columns": {"prompt": "body"}}}'
    )
    found = translate(LLAMAFACTORY, dataset="d", dataset_dir=str(tmp_path))
    assert found.recipe["data"]["sources"] == [{"path": "a/b", "name": "d", "text_column": "body"}]


def test_a_mixture_and_an_adapter_of_llamafactory(translate):
    adapter = {"finetuning_type": "lora", "lora_target": "q_proj,v_proj", "quantization_bit": 4}
    recipe = translate(
        LLAMAFACTORY, dataset="a/b,c/d", interleave_probs="0.7,0.3", **adapter
    ).recipe
    assert [source["weight"] for source in recipe["data"]["sources"]] == [0.7, 0.3]
    lora = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    assert recipe["model"]["lora"] == {**lora, "quantize": "nf4", "double_quantize": True}
    recipe = translate(LLAMAFACTORY, **adapter | {"quantization_bit": 8}).recipe
    assert recipe["model"]["lora"] == {**lora, "quantize": "int8"}


def test_the_v1_of_llamafactory_has_its_sections_and_datasets_translated():
    path = CONFIGS / "llamafactory_v1/lora.yaml"
    found = translated(path, gpus=2)
    instructions, chats = found.recipe["data"]["sources"]
    assert (
        instructions["path"].endswith("llamafactory_v1/instructions.json")
        and instructions["max_documents"] == 500
    )
    assert chats == {
        "path": "example/chats",
        "name": "chats",
        "chat": {"messages": "conversations"},
    }
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    assert (
        found.recipe["model"]["lora"] == lora
        and found.recipe["training"]["gradient_accumulation_steps"] == 4
    )
    assert {"bf16": True, "fsdp": True, "use_liger_kernel": True}.items() <= found.recipe[
        "training"
    ].items()
    assert keys_not_translated(found) == {"template", "kernel_config.include_kernels"}


def test_a_script_of_ms_swift():
    found = translated(CONFIGS / "ms_swift/pretrain.sh")
    recipe = found.recipe
    assert recipe["stage"] == "cpt" and recipe["model"] == {
        "path": "example/base-7b",
        "attention": "auto",
    }
    web = {"path": "example/web", "subset": "zh", "max_documents": 20_000, "weight": 0.7}
    assert recipe["data"]["sources"] == [web, {"path": "corpus/papers.jsonl", "weight": 0.3}]
    assert recipe["budget"] == {"tokens": 1000 * 8192 * 16 * 4}
    assert (
        recipe["optimizer"]["betas"] == [0.9, 0.95] and recipe["optimizer"]["weight_decay"] == 0.1
    )
    assert recipe["evaluation"] == {"held_out_share": 0.01}
    assert keys_not_translated(found) == {
        "columns",
        "lr_scheduler_kwargs",
        "sequence_parallel_size",
        "use_hf",
    }


def test_preferences_and_a_launcher_of_ms_swift():
    recipe = translated(CONFIGS / "ms_swift/dpo.sh").recipe
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    assert recipe["model"]["lora"] == {**lora, "quantize": "nf4", "double_quantize": True}
    assert recipe["stage"] == "dpo" and recipe["training"]["loss_type"] == ["sigmoid"]
    assert (
        recipe["training"]["gradient_accumulation_steps"] == 4
    )  # 16 rows in a step, on 2 x 2 GPUs
    assert recipe["data"]["sources"] == [{"path": "pairs.jsonl"}]


def test_a_yaml_of_ms_swift_does_not_say_its_command(translate):
    found = translated(CONFIGS / "ms_swift/sft.yaml")
    assert (
        found.recipe["stage"] == "sft" and "FILL IN" in found.comments["stage"] and found.gpus == 2
    )
    assert [source.get("subset") for source in found.recipe["data"]["sources"]] == [None, "en"]
    assert translate(SWIFT, use_chat_template=False).recipe["stage"] == "cpt"


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({"rlhf_type": "orpo"}, "orpo"),
        ({"rlhf_type": "rm"}, "reward"),
        ({"rlhf_type": "grpo"}, "grpo"),
    ],
)
def test_a_stage_of_ms_swift(translate, values, stage):
    assert translate(SWIFT, **values).recipe["stage"] == stage


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**AXOLOTL, "processor_type": "AutoProcessor"}, "processor_type"),
        ({**AXOLOTL, "base_model": "Qwen/Qwen2-VL-7B-Instruct"}, "base_model"),
        ({**AXOLOTL, "base_model": "meta-llama/Llama-3.2-11B-Vision"}, "base_model"),
        ({**AXOLOTL, "image_size": 512}, "image_size"),
        ({**AXOLOTL, "chat_template": "llava"}, "chat_template"),
        (
            {**LLAMAFACTORY, "model_name_or_path": "mistral-community/pixtral-12b"},
            "model_name_or_path",
        ),
        ({**LLAMAFACTORY, "template": "qwen2_vl"}, "template"),
        ({**LLAMAFACTORY, "media_dir": "data"}, "media_dir"),
        ({**LLAMAFACTORY, "image_max_pixels": 262144}, "image_max_pixels"),
        ({**SWIFT, "model": "OpenGVLab/InternVL3-8B"}, "model"),
        ({**SWIFT, "model_type": "mllama"}, "model_type"),
        ({**AXOLOTL, "rl": "ebft"}, "rl"),
        ({**AXOLOTL, "diffusion": {"eps": 0.1}}, "diffusion"),
        ({**SWIFT, "freeze_vit": False, "vit_lr": 1e-5}, "vit_lr"),
        ({**SWIFT, "ENV": {"MAX_PIXELS": 4096}}, "max_pixels"),
        ({**SWIFT, "micro_batch_size": 1, "finetune": True}, "micro_batch_size"),
        ({**SWIFT, "swift_version": "4.0.0"}, "swift_version"),
        ({**SWIFT, "rlhf_type": "gkd"}, "teacher_model"),
    ],
)
def test_what_cpt_does_not_train_is_refused_with_one_sentence(tmp_path, config, key):
    path = tmp_path / "c.yml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(RecipeError, match=rf"c.yml:\d+: {key}: ") as refused:
        translated(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "script",
    [
        "megatron sft --model a/b\n",
        "swift sft --model a/b --dataset c/d\nswift rlhf --model a/b --dataset c/d\n",
        "swift sft --model a/b --dataset $DATA\n",
        "swift sft --model 'a/b --dataset c/d\n",
        "swift sft config.yaml 2>&1 | tee log\n",
    ],
)
def test_a_script_without_one_complete_command_is_refused(tmp_path, script):
    (tmp_path / "run.sh").write_text(script)
    with pytest.raises(RecipeError, match=r"run\.sh"):
        translated(tmp_path / "run.sh")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("base_modle: a/b\n", ""),
        ("base_model: a\nmodel_name_or_path: b\n", ""),
        ("base_model: a\n", ""),
        ("base_model: a\ndatasets: x\nmax_steps: many\n", ":3"),
        ("base_model: a\ndatasets: [{type: alpaca}]\n", ":2"),
        ("model_name_or_path: a\nstage: mlm\n", ":2"),
        ("model_name_or_path: a\ndataset_dir: nowhere\ndataset: x\n", ":3"),
        ("base_model: a\nbase_model: b\n", ":2"),
        ("a: [\n", ":1"),
    ],
)
def test_a_config_that_cannot_be_translated_is_refused_with_its_line(tmp_path, text, line):
    path = tmp_path / "c.yml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=f"{path.name}{line}"):
        translated(path)


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\ndatasets: [{path: c}]\n",
        "model_name_or_path: a/b\ndataset: c\n",
        "model: a/b\ndataset: c\n",
    ],
)
def test_in_the_place_of_a_recipe_it_is_one_mistake_with_the_command(tmp_path, text):
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(RecipeError, match="cpt import") as refused:
        load_recipe(tmp_path / "other.yaml")
    assert len(str(refused.value).splitlines()) == 1
