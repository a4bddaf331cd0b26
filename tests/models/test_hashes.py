import hashlib
from pathlib import Path

import pytest

from cpt.errors import CheckpointError
from cpt.models.hashes import check_hashes, hash_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"one")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"two")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_file_that_changed_is_named(folder: Path):
    expected = hash_weights(str(folder))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"tow")
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: its sha256 is"):
        check_hashes(expected, str(folder))


def test_the_snapshot_of_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch):
    snapshot = tmp_path / "models--lab--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"one")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hash_weights("lab/tiny") == {"model.safetensors": hashlib.sha256(b"one").hexdigest()}
    with pytest.raises(CheckpointError, match="hf download lab/other"):
        hash_weights("lab/other")
