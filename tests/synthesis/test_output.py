import pytest

from cpt.commands.rewriting import RewriteCounts, open_output
from cpt.errors import LaunchError, RecipeError, ResourceError

COUNTS = RewriteCounts(1, {"empty": 2})


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


def test_another_process_another_task_and_a_file_are_refused(tmp_path):
    with open_output(tmp_path / "a", {"seed": 1}), pytest.raises(LaunchError), open_output(tmp_path / "a", {}):
        pass
    with pytest.raises(RecipeError, match="seed"), open_output(tmp_path / "a", {"seed": 2}):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError), open_output(tmp_path / "file", {}):
        pass
