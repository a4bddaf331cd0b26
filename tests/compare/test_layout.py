from cpt.compare.layout import difference_table, figure_table
from cpt.compare.rows import Row, Topic

TOPIC = Topic("Recipe", (Row("seed", ("1", "2", "1", None, "1", "1")),), ("a remark",))
NAMES = list("abcdef")


def test_few_runs_stand_side_by_side():
    few = Topic("Recipe", (Row("seed", ("1", None)),))
    for table in (difference_table(few, ["a", "b"]), figure_table(few, ["a", "b"])):
        assert table.columns == ["", "a", "b"] and table.rows == [["seed", "1", "?"]]


def test_of_many_runs_those_with_the_same_value_share_a_line():
    table = difference_table(TOPIC, NAMES)
    assert table.rows == [["seed", "1", "a, c, e, f"], ["", "2", "b"], ["", "?", "d"]] and table.remarks == (
        "a remark",
    )


def test_of_many_runs_each_is_a_line_of_figures():
    table = figure_table(TOPIC, NAMES)
    assert table.columns == ["", "seed"] and table.rows[1] == ["b", "2"] and len(table.rows) == 6
