import pytest

from cpt.recipe.tree import Mistakes, Place
from cpt.search.settings import read_settings
from cpt.search.space import node_of


def read(**written):
    mistakes, place = Mistakes(), Place("space.yaml", 1)
    node = node_of(written, place) if written else None
    return read_settings(node, node_of({}, place), mistakes), " ".join(text for _, text in mistakes.found)


def test_a_name_stands_for_a_sampler_without_options():
    settings, _ = read(metric="loss", sampler="random", pruner={"name": "median", "warmup_tokens": 5})
    assert (
        settings.sampler.name == "random" and settings.pruner.options == {"warmup_tokens": 5} and settings.trials == 20
    )


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({}, "`search` is missing"),
        ({"metrik": "loss"}, "`search.metrik` is not a key of a search. Did you mean `metric`?"),
        ({"trials": 3}, "`search.metric` is missing"),
        ({"metric": "loss", "trials": 0}, "`search.trials`: must be more than 0"),
        ({"metric": "loss", "direction": "down"}, "expected one of minimize, maximize"),
        ({"metric": "loss", "sampler": 3}, "`search.sampler`: expected keys and values"),
        ({"metric": "loss", "pruner": {"warmup_tokens": 3}}, "`search.pruner.name` is missing"),
        ({"metric": "loss", "name": "../x"}, "`search.name`: may hold letters"),
    ],
)
def test_mistakes_are_told_in_words(written, told):
    settings, said = read(**written)
    assert settings is None and told in said
