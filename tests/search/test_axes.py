import pytest

from cpt.recipe.tree import Mistakes, Node, Place
from cpt.search.axes import Choice, Range, read_axis
from cpt.search.library import optuna
from cpt.search.space import node_of

PLACE = Place("space.yaml", 3)


def read(key, value):
    mistakes = Mistakes()
    return read_axis(key, node_of(value, PLACE), mistakes), " ".join(text for _, text in mistakes.found)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("optimizer.learning_rate", {"low": 1e-3, "high": 1e-6}, "`low` (0.001) must be below `high` (1e-6)"),
        ("optimizer.learning_rate", {"low": 1e-3, "high": 1e-3}, "must be below"),
        ("optimizer.learning_rate", {"low": 0, "high": 1, "log": True}, "needs a `low` above 0"),
        ("optimizer.learning_rate", {"low": 1e-6}, "`high` is missing"),
        ("optimizer.learning_rate", {"low": 1e-6, "high": "1"}, '`high` is a number, got the text "1"'),
        ("optimizer.learning_rate", {"low": 1e-6, "high": 1, "log": 1}, "`log` is true or false"),
        ("optimizer.learning_rate", {"low": 1e-6, "high": 1, "lgo": True}, "Did you mean `log`"),
        ("optimizer.learning_rate", {"lo": 1e-6, "hi": 1}, "a range has `low` and `high`"),
        ("optimizer.learning_rate", 1e-5, "or a list of values"),
        ("optimizer.learning_rate", [1e-5], "nothing to choose"),
        ("optimizer.learning_rate", [1e-5, 1e-5], "stands there twice"),
        ("budget.global_batch_tokens", {"low": 512, "high": 1000, "step": 512}, "not reached from `low`"),
        ("budget.global_batch_tokens", {"low": 512, "high": 1024, "step": 512, "log": True}, "exclude each other"),
        ("budget.global_batch_tokens", {"low": 512, "high": 1024, "step": 0}, "`step` must be more than 0"),
        ("budget.global_batch_tokens", {"low": 0.5, "high": 2}, "holds whole numbers"),
        ("optimizer", {"learning_rate": [1, 2]}, "write the keys below it with dots, `optimizer.learning_rate: ...`"),
    ],
)
def test_what_cannot_be_drawn_from_is_told(key, value, told):
    axis, said = read(key, value)
    assert axis is None and told in said


def test_numbers_are_whole_where_the_recipe_says_so_or_both_ends_are():
    assert read("budget.global_batch_tokens", {"low": 1e3, "high": 1e6})[0].is_whole
    assert not read("optimizer.learning_rate", {"low": 1, "high": 2})[0].is_whole, (
        "the schema says that it is a number"
    )
    assert read("schedule.warmup_tokens", {"low": 100, "high": 200})[0].is_whole
    assert not read("schedule.warmup_tokens", {"low": 100, "high": 200.5})[0].is_whole


def test_a_key_is_called_the_same_however_it_is_written():
    assert (
        read("data.sources.0.weight", [1, 2])[0].key
        == read("data.sources[0].weight", [1, 2])[0].key
        == "data.sources[0].weight"
    )


def test_a_choice_may_be_a_section():
    axis, _ = read("schedule", [{"name": "cosine"}, {"name": "wsd", "decay_tokens": 100}])
    drawn = {str(axis.suggest(optuna().create_study().ask())) for _ in range(30)}
    assert drawn == {"{'name': 'cosine'}", "{'name': 'wsd', 'decay_tokens': 100}"} and axis.grid == list(axis.labels)


def test_numbers_that_are_drawn_stay_inside_and_can_be_read():
    axis = Range("a", PLACE, 1e-6, 3e-6, log=True)
    for _ in range(50):
        drawn = axis.suggest(optuna().create_study().ask())
        assert 1e-6 <= drawn <= 3e-6 and len(repr(drawn)) <= len("1.23456e-06")
    assert axis.value_of(2.9999999e-6) == 3e-6 and Range("a", PLACE, 1, 8, is_whole=True).value_of(3) == 3


def test_steps_are_counted():
    assert Range("a", PLACE, 0.0, 0.3, step=0.1).grid == pytest.approx([0, 0.1, 0.2, 0.3])
    assert Range("a", PLACE, 2, 4, is_whole=True).grid == [2, 3, 4] and Range("a", PLACE, 0.0, 1.0).grid is None
    assert Choice("a", PLACE, (True, False)).grid == ["true", "false"]
    assert isinstance(node_of([1], PLACE), Node)
