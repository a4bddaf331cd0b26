"""From the recipe's weights, phases or temperature to the weights that hold from each global row on."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpt.errors import RecipeError
from cpt.recipe.schema import Data, Phase
from cpt.recipe.sense_data import reported_name

Shares = NDArray[np.float64]
Changes = list[
    tuple[int, Shares]
]  # (row, shares of the sources from this row on), in the order of rows, the first from row 0 on

LINEAR_BLOCKS = 64  # of a linear change; weights stand still inside a block, so that its quotas are exact


def asked_shares(data: Data, tokens: Sequence[int]) -> Changes:
    """The shares of tokens that the recipe asks for, and the rows from which they hold.

    Args:
        tokens: of each source once, for `temperature`.
    """
    if data.phases:
        names = [reported_name(source) for source in data.sources]
        return shares_of_phases(data.phases, names, data.sequence_length)
    if data.temperature is not None:
        return [(0, normalised((np.array(tokens) / max(tokens)) ** (1 / data.temperature)))]
    return [(0, normalised(np.array([source.weight for source in data.sources])))]


def normalised(weights: NDArray[np.float64]) -> Shares:
    """Weights that add up to 1."""
    return weights / weights.sum()


def shares_of_phases(phases: Sequence[Phase], names: Sequence[str], sequence_length: int) -> Changes:
    """Each phase's shares; of a linear one, those in the middle of each of its blocks. A phase ends with the row that
    is nearest.

    Raises:
        RecipeError: a phase still ends at a learning rate, which `cpt.optim.schedules.phases_in_tokens` puts in
        tokens.
    """
    changes: Changes = []
    first, before = 0, np.empty(0)
    for number, phase in enumerate(phases):
        if phase.until_learning_rate is not None:
            raise RecipeError(
                f"`data.phases[{number}].until_learning_rate` follows from a run's schedule, which a mixture alone"
                " does not have. Open it as the run does: build_data(phases_in_tokens(recipe), ...)."
            )
        shares = normalised(np.array([phase.weights.get(name, 0.0) for name in names]))
        after = first if phase.until is None else round(phase.until / sequence_length)
        if phase.change == "linear":
            for block in range(LINEAR_BLOCKS):
                way = (block + 0.5) / LINEAR_BLOCKS
                changes.append((first + (after - first) * block // LINEAR_BLOCKS, (1 - way) * before + way * shares))
            changes.append((after, shares))  # a last phase goes on with them
        else:
            changes.append((first, shares))
        first, before = after, shares
    return changes


def shares_over(changes: Changes, rows: int) -> Shares:
    """The shares asked for over the first `rows` rows together."""
    ends = [first for first, _ in changes[1:]] + [max(rows, 1)]
    held = [max(0, min(end, max(rows, 1)) - first) for (first, _), end in zip(changes, ends, strict=True)]
    return np.average([shares for _, shares in changes], axis=0, weights=held)
