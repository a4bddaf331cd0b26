import json

from cpt.errors import CheckpointError
from cpt.rehearsal.table import as_json, bad, good, not_run, shown


def test_a_row_says_step_verdict_and_figure_and_a_failure_the_class_of_its_remedy():
    assert shown(good("save", "14.8 MiB")) == "save         ok      14.8 MiB"
    assert shown(bad("resume", CheckpointError("lost."))) == "resume       FAILED  CheckpointError: lost."
    assert shown(bad("tasks", "'no such answer'", "KeyError")).endswith("KeyError: 'no such answer'")


def test_long_figures_go_on_below_themselves():
    lines = shown(bad("recipe", "first\n" + "word " * 40)).splitlines()
    assert len(lines) == 3 and all(line.startswith(" " * 21 + "word") and len(line) <= 140 for line in lines[1:])


def test_programs_learn_whether_all_went_well():
    findings = [good("save", "1 MiB"), not_run("evaluation", "nothing is held out")]
    assert json.loads(as_json(findings, None))["passed"] is True
    failed = json.loads(as_json([*findings, bad("disk", "full")], "runs/.x"))
    assert (failed["passed"], failed["folder"], failed["findings"][2]["verdict"]) == (False, "runs/.x", "FAILED")
