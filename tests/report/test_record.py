import pytest

from cpt.errors import CheckpointError
from cpt.report.record import read_record


def test_all_files_of_a_run_are_read(record):
    assert (record.recipe["name"], record.status["step"], record.inputs["tokenizer"]["xxh3"]) == ("code", 100, "cd")
    assert (len(record.events), len(record.samples), record.tokens, record.tokens_per_step) == (2, 2, 1600, 16)
    assert (record.general_sets, record.unreadable) == ({"prose"}, [])


def test_a_run_that_has_only_begun_has_what_its_recipe_says(lone_record):
    assert (lone_record.tokens, lone_record.tokens_per_step, lone_record.events) == (None, 16, [])


@pytest.mark.parametrize("name", ["nothing here", ""])
def test_what_is_no_run_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="is no run. Name the folder of one"):
        read_record(tmp_path / name)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("status.json", b'{"state": "fin', "status.json is cut off or no JSON"),
        ("verdict.json", b"[" * 100_000, "verdict.json is cut off or no JSON"),
        ("plan.json", b"3", "plan.json holds no JSON object"),
        ("inputs.json", b"", "inputs.json is cut off or no JSON"),
        ("environment.json", b"\xff\xfe\x00", "environment.json is cut off or no JSON"),
        ("recipe.yaml", b"a: [", "recipe.yaml is cut off or no YAML"),
        ("recipe.yaml", b"- a\n- b\n", "recipe.yaml"),
        ("events.jsonl", b'{"kind": "x"}\n3\n{"kind', "events.jsonl: 2 lines cannot be read"),
    ],
)
def test_rubbish_in_a_file_is_told_and_the_others_are_read(run_folder, file, content, told):
    (run_folder / file).write_bytes(content)
    record = read_record(run_folder)
    assert len(record.unreadable) == 1 and told in record.unreadable[0]
    assert len(record.samples) == 2


def test_a_folder_in_the_place_of_a_file_is_told(run_folder):
    (run_folder / "plan.json").unlink()
    (run_folder / "plan.json").mkdir()
    assert read_record(run_folder).unreadable == [f"{run_folder}/plan.json cannot be read: Is a directory."]


def test_a_line_separator_within_a_text_ends_no_line(run_folder):
    (run_folder / "samples.jsonl").write_text(
        '{"step": 0, "prompt": "a\u2028b", "continuation": "c"}\n', encoding="utf-8"
    )
    record = read_record(run_folder)
    assert record.samples[0]["prompt"] == "a\u2028b" and record.unreadable == []
