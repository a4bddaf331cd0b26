from collections import namedtuple

import pytest

from cpt.checkpoints.universal import make_universal, remove_parts, remove_universal
from cpt.errors import CheckpointError, ResourceError


@pytest.fixture
def checkpoint(tmp_path):
    """ZeRO's parts, none of which can be read."""
    parts = tmp_path / "checkpoint-4" / "global_step4"
    parts.mkdir(parents=True)
    (parts.parent / "latest").write_text("global_step4")
    (parts / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(bytes(1000))
    return parts.parent


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10_000, 8_001, 1_999))
    with pytest.raises(ResourceError, match="another number of processes.*Make room"):
        make_universal(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_what_cannot_be_converted_names_the_way_out_and_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(CheckpointError):
        make_universal(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".universal-3" / "zero").mkdir(parents=True)
    (tmp_path / "checkpoint-3").mkdir()
    remove_universal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_once_loaded_only_the_small_files_stay(tmp_path):
    (tmp_path / "global_step4_universal" / "zero").mkdir(parents=True)
    for name, content in {"latest_universal": "global_step4_universal", "trainer_state.json": "{}"}.items():
        (tmp_path / name).write_text(content)
    remove_parts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"latest_universal", "trainer_state.json"}
