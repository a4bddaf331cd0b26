import json

import pytest
import yaml
from tiny import TINY_LLAMA

from benchmarks.rewarming.__main__ import main, parse


def test_text_of_ones_own_needs_both_kinds(capsys):
    with pytest.raises(SystemExit):
        parse(["--general", "web.jsonl"])
    assert "at least one --shift" in capsys.readouterr().err


@pytest.mark.parametrize("shift", ["german.jsonl", "general=german.jsonl"])
def test_a_shift_has_a_name_of_its_own(shift, capsys):
    with pytest.raises(SystemExit):
        parse(["--general", "web.jsonl", "--shift", shift])
    assert f"not {shift}" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit):
        parse(["--model", str(tmp_path / "none.yaml")])
    assert "none.yaml is not there" in capsys.readouterr().err


def test_results_of_another_model_do_not_replace_ours(capsys, tmp_path):
    (tmp_path / "model.yaml").touch()
    with pytest.raises(SystemExit):
        parse(["--model", str(tmp_path / "model.yaml")])
    assert "need an --output" in capsys.readouterr().err
    assert parse(["--model", str(tmp_path / "model.yaml"), "--output", "mine.json"]).output.name == "mine.json"


@pytest.mark.long
def test_all_arms_with_another_model_and_text_of_ones_own(corpus, tmp_path, capsys):
    model = tmp_path / "models" / "tiny.yaml"
    model.parent.mkdir()
    model.write_text(yaml.safe_dump({"from_scratch": True, "config": TINY_LLAMA}))
    output = tmp_path / "found" / "results.json"
    sizes = [
        "--base-tokens",
        "4_096",
        "--tokens",
        "2_048",
        "--batch-tokens",
        "256",
        "--seeds",
        "2",
        "--model",
        str(model),
    ]
    text = [
        "--general",
        str(corpus / "general.jsonl"),
        "--shift",
        f"own={corpus / 'domain.jsonl'}",
        "--folder",
        str(tmp_path / "runs"),
    ]
    arguments = [*sizes, *text, "--output", str(output), "data.sequence_length=64", "training.logging_steps=4"]
    main(arguments)
    found = json.loads(output.read_text())
    assert len(found["runs"]) == 2 * 5 and found["scale"]["model"] == "models/tiny.yaml"
    assert found["arms"]["own"]["joint from scratch"]["tokens"] == 6144
    assert output.with_suffix(".png").exists() and "| claim |" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/final/model.safetensors")}
    main(arguments)
    assert json.loads(output.read_text())["runs"] == found["runs"], "finished runs are kept"
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(before) == 10
