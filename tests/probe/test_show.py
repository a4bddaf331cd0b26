import pytest
from rich.console import Console

from cpt.errors import ResourceError
from cpt.probe.law import Interval
from cpt.probe.report import Check, Combination, Report
from cpt.probe.show import plot_report, show_report, verdict

BEST = Combination(0.1, 1e-3, 2.4, 2.25, Interval(2.2, 2.15, 2.25), Interval(2.22, 2.2, 2.24))
OTHER = Combination(0.3, 1e-3, 2.45, 2.22, Interval(2.3, 2.25, 2.35), Interval(2.2, 2.18, 2.22))


def report_of(recommended=BEST, why="the knee"):
    checks = [Check("domain", 80_000, 0.1, 1e-3, Interval(2.3, 2.28, 2.32), 2.35)]
    overrides = ["data.sources.0.weight=0.9", "optimizer.learning_rate=0.001"]
    return Report(
        "mine",
        1_000_000,
        90_000,
        ["code"],
        ["prose"],
        2.6,
        2.2,
        2.25,
        [BEST, OTHER],
        checks,
        recommended,
        why,
        overrides,
        ["A remark."],
    )


def shown(report):
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        show_report(report, console)
    return " ".join(captured.get().split())


def test_a_report_shows_forecasts_check_and_what_to_write():
    text = shown(report_of())
    assert "2.200 (2.150 to 2.250)" in text and "2.4000" in text and "A remark." in text
    assert "forecast 2.300 (2.280 to 2.320), held-back run measured 2.350: OUTSIDE" in text
    assert "Recommended: replay 10.0%, learning rate 0.001: the knee." in text
    assert text.endswith("Into the recipe: data.sources.0.weight=0.9 optimizer.learning_rate=0.001")


def test_where_nothing_is_recommended_the_reason_is_the_verdict():
    assert verdict(report_of(None, "CPT is not worth it here: no gain.")) == "CPT is not worth it here: no gain."


@pytest.mark.parametrize(("name", "begins"), [("frontier.png", b"\x89PNG"), ("frontier.svg", b"<?xml")])
def test_the_frontier_is_drawn(tmp_path, name, begins):
    plot_report(report_of(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_of_no_kind_is_refused(tmp_path):
    with pytest.raises(ResourceError, match=r"a \.png or \.svg file"):
        plot_report(report_of(), tmp_path / "frontier.doc")
