from dataclasses import replace

import pytest
from tiny_run import damage, save_checkpoint, seal

from cpt.checkpoints.manifest import (
    FileEntry,
    Verified,
    damages,
    defects,
    hash_file,
    lacking_state,
    read_manifest,
    refuse_changed_weights,
    verify_path,
    write_manifest,
    wrong_contents,
)
from cpt.errors import CheckpointError
from cpt.export.trained import find_trained


def found_in(checkpoint):
    return [(damage.file, damage.what) for damage in damages(checkpoint)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format 2"),
        ({"files": {"../secret": FileEntry(1, "0")}}, "../secret"),
        ({"files": {"/etc/passwd": FileEntry(1, "0")}}, "/etc/passwd"),
    ],
)
def test_a_manifest_of_another_format_or_of_files_outside_its_folder_is_refused(
    tmp_path, changes, named
):
    checkpoint = save_checkpoint(tmp_path, 3)
    write_manifest(checkpoint, replace(read_manifest(checkpoint), **changes))
    with pytest.raises(CheckpointError, match=named):
        read_manifest(checkpoint)


def test_an_additional_file_that_loading_would_read_is_a_damage_and_a_note_is_not(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    (checkpoint / "notes.txt").write_text("good one")
    assert damages(checkpoint) == []
    (checkpoint / "adapter_model.safetensors").write_bytes(b"")
    assert found_in(checkpoint) == [("adapter_model.safetensors", "unknown file")]


# --- what can be resumed from, and what can be exported --------------------------------------------------------------

PLAIN = {"trainer_state.json", "scheduler.pt", "optimizer.pt", "rng_state.pth"}
FSDP = {
    *("trainer_state.json", "scheduler.pt"),
    *(f"rng_state_{rank}.pth" for rank in range(3)),
    *(f"fsdp/part_{rank}_of_3.pt" for rank in range(3)),
}
ZERO = {
    "trainer_state.json",
    "scheduler.pt",
    "latest",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
}


def test_what_a_run_needs_to_resume_differs_between_plain_ddp_and_zero():
    assert lacking_state(PLAIN, 1) == [] and lacking_state(ZERO, 2) == []
    for name in PLAIN:
        assert lacking_state(PLAIN - {name}, 1) == [name]
    assert lacking_state(PLAIN, 2) == ["rng_state_0.pth", "rng_state_1.pth"]
    for name in ZERO - {"latest"}:
        named = "1 of 2 *_optim_states.pt" if name.endswith("optim_states.pt") else name
        assert lacking_state(ZERO - {name}, 2) == [named]
    assert lacking_state(ZERO - {"latest"}, 2) == ["optimizer.pt"]
    assert lacking_state(FSDP, 3) == lacking_state(FSDP) == []
    for name in FSDP:
        assert lacking_state(FSDP - {name}, 3) == [name]
    assert lacking_state(set()) == [
        "trainer_state.json",
        "scheduler.pt",
        "rng_state.pth",
        "optimizer.pt",
    ]


def test_a_checkpoint_whose_files_are_of_another_step_or_were_never_written_has_defects(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    assert defects(checkpoint) == []
    seal(checkpoint, 4)
    assert [str(one) for one in defects(checkpoint)] == [
        "trainer_state.json: another step (the manifest says 4)"
    ]
    seal(checkpoint, 3, world_size=2)
    assert [str(one) for one in defects(checkpoint)] == [
        f"rng_state_{rank}.pth: missing (it was never written)" for rank in (0, 1)
    ]


def test_each_damage_has_a_name_and_details(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    damage(checkpoint / "scheduler.pt", "missing")
    damage(checkpoint / "optimizer.pt", "truncate")
    (checkpoint / "below").mkdir()
    (checkpoint / "below" / "more.bin").touch()
    (checkpoint / ".hidden.bin").touch()
    assert sorted(str(one) for one in damages(checkpoint)) == [
        "below/more.bin: unknown file (it is not in the manifest)",
        f"optimizer.pt: size ({sizes['optimizer.pt'] // 2:,} bytes instead of {sizes['optimizer.pt']:,})",
        "scheduler.pt: missing",
    ]
    other = save_checkpoint(tmp_path, 4)
    manifest = read_manifest(other)
    for name in ("optimizer.pt", "model.safetensors"):
        damage(other / name, "bit flip")
    assert sorted(str(one) for one in damages(other)) == [
        f"{name}: hash ({hash_file(other / name).xxh3_128} instead of {manifest.files[name].xxh3_128})"
        for name in ("model.safetensors", "optimizer.pt")
    ]


def test_weights_alone_are_intact_and_no_run_continues_from_them(tmp_path):
    weights = save_checkpoint(tmp_path, 3, sealed=False).rename(tmp_path / "weights-3")
    seal(weights, 3, kind="weights")
    assert verify_path(tmp_path)[0].found == []
    assert [found.what for found in defects(weights)] == ["weights alone"]


def test_everything_that_a_run_has_published_is_verified_in_order(tmp_path):
    for step in (4, 12, 8):
        save_checkpoint(tmp_path, step)
    save_checkpoint(tmp_path, 16, sealed=False)
    save_checkpoint(tmp_path, 20).rename(tmp_path / "bad-checkpoint-20")
    (tmp_path / "final").mkdir()
    damage(tmp_path / "checkpoint-12" / "optimizer.pt", "zeros")
    assert [
        (one.folder.name, one.step, [found.what for found in one.found])
        for one in verify_path(tmp_path)
    ] == [
        ("checkpoint-4", 4, []),
        ("checkpoint-8", 8, []),
        ("checkpoint-12", 12, ["hash"]),
        ("checkpoint-16", None, ["no valid manifest"]),
        ("final", None, ["no valid manifest"]),
    ]


def test_one_checkpoint_is_verified_with_its_bytes_and_a_folder_without_any_is_refused(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4)
    (checkpoint / "notes.txt").write_text("not counted")
    (found,) = verify_path(checkpoint)
    files = [
        path for path in checkpoint.iterdir() if path.name not in ("manifest.json", "notes.txt")
    ]
    num_bytes = sum(path.stat().st_size for path in files)
    assert found == Verified(checkpoint, 4, num_bytes, [])
    copied = checkpoint.rename(tmp_path / "a copy")
    assert verify_path(copied) == verify_path(tmp_path) == [Verified(copied, 4, num_bytes, [])]
    (copied / "manifest.json").unlink()
    for path in (tmp_path, copied):
        with pytest.raises(CheckpointError, match="neither checkpoints nor manifest.json"):
            verify_path(path)
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_path(tmp_path / "nowhere")


def test_no_model_is_made_of_changed_weights_and_the_optimizer_is_not_read_for_it(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4)
    damage(checkpoint / "optimizer.pt", "zeros")
    refuse_changed_weights(checkpoint)
    damage(checkpoint / "model.safetensors", "bit flip")
    with pytest.raises(CheckpointError, match="model.safetensors: hash"):
        find_trained(checkpoint)
    refuse_changed_weights(save_checkpoint(tmp_path, 8, sealed=False))


def test_a_file_that_cannot_be_read_is_a_damage_and_a_manifest_an_error(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4)
    files = read_manifest(checkpoint).files
    (checkpoint / "folder").mkdir()
    broken = {"gone": FileEntry(1, "0"), "folder": FileEntry(1, "0")}
    assert [str(one) for one in wrong_contents(checkpoint, {**broken, **files})] == [
        "gone: unreadable (No such file or directory)",
        "folder: unreadable (Is a directory)",
    ]
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match="manifest.json cannot be read: "):
        read_manifest(checkpoint)
