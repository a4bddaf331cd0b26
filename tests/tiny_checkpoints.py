"""Small models and adapters on the disk: random weights, no training."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tiny import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def random_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """In memory, with weights so large that its answers differ."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**{**TINY_LLAMA, "initializer_range": 0.3, **changes})
    ).eval()


def save_llama(folder: Path, tokenizer_folder: Path, seed: int, **changes) -> Path:
    """A Llama with random weights, with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape = {key: value for key, value in TINY_LLAMA.items() if key != "model_type"} | changes
    model = LlamaForCausalLM(
        LlamaConfig(
            **shape, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, *, zeroed: bool = False, **options) -> Path:
    """A LoRA adapter that changes the logits, or one as it is before any training."""
    torch.manual_seed(7)
    model = LlamaForCausalLM.from_pretrained(base)
    options = {
        "r": 4,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        "init_lora_weights": zeroed,
    } | options
    adapted = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter *= 0.2  # peft's random ones drown the model
    adapted.save_pretrained(folder)
    return folder
