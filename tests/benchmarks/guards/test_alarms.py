"""What is made of the guard's alarms in healthy runs."""

import json

import pytest

from benchmarks.guards.alarms import alarms, results_of, upper_limit


def test_no_alarm_in_n_steps_leaves_a_rate_of_three_in_n():
    assert upper_limit(0) == pytest.approx(3.0, abs=0.01)
    assert upper_limit(1) == pytest.approx(4.74, abs=0.01)


def test_skipped_steps_are_counted_and_the_others_events_are_not(tmp_path):
    kinds = ("spike_skipped", "saved_again", "nan_skipped", "rolled_back")
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"kind": kind, "message": kind}) + "\n" for kind in kinds)
    )
    (tmp_path / "metrics.jsonl").write_text('{"loss": 4.5}\n{"loss": 4.0}\n{"other": 1}\n')
    found = alarms(tmp_path)
    assert found == {"skipped": 2, "rolled_back": 1, "last_loss": 4.0, "said": ["spike_skipped", "nan_skipped"]}


def test_one_step_in_a_thousand_is_the_most():
    healthy = {"steps": 1000, "skipped": 0, "rolled_back": 0}
    assert results_of([healthy])["measurements"][0]["met"]
    assert not results_of([healthy, {**healthy, "skipped": 3}])["measurements"][0]["met"]
