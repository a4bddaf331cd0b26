import pytest

from cpt.errors import DataError
from cpt.evaluation.frontier import plot_frontier
from cpt.evaluation.retention import Point

COURSE = [
    Point(step, step * 1000, {"domain": 2.6 - 0.05 * step, "general": 2.3 + 0.004 * step**1.5})
    for step in range(0, 11, 2)
]


def test_a_picture_of_one_run_and_of_several_is_written(tmp_path):
    plot_frontier({"run": COURSE}, ["general"], tmp_path / "one.png")
    plot_frontier({"run": COURSE, "other": COURSE[:3]}, ["general"], tmp_path / "two.svg")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG") and "other" in (tmp_path / "two.svg").read_text()


@pytest.mark.parametrize(
    ("courses", "general", "said"),
    [
        ({"run": []}, ["general"], "no evaluation was logged"),
        ({"run": COURSE}, [], "names none"),
        ({"run": COURSE}, ["x"], "names x"),
    ],
)
def test_what_cannot_be_drawn_is_told(courses, general, said, tmp_path):
    with pytest.raises(DataError, match=said):
        plot_frontier(courses, general, tmp_path / "x.png")
