from dataclasses import dataclass, field

import pytest

from cpt.data.rows.build import refuse_small_disk
from cpt.data.store.shards import Plan
from cpt.errors import RecipeError
from cpt.recipe.schema import Budget, Data, Source

DATA = Data(sources=[Source(path="corpus.jsonl")], sequence_length=16, window_bytes=100, disk_bytes=500)


@dataclass
class Tokenized:
    """What is asked of a source: ten windows of it."""

    plan: Plan = field(default_factory=lambda: Plan([[]] * 10, [100] * 10, [[number] for number in range(10)], []))


@pytest.mark.parametrize(
    ("changes", "budget", "key"),
    [
        ({"deduplicate": "exact"}, None, "data.deduplicate"),
        ({"temperature": 2.0}, None, "data.temperature"),
        ({}, Budget(epochs=1, global_batch_tokens=16), "budget.epochs"),
        ({"disk_bytes": 300}, None, "300"),
    ],
)
def test_a_bounded_disk_refuses_what_needs_more(changes, budget, key):
    data, needs_all = DATA.model_copy(update=changes), "disk_bytes" not in changes
    with pytest.raises(RecipeError, match=key):
        refuse_small_disk(data, budget, [Tokenized()], needs_all=needs_all)
