import threading

import pytest
from publishing import save

from cpt.checkpoints import retention
from cpt.checkpoints.manifest import MANIFEST, damages
from cpt.checkpoints.retention import Archive, put
from cpt.runs.events import read_events


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    for step in (1, 2, 3, 4):
        save(folder, step, 10)
    return folder


def test_a_copy_is_whole_and_its_manifest_comes_last(run, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(
        retention,
        "put",
        lambda files, source, target, size: (order.append(source.name), put(files, source, target, size)),
    )
    archive = Archive(run, str(tmp_path / "archive"))
    archive.add(run / "checkpoint-1")
    archive.finish()
    assert damages(tmp_path / "archive" / "run" / "checkpoint-1") == []
    assert order[-1] == MANIFEST and len(order) == 8 and read_events(run) == []


def test_training_does_not_wait_for_the_copy_and_what_is_copied_stays(run, tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(retention, "put", lambda *_: go_on.wait(10))
    archive = Archive(run, str(tmp_path / "archive"))
    archive.add(run / "checkpoint-1")
    archive.add(run / "checkpoint-2")
    assert archive.in_use() == {run / "checkpoint-1", run / "checkpoint-2"}
    go_on.set()
    archive.finish()
    assert archive.in_use() == set()


def test_a_slow_archive_gets_the_newest_ones(run, tmp_path, monkeypatch):
    go_on, begun = threading.Event(), threading.Event()
    copied = []

    def slow(files, source, target, size):
        begun.set()
        go_on.wait(10)
        copied.append(source.relative_to(run).parts[0])

    monkeypatch.setattr(retention, "put", slow)
    archive = Archive(run, str(tmp_path / "archive"))
    archive.add(run / "checkpoint-1")
    begun.wait(10)
    for step in (2, 3, 4):
        archive.add(run / f"checkpoint-{step}")
    go_on.set()
    archive.finish()
    assert list(dict.fromkeys(copied)) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert [event["kind"] for event in read_events(run)] == ["archive_behind"]


def test_an_archive_that_fails_costs_an_event(run, tmp_path):
    (tmp_path / "archive").write_text("a file")
    archive = Archive(run, str(tmp_path / "archive"))
    archive.add(run / "checkpoint-1")
    archive.finish()
    (event,) = read_events(run)
    assert event["kind"] == "archive_failed" and "checkpoint-1" in event["message"]


def test_after_a_kill_the_newest_missing_ones_are_copied(run, tmp_path):
    archive = Archive(run, str(tmp_path / "archive"))
    archive.add(run / "checkpoint-3")
    archive.finish()
    (tmp_path / "archive" / "run" / "checkpoint-3" / MANIFEST).unlink()  # killed before it
    archive.add_missing([run / f"checkpoint-{step}" for step in (1, 2, 3, 4)])
    archive.finish()
    assert all(damages(tmp_path / "archive" / "run" / f"checkpoint-{step}") == [] for step in (3, 4))
