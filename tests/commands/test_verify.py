import json

import pytest
from tiny_run import damage, save_checkpoint

from cpt.cli import main


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *map(str, words)])
    return ended.value.code


def test_damage_is_named_and_ends_with_2(tmp_path, capsys):
    save_checkpoint(tmp_path, 4)
    damage(save_checkpoint(tmp_path, 8) / "model.safetensors", "bit flip")
    assert run(tmp_path) == 2
    told = capsys.readouterr()
    assert "checkpoint-4: sound" in told.out and "1 of 2" in told.err and "model.safetensors: hash" in told.err
    assert "resumes from an older one" in told.err


def test_a_damaged_model_is_exported_again(tmp_path, capsys):
    damage(save_checkpoint(tmp_path, 8).rename(tmp_path / "final") / "model.safetensors", "bit flip")
    assert run(tmp_path / "final") == 2
    assert "model again: cpt export" in capsys.readouterr().err


def test_programs_get_json(tmp_path, capsys):
    damage(save_checkpoint(tmp_path, 8) / "scheduler.pt", "missing")
    assert run(tmp_path, "--json") == 2
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["sound"], one["damages"][0]["file"], one["damages"][0]["what"]) == (False, "scheduler.pt", "missing")
