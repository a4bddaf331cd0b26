"""Check what servers read of an exported folder: the vocabulary, where generation ends, and what an adapter holds."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import ADAPTER_CONFIG
from cpt.errors import CheckpointError

MAX_LORA_RANK = 16  # vLLM's default
ENDS = ("embed_tokens", "wte", "lm_head", "embed_out")  # names of embeddings and heads


def check_vocabulary(rows: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The report's line about rows of the embeddings and tokens.

    Raises:
        CheckpointError: there are more tokens than rows.
    """
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise CheckpointError(
            f"the tokenizer has {tokens:,} tokens, the model {rows:,} rows of embeddings: ids from {rows:,} on would"
            " fail when served. Put the tokenizer of the training beside the weights."
        )
    padding = f" ({rows - tokens:,} rows are padding)" if rows > tokens else ""
    return f"Vocabulary: {tokens:,} tokens in {rows:,} rows of embeddings{padding}."


def model_warnings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Why a server may not stop generating, and that it will not offer chat."""
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    lines = []
    if path.is_file() and tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
        lines.append(
            f"warning: generation_config.json ends at token {ends}, documents at {tokenizer.eos_token_id}"
            f" ({tokenizer.eos_token}): a server may not stop. Set eos_token_id in generation_config.json."
        )
    if not tokenizer.chat_template:
        lines.append("No chat template: servers complete text only. SFT on chats or a chat vector adds one.")
    return lines


def adapter_warnings(folder: Path) -> list[str]:
    """What vLLM refuses of an adapter (vllm#9280)."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    targets = config.get("target_modules") or []
    refused = {
        "whole layers": config.get("modules_to_save"),
        "embeddings or a head": any(name.split(".")[-1] in ENDS for name in targets),
        "single tokens' embeddings": config.get("trainable_token_indices"),
        "DoRA": config.get("use_dora"),
    }
    reasons = ", ".join(name for name, has in refused.items() if has)
    lines = [f"warning: vLLM refuses adapters with {reasons}. Serve the merged model."] if reasons else []
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return lines + ([f"Its rank is {rank}: vLLM needs --max-lora-rank {rank}."] if rank > MAX_LORA_RANK else [])
