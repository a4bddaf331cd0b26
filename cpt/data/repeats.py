"""How often a run reads each source: told before it starts, or refused."""

import logging
import math
from collections.abc import Mapping

from cpt.data.mixture import MixtureRows
from cpt.errors import RecipeError
from cpt.ranks import is_main_process
from cpt.recipe.schema import Budget, Data

log = logging.getLogger("cpt")


def rows_of_run(budget: Budget, num_tokens: int, sequence_length: int) -> int:
    """Rows of the whole run. Without `global_batch_tokens` it may be up to one step longer: how long a step is, only the launch says.

    Args:
        num_tokens: of all sources once.
    """
    tokens = budget.tokens if budget.tokens is not None else (budget.epochs or 0) * num_tokens
    step = max(1, (budget.global_batch_tokens or 0) // sequence_length)
    return max(1, math.ceil(tokens / (step * sequence_length))) * step


def epochs_of(mixture: MixtureRows, rows: int) -> list[float]:
    """How many times the first `rows` rows go through each source."""
    return [count / len(source) for count, source in zip(mixture.turns.counts(rows), mixture.sources, strict=True)]


def tell_repeats(data: Data, mixture: MixtureRows, tokens: Mapping[str, int], rows: int) -> None:
    """Warn of the sources that a run of so many rows goes through more than once; with `when_exhausted: stop`, refuse it.

    Args:
        tokens: of each source once, by name, in the order of the mixture.

    Raises:
        RecipeError: a source would have to be repeated and may not.
    """
    epochs = dict(zip(tokens, epochs_of(mixture, rows), strict=True))
    repeated = {name: times for name, times in epochs.items() if times > 1}
    if not repeated:
        return
    if data.when_exhausted == "stop":
        lacking = ", ".join(
            f"`{name}` has {tokens[name]:,} tokens, the run needs {times:.2f} times as many" for name, times in repeated.items()
        )
        raise RecipeError(
            f"`data.when_exhausted`: {lacking}. Lower its weight or the budget, add documents, or set `data.when_exhausted: wrap`."
        )
    if is_main_process():
        listing = ", ".join(f"{name} {times:.2f} times ({tokens[name]:,} tokens)" for name, times in repeated.items())
        log.warning(
            f"The run reads more than there is: {listing}, each time in another order. `data.when_exhausted: stop` would refuse it."
        )
