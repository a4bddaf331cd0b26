from dataclasses import dataclass, field, replace

import pytest

from cpt.data.examples.segments import LONG_PROMPT
from cpt.data.plan import Plan
from cpt.data.windows.complaints import all_held_out, other_documents, refuse_bad_windows, used_up
from cpt.data.windows.entry import START
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


def test_a_source_of_one_window_is_judged_when_all_of_it_was_read():
    refuse_bad_windows(Tokenized(Plan([[]], [100], [[0]], [0])), replace(START, bad_rows={"null": 9}), 0)


def test_each_complaint_names_the_source_and_what_to_do():
    for message, remedy in (
        (all_held_out(FOUR, replace(START, held_out=3)), "evaluation.held_out_share"),
        (
            all_held_out(FOUR, replace(START, held_out=3, left_out={LONG_PROMPT: 17})),
            "(17: prompt longer than sequence_length; 3 are",
        ),
        (all_held_out(FOUR, START), "`data.sources[0].max_tokens` is less than its first document has"),
        (other_documents(FOUR), "begin a new run"),
        (used_up(FOUR, 2.0), "data.sources[0].max_epochs"),
    ):
        assert message.startswith("corpus: ") and remedy in message
