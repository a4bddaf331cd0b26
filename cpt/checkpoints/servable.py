"""What a server will make of an exported folder: vocabulary, head, generation config, chat template; and of an
adapter."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, HEADS, Tensors
from cpt.errors import CheckpointError


def check_vocabulary(rows: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """How the embedding's rows and the tokenizer's tokens go together.

    Raises:
        CheckpointError: there are tokens without a row.
    """
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise CheckpointError(
            f"the tokenizer has {tokens:,} tokens, the model {rows:,} rows of embeddings: ids from {rows:,} on would"
            " fail when served. Put the tokenizer of the training beside the weights."
        )
    if tokens == rows:
        return f"Vocabulary: {tokens:,} tokens, a row of embeddings for each."
    return (
        f"Vocabulary: {tokens:,} tokens in {rows:,} rows of embeddings; the last {rows - tokens:,} are padding and"
        " stand for no token."
    )


def describe_for_servers(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One line for each thing that servers read beside the weights, warnings among them."""
    config = json.loads((folder / "config.json").read_text())
    has_head = any(name.endswith(HEADS) for name in Tensors(folder).files)
    lines = [
        "Head: its own matrix." if has_head else "Head: tied to the embeddings, so stored once.",
        describe_generation(folder, tokenizer),
        (
            "Chat template: there, so servers offer chat."
            if tokenizer.chat_template
            else (
                "Chat template: none, so completions only. SFT on chats or `cpt merge --method task_arithmetic` gives"
                " one."
            )
        ),
    ]
    if config.get("tie_word_embeddings") and has_head:
        lines.append(
            "warning: config.json ties the head to the embeddings, and yet a head is stored: servers differ in which"
            " they take."
        )
    return lines


def describe_generation(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Whether generation ends where the tokenizer ends a document."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return "warning: no generation_config.json: servers take the end token of config.json."
    ends = json.loads(path.read_text()).get("eos_token_id")
    known = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id not in known:
        return (
            f"warning: generation_config.json ends at token {ends}, the tokenizer's end of a document is"
            f" {tokenizer.eos_token_id} ({tokenizer.eos_token}): a server may not stop. Set eos_token_id in"
            " generation_config.json."
        )
    return f"Generation ends at {tokenizer.eos_token} ({ends})."


def describe_adapter(folder: Path) -> list[str]:
    """What servers refuse of an adapter, vLLM first of all (vllm#9280)."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    lines = []
    if whole := config.get("modules_to_save"):
        lines.append(
            f"warning: it carries whole layers ({', '.join(whole)}): vLLM refuses such adapters. Serve the merged"
            " model."
        )
    targets = config.get("target_modules") or []
    names = [targets] if isinstance(targets, str) else targets
    if trained := [name for name in names if name.split(".")[-1] in ("embed_tokens", "wte", "lm_head", "embed_out")]:
        lines.append(
            f"warning: it adapts embeddings or head ({', '.join(trained)}): vLLM and llama.cpp refuse that or need"
            " options."
        )
    if config.get("trainable_token_indices"):
        lines.append(
            "warning: it trains single tokens' embeddings, which servers do not read. Serve the merged model."
        )
    if config.get("use_dora"):
        lines.append("warning: it is a DoRA adapter, which vLLM refuses. Serve the merged model.")
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > 16:
        lines.append(f"Its rank is {rank}: vLLM needs --max-lora-rank {rank}.")
    return lines


def adapter_file(folder: Path) -> Path:
    """The adapter's weights.

    Raises:
        CheckpointError: there are none.
    """
    for name in ADAPTER_WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder} is incomplete: it has adapter_config.json, but none of {', '.join(ADAPTER_WEIGHTS)}."
    )
