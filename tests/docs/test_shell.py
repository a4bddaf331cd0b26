"""Commands are told from what stands around them in a piece of shell."""

from documented.shell import simple_commands


def test_comments_variables_pipes_and_redirections_are_no_words():
    script = "A=1 cpt train r.yaml a='x y'  # that\ncat f | grep -c x > out 2>&1 && ls; sleep 1 &\n"
    assert list(simple_commands(script)) == [
        ["cpt", "train", "r.yaml", "a=x y"],
        ["cat", "f"],
        ["grep", "-c", "x"],
        ["ls"],
        ["sleep", "1"],
    ]


def test_lines_that_go_on_and_loops_hold_commands():
    script = "cpt plan r.yaml \\\n  --gpus 1\nfor a in 1 2; do cpt train r.yaml seed=$a; done\nif true; then ls; fi\n"
    assert list(simple_commands(script)) == [
        ["cpt", "plan", "r.yaml", "--gpus", "1"],
        ["cpt", "train", "r.yaml", "seed=$a"],
        ["true"],
        ["ls"],
    ]


def test_texts_of_several_lines_are_one_word_and_files_in_the_shell_are_none():
    script = "cat > r.yaml <<'END'\nname: it's\ncpt nothing\nEND\necho 'a\nb' c\n"
    assert list(simple_commands(script)) == [["cat"], ["echo", "a\nb", "c"]]
