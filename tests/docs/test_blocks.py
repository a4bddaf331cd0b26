"""No block of a page slips through: each is told by its fence and its comments, or refused."""

import pytest
from documented.blocks import PageError, Typed, read_blocks, read_inline_code, typed


def page(tmp_path, text):
    (tmp_path / "page.md").write_text(text)
    return tmp_path / "page.md"


def test_the_fence_and_the_comments_before_it_say_what_a_block_is(tmp_path):
    text = (
        "# A\n\n```\nls\n```\n\n<!-- needs: gpu, hub; -->\n\n```bash\nls\n```\n- a list\n  ```yaml\n  a: 1\n "
        " ```\n\n```text\nout\n```\n"
    )
    first, second, third, fourth = read_blocks(page(tmp_path, text))
    assert first.is_run and first.line == 3 and first.text == "ls\n"
    assert second.is_commands and not second.is_run and second.settings == {"needs": "gpu, hub"}
    assert (third.language, third.text, fourth.is_commands) == ("yaml", "a: 1\n", False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```output\nx\n```", "`output` is none of"),
        ("```sh\nx\n```", "`sh` is none of"),
        ("```text\n$ cpt train r.yaml\n```", "commands, which begin with"),
        ("text\n\n    cpt train r.yaml\n", "indented block"),
        ("<!-- needs: gpus -->\n```\nx\n```", "gpus"),
        ("<!-- need: gpu -->\n```\nx\n```", "`need:` is none of"),
        ("<!-- needs: gpu -->\n```text\nx\n```", "for commands"),
        ("<!-- needs: gpu -->\n\nText between.\n\n```\nx\n```", "followed by no block"),
        ("```\nx\n```\n\n<!-- needs: gpu -->\n", "followed by no block"),
        ("<!-- exit: two -->\n```\nx\n```", "a number"),
        ("<!-- exit: 2 -->\n```yaml\na: 1\n```", "for commands"),
        ("<!-- needs: gpu; exit: 2 -->\n```\nx\n```", "that are run"),
        ("<!-- file: a.sh -->\n```bash\nx\n```", "not for commands"),
        ("<!-- prints -->\n```\nx\n```", "for `text`"),
        ("<!-- yaml: other -->\n```yaml\nx: 1\n```", "says `any`"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, text, said):
    with pytest.raises(PageError, match=said):
        read_blocks(page(tmp_path, text))


def test_comments_of_others_and_directives_of_the_generator_are_left_alone(tmp_path):
    text = "<!-- table begin -->\n\n| a |\n| --- |\n\n<!-- table end -->\n\n```{toctree}\nstart\n```\n"
    assert read_blocks(page(tmp_path, text)) == []


def test_prompts_divide_commands_from_what_they_print(tmp_path):
    (block,) = read_blocks(page(tmp_path, "```\n$ cpt train \\\n    r.yaml\nloss 1\n$ ls\na\nb\n```\n"))
    assert typed(block) == [Typed("cpt train \\\n    r.yaml\n", ("loss 1",)), Typed("ls\n", ("a", "b"))]


def test_code_in_the_text_is_found_in_tables_too(tmp_path):
    text = "Type `cpt a`.\n\n| one | two |\n| --- | --- |\n| `cpt b` | `c` |\n"
    assert [code for _, code in read_inline_code(page(tmp_path, text))] == ["cpt a", "cpt b", "c"]
