import fcntl

import pytest

from cpt.errors import LaunchError, RecipeError, ResourceError
from cpt.synthesis.output import Counts, open_output

COUNTS = Counts(1, {"empty": 2})


def test_a_group_is_found_by_its_texts(tmp_path):
    with open_output(tmp_path, {}) as folder:
        folder.write(0, [{"text": "x"}], ["a", "b"], COUNTS)
        assert (
            folder.find(0, ["a", "b"]) == COUNTS
            and folder.find(0, ["a", "c"]) is None
            and folder.find(1, ["a", "b"]) is None
        )


def test_a_group_whose_file_was_removed_is_made_again(tmp_path):
    with open_output(tmp_path, {}) as folder:
        folder.write(0, [{"text": "x"}], ["a", "b"], COUNTS)
        (tmp_path / "rewritten-00000.jsonl").unlink()
        assert folder.find(0, ["a", "b"]) is None


def test_only_one_process_writes(tmp_path):
    with open_output(tmp_path, {}), (tmp_path / ".rewrite/lock").open("a") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(LaunchError, match="another `cpt data rewrite`"), open_output(tmp_path, {}):
            pass


def test_another_task_and_a_folder_that_cannot_be_written_are_refused(tmp_path):
    with open_output(tmp_path / "a", {"seed": 1}):
        pass
    with pytest.raises(RecipeError, match=r"\(seed differ\)"), open_output(tmp_path / "a", {"seed": 2}):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"), open_output(tmp_path / "file", {}):
        pass
