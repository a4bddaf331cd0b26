import json

import pytest
import yaml

from cpt.report.mixture import mixture
from cpt.report.record import read_record
from cpt.runs.page import Table
from cpt.runs.plots import Bars


def changed(run_folder, **data):
    recipe = yaml.safe_load((run_folder / "recipe.yaml").read_text())
    recipe["data"] |= data
    recipe.pop("evaluation")  # names a set of the second source
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return read_record(run_folder)


def table(section):
    return next(part for part in section.parts if isinstance(part, Table))


def test_what_each_source_had_stands_beside_what_was_asked(record):
    section = mixture(record)
    bars = section.parts[0]
    assert isinstance(bars, Bars) and bars.series == {"asked": [75, 25], "realised": [74, 26]}
    assert table(section).rows[0] == ("code", "75.0 %", "74.0 %", "-1.00 points")


def test_on_the_way_a_pale_line_shows_what_was_asked(record):
    curves = mixture(record).parts[1].curves
    assert [(curve.name, curve.faint) for curve in curves][:2] == [("code, asked", True), ("code", False)]
    assert list(curves[0].y) == [75, 75] and curves[1].y[0] == 74


def test_phases_are_asked_for_as_they_follow_each_other(run_folder):
    phases = [{"until": 800, "weights": {"code": 1}}, {"weights": {"code": 1, "prose": 1}}]
    section = mixture(changed(run_folder, phases=phases, sources=[{"path": "code.jsonl"}, {"path": "prose.jsonl"}]))
    assert section.parts[0].series["asked"] == [75, 25]
    asked = section.parts[1].curves[0].y
    assert asked[0] == 100 and asked[-1] == pytest.approx(75)


def test_a_temperature_asks_for_shares_by_size(run_folder):
    section = mixture(changed(run_folder, temperature=1, sources=[{"path": "code.jsonl"}, {"path": "prose.jsonl"}]))
    assert section.parts[0].series["asked"] == pytest.approx([60, 40])


def test_phases_that_follow_the_learning_rate_are_said_to_be_unknown(run_folder):
    phases = [{"until_learning_rate": 0.5, "weights": {"code": 1}}, {"weights": {"prose": 1}}]
    section = mixture(changed(run_folder, phases=phases, sources=[{"path": "code.jsonl"}, {"path": "prose.jsonl"}]))
    assert list(section.parts[0].series) == ["realised"] and "phases follow the learning rate" in section.parts[-1]


def test_a_recipe_of_another_version_still_shows_what_was_read(run_folder):
    (run_folder / "recipe.yaml").write_text("name: x\nkey_of_another_version: 3\n")
    assert table(mixture(read_record(run_folder))).rows[0] == ("code", "", "74.0 %", "")


def test_a_run_that_logged_no_shares_shows_those_that_it_wrote_down(run_folder):
    (run_folder / "metrics.jsonl").unlink()
    assert table(mixture(read_record(run_folder))).rows[0][2] == "75.0 %"


def test_of_a_single_source_there_is_nothing_to_tell(run_folder):
    assert mixture(changed(run_folder, sources=[{"path": "code.jsonl"}])).parts == []


def test_shares_of_no_known_form_are_survived(run_folder):
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "inputs.json").write_text(json.dumps({"data": {"sources": {"code": 3, "prose": {"share": "all"}}}}))
    assert mixture(read_record(run_folder)).parts == []
