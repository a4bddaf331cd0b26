import json
import shutil

import pytest
from faulty_store import FaultyStore

from cpt.commands.prepare import upload
from cpt.data.rows.build import build_data
from cpt.data.store import shards
from cpt.data.store.token_files import bucket
from cpt.errors import DataError, ResourceError
from cpt.recipe.schema import Data, Evaluation, Source

SHARD, WINDOW = 2_000, 8_000
EVALUATION = Evaluation(held_out_share=0.02)


@pytest.fixture(scope="module")
def brought(tmp_path_factory, tokenizer):
    """The sources, some 12 and 6 shards; all of them prepared without a bucket, and on a machine that brought them to
    one."""
    folder = tmp_path_factory.mktemp("brought")
    for name, number in (("a", 750), ("b", 350)):
        lines = [json.dumps({"text": f"{name}{number:04}" + "x" * (number % 40)}) + "\n" for number in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "bucket").mkdir()
    data = Data(
        sources=[Source(path=str(folder / f"{name}.jsonl")) for name in "ab"], sequence_length=64, window_bytes=WINDOW
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cpt.data.store.shards.SHARD_BYTES", SHARD)
        patched.setenv("CPT_WORKERS", "0")
        straight = build_data(
            data, tokenizer, seed=1, evaluation=EVALUATION, cache_dir=folder / "straight", whole=True
        )
        patched.setenv("CPT_STORE", f"faulty://{folder}/bucket")
        first = build_data(data, tokenizer, seed=1, evaluation=EVALUATION, cache_dir=folder / "first", whole=True)
        assert upload(first, bucket()) == sum(len(rows.tokenized.plan.shards) for rows in first.windowed)
    return folder, data, all_rows(straight, range(300)), straight.fingerprint


@pytest.fixture
def data(brought, tmp_path, monkeypatch):
    """An empty bucket."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", SHARD)
    monkeypatch.setenv("CPT_WORKERS", "0")
    FaultyStore.failing.clear()
    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("CPT_STORE", f"faulty://{tmp_path}/bucket")
    return brought[1]


@pytest.fixture
def build(data, tokenizer, tmp_path):
    def run(machine, *, whole=False, **changes):
        asked = data.model_copy(update=changes)
        return build_data(asked, tokenizer, seed=1, evaluation=EVALUATION, cache_dir=tmp_path / machine, whole=whole)

    return run


@pytest.fixture
def filled(brought, data, tmp_path, monkeypatch):
    """The bucket is what one machine brought there, and from now on nothing may be tokenised; gives the rows as they
    should be."""
    shutil.copytree(brought[0] / "bucket", tmp_path / "bucket", dirs_exist_ok=True)
    monkeypatch.setattr(shards, "fill_shard", lambda *_: pytest.fail("made and not fetched"))
    return brought[2]


def all_rows(prepared, numbers):
    return [prepared.rows[row]["input_ids"].tolist() for row in numbers]


def objects(tmp_path) -> set[str]:
    return {str(path.relative_to(tmp_path / "bucket")) for path in (tmp_path / "bucket").rglob("*") if path.is_file()}


def test_another_machine_reads_the_same_rows_and_makes_nothing(build, filled):
    other = build("other")
    assert all_rows(other, range(300)) == filled


def test_an_upload_that_ended_half_way_is_continued(build, brought, tmp_path):
    first = build("first", whole=True)
    FaultyStore.failing += [("put_file", PermissionError("403"))] * 60
    with pytest.raises(ResourceError):
        upload(first, bucket())
    FaultyStore.failing.clear()
    upload(first, bucket())
    assert len(objects(tmp_path)) == len(list((brought[0] / "bucket").rglob("*.tar")))


@pytest.mark.parametrize("harm", ["a changed byte", "cut off", "empty"])
def test_a_damaged_object_is_an_error_with_its_name(build, filled, tmp_path, harm):
    for path in (tmp_path / "bucket").rglob("*.tar"):
        whole = bytearray(path.read_bytes())
        whole[whole.rindex(b"tokens.bin") + 520] ^= 1  # behind the header of the file
        path.write_bytes({"a changed byte": whole, "cut off": whole[: len(whole) // 3], "empty": b""}[harm])
    with pytest.raises(DataError, match=r"bucket/tokens/\w+/\w+.tar"):
        all_rows(build("other"), range(300))


def test_a_refusal_is_an_error_at_once(build, filled):
    FaultyStore.failing.append(("get_file", PermissionError("403 Forbidden")))
    with pytest.raises(ResourceError, match=r"\.tar: .*403"):
        build("other")


def test_a_place_that_is_not_a_bucket_is_refused(monkeypatch):
    monkeypatch.delenv("CPT_STORE", raising=False)
    assert bucket() is None
    for url in ("/shared/folder", "nosuch://bucket"):
        monkeypatch.setenv("CPT_STORE", url)
        with pytest.raises(ResourceError, match=url):
            bucket()
