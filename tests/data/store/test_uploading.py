import json
import shutil

import pytest
from faulty_store import FaultyStore

from cpt.data.build import build_data
from cpt.data.store import plan, shards
from cpt.data.store.bucket import bucket
from cpt.errors import DataError, ResourceError
from cpt.prepare.prepare import upload
from cpt.recipe.schema import Data, Evaluation, HeldOut, Source

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
        patched.setattr(plan, "SHARD_BYTES", SHARD)
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
    monkeypatch.setattr(plan, "SHARD_BYTES", SHARD)
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
    assert not any(report.is_estimate for report in other.sources), "all of it is known at once"


def test_a_start_fetches_what_it_begins_with_and_no_more(build, brought, filled, tmp_path):
    build("other")
    fetched, there = (
        len(list(folder.glob("tokens/*/*/tokens.bin"))) for folder in (tmp_path / "other", brought[0] / "first")
    )
    assert 8 < fetched < there


def test_what_is_there_already_is_not_brought_again(build, filled, tmp_path):
    before = objects(tmp_path)
    assert upload(build("other", whole=True), bucket()) == 0 and objects(tmp_path) == before


def test_half_an_upload_is_not_seen(build, tmp_path):
    first = build("first", whole=True)
    FaultyStore.failing += [("put_file", PermissionError("403"))] * 60
    with pytest.raises(ResourceError, match="refused"):
        upload(first, bucket())
    assert not [name for name in objects(tmp_path) if name.endswith("description.json")]
    assert build("other").sources[0].is_estimate, "it makes its own"
    FaultyStore.failing.clear()
    upload(first, bucket())
    assert len([name for name in objects(tmp_path) if name.endswith("description.json")]) == 2


def test_a_missing_object_is_told_by_its_name(build, filled, tmp_path):
    for path in (tmp_path / "bucket").rglob("*.tar"):
        path.unlink()
    with pytest.raises(
        DataError, match=r"faulty://.*/bucket/tokens/\w+/\w+.tar: not there, though the manifest lists it"
    ):
        all_rows(build("other"), range(300))


def test_a_damaged_object_is_told_by_its_name(build, filled, tmp_path):
    for path in (tmp_path / "bucket").rglob("*.tar"):
        path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(DataError, match=r"bucket/tokens/\w+/\w+.tar: not what was written"):
        all_rows(build("other"), range(300))


def test_an_object_of_other_content_is_not_taken_for_the_manifests(build, filled, tmp_path):
    for source in (tmp_path / "bucket" / "tokens").iterdir():
        whole = sorted(source.glob("*.tar"))
        for one, other in zip(whole[::2], whole[1::2], strict=False):
            one.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=r"bucket/tokens/\w+/\w+.tar: not what was written"):
        all_rows(build("other"), range(300))


def test_a_damaged_manifest_or_table_is_told(build, filled, tmp_path):
    for path in (tmp_path / "bucket").rglob("windows.npy"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"rows/\w+/windows.npy: not what was written"):
        build("other")
    for path in (tmp_path / "bucket").rglob("description.json"):
        path.write_text(path.read_text()[:200])
    with pytest.raises(DataError, match=r"tokens/\w+/description.json: not what was written"):
        build("third")


@pytest.mark.slow
def test_what_was_left_out_as_a_copy_is_known_to_all(build, tmp_path, monkeypatch):
    first = build("first", whole=True, deduplicate="exact")
    upload(first, bucket())
    monkeypatch.setattr(shards, "fill_shard", lambda *_: pytest.fail("made and not fetched"))
    monkeypatch.setattr("cpt.data.rows.selection.first_of_each", lambda *_: pytest.fail("compared again"))
    assert all_rows(build("other", deduplicate="exact"), range(200)) == all_rows(first, range(200))


@pytest.mark.slow
def test_a_held_out_set_of_its_own_files_is_brought_too(data, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "judge.jsonl").write_text(json.dumps({"text": "judge " * 40}) + "\n")
    evaluation = Evaluation(perplexity=[HeldOut(path=str(tmp_path / "judge.jsonl"))])
    upload(
        build_data(data, tokenizer, seed=1, evaluation=evaluation, cache_dir=tmp_path / "first", whole=True), bucket()
    )
    monkeypatch.setattr(shards, "fill_shard", lambda *_: pytest.fail("made and not fetched"))
    other = build_data(data, tokenizer, seed=1, evaluation=evaluation, cache_dir=tmp_path / "other")
    assert [held_out.num_documents for held_out in other.held_out.values()] == [1]
