"""What `cpt import` writes passes `cpt check`: the engine, the optimizer, the adapter and the stage fit together."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cpt.errors import RecipeError
from cpt.importing.command import Tool, translated
from cpt.preflight.gate import found_in
from cpt.recipe.load import load_recipe

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
ROOT = Path(__file__).parents[2]
PROFILES = ["zero1.json", "zero2.json", "ds_z2_offload_config.json", "zero3_bf16.json", "ds_z3_offload_config.json"]
ENGINES: list[dict[str, Any]] = [
    {},
    *({"deepspeed": f"elsewhere/{name}"} for name in PROFILES),
    {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD"}},
    {"fsdp": ["full_shard", "offload"]},
]
PRECISIONS: list[dict[str, Any]] = [{"bf16": True}, {"fp16": True}]
COMPILED: list[dict[str, Any]] = [
    {},
    {"torch_compile": True, "torch_compile_mode": "max-autotune", "gradient_accumulation_steps": 2},
]
AXOLOTL: list[list[dict[str, Any]]] = [
    [
        {
            "base_model": "base",
            "micro_batch_size": 1,
            "warmup_steps": 10,
            "saves_per_epoch": 4,
            "val_set_size": 0.5,
            "evals_per_epoch": 2,
        }
    ],
    [
        {"datasets": [{"path": "texts.jsonl", "type": "completion"}]},
        {"datasets": [{"path": "pairs.jsonl", "type": "alpaca"}], "sample_packing": True},
        {"rl": "grpo", "datasets": [{"path": "pairs.jsonl", "type": "rwd.prompts"}]},
        {"rl": "dpo", "datasets": [{"path": "prefs.jsonl", "type": {"field_prompt": "instruction"}}]},
    ],
    [{}, {"adapter": "lora", "lora_r": 8}, {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8}],
    [
        {"optimizer": name}
        for name in ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "muon", "sgd", "adamw_torch_4bit")
    ],
    ENGINES,
    [*PRECISIONS, {"bf16": "full"}, {"bfloat16": True}],
    [{}, {"gradient_checkpointing": True, "activation_offloading": True}, {"activation_offloading": True}],
    COMPILED,
]
LLAMAFACTORY: list[list[dict[str, Any]]] = [
    [
        {
            "model_name_or_path": "base",
            "dataset_dir": ".",
            "val_size": 0.5,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
        }
    ],
    [{"stage": "pt", "dataset": "texts"}, {"stage": "sft", "dataset": "pairs"}, {"stage": "dpo", "dataset": "prefs"}],
    [
        {"finetuning_type": "full"},
        {"finetuning_type": "lora"},
        {"finetuning_type": "lora", "quantization_bit": 4},
    ],
    [{"optim": name} for name in ("adamw_torch", "adamw_8bit", "paged_adamw_8bit", "sgd")],
    ENGINES,
    [*PRECISIONS, {"pure_bf16": True}],
    [{}, {"use_unsloth_gc": True}, {"disable_gradient_checkpointing": True}],
    COMPILED,
]
INFO = """{"texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}}, "pairs": {"file_name": "pairs.jsonl"},
"prefs": {"file_name": "prefs.jsonl", "ranking": true, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}}"""  # noqa: E501


@pytest.fixture
def complaints(tmp_path, monkeypatch, tokenizer_folder):
    """What `cpt check` says of the recipe that a config becomes; packages that this machine lacks do not count."""
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("base")
    LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(tokenizer)})).save_pretrained("base")
    (tmp_path / "deepspeed_configs").symlink_to(ROOT / "deepspeed_configs")
    rows = 60 * ['{"text": "abc", "instruction": "a", "input": "", "output": "b", "chosen": "c", "rejected": "d"}\n']
    for name in ("texts", "pairs", "prefs"):
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    (tmp_path / "dataset_info.json").write_text(INFO)

    def complain(tool: Tool, config: dict[str, Any]) -> list[str]:
        Path("config.yml").write_text(yaml.safe_dump(config))
        Path("recipe.yaml").write_text(translated(Path("config.yml"), tool).text())
        return [
            str(mistake)
            for mistake in found_in(load_recipe("recipe.yaml")).mistakes
            if isinstance(mistake, RecipeError)
        ]

    return complain


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "axes"), [(Tool.AXOLOTL, AXOLOTL), (Tool.LLAMAFACTORY, LLAMAFACTORY)])
def test_what_is_written_passes_the_check(complaints, tool, axes):
    grid = list(itertools.product(*axes))
    refused: dict[str, dict[str, Any]] = {}
    for parts in random.Random(0).sample(grid, 200):
        config = {key: value for part in parts for key, value in part.items()}
        refused |= dict.fromkeys(complaints(tool, config), config)
    assert not refused, "\n".join(refused)
