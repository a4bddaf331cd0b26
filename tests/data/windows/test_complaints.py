from dataclasses import dataclass, field, replace

import pytest

from cpt.data.rows.window_entries import START
from cpt.data.rows.windows import refuse_bad_windows
from cpt.data.store.plan import Plan
from cpt.errors import DataError
from cpt.recipe.schema import Source


@dataclass
class Work:
    source: Source = field(default_factory=lambda: Source(path="corpus"))
    key: str = "data.sources[0]"


@dataclass
class Tokenized:
    """What the messages ask of a source."""

    plan: Plan
    max_bad_share: float = 0.01
    work: Work = field(default_factory=Work)


FOUR = Tokenized(Plan([[], [], [], []], [100] * 4, [[0], [1], [2], [3]], []))


def test_bad_rows_end_a_run_when_the_rest_cannot_make_up_for_them():
    entry = replace(START, documents=98, bad_rows={"null": 2})
    refuse_bad_windows(FOUR, entry, 0)  # of some 400 rows four may be bad
    with pytest.raises(DataError, match="5 of the first 100 rows are bad.*data.max_bad_share.*cpt data check"):
        refuse_bad_windows(FOUR, replace(entry, documents=95, bad_rows={"null": 5}), 0)
