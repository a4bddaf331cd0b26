"""From findings to figures and the page."""

from benchmarks.faults.page import BEGIN, END, with_tables
from benchmarks.faults.results import measurements, results_of

KILLED = {
    "run": "plain",
    "system": "cpt",
    "kills": 200,
    "inside_saves": 120,
    "moments": {"write": 70, "hash": 30, "rename": 20, "between saves": 80},
    "failed_resumes": 0,
    "runs": 4,
    "unfinished": 0,
    "wrong_samples": 0,
    "other_weights": 0,
    "other_losses": 0,
    "save_seconds": [4.5, 4.9],
}
STEPS = [
    {"fault": "NaN", "run": "plain", "system": "cpt", "trials": 3, "good": 3, "outcomes": {"skipped": 3}},
    {"fault": "NaN", "run": "plain", "system": "trainer", "trials": 3, "good": 0, "outcomes": {"all weights NaN": 3}},
]
PARTS = {"kills": {"minutes": 1.0, "found": [KILLED]}, "steps": {"minutes": 1.0, "found": STEPS}}


def by_name(parts):
    return {row["name"]: row for row in measurements(parts)}


def test_every_target_is_met_where_nothing_went_wrong():
    assert all(row["met"] for row in by_name(PARTS).values())


def test_one_failed_resume_or_too_few_kills_are_told():
    worse = {"kills": {"found": [{**KILLED, "kills": 12, "inside_saves": 5, "failed_resumes": 1}]}}
    missed = {name for name, row in by_name(worse).items() if not row["met"]}
    assert missed == {"SIGKILLs", "of them inside a save", "failed resumes after a kill"}


def test_the_plain_trainers_failures_are_not_ours():
    assert by_name(PARTS)["NaN: trials that did not come out as they should, of 3"]["measured"] == 0


def test_the_page_shows_both_side_by_side():
    page = with_tables(f"before\n{BEGIN}old\n{END}after\n", results_of(PARTS))
    assert "| NaN | plain | **3 of 3**: skipped (3) | **0 of 3**: all weights NaN (3) |" in page
    assert "hash 30" in page and "old" not in page and page.startswith("before") and page.endswith("after\n")
