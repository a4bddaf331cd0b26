import json

from run_folders import keep_document_losses, write_run

from cpt.compare.held_out import held_out_topic, task_topic, told_difference
from cpt.compare.record import read_record
from cpt.evaluation.paired import Difference


def test_a_set_that_one_run_lacks_is_not_known_of_it(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    (second / "metrics.jsonl").write_text('{"step": 4, "tokens": 4096, "eval_other_bits_per_byte": 2}\n')
    said: list[str] = []
    topic = held_out_topic([read_record(folder, folder.name) for folder in (first, second)], said)
    assert {row.name: row.values for row in topic.rows} == {
        "domain": ("1.2500", None),
        "other": (None, "2.0000"),
        "tokens seen by then": ("20,480", "4,096"),
    }
    assert said == [
        f"`{name}` document by document: no run kept its losses by document." for name in ("domain", "other")
    ]


def test_losses_that_one_run_did_not_keep_are_told(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    keep_document_losses(first)
    said: list[str] = []
    held_out_topic([read_record(folder, folder.name) for folder in (first, second)], said)
    assert said == ["`domain` document by document, second with first: no losses were kept by second."]


def test_scores_have_standard_errors(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    task = {"name": "arc", "metric": "acc", "value": 0.5, "interval": [0.402, 0.598], "questions": 100}
    (runs[0] / "verdict.json").write_text(
        json.dumps({"tasks": [task, {"name": "odd", "value": "x"}, 5], "domain_test": None})
    )
    (runs[1] / "verdict.json").write_text(json.dumps({"tasks": [{**task, "value": 0.6, "interval": None}]}))
    (row,) = task_topic([read_record(run, run.name) for run in runs]).rows
    assert (
        row.name == "arc (acc)"
        and row.values == ("0.500 ± 0.050 (100 questions)", "0.600 (100 questions)")
        and row.numbers == (0.5, 0.6)
    )


def test_a_difference_says_how_sure_it_is():
    assert (
        told_difference(Difference(1, 0.9, -0.1, -0.12, -0.08, 300))
        == "-0.1000 (95 % interval -0.1200 to -0.0800, 300 documents)"
    )
    assert told_difference(Difference(1, 0.9, -0.1, -0.3, 0.1, 9)).endswith("9 documents, few, not clear)")
    assert told_difference(Difference(1, 1, 0, 0, 0, 40)) == "none, on all 40 documents"
