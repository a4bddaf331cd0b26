"""Floating-point operations of a token, without those of recomputation (arXiv 2204.02311, appendix B).

6 for each weight of a matrix (the head once, the embedding's lookup not at all), and causal attention over the
positions that a token really sees.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def matrices_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The weights that each token is multiplied with, and the width of attention in all layers."""
    if config["model_type"] == "gpt2":
        width, layers = config["n_embd"], config["n_layer"]
        return layers * 12 * width**2 + config["vocab_size"] * width, layers * width
    width, layers, heads = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
    )
    head_width = config.get("head_dim", width // heads)
    queries, keys = heads * head_width, config["num_key_value_heads"] * head_width
    layer = 2 * width * queries + 2 * width * keys + 3 * width * config["intermediate_size"]
    return layers * layer + config["vocab_size"] * width, layers * queries


def strict(config: Mapping[str, Any], seen: float) -> float:
    """Operations of a token.

    Args:
        seen: tokens of its document, or of its row where that is one document.
    """
    weights, attention = matrices_of(config)
    return 6 * weights + 6 * attention * seen


def seen_by_each(lengths: Sequence[int]) -> float:
    """The average over tokens of the length of their document: long documents have more tokens."""
    return sum(length**2 for length in lengths) / sum(lengths)
