"""Which checkpoints stay, and their copies in an archive."""

import json
import threading

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from publishing import save
from tiny_run import damage, save_checkpoint, seal

from cpt.checkpoints import retention
from cpt.checkpoints.manifest import MANIFEST, damages
from cpt.checkpoints.retention import RULES, Archive, archive_record, local_archive, put, rotate
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


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [4, 6, 7]),
        ({"last": 1}, [7]),
        ({"last": 2, "every": 2}, [2, 4, 6, 7]),
        ({"last": 1, "every": 3}, [3, 6, 7]),
        ({"last": 1, "best": "eval_general_loss"}, [3, 7]),
        ({"last": 1, "best": "eval_domain_loss"}, [2, 7]),
        ({"last": 1, "best": "eval_loss"}, [7]),
        ({"last": 1, "best": "loss"}, [7]),
        ({"last": 1, "every": 4, "best": "eval_domain_loss"}, [2, 4, 7]),
    ],
)
def test_the_newest_those_of_every_kth_step_and_the_best_are_kept(tmp_path, options, kept):
    losses = {1: {}, 2: (2.0, 1.0), 3: (1.0, 3.0), 4: (4.0, 2.0), 6: (3.0, 1.5), 7: {}}
    names, history = ("eval_general_loss", "eval_domain_loss"), []
    for step, measured in losses.items():
        history += [{"step": step, "loss": 0.5}]
        if measured:
            history += [{"step": step, **dict(zip(names, measured, strict=True))}]
        checkpoint = save_checkpoint(tmp_path, step, sealed=False)
        state = {"global_step": step, "log_history": history}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        seal(checkpoint, step)
    removed = rotate(tmp_path, keep(**options))
    assert left(tmp_path) == [f"checkpoint-{step}" for step in kept]
    assert [path.name for path in removed] == [
        f"checkpoint-{step}" for step in losses if step not in kept
    ]


def test_weights_have_their_own_prefix_and_no_rule_removes_nothing(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, sealed=False).rename(tmp_path / f"weights-{step}")
        (tmp_path / f"weights-{step}" / "trainer_state.json").unlink()
        seal(tmp_path / f"weights-{step}", step, kind="weights")
        save(tmp_path, step, 3)
    assert rotate(tmp_path, None) == []
    rotate(tmp_path, keep(last=1), prefix="weights-")
    assert left(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "weights-3"]


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
    (event,) = read_events(run)
    assert (event["kind"], event["place"]) == ("archive_failed", "nowhere://archive")
    assert event["message"].startswith(
        "The record of run could not be copied to the archive nowhere://archive: "
    )
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
    assert archive.in_use() == set()
    (event,) = read_events(run)
    assert event["kind"] == "archive_behind" and event["message"] == (
        f"The archive {archive.place} is too slow: checkpoint-2 is not copied to it."
    )


def test_an_archive_that_fails_costs_an_event(run, archive, tmp_path):
    (tmp_path / "archive").write_text("a file")
    archived(archive, 1)
    (event,) = read_events(run)
    assert event["kind"] == "archive_failed" and event["place"] == archive.place
    assert event["message"].startswith(
        f"checkpoint-1 could not be copied to the archive {archive.place}: "
    )
    (tmp_path / "archive").unlink()
    archived(archive, 2)
    assert damages(tmp_path / "archive" / "run" / "checkpoint-2") == []


def test_a_file_that_arrives_with_another_size_is_an_event_and_no_manifest_follows(
    run, archive, tmp_path, monkeypatch
):
    own = LocalFileSystem.put_file

    def cut(self, source, target, **options):
        own(self, source, target, **options)
        if target.endswith("optimizer.pt"):
            damage(tmp_path / "archive" / "run" / "checkpoint-1" / "optimizer.pt", "truncate")

    monkeypatch.setattr(LocalFileSystem, "put_file", cut)
    archived(archive, 1)
    (event,) = read_events(run)
    sizes = [
        (folder / "checkpoint-1" / "optimizer.pt").stat().st_size
        for folder in (tmp_path / "archive" / "run", run)
    ]
    assert event["kind"] == "archive_failed"
    assert event["message"].endswith(f"optimizer.pt has {sizes[0]:,} bytes, expected {sizes[1]:,}")
    assert not (tmp_path / "archive" / "run" / "checkpoint-1" / MANIFEST).exists()


def test_after_a_kill_the_newest_missing_ones_are_copied(run, archive, tmp_path):
    archived(archive, 3)
    place = tmp_path / "archive" / "run"
    (place / "checkpoint-3" / MANIFEST).unlink()  # killed before it
    (place / "checkpoint-3" / "old.bin").touch()
    archive.add_missing([run / f"checkpoint-{step}" for step in (1, 2, 3, 4)])
    archive.finish()
    assert left(place) == ["checkpoint-3", "checkpoint-4"]
    assert all(damages(place / f"checkpoint-{step}") == [] for step in (3, 4))
    times = (place / "checkpoint-4" / MANIFEST).stat().st_mtime_ns
    archive.add_missing([run / f"checkpoint-{step}" for step in (2, 3, 4)])
    archive.finish()
    assert left(place) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert (place / "checkpoint-4" / MANIFEST).stat().st_mtime_ns == times, "not copied again"


def test_only_a_folder_is_a_local_archive(tmp_path):
    assert local_archive(str(tmp_path)) == tmp_path and local_archive("memory://archive") is None


def test_an_archive_that_cannot_be_reached_fails_for_the_newest_checkpoints_only(run):
    archive = Archive(run, "nowhere://archive")
    archive.add_missing([run / f"checkpoint-{step}" for step in (1, 2, 3, 4)])
    archive.finish()
    assert [
        (event["kind"], event["place"], event["message"].partition(" could")[0])
        for event in read_events(run)
    ] == [("archive_failed", "nowhere://archive", f"checkpoint-{step}") for step in (3, 4)]


def test_a_file_of_the_record_that_was_removed_meanwhile_is_passed_over(run, archive, tmp_path):
    (run / "gone.yaml").symlink_to(run / "nowhere")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    archived(archive, 1)
    place = tmp_path / "archive" / "run"
    assert left(place) == ["checkpoint-1", "metrics.jsonl"] and read_events(run) == []


def test_only_the_main_process_copies_the_record(run, tmp_path, monkeypatch):
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setenv("RANK", "1")
    archive_record(run, str(tmp_path / "archive"))
    assert not (tmp_path / "archive").exists()
    monkeypatch.setenv("RANK", "0")
    archive_record(run, str(tmp_path / "archive"))
    assert left(tmp_path / "archive" / "run") == ["metrics.jsonl"]
