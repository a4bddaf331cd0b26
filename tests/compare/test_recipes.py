from run_folders import copied, write_run

from cpt.compare.recipes import differing_keys, dotted, recipe_topic, told, with_defaults
from cpt.compare.record import read_record
from cpt.recipe.difference import UNSET


def keys(*trees):
    return {dotted(location): values for location, values in differing_keys(list(trees))}


def test_only_the_deepest_keys_that_differ_are_told():
    first = {"name": "a", "output_dir": "x", "optimizer": {"learning_rate": 1, "name": "adamw"}, "seed": 1}
    assert keys(first, copied(first) | {"name": "b", "output_dir": "y"}) == {}
    assert keys(first, first | {"seed": 2}, first) == {"seed": [1, 2, 1]}
    assert keys(first, first | {"optimizer": {"learning_rate": 2, "name": "adamw"}}) == {
        "optimizer.learning_rate": [1, 2]
    }


def test_true_is_not_one_but_one_is_one():
    assert keys({"a": True}, {"a": 1}) == {"a": [True, 1]} and keys({"a": 1}, {"a": 1.0}) == {}


def test_sources_are_told_apart_by_name_and_their_order_counts():
    one, two = {"name": "one", "weight": 1}, {"name": "two", "weight": 2}
    assert keys({"s": [one, two]}, {"s": [one, {"name": "two", "weight": 3}]}) == {"s[two].weight": [2, 3]}
    assert keys({"s": [one]}, {"s": [one, two]}) == {"s[two]": [UNSET, two]}
    assert keys({"s": [one, two]}, {"s": [two, one]}) == {"s.order": [["[one]", "[two]"], ["[two]", "[one]"]]}
    assert keys({"s": [1, 2]}, {"s": [1, 3, 4]}) == {"s[1]": [2, 3], "s[2]": [UNSET, 4]}


def test_a_key_that_did_not_exist_yet_has_this_versions_default(tmp_path):
    first = write_run(tmp_path / "old")
    second = write_run(tmp_path / "new", lambda recipe, **others: recipe.update(checkpoints={"keep": 3}, safety={}))
    said: list[str] = []
    records = [read_record(folder, folder.name) for folder in (first, second)]
    assert recipe_topic(records, set(), said).rows == () and said == []


def test_a_key_that_exists_no_more_is_compared_as_written_and_told(tmp_path):
    def old_keys(recipe, **others):
        recipe.update(gone=5)
        recipe["checkpoints"] = {"lost": 6}

    records = [
        read_record(write_run(tmp_path / "now"), "now"),
        read_record(write_run(tmp_path / "old", old_keys), "old"),
    ]
    said: list[str] = []
    topic = recipe_topic(records, set(), said)
    assert {row.name: row.values for row in topic.rows} == {
        "gone": ("not set", "5"),
        "checkpoints.lost": ("not set", "6"),
    }
    assert "`checkpoints.lost`" in said[0] and "`gone`" in said[0] and "another version" in said[0]


def test_a_recipe_that_has_lost_its_form_is_compared_as_written(tmp_path):
    def other_form(recipe, **others):
        recipe["data"] = "a mixture"
        del recipe["budget"]

    records = [
        read_record(write_run(tmp_path / "now"), "now"),
        read_record(write_run(tmp_path / "old", other_form), "old"),
    ]
    said: list[str] = []
    topic = recipe_topic(records, set(), said)
    assert [row.name for row in topic.rows] == ["data"] and "as they are written" in said[0]


def test_a_recipe_without_unknown_keys_is_filled_with_defaults(tmp_path):
    tree, unknown = with_defaults(read_record(write_run(tmp_path / "run"), "run").recipe)
    assert tree is not None and tree["checkpoints"]["keep"] == 3 and unknown == []


def test_values_are_told_in_one_line():
    assert [told(value) for value in (UNSET, None, "", 1e-5, "a\nb")] == ["not set", "null", "''", "1e-5", "a b"]
    assert told({"name": "a", "options": {}, "subset": None}) == "{name: a}"
    assert [told(value) for value in (1, "1", True, "true", None, "null")] == [
        "1",
        "'1'",
        "true",
        "'true'",
        "null",
        "'null'",
    ]


def test_long_values_that_differ_at_their_end_differ_in_the_table():
    first, second = told("x" * 500), told("x" * 499 + "y")
    assert len(first) <= 100 and first.startswith("xxx") and first != second


def test_text_that_looks_like_a_number_is_told_in_quotes():
    assert [told(value) for value in ("1", "010", "true", "", "a", 1)] == ["'1'", "'010'", "'true'", "''", "a", "1"]
