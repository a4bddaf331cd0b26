import pytest

from cpt.data.open_sources import open_sources
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import RecipeError
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut


@pytest.fixture
def opened(tokenizer, tmp_path):
    def run(data, evaluation=None, window_bytes=None):
        return open_sources(data, evaluation or Evaluation(), DocumentEncoder(tokenizer), tmp_path / "cache", seed=1)

    return run


def test_sources_and_held_out_sets_are_opened_by_their_place_and_nothing_is_read(opened, source, tmp_path):
    data = Data(sources=[source("a", ["x" * 100] * 50)], window_bytes=1000)
    found = opened(data, Evaluation(perplexity=[HeldOut(path=source("b", ["y" * 100] * 50).path)]))
    assert list(found) == ["data.sources[0]", "evaluation.perplexity[0]"]
    assert not found["data.sources[0]"].plan.is_whole and found["evaluation.perplexity[0]"].plan.is_whole
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_wrong_filter_of_any_source_is_told_before_anything_is_looked_at(opened, source):
    data = Data(sources=[source("a", ["x"]), source("b", ["x"], filters=[Component(name="lenth")])])
    with pytest.raises(RecipeError, match="no filter called `lenth`"):
        opened(data)


def test_sources_of_other_rules_have_other_folders(opened, source):
    first = source("a", ["x"])
    other = first.model_copy(update={"name": "other", "filters": [Component(name="length", min_characters=1)]})
    found = opened(Data(sources=[first, other]))
    assert len({one.folder for one in found.values()}) == 2
