"""What `cpt verify` prints for programs. Every kind of damage: tests/promises/test_never_lost.py."""

import json

from tiny_run import damage, save_checkpoint


def test_programs_get_json(cpt, tmp_path):
    damage(save_checkpoint(tmp_path, 8) / "scheduler.pt", "missing")
    _, said = cpt("verify", tmp_path, "--json")
    (one,) = json.JSONDecoder().raw_decode(said)[0]  # behind it is the error
    assert not one["intact"]
    assert (one["damages"][0]["file"], one["damages"][0]["what"]) == ("scheduler.pt", "missing")
