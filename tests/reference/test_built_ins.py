import pytest

from cpt.optim.build import FOR_ALL as OF_ALL_OPTIMIZERS
from cpt.recipe.sections import all_keys
from cpt.reference.built_ins import NAMED, OF_ALL, built_ins, options_of, options_of_all
from cpt.safety.loss_guard import FOR_ALL as OF_ALL_GUARDS


def test_the_keys_that_take_names_are_in_the_schema():
    known = {".".join(str(step) for step in location) for location in all_keys()}
    assert NAMED.keys() <= known


@pytest.mark.parametrize("key", NAMED)
def test_every_built_in_says_what_it_does(key):
    assert all(one.meaning.endswith((".", ":")) for one in built_ins(key)), [one.name for one in built_ins(key)]


def test_the_options_of_all_are_those_that_are_taken():
    assert OF_ALL["optimizer.name"].keys() == OF_ALL_OPTIMIZERS.keys()
    assert OF_ALL["safety.loss_guard"].keys() == OF_ALL_GUARDS.keys()
    assert [option.name for option in options_of_all("data.filters")] == []


def test_options_are_keyword_arguments_with_type_default_and_meaning():
    def thin(document: dict[str, str], *, share: float, names: tuple[str, ...] = ("a", "b")) -> None:
        """Thin out.

        Args:
            document: not an option.
            share: how much
                of it stays.

        Raises:
            ValueError: never.
        """

    told = [(option.name, option.kind, option.default, option.meaning) for option in options_of(thin)]
    assert told == [
        ("share", "number", "needed", "how much of it stays."),
        ("names", "list of texts", 'default `["a", "b"]`', ""),
    ]
