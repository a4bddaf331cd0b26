from dataclasses import replace

from cpt.report.missing import missing
from cpt.report.record import read_record


def lines(record):
    return [line for part in missing(record).parts for line in part.lines]


def test_nothing_is_missing_in_a_whole_run(record):
    assert lines(record) == []


def test_a_run_that_has_only_begun_lacks_what_it_has_not_written(lone_record):
    told = " ".join(lines(lone_record))
    for name in ("environment.json", "inputs.json", "status.json", "metrics.jsonl", "samples.jsonl", "`prose`"):
        assert name in told
    assert "verdict.json" not in told  # nobody expects one of a run that has not finished


def test_a_finished_run_without_a_verdict_is_told_how_to_get_one(run_folder):
    (run_folder / "verdict.json").unlink()
    assert lines(read_record(run_folder)) == [
        f"verdict.json: whether it worked is not judged. Do it: cpt verdict {run_folder}"
    ]


def test_unreadable_files_are_in_the_same_list(record):
    assert lines(replace(record, unreadable=["plan.json is empty."])) == ["plan.json is empty."]


def test_a_machine_with_a_gpu_whose_memory_was_not_logged_is_told(run_folder):
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 16, "loss": 1, "eval_prose_bits_per_byte": 2}\n')
    assert lines(read_record(run_folder)) == [
        "GPU memory was not logged, though the machine has a GPU.",
        "Speed was not logged.",
    ]


def test_a_run_without_a_gpu_is_said_to_have_no_plan(run_folder):
    (run_folder / "plan.json").unlink()
    record = read_record(run_folder)
    assert lines(record) == ["plan.json: memory and speed have no plan to be held against."]
    without = replace(record, environment={"hardware": {"gpus": []}})
    assert lines(without) == ["plan.json: memory has no plan to be held against: the run had no GPU."]


def test_metrics_without_a_loss_are_told(run_folder):
    (run_folder / "metrics.jsonl").write_text("rubbish\n")
    assert "metrics.jsonl holds no training loss." in lines(read_record(run_folder))
