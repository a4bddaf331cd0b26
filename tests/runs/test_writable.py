import errno
import os

import pytest
from full_disk import files_end_at

from cpt.errors import RecipeError
from cpt.runs.writable import refuse_unwritable


def test_a_folder_that_takes_files_is_left_as_it_was(tmp_path):
    refuse_unwritable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_out(tmp_path):
    with (
        files_end_at(1000),
        pytest.raises(RecipeError, match="`output_dir`: nothing can be saved in .*File too large"),
    ):
        refuse_unwritable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_at_any_of_the_steps_is_found_out(tmp_path, monkeypatch, call):
    def fails(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(RecipeError, match="Read-only file system"):
        refuse_unwritable(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_found_out(tmp_path):
    with pytest.raises(RecipeError, match="No such file"):
        refuse_unwritable(tmp_path / "nowhere")
