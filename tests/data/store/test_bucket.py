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


def test_a_place_that_is_no_bucket_is_told(monkeypatch):
    monkeypatch.delenv("CPT_STORE", raising=False)
    assert bucket() is None
    monkeypatch.setenv("CPT_STORE", "/shared/folder")
    with pytest.raises(ResourceError, match="expected a URL.*CPT_CACHE"):
        bucket()
    monkeypatch.setenv("CPT_STORE", "nosuch://bucket")
    with pytest.raises(ResourceError, match="nosuch"):
        bucket()
