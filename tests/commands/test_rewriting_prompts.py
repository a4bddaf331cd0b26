import pytest

from cpt.commands.rewriting import find_prompt
from cpt.errors import RecipeError


def test_a_file_is_a_prompt(tmp_path):
    (tmp_path / "mine.txt").write_text("Say {text} in verse, {name}.\n")
    prompt = find_prompt(str(tmp_path / "mine.txt"))
    assert prompt.name == "mine.txt" and prompt.template == "Say {text} in verse, {name}.\n"


@pytest.mark.parametrize("content", [b"no place", b"{text}\xff"])
def test_a_file_that_is_not_a_prompt_is_refused(tmp_path, content):
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(RecipeError, match="mine.txt"):
        find_prompt(str(tmp_path / "mine.txt"))


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(RecipeError, match="`clear_prose`"):
        find_prompt("clear_pose")
