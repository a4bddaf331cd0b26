import pytest

from cpt.errors import RecipeError
from cpt.importing.config import Config
from cpt.importing.ledger import Ledger, truth


def ledger(path, **values):
    return Ledger(Config(path / "c.yml", values, {"rate": 4}), "axolotl")


def test_each_key_is_entered_once_and_only_if_it_is_there(tmp_path):
    found = ledger(tmp_path, rate=1, sets=[{"path": "a"}])
    for key in ("rate", "rate", "other", "sets[0].path", "sets[0].type", "sets[1].path"):
        found.enter(key, "carried", "here")
    assert [entry.key for entry in found.entries] == ["rate", "sets[0].path"] and found.open_keys() == []


def test_values_go_where_the_location_says_with_the_name_they_had(tmp_path):
    found = ledger(tmp_path, rate=1)
    found.carry("rate", "optimizer.learning_rate")
    found.put("seed", 3)
    assert found.recipe == {"optimizer": {"learning_rate": 1}, "seed": 3}
    assert found.comments == {"optimizer.learning_rate": "rate"}


def test_numbers_may_be_texts_as_yaml_1_1_has_them(tmp_path):
    found = ledger(tmp_path, rate="1e-5", steps=0, none=None)
    assert found.number("rate") == 1e-5 and found.number("none", 2.0) == 2.0 and found.whole("steps") is None


@pytest.mark.parametrize("value", ["fast", True, [1], {"a": 1}, "nan", "inf", 10**400])
def test_what_is_no_number_is_told_with_its_line(tmp_path, value):
    with pytest.raises(RecipeError, match=r"c.yml:4: `rate`: expected a number"):
        ledger(tmp_path, rate=value).number("rate")


def test_a_section_may_be_json_in_a_text(tmp_path):
    found = ledger(tmp_path, a={"b": 1}, c=' {"d": 2}', e=None, f="", g=[])
    assert [found.section(key) for key in "acefg"] == [{"b": 1}, {"d": 2}, {}, {}, {}]


@pytest.mark.parametrize("value", ["fast", "{", 3, [1], True])
def test_what_has_no_keys_is_told(tmp_path, value):
    with pytest.raises(RecipeError, match=r"c.yml:4: `rate`: expected keys with values"):
        ledger(tmp_path, rate=value).section("rate")


def test_switches():
    assert truth("yes") and truth("auto") and truth(1) and not truth("no") and not truth(None) and not truth("false")


def test_keys_without_a_value_ask_for_nothing(tmp_path):
    found = ledger(tmp_path, rate=None, steps=1)
    found.skip_empty(["rate", "steps", "other"])
    assert [(entry.key, entry.told) for entry in found.entries] == [("rate", "empty there")] and found.open_keys() == [
        "steps"
    ]
