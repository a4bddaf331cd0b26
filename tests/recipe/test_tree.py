"""The tree: merging keeps each value's own place, and mistakes come out in the order of files and lines."""

import pytest

from cpt.errors import RecipeError
from cpt.recipe.tree import Mistakes, Node, Place, copied, dotted, is_broken, merged, node_at, place_of, plain, size


def tree(value, file="a.yaml", line=1):
    if isinstance(value, dict):
        return Node({key: tree(child, file, line) for key, child in value.items()}, Place(file, line))
    if isinstance(value, list):
        return Node([tree(child, file, line) for child in value], Place(file, line))
    return Node(value, Place(file, line))


def test_mappings_merge_at_every_depth_and_lists_and_values_replace():
    base = tree({"a": {"b": 1, "c": {"d": 2, "e": 3}}, "list": [1, 2], "x": 1})
    over = tree({"a": {"c": {"d": 9}, "f": 4}, "list": [3], "x": None})
    assert plain(merged(over, base)) == {"a": {"b": 1, "c": {"d": 9, "e": 3}, "f": 4}, "list": [3], "x": None}


def test_merged_values_keep_their_own_places():
    both = merged(tree({"a": {"b": 1}}, "over.yaml"), tree({"a": {"c": 2}}, "base.yaml"))
    assert place_of(both, ("a", "b")).file == "over.yaml"
    assert place_of(both, ("a", "c")).file == "base.yaml"


def test_merging_leaves_the_base_alone():
    base = tree({"a": {"b": 1}})
    merged(tree({"a": {"b": 2, "c": 3}}), base)
    assert plain(base) == {"a": {"b": 1}}


def test_a_section_with_a_file_of_its_own_takes_nothing_from_an_outer_base():
    over = tree({"model": {"path": "new"}})
    over.value["model"].own_file = True
    assert plain(merged(over, tree({"model": {"path": "old", "config": {}}, "x": 1}))) == {
        "model": {"path": "new"},
        "x": 1,
    }


def test_the_place_of_what_is_missing_is_that_of_its_section():
    root = Node({"data": Node({}, Place("a.yaml", 7))}, Place("a.yaml", 1))
    assert place_of(root, ("data", "sources", 0)).line == 7
    assert node_at(root, ("data", "sources")) is None


def test_what_lies_in_a_broken_part_is_broken():
    root = Node({"data": Node({}, Place("a.yaml", 7), broken=True)}, Place("a.yaml", 1))
    assert is_broken(root, ("data", "sources", 0)) and not is_broken(root, ("model",))


def test_mistakes_are_told_once_in_the_order_of_files_and_lines_and_the_command_line_last():
    found = Mistakes()
    for place in [
        Place("b.yaml", 2),
        Place("on the command line: `a=1`", 0),
        Place("a.yaml", 10),
        Place("a.yaml", 9),
        Place("a.yaml", 9),
    ]:
        found.add(place, "wrong")
    with pytest.raises(RecipeError) as caught:
        found.raise_if_any()
    assert str(caught.value).splitlines() == [
        "a.yaml:9: wrong",
        "a.yaml:10: wrong",
        "b.yaml:2: wrong",
        "on the command line: `a=1`: wrong",
    ]


def test_no_mistakes_no_error():
    Mistakes().raise_if_any()


def test_a_copy_is_changed_on_its_own():
    root = tree({"a": [1, {"b": 2}]})
    copied(root).value["a"].value.clear()
    assert plain(root) == {"a": [1, {"b": 2}]} and size(root) == 5


def test_a_location_reads_like_a_path():
    assert dotted(("data", "sources", 0, "weight")) == "data.sources[0].weight"
