import json
from pathlib import Path

import pytest
from approved import check_approved
from run_folders import keep_document_losses, write_lines, write_run

from cpt.analysis import compare as module
from cpt.analysis.compare import compare


def compared(tmp_path, *plants):
    """Runs that differ from `first` in what each plant changes."""
    first = write_run(tmp_path / "first")
    return compare([first, *(write_run(tmp_path / plant.__name__, plant) for plant in plants)])


def differences(comparison):
    return {
        (topic.title, row.name): tuple(row.values)
        for topic in comparison.differences
        for row in topic.rows
    }


def figures(comparison, title):
    (topic,) = (topic for topic in comparison.results if topic.title.startswith(title))
    return {row.name: tuple(row.values) for row in topic.rows}


def one_key(recipe, **others):
    recipe["optimizer"]["learning_rate"] = 2e-3


def one_byte(inputs, **others):
    inputs["data"]["sources"]["general"]["files"] = {"/corpus/general.jsonl": "another-hash"}
    inputs["data"]["fingerprint"] = "f1"


def elsewhere(recipe, environment, inputs, status):
    """Only the paths are differences."""
    recipe["output_dir"] = "elsewhere/runs"
    environment.update(
        started="2026-05-05T00:00:00+00:00", command=["other.py"], folder="/elsewhere"
    )
    environment["git"]["changes"] = "?? elsewhere/runs/\n"
    status.update(pid=77, seconds=99.0)
    recipe["data"]["sources"][0]["path"] = "copy/of.jsonl"
    inputs["data"]["sources"]["domain"]["files"] = {"/copy/of.jsonl": "domain-hash"}
    recipe["model"]["path"] = "copy/model"
    inputs["weights"]["path"] = inputs["tokenizer"]["path"] = "copy/model"


def another_machine(environment, **others):
    environment["versions"] |= {"peft": "0.21", "torch": "2.14.0"}
    environment["hardware"] |= {"gpus": ["H100"] * 8}
    environment["variables"] = {"NCCL_ALGO": "Ring"}
    environment["git"] |= {"changes": " M a.py\n?? b.py", "diff": "+1"}


# --- what differs ----------------------------------------------------------------------------------------------------


def test_planted_differences_are_found_and_files_are_compared_by_content(tmp_path):
    comparison = compared(tmp_path, one_key, one_byte)
    assert differences(comparison) == {
        ("Recipe", "optimizer.learning_rate"): ("0.001", "0.002", "0.001"),
        ("Data", "general: general.jsonl"): ("general-hash", "general-hash", "another-hash"),
    }
    moved = differences(compared(tmp_path / "two", elsewhere))
    assert [*moved] == [("Recipe", "model.path"), ("Recipe", "data.sources[domain].path")]


def test_other_rows_of_the_same_files_have_another_fingerprint(tmp_path):
    def other_rows(inputs, **others):
        inputs["data"]["fingerprint"] = "f9"

    assert differences(compared(tmp_path, other_rows)) == {("Data", "fingerprint"): ("f0", "f9")}


def changed(step, key, after, *, kind="from_step", note=None):
    return {
        "step": step,
        "note": note,
        "changes": [{"key": key, "kind": kind, "before": 1.0, "after": after}],
    }


