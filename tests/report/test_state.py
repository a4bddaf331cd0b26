from dataclasses import replace

import pytest

from cpt.report.record import read_record
from cpt.report.state import told_state


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ({"state": "finished", "step": 100, "steps": 100}, "Finished after 100 steps and 1,600 tokens."),
        (
            {"state": "failed", "step": 50, "steps": 100, "message": "No room\nleft."},
            "Failed after 50 of 100 steps and 1,600 tokens: No room left.",
        ),
        ({"state": "failed", "error": "KeyError"}, "Failed after 100 steps and 1,600 tokens: KeyError"),
        ({"state": "interrupted", "message": "SIGTERM"}, "Interrupted after 100 steps and 1,600 tokens: SIGTERM"),
        ({"state": "running", "step": 50, "steps": 100}, "Running after 50 of 100 steps and 1,600 tokens."),
        ({"state": ["?"]}, "How the run stands is not known: it came to 100 steps and 1,600 tokens."),
    ],
)
def test_a_run_says_how_it_stands(record, status, told):
    assert told_state(replace(record, status=status)) == told


def test_a_run_whose_process_is_gone_is_said_to_have_died(run_folder):
    (run_folder / "status.json").write_text('{"state": "running", "pid": 4194303, "step": 50}')
    assert told_state(read_record(run_folder)).startswith("Died without a word after 50 steps")


def test_of_a_run_that_has_only_begun_nothing_is_made_up(lone_record):
    assert told_state(lone_record) == "How the run stands is not known."
