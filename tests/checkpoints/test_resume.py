from cpt.checkpoints.resume import latest_checkpoint


def make(folder, name, *, complete=True):
    (folder / name).mkdir()
    if complete:
        (folder / name / "trainer_state.json").write_text("{}")


def test_the_newest_complete_checkpoint_is_taken_by_number_not_by_name(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        make(tmp_path, name)
    make(tmp_path, "checkpoint-11", complete=False)
    make(tmp_path, "checkpoint-99-old")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_run_without_checkpoints_starts_from_the_beginning(tmp_path):
    assert latest_checkpoint(tmp_path) is None
