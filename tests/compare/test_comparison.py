import json

import pytest
from run_folders import keep_document_losses, write_lines, write_run

from cpt.compare.comparison import compare, read_records


def lines_of(comparison):
    return {(topic.title, row.name): row.values for topic in comparison.differences for row in topic.rows}


def not_compared(comparison):
    return "\n".join(comparison.not_compared)


def one_key(recipe, **others):
    recipe["optimizer"]["learning_rate"] = 2e-3


def one_byte(inputs, **others):
    inputs["data"]["sources"]["general"]["files"] = {"/corpus/general.jsonl": "another-hash"}
    inputs["data"]["sources"]["general"]["tokens"] += 1  # what follows from it
    inputs["data"]["fingerprint"] = "f1"


def one_version(environment, **others):
    environment["versions"]["torch"] = "2.14.0"


def same_but_elsewhere(recipe, environment, inputs, status):
    """Nothing of this is a difference."""
    recipe["output_dir"] = "elsewhere/runs"
    environment.update(started="2026-05-05T00:00:00+00:00", command=["other.py"], folder="/elsewhere")
    environment["git"]["changes"] = "?? elsewhere/runs/\n"
    status.update(pid=77, seconds=99.0)
    recipe["data"]["sources"][0]["path"] = "copy/of.jsonl"
    inputs["data"]["sources"]["domain"]["files"] = {"/copy/of.jsonl": "domain-hash"}
    recipe["model"]["path"] = "copy/model"
    inputs["weights"]["path"] = inputs["tokenizer"]["path"] = "copy/model"


def test_three_runs_with_three_planted_differences_show_exactly_those(tmp_path):
    """The acceptance test: a key of the recipe, a byte of the data, the version of a package."""
    write_run(tmp_path / "first", one_key)
    write_run(tmp_path / "second", one_byte)

    def version_elsewhere(**files):
        one_version(**files)
        same_but_elsewhere(**files)

    write_run(tmp_path / "third", version_elsewhere)
    comparison = compare([tmp_path / name for name in ("first", "second", "third")])
    assert lines_of(comparison) == {
        ("Recipe", "optimizer.learning_rate"): ("0.002", "0.001", "0.001"),
        ("Versions", "torch"): ("2.13.0", "2.13.0", "2.14.0"),
        ("Data", "general: general.jsonl"): ("general-hash", "another-hash", "general-hash"),
    }
    assert "3 differences (recipe 1, versions 1, data 1)" in comparison.headline()


