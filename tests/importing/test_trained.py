"""A config of each tool, imported, checked and trained at a tiny size."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tiny import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cpt.importing.command import imported
from cpt.importing.writing import recipe_text
from cpt.preflight.gate import found_in
from cpt.recipe.load import load_recipe
from cpt.train import train

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALPACA = [{"instruction": f"say {n}", "input": "" if n % 2 else "now", "output": f"number {n}"} for n in range(40)]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": f"number {n}"}]}
    for n in range(40)
]
PAIRS = [
    {
        "conversations": [{"from": "human", "value": f"say {n}"}],
        "chosen": {"from": "gpt", "value": f"number {n}"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    for n in range(40)
]


@pytest.fixture
def base(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model with a chat template, in the folder that the run is started from."""
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(tokenizer)})).save_pretrained("base")
    return "base"


def losses(config: dict) -> list[float]:
    """Of a run of the recipe that a config becomes, which passes the check."""
    Path("config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    Path("recipe.yaml").write_text(recipe_text(imported(Path("config.yml"))))
    recipe = load_recipe("recipe.yaml")
    assert not found_in(recipe).mistakes
    folder = train(recipe).parent
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in logged if "loss" in line]


@pytest.mark.slow
def test_a_config_of_axolotl_trains(base):
    Path("alpaca.json").write_text(json.dumps(ALPACA))
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SHAREGPT))
    config = {
        "base_model": base,
        "datasets": [
            {"path": "alpaca.json", "type": "alpaca", "ds_type": "json"},
            {
                "path": "chats.jsonl",
                "type": "chat_template",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
        ],
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "sequence_len": 96,
        "sample_packing": True,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 12,
        "warmup_steps": 2,
        "learning_rate": "1e-2",
        "bf16": False,
        "logging_steps": 1,
        "output_dir": "outputs/tiny",
    }
    config["datasets"][1]["field_messages"] = "conversations"
    found = losses(config)
    assert len(found) == 12 and found[-1] < found[0]


@pytest.mark.slow
def test_a_config_of_llamafactory_trains(base):
    Path("data").mkdir()
    Path("data/pairs.json").write_text(json.dumps(PAIRS))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {"pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": columns}}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    config = {
        "model_name_or_path": base,
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "full",
        "pref_beta": 0.1,
        "dataset": "pairs",
        "template": "default",
        "cutoff_len": 64,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1.0,
        "val_size": 0.1,
        "eval_strategy": "epoch",
        "learning_rate": 1.0e-2,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "disable_gradient_checkpointing": True,
        "logging_steps": 1,
        "report_to": "none",
        "output_dir": "saves/tiny/dpo",
    }
    found = losses(config)
    assert len(found) >= 8 and found[-1] < found[0]
