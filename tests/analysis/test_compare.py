import json

import pytest
from run_folders import keep_document_losses, write_lines, write_run

from cpt.analysis import compare as module
from cpt.analysis.compare import compare
from cpt.cli import main


def differences(comparison):
    return {(topic.title, row.name): row.values for topic in comparison.differences for row in topic.rows}


def figures(comparison, title):
    (topic,) = (topic for topic in comparison.figures if topic.title.startswith(title))
    return {row.name: row.values for row in topic.rows}


def two_runs(tmp_path, plant=lambda **files: None):
    return [write_run(tmp_path / "first"), write_run(tmp_path / "second", plant)]


def one_key(recipe, **others):
    recipe["optimizer"]["learning_rate"] = 2e-3


def one_byte(inputs, **others):
    inputs["data"]["sources"]["general"]["files"] = {"/corpus/general.jsonl": "another-hash"}
    inputs["data"]["fingerprint"] = "f1"


def elsewhere(recipe, environment, inputs, status):
    """Nothing of this is a difference."""
    recipe["output_dir"] = "elsewhere/runs"
    environment.update(started="2026-05-05T00:00:00+00:00", command=["other.py"], folder="/elsewhere")
    environment["git"]["changes"] = "?? elsewhere/runs/\n"
    status.update(pid=77, seconds=99.0)
    recipe["data"]["sources"][0]["path"] = "copy/of.jsonl"
    inputs["data"]["sources"]["domain"]["files"] = {"/copy/of.jsonl": "domain-hash"}
    recipe["model"]["path"] = "copy/model"
    inputs["weights"]["path"] = inputs["tokenizer"]["path"] = "copy/model"


def test_three_planted_differences_are_found_and_no_others(tmp_path):
    def one_version(environment, **others):
        elsewhere(environment=environment, **others)
        environment["versions"]["torch"] = "2.14.0"

    write_run(tmp_path / "first", one_key)
    write_run(tmp_path / "second", one_byte)
    write_run(tmp_path / "third", one_version)
    comparison = compare([tmp_path / name for name in ("first", "second", "third")])
    assert differences(comparison) == {
        ("Recipe", "optimizer.learning_rate"): ("0.002", "0.001", "0.001"),
        ("Versions", "torch"): ("2.13.0", "2.13.0", "2.14.0"),
        ("Data", "general: general.jsonl"): ("general-hash", "another-hash", "general-hash"),
    }
    assert "3 differences" in comparison.headline()


def test_the_same_files_elsewhere_are_a_remark_and_no_difference(tmp_path):
    comparison = compare(two_runs(tmp_path, elsewhere))
    assert differences(comparison) == {}
    remarks = [remark for topic in comparison.differences for remark in topic.remarks]
    assert [remark.split()[0] for remark in remarks] == ["model.path", "data.sources[domain].path"]


def test_a_recipe_of_another_version_is_compared_as_written(tmp_path):
    comparison = compare(two_runs(tmp_path, lambda recipe, **others: recipe.update(unknown=1)))
    assert differences(comparison)[("Recipe", "unknown")] == ("not set", "1")
    assert "second" in comparison.not_compared[0] and "recipe.yaml" in comparison.not_compared[0]


def test_environments_differ_in_what_both_are_known_to_have(tmp_path):
    def plant(environment, **others):
        environment["versions"] |= {"peft": "0.21", "deepspeed": "0.19"}
        environment["hardware"] |= {"gpus": ["H100"] * 8}
        environment["variables"] = {"NCCL_ALGO": "Ring"}
        environment["git"] |= {"changes": " M a.py\n?? b.py", "diff": "+1"}
        del environment["platform"]

    first, second = two_runs(tmp_path, plant)
    write_lines(second / "starts.jsonl", [{"started": "later", "processes": 4}])
    found = differences(compare([first, second]))
    assert found.pop(("Code", "uncommitted changes"))[1].startswith("a.py (")
    assert found == {
        ("Versions", "peft"): ("not installed", "0.21"),
        ("Machine", "processes"): ("1", "1, then 4"),
        ("Machine", "gpus"): ("none", "8 x H100"),
        ("Machine", "variable OMP_NUM_THREADS"): ("2", "not set"),
        ("Machine", "variable NCCL_ALGO"): ("not set", "Ring"),
    }


def test_a_fingerprint_differs_only_if_nothing_explains_it(tmp_path):
    def other_rows(recipe, inputs, **others):
        inputs["data"]["fingerprint"] = "f9"

    def other_seed(recipe, inputs, **others):
        inputs["data"]["fingerprint"], recipe["seed"] = "f9", 2

    first, second = two_runs(tmp_path, other_rows)
    third = write_run(tmp_path / "third", other_seed)
    assert differences(compare([first, second])) == {("Data", "fingerprint"): ("f0", "f9")}
    assert list(differences(compare([first, third]))) == [("Recipe", "seed")]