def test_runs_that_differ_in_nothing_are_said_to(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", same_but_elsewhere)
    comparison = compare([first, second])
    assert lines_of(comparison) == {} and "nothing differs" in comparison.headline()
    (recipe,) = comparison.differences
    assert recipe.remarks == tuple(
        f"{key} is written in other ways, but the files are the same."
        for key in ("model.path", "data.sources[domain].path")
    )


def test_losses_are_compared_at_the_same_tokens_and_told_to_the_last_bit(tmp_path):
    losses = [5 - 0.1 * step for step in range(1, 21)]
    first, same = write_run(tmp_path / "first"), write_run(tmp_path / "same")
    other = write_run(tmp_path / "other", losses=[*losses[:9], losses[9] + 1e-15, *losses[10:15]])
    comparison = compare([first, same, other])
    (topic,) = (topic for topic in comparison.figures if topic.title == "Training loss")
    rows = {row.name: row.values for row in topic.rows}
    assert rows["after 7,680 tokens"] == ("4.3000", "4.3000 (+0.0000)", "4.3000 (+0.0000)")
    assert rows["at the run's end"][2] == "3.5000 (+0.5000)"
    assert "bit-equal up to step 20, the last log of both (20 compared)." in topic.remarks[1]
    assert "bit-equal up to step 9 and first differ at step 10: 4.000000000000001 and 4.0." in topic.remarks[2]


def test_held_out_text_has_standard_errors_and_paired_differences(tmp_path):
    first, second, third = (write_run(tmp_path / name) for name in ("first", "second", "third"))
    keep_document_losses(first)
    keep_document_losses(second, shift=0.1)
    keep_document_losses(third, first=1)
    comparison = compare([first, second, third])
    (topic,) = (topic for topic in comparison.figures if topic.title.startswith("Held-out"))
    value, difference = topic.rows
    assert value.values[0] is not None and value.values[0].startswith("1.2500 ± 0.00")
    assert difference.numbers[1] == pytest.approx(0.1 / 0.6931, rel=1e-3)
    assert "+0.1443 (95 % interval +0.1443 to +0.1443, 40 documents)" in difference.values
    assert (
        "`domain` document by document, third with first: the documents are not the same." in comparison.not_compared
    )


def test_what_makes_losses_mean_something_else_is_told(tmp_path):
    first = write_run(tmp_path / "first")
    tokenizer = write_run(tmp_path / "tokenizer", lambda inputs, **others: inputs["tokenizer"].update(xxh3="other"))
    stage = write_run(tmp_path / "stage", lambda recipe, **others: recipe.update(stage="sft"))
    comparison = compare([first, tokenizer, stage])
    told = not_compared(comparison)
    assert "losses per token of tokenizer: its tokenizer is another than that of first" in told
    assert "training losses of stage: its stage is sft, that of first is cpt." in told
    (losses,) = (topic for topic in comparison.figures if topic.title == "Training loss")
    assert all(row.values[1:] == (None, None) for row in losses.rows) and len(losses.remarks) == 1
    assert lines_of(comparison)[("Tokenizer and weights", "tokenizer")] == ("tokenizer-ha", "other", "tokenizer-ha")


def test_a_run_that_goes_on_and_one_given_twice_are_told(tmp_path):
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", lambda status, **others: status.update(state="running", pid=1))
    told = not_compared(compare([first, second, first]))
    assert "the end of second: it is still running at step 20" in told
    assert "first (again) is the very folder of first: it was given twice." in told


def test_a_title_names_a_few_runs_and_counts_many(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    assert compare([first, second]).title == "first and second"
    assert compare([first, *[second] * 6]).title == "7 runs beside first"


FILES = (
    "recipe.yaml",
    "environment.json",
    "inputs.json",
    "status.json",
    "metrics.jsonl",
    "events.jsonl",
    "verdict.json",
    "starts.jsonl",
)


@pytest.mark.parametrize("name", [*FILES, "held_out/step-20.npz"])
@pytest.mark.parametrize(
    "rubbish",
    [None, b"", b'{"a": ', b"[1, 2]", b'{"data": 5, "git": 3, "versions": [], "stage": []}', b"\xff\xfe\x00"],
)
def test_a_file_that_is_gone_or_rubbish_costs_only_what_it_tells(tmp_path, name, rubbish):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", one_key)
    for folder in (first, second):
        keep_document_losses(folder)
        write_lines(folder / "events.jsonl", [{"kind": "restart", "message": "x"}])
    path = second / name
    path.unlink(missing_ok=True)
    if rubbish is not None:
        path.write_bytes(rubbish)
    for folders in ([first, second], [second, first]):
        comparison = compare(folders)
        json.dumps(comparison.to_json(), allow_nan=False)
        assert (("Recipe", "optimizer.learning_rate") in lines_of(comparison)) == (name != "recipe.yaml")
        if name not in ("events.jsonl", "verdict.json", "starts.jsonl") and not (rubbish or b"").startswith(
            b'{"data"'
        ):
            assert "second" in not_compared(comparison)


def test_losses_by_document_without_sense_are_survived(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    keep_document_losses(first, documents=1)
    keep_document_losses(second, documents=1)
    assert "an interval needs 2 documents" in not_compared(compare([first, second]))


def test_long_runs_are_read_by_several_processes_with_the_same_result(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    alone = read_records(folders)
    monkeypatch.setattr("cpt.compare.comparison.WORTH_PROCESSES", 0)
    assert [record.recipe for record in read_records(folders)] == [record.recipe for record in alone]
    assert [record.name for record in read_records(folders)] == ["a", "b"]
