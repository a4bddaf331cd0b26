from dataclasses import dataclass, field

import pytest

from cpt.data.plan import Plan
from cpt.data.windows.bounded import disk_limit, is_ready, refuse_small_disk, why_all
from cpt.errors import RecipeError, ResourceError
from cpt.recipe.schema import Budget, Data, Source

DATA = Data(sources=[Source(path="corpus.jsonl")], sequence_length=16, window_bytes=100)


@dataclass
class Tokenized:
    """What is asked of a source: ten windows of it."""

    is_kept: bool
    plan: Plan = field(default_factory=lambda: Plan([[]] * 10, [100] * 10, [[number] for number in range(10)], []))


KEPT, OWN = Tokenized(is_kept=True), Tokenized(is_kept=False)


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    monkeypatch.setenv("CPT_STORE", "memory://bucket")
    monkeypatch.setenv("CPT_CACHE_LIMIT", "500")


def test_the_smaller_of_both_limits_holds_and_a_machines_only_for_what_can_be_fetched_again():
    assert disk_limit(DATA, [KEPT, OWN]) == 500 and disk_limit(DATA, [OWN]) is None
    assert disk_limit(DATA.model_copy(update={"disk_bytes": 400}), [KEPT]) == 400


def test_what_needs_all_of_a_source_is_named():
    assert why_all(DATA.model_copy(update={"deduplicate": "exact"}), None) == "data.deduplicate"
    assert why_all(DATA.model_copy(update={"temperature": 2.0}), None) == "data.temperature"
    assert why_all(DATA, Budget(epochs=1, global_batch_tokens=16)) == "budget.epochs" and why_all(DATA, None) is None


def test_a_bucket_knows_what_a_bounded_disk_has_no_room_for_but_not_copies():
    assert is_ready(DATA, KEPT) and not is_ready(DATA, OWN)
    assert not is_ready(DATA.model_copy(update={"deduplicate": "exact"}), KEPT)
    refuse_small_disk(DATA, None, [KEPT], 500, needs_all=True)
    with pytest.raises(ResourceError, match="CPT_CACHE_LIMIT: preparing needs the whole"):
        refuse_small_disk(DATA, None, [OWN], 500, needs_all=True)
    with pytest.raises(RecipeError, match="`data.disk_bytes`: preparing needs the whole"):
        refuse_small_disk(DATA.model_copy(update={"disk_bytes": 500}), None, [OWN], 500, needs_all=True)


def test_too_little_for_some_windows_is_told():
    with pytest.raises(
        ResourceError, match="CPT_CACHE_LIMIT is 300, but 1 source.s., read in windows of 100 bytes, need 400"
    ):
        refuse_small_disk(DATA, None, [KEPT], 300, needs_all=False)
