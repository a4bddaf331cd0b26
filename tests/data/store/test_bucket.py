import errno
import os
import tarfile

import pytest
from faulty_store import FaultyStore

from cpt.data.store.bucket import bucket, opened
from cpt.errors import DataError, ResourceError


@pytest.fixture(autouse=True)
def nothing_fails():
    FaultyStore.failing.clear()
    FaultyStore.asked.clear()


@pytest.fixture
def store(tmp_path):
    (tmp_path / "bucket").mkdir()
    return opened(f"faulty://{tmp_path}/bucket")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "tokens.bin").write_bytes(bytes(range(200)) * 50)
    (tmp_path / "shard" / "empty.bin").touch()
    return tmp_path / "shard"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("url", ["memory://prefix/of/it", "faulty://{}/bucket"])
def test_a_folder_comes_back_as_it_was(folder, tmp_path, url):
    store = opened(url.format(tmp_path))
    store.put_folder(folder, "tokens/a/b.tar")
    (tmp_path / "again").mkdir()
    assert store.get_folder("tokens/a/b.tar", tmp_path / "again")
    assert content(tmp_path / "again") == content(folder)
    assert store.names("tokens/a") == {"b.tar"} and store.has("tokens/a/b.tar")


def test_what_is_not_there_is_no_error(store, tmp_path):
    (tmp_path / "again").mkdir()
    assert not store.get_folder("tokens/a/b.tar", tmp_path / "again") and not list((tmp_path / "again").iterdir())
    assert (
        store.read("tokens/a/x.json") is None and store.names("tokens/a") == set() and not store.has("tokens/a/b.tar")
    )


def test_equal_content_is_an_equal_object_that_tar_can_read(store, folder, tmp_path):
    store.put_folder(folder, "one.tar")
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    store.put_folder(folder, "two.tar")
    assert (tmp_path / "bucket" / "one.tar").read_bytes() == (tmp_path / "bucket" / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "bucket" / "one.tar") as tar:
        assert tar.getnames() == ["empty.bin", "tokens.bin"]


@pytest.mark.parametrize("harm", ["a changed byte", "cut off", "empty"])
def test_a_damaged_object_is_told_by_its_name(store, folder, tmp_path, harm):
    store.put_folder(folder, "tokens/a/b.tar")
    path = tmp_path / "bucket" / "tokens" / "a" / "b.tar"
    whole = bytearray(path.read_bytes())
    whole[600] ^= 1
    path.write_bytes({"a changed byte": whole, "cut off": whole[:-700], "empty": b""}[harm])
    (tmp_path / "again").mkdir()
    with pytest.raises(DataError, match=r"bucket/tokens/a/b.tar: not what was written"):
        store.get_folder("tokens/a/b.tar", tmp_path / "again")


def test_a_refusal_is_told_at_once(store):
    FaultyStore.failing.append(("cat_file", PermissionError("403 Forbidden")))
    with pytest.raises(ResourceError, match="a.json: refused .*403.*credentials"):
        store.read("a.json")


def test_a_full_disk_is_not_taken_for_the_network(store, folder, tmp_path):
    store.put_folder(folder, "b.tar")
    FaultyStore.failing.append(("get_file", OSError(errno.ENOSPC, "No space left on device")))
    (tmp_path / "again").mkdir()
    with pytest.raises(OSError, match="No space left"):
        store.get_folder("b.tar", tmp_path / "again")


def test_a_place_that_is_no_bucket_is_told(monkeypatch):
    monkeypatch.delenv("CPT_STORE", raising=False)
    assert bucket() is None
    monkeypatch.setenv("CPT_STORE", "/shared/folder")
    with pytest.raises(ResourceError, match="expected a URL.*CPT_CACHE"):
        bucket()
    monkeypatch.setenv("CPT_STORE", "nosuch://bucket")
    with pytest.raises(ResourceError, match="nosuch"):
        bucket()
