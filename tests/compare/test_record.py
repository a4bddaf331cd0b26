from pathlib import Path

import pytest
from run_folders import keep_document_losses, write_run

from cpt.compare.record import missing_parts, read_record, short_names


def test_a_whole_run_misses_nothing(tmp_path):
    record = read_record(write_run(tmp_path / "run"), "run")
    assert missing_parts(record) == [] and record.state == "finished" and record.stage == "cpt"


def test_what_is_missing_is_told_with_its_file(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "inputs.json").unlink()
    (run / "environment.json").write_text("{")
    (run / "verdict.json").write_text("{")
    told = missing_parts(read_record(run, "run"))
    assert told == [
        f"versions, code and machine of run: {run}/environment.json is cut off or no JSON.",
        f"data, tokenizer and weights of run: {run}/inputs.json is missing.",
        f"run: {run}/verdict.json is cut off or no JSON.",
    ]


def test_losses_of_the_last_evaluation_are_read_and_damaged_ones_told(tmp_path):
    run = write_run(tmp_path / "run")
    keep_document_losses(run)
    (run / "held_out" / "step-x.npz").write_text("not of a step")
    record = read_record(run, "run")
    assert list(record.losses) == ["domain"] and record.losses_step == 20
    (run / "held_out" / "step-20.npz").write_bytes(b"rubbish")
    assert missing_parts(read_record(run, "run")) == [f"run: {run}/held_out/step-20.npz is damaged."]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a", "x/b"], ["a", "b"]),
        (["x/a", "y/a", "y/b"], ["x/a", "y/a", "y/b"]),
        (["x/a", "x/a", "x/a"], ["a", "a (again)", "a (again 2)"]),
        (["x/a", "x/b", "x/../x/a"], ["a", "b", "a (again)"]),
    ],
)
def test_names_are_as_short_as_they_can_be_told_apart(paths, names):
    assert short_names([Path(path) for path in paths]) == names
