import hashlib
from pathlib import Path

import pytest

from cpt.errors import CheckpointError
from cpt.models.config import hash_weights


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
