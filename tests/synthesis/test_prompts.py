import pytest

from cpt.errors import RecipeError
from cpt.synthesis.prompts import find_prompt


def test_a_back_translation_goes_there_and_back():
    there, back = find_prompt("back_translation", pivot="French", language="Dutch").steps
    assert "from Dutch into French" in there and "from French into Dutch" in back
    assert "German" in find_prompt("back_translation").steps[0]


def test_a_prompt_of_ones_own_is_a_file_with_steps(tmp_path):
    (tmp_path / "mine.txt").write_text("Say {text} in verse, {name}.\n---\nNow in prose:\n{text}\n")
    prompt = find_prompt(str(tmp_path / "mine.txt"))
    assert prompt.name == "mine.txt" and prompt.steps == ("Say {text} in verse, {name}.\n", "Now in prose:\n{text}\n")


@pytest.mark.parametrize(
    "content, message",
    [(b"no place", "{text} is missing in step 1 of 1"), (b"{text}\n---\nx", "in step 2 of 2"), (b"\xff", "not UTF-8")],
)
def test_a_file_that_is_no_prompt_is_refused(tmp_path, content, message):
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        find_prompt(str(tmp_path / "mine.txt"))


def test_an_unknown_name_gets_a_suggestion_and_a_language_without_use_is_refused():
    with pytest.raises(RecipeError, match="Did you mean `clear_prose`"):
        find_prompt("clear_pose")
    with pytest.raises(RecipeError, match="--pivot has no effect"):
        find_prompt("easy", pivot="French")
