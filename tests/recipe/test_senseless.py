from cpt.recipe.senseless import Senseless, line_of_other
from cpt.recipe.tree import Mistakes
from cpt.recipe.yaml_lines import read_text


def told(other, text=b"a: 1\nb: 2\n"):
    return line_of_other(Senseless(("a",), "no", other), read_text(text, "r.yaml", Mistakes()))


def test_the_line_of_the_other_side_is_told():
    assert told(("b",)) == " (`b`: line 2)"


def test_what_was_not_written_has_no_line():
    assert told(None) == told(("c",)) == ""
