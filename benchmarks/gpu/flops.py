"""Floating-point operations of a token, and what share of a GPU's peak they make. What is computed again is never counted, but for HFU.

Strict: 6 for each weight of a matrix (the head once, the look-up in the embedding not at all), and causal attention over the positions that
a token really sees. As torchtitan counts: attention over all positions. arXiv 2204.02311, appendix B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Matrices:
    """Of a shape."""

    in_layers: int
    """Weights of matrices in all layers."""
    head: int
    layers: int
    attention_width: int
    """Heads times their width."""

    @property
    def weights(self) -> int:
        """That each token is multiplied with."""
        return self.in_layers + self.head


def matrices_of(config: Mapping[str, Any]) -> Matrices:
    """From GPT-2's names, or Llama's."""
    if config["model_type"] == "gpt2":
        width, layers = config["n_embd"], config["n_layer"]
        return Matrices(layers * 12 * width**2, config["vocab_size"] * width, layers, width)
    width, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_width = config.get("head_dim", width // heads)
    queries, keys = heads * head_width, config["num_key_value_heads"] * head_width
    layer = 2 * width * queries + 2 * width * keys + 3 * width * config["intermediate_size"]
    return Matrices(layers * layer, config["vocab_size"] * width, layers, queries)


def strict(config: Mapping[str, Any], seen: float) -> float:
    """Operations of a token.

    Args:
        seen: tokens of its document, or of its row where that is one document.
    """
    shape = matrices_of(config)
    return 6 * shape.weights + 6 * shape.layers * shape.attention_width * seen


def as_torchtitan(config: Mapping[str, Any], tokens: int) -> float:
    """With attention over the whole row, twice."""
    shape = matrices_of(config)
    return 6 * shape.weights + 12 * shape.layers * shape.attention_width * tokens


def of_hardware(config: Mapping[str, Any], seen: float, *, adapters: bool, again: bool, attention_again: bool) -> float:
    """Operations that are really made: frozen weights have no gradient, and what is computed again counts.

    Args:
        again: layers are.
        attention_again: their attention too.
    """
    shape = matrices_of(config)
    attention = 6 * shape.layers * shape.attention_width * seen
    more = 2 * shape.in_layers if again else 0
    return (4 if adapters else 6) * shape.weights + more + attention * (4 / 3 if again and attention_again else 1)


def seen_by_each(lengths: Sequence[int]) -> float:
    """The length of its document that a token has on average: long documents have more tokens."""
    return sum(length**2 for length in lengths) / sum(lengths)
