"""From findings to figures and the page."""

import json

from benchmarks.faults.page import BEGIN, END, with_tables
from benchmarks.faults.results import added, code_of, keep, measurements, results_of

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


def test_what_sittings_find_adds_up_as_long_as_the_code_is_the_same():
    mine, other = {**KILLED, "code": "a"}, {**KILLED, "code": "b", "kills": 10}
    (twice,) = added([mine], [{**mine, "moments": {"write": 1, "start": 2}, "most_steps_lost": 0} | {"errors": []}])
    assert (twice["kills"], twice["save_seconds"], twice["moments"]["write"], twice["moments"]["start"]) == (
        400,
        [4.5, 4.9] * 2,
        71,
        2,
    )
    assert added([mine], [other]) == [other]


def test_trials_of_another_fault_run_or_system_stay_as_they_were():
    new = {**STEPS[0], "good": 2, "outcomes": {"skipped": 2, "crash": 1}}
    rows = added(STEPS, [new, {**new, "run": "ZeRO-2 x 2"}])
    assert [(row["system"], row["run"], row["trials"], row["good"]) for row in rows] == [
        ("trainer", "plain", 3, 0),
        ("cpt", "plain", 6, 5),
        ("cpt", "ZeRO-2 x 2", 3, 2),
    ]
    assert rows[1]["outcomes"] == {"skipped": 5, "crash": 1}


def test_parts_of_several_sittings_are_kept_beside_each_other(tmp_path):
    results = tmp_path / "faults.json"
    for part, rows in (("kills", [KILLED]), ("steps", STEPS), ("kills", [KILLED])):
        keep(results, part, rows, 60.0)
    parts = json.loads(results.read_text())["parts"]
    assert (parts["kills"]["found"][0]["kills"], parts["kills"]["minutes"], len(parts["steps"]["found"])) == (
        400,
        2.0,
        2,
    )
    keep(results, "kills", [KILLED], 60.0, anew=True)
    assert json.loads(results.read_text())["parts"]["kills"]["found"][0]["kills"] == 200


def test_a_changed_line_is_another_code(tmp_path):
    (tmp_path / "a.py").write_text("a = 1\n")
    before = code_of(tmp_path)
    assert code_of(tmp_path) == before
    (tmp_path / "a.py").write_text("a = 2\n")
    assert code_of(tmp_path) != before


def test_the_cost_of_a_failure_is_without_the_steps_made_again():
    job = {"seconds": 160.0, "undisturbed": 90.0, "again": 10.0, "failures": 2, "failed": False}
    figures = by_name({"time": {"found": [{"run": "plain", "jobs": [job, {**job, "seconds": 180.0}]}]}})
    assert figures["seconds that a failure costs, mean of 4"]["measured"] == 35
    assert figures["the same in the worst job"]["measured"] == 40


def test_faults_that_came_out_alike_share_a_row_of_the_page():
    rows = [
        {**STEPS[0], "fault": f"{name} to {whom}"} for whom in ("one process", "all") for name in ("SIGTERM", "SIGHUP")
    ]
    page = with_tables(
        f"{BEGIN}{END}", results_of({"signals": {"found": [*rows, {**rows[0], "fault": "SIGINT to all", "good": 2}]}})
    )
    assert "| SIGTERM, SIGHUP to one process | plain | **3 of 3**: skipped (3) |  |" in page
    assert "| SIGTERM, SIGHUP to all | plain | **3 of 3**" in page and "| SIGINT to all | plain | **2 of 3**" in page
