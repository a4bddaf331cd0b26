"""Bytes of activations: of one row and of two, from which those of any number follow, and of every way to keep or to
recompute them."""

import math
from dataclasses import dataclass, replace
from typing import Any

from cpt.models.recomputing import Recomputing

SIZES = ("kept", "largest_layer", "layer_inputs", "backward", "again", "attention", "forward")
LAYERS_ON_THEIR_WAY = 2


@dataclass(frozen=True)
class Activations:
    """Bytes for the rows that go through at once."""

    kept: int
    """By all layers, with nothing computed again."""
    largest_layer: int
    """By the layer that keeps most."""
    layer_inputs: int
    """All that is kept when each layer is computed again: what went into each, and what is outside of them."""
    backward: int
    """What the backward pass of that layer has at its most beyond what the layer keeps."""
    again: int
    """The same with the layer's own forward pass, where it is computed again."""
    is_counted: bool = True
    """False where the model's own code cannot be run without values; then it is an estimate."""
    attention: int = 0
    """What attention gives, of all layers: kept as well where checkpoints are selective."""
    layers: int = 1
    forward: int = 0
    """The most in one layer's forward pass without gradients, where nothing is kept."""
    layer_gradients: int = 0
    """Of a compiled layer's parameters: its backward pass returns them all at once. Not in `backward`; 0 if layers are
    not compiled."""

    def of_rows(self, rows: int, two: "Activations") -> "Activations":
        """From one row's, these, and those of two: copies of weights and what depends on positions alone are there
        once."""
        first, second = vars(self), vars(two)
        sizes: dict[str, Any] = {name: first[name] + (rows - 1) * (second[name] - first[name]) for name in SIZES}
        return replace(self, **sizes)

    def times(self, factor: float) -> "Activations":
        """Of rows that are so many times as long, where nothing grows with the square of their length."""
        sizes: dict[str, Any] = {name: int(factor * vars(self)[name]) for name in SIZES}
        return replace(self, **sizes)

    def kept_with(self, *, checkpointing: bool, how: Recomputing) -> float:
        """At the end of the forward pass, wherever it lies.

        Args:
            how: which layers are computed again, and whether their attention is.
        """
        if not checkpointing:
            return self.kept
        again = math.ceil(self.layers / how.every_n_layers) / self.layers
        return again * (self.layer_inputs + (self.attention if how.selective else 0)) + (1 - again) * self.kept

    def in_one_layer(self, *, checkpointing: bool) -> int:
        """What the backward pass of one layer adds while the others wait."""
        return self.again if checkpointing else self.backward

    def offloaded_with(self, *, checkpointing: bool, how: Recomputing) -> float:
        """What of it waits on the host: all but two layers, which are on their way."""
        if not how.offload:
            return 0.0
        return self.kept_with(checkpointing=checkpointing, how=how) * max(0.0, 1 - LAYERS_ON_THEIR_WAY / self.layers)


@dataclass(frozen=True)
class Counted:
    """Of one row and of two, from which those of any number follow."""

    one: Activations
    two: Activations

    def of_rows(self, rows: int) -> Activations:
        """For so many rows at once."""
        return self.one.of_rows(rows, self.two)
