"""`cpt verify` names the damaged files of a run. Every kind of damage: tests/promises/test_never_lost.py."""

import json

import pytest
from tiny_run import damage, save_checkpoint

from cpt.cli import main


def test_programs_get_json(capsys, tmp_path):
    damage(save_checkpoint(tmp_path, 8) / "scheduler.pt", "missing")
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path), "--json"])
    (one,) = json.loads(capsys.readouterr().out)
    assert not one["sound"]
    assert (one["damages"][0]["file"], one["damages"][0]["what"]) == ("scheduler.pt", "missing")
