"""`cpt verify` names the damaged files of a run. Every kind of damage: tests/promises/test_never_lost.py."""

import json

import pytest
from tiny_run import damage, save_checkpoint

from cpt.cli import main


@pytest.mark.parametrize(("name", "advice"), [("checkpoint-8", "resumes from an older one"), ("final", "cpt export")])
def test_damage_is_named_with_what_to_do(cpt, tmp_path, name, advice):
    save_checkpoint(tmp_path, 4)
    damage(save_checkpoint(tmp_path, 8).rename(tmp_path / name) / "model.safetensors", "bit flip")
    code, said = cpt("verify", tmp_path)
    assert code == 2 and "checkpoint-4: sound" in said and "model.safetensors: hash" in said and advice in said


def test_programs_get_json(capsys, tmp_path):
    damage(save_checkpoint(tmp_path, 8) / "scheduler.pt", "missing")
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path), "--json"])
    (one,) = json.loads(capsys.readouterr().out)
    assert not one["sound"]
    assert (one["damages"][0]["file"], one["damages"][0]["what"]) == ("scheduler.pt", "missing")
