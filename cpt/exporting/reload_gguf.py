"""Load a GGUF file as a stranger would, and write down its logits: `python -I reload_gguf.py JOB.json`, with this
package out of reach."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ISOLATED = "cpt"  # importing it fails in this process


def logits_of_file(folder: str, name: str, job: dict[str, Any]) -> torch.Tensor:
    """[T, V] on the job's text, in fp32; refuses other tokens, and weights that are missing or that no part of the
    model takes."""
    ids = AutoTokenizer.from_pretrained(folder, gguf_file=name)(job["text"], add_special_tokens=False)["input_ids"][
        : job["tokens"]
    ]
    if ids != job["ids"]:
        raise SystemExit(f"the file's tokenizer gives other tokens: {ids[:8]} instead of {job['ids'][:8]}")
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    read_what_transformers_leaves_out(config, GGUFReader(str(Path(folder) / name)))
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    model_and_info: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)
    model, info = model_and_info
    missing = set(info["missing_keys"]) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if missing or info["unexpected_keys"]:
        raise SystemExit(f"missing {sorted(missing)[:3]}, unexpected {sorted(info['unexpected_keys'])[:3]}")
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]), use_cache=False).logits[0].float()


def read_what_transformers_leaves_out(config: Any, reader: Any) -> None:
    """Keys of the file that llama.cpp reads, and transformers 5.23 does not for every family."""
    arch = reader.get_field("general.architecture").contents()

    def value(key: str) -> Any:
        field = reader.get_field(f"{arch}.{key}")
        return None if field is None else field.contents()

    if arch in ("qwen2", "qwen3", "qwen3moe", "llama", "nemotron") and (width := value("attention.key_length")):
        config.head_dim = width
    if arch == "qwen3moe":
        config.moe_intermediate_size = value("expert_feed_forward_length")
    if arch == "nemotron":
        config.norm_eps = value("attention.layer_norm_epsilon")
        config.rope_parameters["partial_rotary_factor"] = value("rope.dimension_count") / config.head_dim
    if arch == "gpt2":
        config.n_inner = value("feed_forward_length")
        config.n_positions = value("context_length")
        config.vocab_size = value("vocab_size")


def main() -> None:
    """Everything is told by the job's file."""
    sys.modules[ISOLATED] = None  # type: ignore[assignment]  # Python's way to make an import fail
    job = json.loads(Path(sys.argv[1]).read_text())
    file = Path(job["file"])
    save_file({"logits": logits_of_file(str(file.parent), file.name, job).contiguous()}, job["output"])


if __name__ == "__main__":
    main()
