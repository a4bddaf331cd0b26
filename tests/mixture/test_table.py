from dataclasses import replace

from rich.console import Console

from cpt.data.prepared import SourceReport
from cpt.mixture.command import print_forecast
from cpt.mixture.forecast import Forecast, PhaseForecast, SourceForecast

LENGTHS = {1: 1, 16: 7, 2**22: 2}
REPORT = SourceReport(
    "code", 10, 1, {"too [short]": 2}, {"invalid UTF-8": 3}, LENGTHS, 900, 1, 0.01, 0.5, {}, None, False
)
SOURCE = SourceForecast(**vars(REPORT), asked=0.5, seen=0.5, epochs=1.5)


def test_all_is_printed(capsys):
    phases = [PhaseForecast(0, 1000, {"code": 1.0})]
    print_forecast(Forecast("r", 1000, 2, [SOURCE], phases, False, ["Look [here]."]), Console(width=240))
    shown = capsys.readouterr().out
    for part in (
        "900",
        "50.00%",
        "1.50",
        "too [short]",
        "100.00%",
        "Look [here].",
        "The mixture is not reached: 1,000 tokens in 2 rows.",
    ):
        assert part in shown


def test_estimates_and_licences_are_shown(capsys):
    forecast = Forecast("r", 100, 1, [replace(SOURCE, is_estimate=True, licence="CC-BY-4.0")], [], True, [])
    print_forecast(forecast, Console(width=150))
    shown = capsys.readouterr().out
    assert "~900" in shown and "CC-BY-4.0" in shown
    print_forecast(replace(forecast, sources=[SOURCE]), Console(width=150))
    assert "licence" not in capsys.readouterr().out