def test_changes_during_a_run_are_differences_unless_they_are_free_or_the_same(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    free = changed(5, "checkpoints.keep", 2, kind="free")
    same = changed(8, "data.sources[code].weight", 2.0)
    write_lines(first / "history.jsonl", [same])
    slower = [
        changed(9, "optimizer.learning_rate", 0.7),
        changed(9, "optimizer.learning_rate", 0.5, note="too fast"),
    ]
    write_lines(second / "history.jsonl", [free, same, *slower])
    assert differences(compare([first, second])) == {
        ("Changes during the run", "step 9: optimizer.learning_rate"): (
            "unchanged",
            "1.0 -> 0.7, then 1.0 -> 0.5 (too fast)",
        )
    }


# --- branches --------------------------------------------------------------------------------------------------------


def branch_of(folder, step, losses):
    """A run that began from a checkpoint of a run of 20 steps."""
    run = write_run(folder.with_name(f"branch-{step}"))
    (run / "began_from.json").write_text(
        json.dumps({"checkpoint": str(folder / f"checkpoint-{step}")})
    )
    lines = [
        {"step": at, "tokens": 1024 * at, "loss": loss} for at, loss in enumerate(losses, step + 1)
    ]
    write_lines(run / "metrics.jsonl", lines)
    return run


@pytest.mark.parametrize("html", [False, True])
def test_a_trunk_and_its_branch_are_compared_from_the_fork_on(tmp_path, cpt, html):
    trunk = write_run(tmp_path / "trunk")
    branch = branch_of(trunk, 10, [1.0] * 10)
    write_lines(trunk / "history.jsonl", [changed(4, "seed", 2)])  # both have it
    comparison = compare([trunk, branch])
    assert comparison.fork == 10 and comparison.differences == []
    assert [len(run.record.metrics.columns["step"]) for run in comparison.runs] == [11, 10]
    assert list(figures(comparison, "Training loss"))[0] == "after 12,186 tokens"
    page = tmp_path / "page.html"
    _, said = cpt("compare", trunk, branch, *(["--html", page] if html else []))
    assert "step 10" in (page.read_text() if html else said).partition("Progress")[0]


def test_branches_of_one_trunk_fork_where_the_first_of_them_left_it(tmp_path):
    trunk = write_run(tmp_path / "trunk")
    early, late = branch_of(trunk, 5, [2.0] * 15), branch_of(trunk, 15, [3.0] * 5)
    last = branch_of(early, 12, [4.0] * 8)
    forks = {
        (early, late): 5,
        (late, early, trunk): 5,
        (late, last): 5,
        (last, early): 12,
        (late, trunk): 15,
    }
    assert {runs: compare(runs).fork for runs in forks} == forks
    assert compare([trunk, trunk]).fork == compare([early, write_run(tmp_path / "other")]).fork == 0


# --- what they achieved ----------------------------------------------------------------------------------------------


def test_losses_are_compared_at_the_same_tokens_and_bit_for_bit(tmp_path):
    losses = [5 - 0.1 * step for step in range(1, 21)]
    first, same = write_run(tmp_path / "first"), write_run(tmp_path / "same")
    other = write_run(tmp_path / "other", losses=[*losses[:9], losses[9] + 1e-15, *losses[10:15]])
    comparison = compare([first, same, other])
    rows = figures(comparison, "Training loss")
    assert rows["after 7,680 tokens"] == ("4.3000", "4.3000 (+0.0000)", "4.3000 (+0.0000)")
    assert rows["after 20,480 tokens"] == ("3.0000", "3.0000 (+0.0000)", None)
    assert rows["first different log"] == ("-", "none of 20", "step 10")


def test_losses_of_another_task_or_tokenizer_are_not_compared(tmp_path):
    def other_tokenizer(inputs, **others):
        inputs["tokenizer"]["xxh3"] = "other"

    def other_stage(recipe, **others):
        recipe["stage"] = "sft"

    comparison = compared(tmp_path, other_tokenizer, other_stage)
    assert all(
        values[1:] == (None, None) for values in figures(comparison, "Training loss").values()
    )
    assert any("tokenizer" in one for one in comparison.not_compared)
    assert any("sft" in one for one in comparison.not_compared)


def test_held_out_text_is_compared_document_by_document_if_the_documents_are_the_same(tmp_path):
    first, second, third = (write_run(tmp_path / name) for name in ("first", "second", "third"))
    keep_document_losses(first)
    keep_document_losses(second, shift=0.1)  # nats a byte: 0.1 / ln 2 bits
    keep_document_losses(third, first=1)
    comparison = compare([first, second, third])
    rows = figures(comparison, "Held-out")
    assert rows["domain, difference"][1].startswith(
        "+0.1443, worse (95 % interval +10.4 to +10.6 % per document; 40 of 40 documents"
    )
    assert rows["domain, difference"][2] is None and "third" in comparison.not_compared[0]


FILES = (
    "recipe.yaml",
    "environment.json",
    "inputs.json",
    "status.json",
    "metrics.jsonl",
    "held_out/step-20.npz",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [None, b'{"a": '])
def test_a_missing_or_damaged_file_costs_only_its_own_rows(tmp_path, name, damage):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", one_key)
    for run in (first, second):
        keep_document_losses(run)
    (second / name).unlink()
    if damage is not None:
        (second / name).write_bytes(damage)
    comparison = compare([first, second])
    json.dumps(comparison.to_json(), allow_nan=False)
    assert (("Recipe", "optimizer.learning_rate") in differences(comparison)) == (
        name != "recipe.yaml"
    )
    assert any("second" in sentence for sentence in comparison.not_compared)


@pytest.mark.heavy
def test_long_runs_are_read_by_several_processes(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "second", one_key)]
    alone = compare(folders).to_json()
    monkeypatch.setattr(module, "WORTH_PROCESSES", 0)
    assert compare(folders).to_json() == alone


