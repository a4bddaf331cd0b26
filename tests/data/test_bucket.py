from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from cpt.commands.prepare import upload
from cpt.data.store import shards
from cpt.data.store.token_files import bucket
from cpt.errors import DataError, ResourceError
from cpt.recipe.schema import Evaluation

pytestmark = pytest.mark.heavy
EVALUATION = Evaluation(held_out_share=0.02)


class FaultyStore(LocalFileSystem):
    """`faulty:///folder`: a bucket in a folder. Each of `failing` is raised once, by the call of that name."""

    protocol = "faulty"
    cachable = False
    failing: ClassVar[list[tuple[str, Exception]]] = []

    def fail(self, call):
        for fault in self.failing:
            if fault[0] == call:
                self.failing.remove(fault)
                raise fault[1]

    def get_file(self, path, local, *arguments, **options):
        self.fail("get_file")
        return super().get_file(path, local, *arguments, **options)

    def put_file(self, local, path, *arguments, **options):
        self.fail("put_file")
        return super().put_file(local, path, *arguments, **options)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)


@pytest.fixture
def machine(build, source, tmp_path, monkeypatch):
    """`machine("first")`: the rows of two sources, some 6 and 3 shards, on a machine with an empty bucket."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 2_000)
    monkeypatch.setenv("CPT_WORKERS", "0")
    FaultyStore.failing.clear()
    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("CPT_STORE", f"faulty://{tmp_path}/bucket")
    sizes = {"a": 400, "b": 200}
    sources = [
        source(name, [f"{name}{n:04}" + "x" * (n % 40) for n in range(size)])
        for name, size in sizes.items()
    ]

    def run(name, **options):
        return build(*sources, chunk_bytes=8_000, cache=name, evaluation=EVALUATION, **options)

    return run


@pytest.fixture
def filled(machine, monkeypatch):
    """A machine brought everything to the bucket, and from now on nothing may be tokenised; gives its rows."""
    first = machine("first", whole=True)
    assert upload(first, bucket()) == sum(len(rows.tokenized.plan.shards) for rows in first.chunked)
    monkeypatch.setattr(shards, "fill_shard", lambda *_: pytest.fail("made and not fetched"))
    return all_rows(first)


def all_rows(prepared):
    return [prepared.rows[row]["input_ids"].tolist() for row in range(150)]


def test_another_machine_reads_the_same_rows_and_makes_nothing(machine, filled):
    assert all_rows(machine("other")) == filled


def test_an_upload_that_ended_half_way_is_continued(machine, tmp_path):
    first = machine("first", whole=True)
    FaultyStore.failing += [("put_file", PermissionError("403"))] * 60
    with pytest.raises(ResourceError):
        upload(first, bucket())
    FaultyStore.failing.clear()
    upload(first, bucket())
    assert len(list((tmp_path / "bucket").rglob("*.tar"))) == sum(
        len(rows.tokenized.plan.shards) for rows in first.chunked
    )


def test_what_the_bucket_has_is_not_uploaded_again(machine, filled, tmp_path):
    first = machine("first", whole=True)
    assert upload(first, bucket()) == 0
    removed = sorted((tmp_path / "bucket").rglob("*.tar"))[1::4]
    for path in removed:
        path.unlink()
    assert upload(first, bucket()) == len(removed) >= 2


@pytest.mark.parametrize("harm", ["a changed byte", "cut off", "empty"])
def test_a_damaged_object_is_an_error_with_its_name(machine, filled, tmp_path, harm):
    for path in (tmp_path / "bucket").rglob("*.tar"):
        whole = bytearray(path.read_bytes())
        whole[whole.rindex(b"tokens.bin") + 520] ^= 1  # behind the header of the file
        path.write_bytes(
            {"a changed byte": whole, "cut off": whole[: len(whole) // 3], "empty": b""}[harm]
        )
    with pytest.raises(DataError, match=r"bucket/tokens/\w+/\w+.tar"):
        all_rows(machine("other"))


def test_a_refusal_is_an_error_at_once(machine, filled):
    FaultyStore.failing.append(("get_file", PermissionError("403 Forbidden")))
    with pytest.raises(ResourceError, match=r"\.tar: .*403"):
        machine("other")


def test_a_place_that_is_not_a_bucket_is_refused(monkeypatch):
    monkeypatch.delenv("CPT_STORE", raising=False)
    assert bucket() is None
    for url in ("/shared/folder", "nosuch://bucket"):
        monkeypatch.setenv("CPT_STORE", url)
        with pytest.raises(ResourceError, match=url):
            bucket()
