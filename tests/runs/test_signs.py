import json

from cpt.runs.signs import Sign, forget_signs, read_signs, write_sign


def sign(**changed):
    return Sign(**{"rank": 0, "pid": 1, "host": "h", "phase": "training", "step": 3, "beats": 4, "seconds_per_step": 2.0, **changed})


def test_signs_come_back_by_rank_until_they_are_forgotten(tmp_path):
    for rank in (10, 2):
        write_sign(tmp_path, sign(rank=rank))
    assert read_signs(tmp_path) == [sign(rank=2), sign(rank=10)]
    forget_signs(tmp_path)
    assert read_signs(tmp_path) == []


def test_what_another_version_or_a_crash_left_is_left_out(tmp_path):
    write_sign(tmp_path, sign())
    (tmp_path / "heartbeats" / "rank-1.json").write_text(json.dumps({"rank": 1, "other": 2}))
    (tmp_path / "heartbeats" / "rank-2.json").write_text("{")
    assert read_signs(tmp_path) == [sign()]
