import json

import pytest
from tiny import write_recipe

from cpt.errors import CheckpointError
from cpt.reproduce.record import read_record


@pytest.fixture
def run(tiny_recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_recipe(tiny_recipe, folder / "recipe.yaml")
    (folder / "environment.json").write_text(json.dumps({"processes": 2, "folder": str(tmp_path)}))
    (folder / "inputs.json").write_text("{}")
    lines = [{"step": 0, "eval_a_loss": 1.0}, {"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.5}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 30, "lo')
    return folder


def test_a_record_knows_its_processes_place_and_logs(run, tmp_path):
    record = read_record(run)
    assert (record.processes, record.place, len(record.lines)) == (2, tmp_path, 3)
    assert (record.first_log_from(5), record.first_log_from(20), record.first_log_from(21)) == (10, 20, None)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("recipe.yaml", None, "is no run's folder"),
        ("environment.json", None, "environment.json cannot be read"),
        ("inputs.json", "{not json", "inputs.json cannot be read"),
        ("inputs.json", "[]", "is no record of a run"),
        ("metrics.jsonl", None, "holds no loss"),
        ("metrics.jsonl", "rubbish\n[1]\n", "holds no loss"),
    ],
)
def test_what_is_missing_or_damaged_is_named(run, name, content, complaint):
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_text(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_record(run)
