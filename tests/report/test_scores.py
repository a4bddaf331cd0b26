from dataclasses import replace

from cpt.report.scores import scores


def test_each_score_has_its_standard_error_and_its_distance_from_the_base(record):
    plot, table = scores(record).parts
    assert table.rows[0] == ("code cloze", "accuracy", "100", "0.300", "0.500", "0.050", "+0.100 to +0.300", "better")
    assert plot.rows == [("code cloze (accuracy)", 0.2, 0.1, 0.3)]


def test_a_score_without_base_and_interval_says_so(record):
    assert scores(record).parts[1].rows[1] == ("hellaswag", "acc", "500", "", "0.250", "", "none", "not known")


def test_where_lower_is_better_a_fall_is_better(record):
    against = {"before": 9, "difference": -1, "low": -2, "high": -0.5}
    task = {"name": "wikitext", "metric": "perplexity", "value": 8, "higher_is_better": False, "against": against}
    assert scores(replace(record, verdict={"tasks": [task]})).parts[1].rows[0][-1] == "better"


def test_without_scores_there_is_no_section(lone_record):
    assert scores(lone_record).parts == []


def test_an_interval_of_another_form_is_no_interval(record):
    task = {"name": "t", "interval": [1, "x"], "value": "y", "against": [3]}
    assert scores(replace(record, verdict={"tasks": [task]})).parts[0].rows[0][4:6] == ("", "")
