"""Which checkpoints stay, and their copies in an archive."""

import threading

import fsspec
import pytest
from publishing import save

from cpt.checkpoints import retention
from cpt.checkpoints.manifest import MANIFEST, damages
from cpt.checkpoints.retention import RULES, Archive, archive_record, put, rotate
from cpt.errors import RecipeError
from cpt.files import append
from cpt.recipe.schema import Keep
from cpt.runs.events import read_events


@pytest.fixture
def run(tmp_path):
    """Checkpoints of four steps."""
    folder = tmp_path / "run"
    for step in (1, 2, 3, 4):
        save(folder, step, 3)
    return folder


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def keep(**options):
    return Keep.model_validate(options)


def test_the_newest_are_kept_by_step_and_not_by_time(tmp_path):
    for step in (100, 20, 3):
        save(tmp_path, step, 3)
    assert [path.name for path in rotate(tmp_path, keep(last=2))] == ["checkpoint-3"]
    assert left(tmp_path) == ["checkpoint-100", "checkpoint-20"]


def test_what_is_not_whole_is_neither_counted_nor_removed(run):
    (run / "checkpoint-4" / "optimizer.pt").unlink()
    (run / "checkpoint-9").mkdir()  # of another program
    (run / "checkpoint-9" / "model.safetensors").touch()
    rotate(run, keep(last=2))
    assert left(run) == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-9"]


def test_what_is_still_read_and_the_newest_always_stay(run, monkeypatch):
    monkeypatch.setitem(RULES, "none", lambda checkpoints: [])
    rotate(run, keep(name="none"), spared=[run / "checkpoint-1"])
    assert left(run) == ["checkpoint-1", "checkpoint-4"]


def test_a_users_own_rule_sees_steps_and_tokens(run, tmp_path, monkeypatch):
    (tmp_path / "my_keep.py").write_text(
        "def odd(checkpoints, *, least=0):\n    return [c for c in checkpoints if c.step % 2 and c.tokens > least]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rotate(run, keep(name="my_keep:odd", least=256))
    assert left(run) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("options", "key"),
    [({"lasst": 3}, "checkpoints.keep.lasst"), ({"name": "newst"}, "keep.name.*newest")],
)
def test_a_wrong_rule_or_option_is_refused(run, options, key):
    with pytest.raises(RecipeError, match=key):
        rotate(run, keep(**options))


# --- the archive -----------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(run, tmp_path):
    return Archive(run, str(tmp_path / "archive"))


def archived(archive, *steps):
    """Copy checkpoints, and wait until they are there."""
    for step in steps:
        archive.add(archive.run / f"checkpoint-{step}")
    archive.finish()


def test_a_copy_is_whole_and_its_manifest_comes_last(run, archive, tmp_path, monkeypatch):
    order = []

    def recorded(files, source, target, size):
        order.append(source.name)
        put(files, source, target, size)

    monkeypatch.setattr(retention, "put", recorded)
    archived(archive, 1)
    assert damages(tmp_path / "archive" / "run" / "checkpoint-1") == []
    assert order[-1] == MANIFEST and len(order) == 8 and read_events(run) == []


def test_the_record_covers_each_copied_checkpoint(run, archive, tmp_path):
    place, sizes = tmp_path / "archive" / "run", []
    (run / "held_out").mkdir()
    for name in (
        "recipe.yaml",
        "status.json",
        "verdict.md",
        "held_out/step-0.npz",
        "final.bin",
        ".lock",
    ):
        (run / name).write_text(name)
    for step in (1, 2):
        append(run / "metrics.jsonl", f'{{"step": {step}}}\n')
        archived(archive, step)
        sizes.append(len((place / "metrics.jsonl").read_text().splitlines()))
    copied = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert sizes == [1, 2] and read_events(run) == []
    assert {name for name in copied if not name.startswith("checkpoint")} == {
        *("metrics.jsonl", "recipe.yaml", "status.json", "verdict.md", "held_out/step-0.npz")
    }, "no models"


def test_an_archive_without_files_of_this_machine_gets_the_record_too(run):
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    archive_record(run, "memory://archive")
    assert fsspec.filesystem("memory").cat_file("/archive/run/metrics.jsonl") == b'{"step": 1}\n'
    archive_record(run, "nowhere://archive")
    assert [event["kind"] for event in read_events(run)] == ["archive_failed"]
    archive_record(run, None)


def test_a_slow_archive_gets_the_newest_checkpoints_and_training_does_not_wait(
    run, archive, monkeypatch
):
    proceed, begun, copied = threading.Event(), threading.Event(), []

    def slow(files, source, target, size):
        begun.set()
        proceed.wait(10)
        copied.append(source.relative_to(run).parts[0])

    monkeypatch.setattr(retention, "put", slow)
    archive.add(run / "checkpoint-1")
    begun.wait(10)
    for step in (2, 3, 4):
        archive.add(run / f"checkpoint-{step}")
    assert archive.in_use() == {run / f"checkpoint-{step}" for step in (1, 3, 4)}, (
        "what is copied must stay"
    )
    proceed.set()
    archive.finish()
    assert list(dict.fromkeys(copied)) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert archive.in_use() == set() and [event["kind"] for event in read_events(run)] == [
        "archive_behind"
    ]


def test_an_archive_that_fails_costs_an_event(run, archive, tmp_path):
    (tmp_path / "archive").write_text("a file")
    archived(archive, 1)
    (event,) = read_events(run)
    assert event["kind"] == "archive_failed" and "checkpoint-1" in event["message"]


def test_after_a_kill_the_newest_missing_ones_are_copied(run, archive, tmp_path):
    archived(archive, 3)
    (tmp_path / "archive" / "run" / "checkpoint-3" / MANIFEST).unlink()  # killed before it
    archive.add_missing([run / f"checkpoint-{step}" for step in (1, 2, 3, 4)])
    archive.finish()
    assert all(
        damages(tmp_path / "archive" / "run" / f"checkpoint-{step}") == [] for step in (3, 4)
    )
