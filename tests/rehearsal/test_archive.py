import fsspec
import pytest

from cpt.rehearsal.archive import judge_archive


def test_an_archive_that_works_is_left_as_it_was(tmp_path):
    archive = tmp_path / "archive"
    (archive / "tiny" / "checkpoint-2").mkdir(parents=True)
    found = judge_archive(str(archive))
    assert found.verdict == "ok" and "read back" in found.figure
    assert [path.name for path in archive.iterdir()] == ["tiny"]


def test_any_storage_of_fsspec_can_be_one():
    assert judge_archive("memory://archive").verdict == "ok"
    assert not fsspec.filesystem("memory").find("/archive")


@pytest.mark.parametrize("place", ["/proc/nothing", "nosuch://bucket", "/dev/null/runs"])
def test_a_dead_archive_is_a_failure_that_names_its_key(place):
    found = judge_archive(place)
    assert (found.verdict, found.error) == ("FAILED", "ResourceError")
    assert f"`checkpoints.archive`: nothing can be copied to {place}" in found.figure
