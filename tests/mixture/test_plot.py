import sys

import pytest

from cpt.errors import ResourceError
from cpt.mixture.command import plot_forecast
from cpt.mixture.forecast import Forecast, PhaseForecast, SourceForecast

SOURCES = [
    SourceForecast(
        name, 10, 1, {}, {}, {16: 3, 128: 7}, 900, 1, 0.01, 0.5, {}, None, False, asked=0.5, seen=0.5, epochs=1.5
    )
    for name in ("code", "prose")
]
PHASES = [PhaseForecast(0, 64, {"code": 1.0, "prose": 0.0}), PhaseForecast(64, 128, {"code": 0.0, "prose": 1.0})]
FORECAST = Forecast("r", 128, 2, SOURCES, PHASES, PHASES, True, [])


def test_a_picture_is_drawn_with_its_phases(tmp_path):
    plot_forecast(FORECAST, tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert "as the run goes on" in drawn and "tokens in a document" in drawn


def test_without_matplotlib_the_install_line_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[plots\]'"):
        plot_forecast(FORECAST, tmp_path / "x.png")


def test_a_name_that_is_no_pictures_is_told(tmp_path):
    with pytest.raises(ResourceError, match="x.tar: cannot write the picture"):
        plot_forecast(FORECAST, tmp_path / "x.tar")
