import json
import sys

import numpy as np
import pytest

from cpt.errors import ResourceError
from cpt.runs.plots import MOST_POINTS, Bars, Curve, Intervals, Plot, figure_json, plotly_script, thinned


def drawn(drawing):
    return json.loads(figure_json(drawing))


def plot(*curves, **options):
    return Plot("a title", "tokens", "loss", curves, **options)


def test_a_long_curve_is_thinned_out_and_keeps_its_ends_and_extremes():
    y = np.sin(np.arange(100_000) / 50)
    y[54_321], y[77_777] = 9, -9
    x, kept = thinned(np.arange(100_000.0), y, MOST_POINTS)
    assert len(x) <= MOST_POINTS and kept.max() == 9 and kept.min() == -9
    assert (x[0], x[-1]) == (0, 99_999) and (np.diff(x) > 0).all()


def test_many_curves_have_fewer_points_each():
    curves = [Curve(str(number), range(10_000), np.random.default_rng(number).random(10_000)) for number in range(40)]
    points = [len(trace["x"]) for trace in drawn(plot(*curves))["data"]]
    assert max(points) <= 250 and min(points) > 200


def test_a_short_curve_is_drawn_point_by_point():
    trace = drawn(plot(Curve("loss", [0, 10], [3.14159265, 2])))["data"][0]
    assert (trace["x"], trace["y"], trace["mode"]) == ([0, 10], [3.14159, 2], "lines+markers")


def test_what_is_no_number_is_left_out():
    trace = drawn(plot(Curve("loss", [0, 1, 2, 3], [1, float("nan"), float("inf"), 2])))["data"][0]
    assert (trace["x"], trace["y"]) == ([0, 3], [1, 2])


def test_a_curve_of_nothing_is_drawn_empty():
    assert drawn(plot(Curve("loss", [], [])))["data"][0]["x"] == []


def test_a_faint_curve_has_the_colour_of_the_one_that_follows():
    curves = [
        Curve(name, [0, 1], [0, 1], faint=faint)
        for name, faint in (("raw", True), ("smooth", False), ("other", False))
    ]
    colors = [trace["line"]["color"] for trace in drawn(plot(*curves))["data"]]
    assert colors[0] == colors[1] != colors[2]


def test_of_many_curves_the_faint_ones_are_not_in_the_legend():
    curves = [Curve(str(number), [0, 1], [0, 1], faint=number % 2 == 0) for number in range(6)]
    assert [trace["showlegend"] for trace in drawn(plot(*curves))["data"]] == [False, True] * 3


def test_names_cannot_break_out_of_the_script_and_stay_text():
    text = figure_json(plot(Curve("</script><b>bold</b>", [0, 1], [0, 1]), marks=[(1, "<img src=x>")]))
    assert "<" not in text
    assert json.loads(text)["data"][0]["name"] == "&lt;/script&gt;&lt;b&gt;bold&lt;/b&gt;"


def test_half_of_a_pair_of_surrogates_is_survived():
    assert drawn(plot(Curve("\ud800", [0, 1], [0, 1])))["data"][0]["name"] == "?"


def test_marks_at_one_place_are_one_triangle_that_tells_all():
    figure = drawn(plot(Curve("loss", [0, 9], [1, 2]), marks=[(3, "skipped"), (3, "again"), (5, "restart")]))
    events = figure["data"][-1]
    assert (events["x"], events["text"]) == ([3, 5], ["skipped<br>again", "restart"])
    assert len(figure["layout"]["shapes"]) == 2


def test_small_values_are_written_with_exponents_and_large_ones_not():
    formats = [drawn(plot(Curve("x", [0, 1], [0, top])))["layout"]["yaxis"]["exponentformat"] for top in (1e-4, 2e9)]
    assert formats == ["e", "B"]


def test_an_axis_may_begin_at_0_or_be_logarithmic():
    layout = drawn(plot(Curve("x", [0, 1], [5, 6]), from_zero=True, log_y=True))["layout"]["yaxis"]
    assert (layout["rangemode"], layout["type"]) == ("tozero", "log")


def test_a_single_point_with_hover_says_its_text():
    trace = drawn(plot(Curve("before", [1], [2], symbol="x", hover=["after 0 tokens"])))["data"][0]
    assert (trace["mode"], trace["marker"]["symbol"], trace["text"]) == ("markers", "x", ["after 0 tokens"])


def test_bars_stand_side_by_side_or_on_top_of_each_other():
    series = {"asked": [70, 30], "realised": [69.5, None]}
    figure = drawn(Bars("Mixture", "%", ["code", "prose"], series))
    assert [trace["y"] for trace in figure["data"]] == [[70, 30], [69.5, None]] and figure["layout"][
        "barmode"
    ] == "group"
    assert drawn(Bars("Memory", "GiB", ["planned"], {"weights": [1.0]}, stacked=True))["layout"]["barmode"] == "stack"


def test_intervals_reach_from_low_to_high_the_first_on_top():
    trace = drawn(Intervals("Change", "%", [("code", -20, -22, -19), ("prose", 1, -1, 2)]))["data"][0]
    assert (trace["y"], trace["x"]) == (["prose", "code"], [1, -20])
    assert (trace["error_x"]["arrayminus"], trace["error_x"]["array"]) == ([2, 2], [1, 1])


@pytest.mark.parametrize(
    ("module", "use"), [("plotly.graph_objects", lambda: figure_json(plot())), ("plotly.offline", plotly_script)]
)
def test_without_plotly_the_install_line_is_told(module, use, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[report\]'"):
        use()
