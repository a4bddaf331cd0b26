"""How often a run reads each source: told before it starts, or refused."""

import logging
import math
from collections.abc import Sequence

from cpt.data.checking.report import SourceReport
from cpt.data.mixture.mixture import MixtureRows
from cpt.errors import RecipeError
from cpt.ranks import is_main_process
from cpt.recipe.schema import Budget, Data, Source
from cpt.recipe.sense_data import reported_name

log = logging.getLogger("cpt")


def rows_of_run(budget: Budget, rows_of_epoch: int, sequence_length: int) -> int:
    """Rows of the whole run. Without `global_batch_tokens` the run may be up to one step longer: only the launch
    decides how long a step is.

    Args:
        rows_of_epoch: rows of all sources. An epoch counts rows, padding included: counted in tokens it would end
            before the last rows.
    """
    rows = (budget.epochs or 0) * rows_of_epoch if budget.tokens is None else budget.tokens / sequence_length
    step = max(1, (budget.global_batch_tokens or 0) // sequence_length)
    return max(1, math.ceil(rows / step)) * step


def allowed_epochs(data: Data, source: Source) -> float | None:
    """How often a run may go through a source; None for any number of times."""
    limits = [
        limit for limit in (source.max_epochs, 1.0 if data.when_exhausted == "stop" else None) if limit is not None
    ]
    return min(limits, default=None)


def refused(data: Data, name: str, epochs: float, tokens: int) -> str | None:
    """Why a run that goes through the source of this name so often may not start."""
    source = next(source for source in data.sources if reported_name(source) == name)
    allowed = allowed_epochs(data, source)
    if allowed is None or epochs <= allowed:
        return None
    key = "data.when_exhausted" if allowed == 1 and data.when_exhausted == "stop" else f"max_epochs` of `{name}"
    return f"`{key}`: `{name}` has {tokens:,} tokens, the run needs {epochs:.2f} times as many"


def tell_repeats(data: Data, mixture: MixtureRows, reports: Sequence[SourceReport], rows: int) -> None:
    """Warn of the sources that a run of so many rows goes through more than once; refuse it where it may not.

    Raises:
        RecipeError: a source would have to be repeated and may not.
    """
    epochs = [count / report.rows for report, count in zip(reports, mixture.turns.counts(rows), strict=True)]
    told = list(zip(reports, epochs, strict=True))
    if lacking := [why for report, times in told if (why := refused(data, report.name, times, report.tokens))]:
        raise RecipeError(
            f"{'; '.join(lacking)}. Lower its weight or the budget, add documents, or allow more:"
            " `data.when_exhausted`, `max_epochs`."
        )
    repeated = [f"{report.name} {times:.2f} times ({report.tokens:,} tokens)" for report, times in told if times > 1]
    if repeated and is_main_process():
        log.warning(
            f"The run reads more than there is: {', '.join(repeated)}, each time in another order. "
            "`data.when_exhausted: stop` would refuse it."
        )