def test_the_page_draws_the_smoothed_losses(tmp_path, cpt):
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    for run in runs:
        write_lines(
            run / "metrics.jsonl",
            [{"step": s, "tokens": s, "loss_smoothed": 1 / s} for s in range(1, 9)],
        )
    cpt("compare", *runs, "--html", tmp_path / "page.html")
    assert "<figcaption>Training loss" in (tmp_path / "page.html").read_text()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_printed_comparison_is_as_approved(tmp_path, cpt):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", another_machine)
    task = {"name": "arc", "metric": "acc", "interval": [0.402, 0.598], "questions": 100}
    for run, value in ((first, 0.5), (second, 0.6)):
        (run / "verdict.json").write_text(
            json.dumps({"tasks": [{**task, "value": value}], "domain_test": None})
        )
        keep_document_losses(run, shift=value)
    write_lines(second / "starts.jsonl", [{"started": "later", "processes": 4}])
    lines = [
        {
            "step": step,
            "tokens": 1024 * step,
            "loss": 5 - 0.09 * step,
            "tokens_per_second": 2000,
            "mfu": 0.4,
        }
        for step in range(1, 21)
    ]
    write_lines(second / "metrics.jsonl", [{**line, "gpu_memory_peak_gib": 7} for line in lines])
    write_lines(
        second / "events.jsonl", [{"kind": "restart"}, {"kind": "restart"}, {"kind": "alert"}]
    )
    assert len(json.loads(cpt("compare", first, second, "--json")[1])["differences"]) > 5
    code, said = cpt("compare", first, second)
    assert code == 0
    check_approved(said, Path(__file__).with_name("approved_comparison.txt"))


LONG = "x" * 120


@pytest.mark.parametrize(
    ("values", "visible"),
    [
        ((f"{LONG}one", f"{LONG}two"), ("one", "two")),
        ((f"{LONG}one{LONG}", f"{LONG}two{LONG}", "short"), ("one", "two", "short")),
        (([LONG, LONG, 1], [LONG, LONG, 2]), ("1]", "2]")),
        (({"a": LONG, "b": {"c": 1}}, {"a": LONG, "b": {"c": 2}}), ("c: 1", "c: 2")),
        ((LONG, LONG + "end"), ("x", "end")),
        (("a  b", "a b"), ("a  b", "a b")),
        (("1", 1), ('"1"', "1")),
    ],
)
def test_what_differs_of_long_values_is_visible(values, visible):
    found = module.format_values(values)
    assert len(set(found)) == len(values) and max(map(len, found)) <= module.LONGEST + 6
    assert all(part in text for part, text in zip(visible, found, strict=True))


def test_long_keys_and_values_are_whole_in_a_narrow_terminal(tmp_path, cpt, monkeypatch):
    key = "a_key_of_the_model_config_with_a_very_long_name_" * 2 + "end"

    def plant(recipe, **others):
        recipe["model"]["config"] = {"model_type": "llama", key: LONG + "planted"}

    def other(recipe, **others):
        recipe["model"]["config"] = {"model_type": "llama", key: LONG + "another"}

    folders = [write_run(tmp_path / one.__name__, one) for one in (plant, other)]
    for columns in ("80", ""):
        monkeypatch.setenv("COLUMNS", columns)
        code, said = cpt("compare", *folders)
        table = said[said.index("Recipe") :]
        letters = "".join(
            line[: line.find("  ")].strip() if "  " in line else line for line in table.splitlines()
        )
        assert code == 0
        for part in ("planted", "another"):
            assert part in "".join(said.split()), columns
        assert key in letters.replace(" ", ""), (columns, table)
