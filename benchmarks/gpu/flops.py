"""Floating-point operations of a token. Recomputed ones count for HFU only (arXiv 2204.02311, appendix B).

Strict: 6 for each weight of a matrix (the head once, the embedding's lookup not at all), and causal attention over the positions that
a token really sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Matrices:
    """Sizes of a model that decide its operations."""

    in_layers: int
    """Weights of matrices in all layers."""
    head: int
    layers: int
    attention_width: int
    """Heads times their width."""

    @property
    def weights(self) -> int:
        """Weights that each token is multiplied with."""
        return self.in_layers + self.head


def matrices_of(config: Mapping[str, Any]) -> Matrices:
    """Read from a config with GPT-2's or Llama's names."""
    if config["model_type"] == "gpt2":
        width, layers = config["n_embd"], config["n_layer"]
        return Matrices(layers * 12 * width**2, config["vocab_size"] * width, layers, width)
    width, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_width = config.get("head_dim", width // heads)
    queries, keys = heads * head_width, config["num_key_value_heads"] * head_width
    layer = 2 * width * queries + 2 * width * keys + 3 * width * config["intermediate_size"]
    return Matrices(layers * layer, config["vocab_size"] * width, layers, queries)


def strict(config: Mapping[str, Any], seen: float) -> float:
    """Operations of a token without recomputation.

    Args:
        seen: tokens of its document, or of its row where that is one document.
    """
    shape = matrices_of(config)
    return 6 * shape.weights + 6 * shape.layers * shape.attention_width * seen


def of_hardware(config: Mapping[str, Any], seen: float, *, adapters: bool, again: bool, attention_again: bool) -> float:
    """Operations that are executed: frozen weights have no gradient, and recomputed layers count.

    Args:
        again: layers are recomputed.
        attention_again: their attention is, too.
    """
    shape = matrices_of(config)
    attention = 6 * shape.layers * shape.attention_width * seen
    more = 2 * shape.in_layers if again else 0
    return (4 if adapters else 6) * shape.weights + more + attention * (4 / 3 if again and attention_again else 1)


def seen_by_each(lengths: Sequence[int]) -> float:
    """The average over tokens of the length of their document: long documents have more tokens."""
    return sum(length**2 for length in lengths) / sum(lengths)
