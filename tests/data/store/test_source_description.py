import json
from dataclasses import replace

import pytest

from cpt.data.store.bucket import bucket
from cpt.data.store.source_description import (
    SourceDescription,
    as_description,
    as_text,
    fetch_description,
    manifest_of,
    read_description,
)
from cpt.errors import DataError

ONE = SourceDescription(
    "name", 3, 30, {"shard": "digest"}, {"short": 1}, {}, ("a:1", 9), {"a": "hash"}, {"source": "a"}, "error"
)


def test_a_description_comes_back(tmp_path):
    (tmp_path / "description.json").write_text(as_text(ONE))
    assert read_description(tmp_path) == ONE == as_description(as_text(ONE).encode(), "bucket")


def test_another_version_is_told_and_what_is_damaged_is_none(tmp_path):
    with pytest.raises(DataError, match="bucket: made by another version of cpt"):
        as_description(as_text(replace(ONE, format=1)), "bucket")
    with pytest.raises((ValueError, TypeError)):
        as_description(json.dumps({"format": ONE.format, "longest": ["a", 1]}), "bucket")


def test_a_bucket_is_asked_for_the_manifest_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("CPT_STORE", raising=False)
    assert fetch_description(tmp_path / "key") is None
    monkeypatch.setenv("CPT_STORE", f"memory://{tmp_path.name}")
    assert fetch_description(tmp_path / "key") is None
    bucket().write(manifest_of(tmp_path / "key"), as_text(ONE).encode())
    assert (
        manifest_of(tmp_path / "key") == "tokens/key/description.json" and fetch_description(tmp_path / "key") == ONE
    )
    bucket().write(manifest_of(tmp_path / "key"), b"{half of")
    with pytest.raises(DataError, match="tokens/key/description.json: not what was written"):
        fetch_description(tmp_path / "key")