def test_losses_are_compared_at_the_same_tokens_and_bit_for_bit(tmp_path):
    losses = [5 - 0.1 * step for step in range(1, 21)]
    first, same = write_run(tmp_path / "first"), write_run(tmp_path / "same")
    other = write_run(tmp_path / "other", losses=[*losses[:9], losses[9] + 1e-15, *losses[10:15]])
    comparison = compare([first, same, other])
    rows = figures(comparison, "Training loss")
    assert rows["after 7,680 tokens"] == ("4.3000", "4.3000 (+0.0000)", "4.3000 (+0.0000)")
    assert rows["after 20,480 tokens"] == ("3.0000", "3.0000 (+0.0000)", None)
    remarks = [remark for topic in comparison.figures for remark in topic.remarks]
    assert "step 20" in remarks[1]
    assert "step 9 " in remarks[2] and "step 10: 4.000000000000001 and 4.0." in remarks[2]


def test_held_out_text_is_compared_document_by_document(tmp_path):
    first, second, third, fourth = (write_run(tmp_path / name) for name in ("first", "second", "third", "fourth"))
    keep_document_losses(first)
    keep_document_losses(second, shift=0.1)
    keep_document_losses(third, first=1)
    comparison = compare([first, second, third, fourth])
    rows = figures(comparison, "Held-out")
    assert rows["domain"][0].startswith("1.2500 ± 0.00") and rows["domain"][3] == "1.2500"
    assert rows["domain, difference"][1].startswith("+0.1443 (95 % interval +0.1443 to +0.1443, 40 documents")
    assert rows["domain, difference"][2:] == (None, None)
    assert ["third" in one or "fourth" in one for one in comparison.not_compared] == [True, True]


def test_losses_of_another_task_or_tokenizer_are_not_compared(tmp_path):
    first = write_run(tmp_path / "first")
    tokenizer = write_run(tmp_path / "tokenizer", lambda inputs, **others: inputs["tokenizer"].update(xxh3="other"))
    stage = write_run(tmp_path / "stage", lambda recipe, **others: recipe.update(stage="sft"))
    comparison = compare([first, tokenizer, stage])
    assert all(values[1:] == (None, None) for values in figures(comparison, "Training loss").values())
    assert any("tokenizer" in one for one in comparison.not_compared)
    assert any("sft" in one for one in comparison.not_compared)


def test_scores_speed_memory_and_events_are_compared(tmp_path):
    first, second = two_runs(tmp_path)
    task = {"name": "arc", "metric": "acc", "value": 0.5, "interval": [0.402, 0.598], "questions": 100}
    for run, value in ((first, 0.5), (second, 0.6)):
        (run / "verdict.json").write_text(json.dumps({"tasks": [{**task, "value": value}], "domain_test": None}))
    lines = [{"step": n, "tokens": n, "tokens_per_second": 2000.0, "gpu_memory_peak_gib": n} for n in (1, 3, 2)]
    write_lines(second / "metrics.jsonl", lines)
    write_lines(second / "events.jsonl", [{"kind": "restart"}, {"kind": "restart"}, {"kind": "alert"}])
    comparison = compare([first, second])
    assert figures(comparison, "Tasks")["arc (acc)"][1] == "0.600 ± 0.050 (100 questions)"
    assert figures(comparison, "Speed")["tokens/s"] == ("1,010", "2,000 (+97.9%)")
    assert figures(comparison, "Speed")["GPU memory, peak (GiB)"] == (None, "3.00")
    assert figures(comparison, "Events") == {"alert": ("0", "1"), "restart": ("0", "2")}
    assert figures(comparison, "Progress")["time of the last start"] == ("12.5 s", "12.5 s")


FILES = ("recipe.yaml", "environment.json", "inputs.json", "status.json", "metrics.jsonl", "held_out/step-20.npz")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [None, b'{"a": '])
def test_a_missing_or_damaged_file_costs_only_its_own_rows(tmp_path, name, damage):
    first, second = two_runs(tmp_path, one_key)
    for run in (first, second):
        keep_document_losses(run)
    (second / name).unlink()
    if damage is not None:
        (second / name).write_bytes(damage)
    comparison = compare([first, second])
    json.dumps(comparison.to_json(), allow_nan=False)
    assert (("Recipe", "optimizer.learning_rate") in differences(comparison)) == (name != "recipe.yaml")
    assert any("second" in sentence for sentence in comparison.not_compared)


def test_long_runs_are_read_by_several_processes(tmp_path, monkeypatch):
    folders = two_runs(tmp_path)
    alone = compare(folders).to_json()
    monkeypatch.setattr(module, "WORTH_PROCESSES", 0)
    assert compare(folders).to_json() == alone


def ended(*words):
    with pytest.raises(SystemExit) as code:
        main(["compare", *map(str, words)])
    return code.value.code


def test_a_comparison_is_printed_and_written_in_each_form(tmp_path, capsys):
    runs = [*two_runs(tmp_path, one_key), *(write_run(tmp_path / name) for name in "cdef")]
    page = tmp_path / "c.html"
    assert ended(*runs, "--html", page) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        assert "optimizer.learning_rate" in text and "0.002" in text
    assert ended(*runs[:2], "--json") == 0
    assert json.loads(capsys.readouterr().out)["differences"][0]["values"] == ["0.001", "0.002"]


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "first")
    assert ended(run) == 2
    assert ended(run, tmp_path / "firts") == 2 and str(run) in capsys.readouterr().err
    assert ended(run, run, "--html", tmp_path / "no" / "x.html") == 2 and "x.html" in capsys.readouterr().err
