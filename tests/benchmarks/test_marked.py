import pytest

from benchmarks.marked import with_part


def test_what_stands_between_the_markers_is_made_anew():
    assert with_part("a\n<b>old<e>\nz", "<b>", "<e>", "new", "page.md") == "a\n<b>new<e>\nz"


@pytest.mark.parametrize("text", ["a", "a <b> c", "a <e> c"])
def test_a_lost_marker_is_told(text):
    with pytest.raises(SystemExit, match=r"page.md has no lines <b> and <e>"):
        with_part(text, "<b>", "<e>", "new", "page.md")
