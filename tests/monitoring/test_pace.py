from types import SimpleNamespace

from cpt.monitoring import pace as pace_module
from cpt.monitoring.pace import SHARE, Pace


def test_looks_take_a_thousandth_of_the_time(monkeypatch):
    now, pace, seen = [0.0], Pace(), 0

    def look():
        now[0] += 0.002
        return "seen"

    monkeypatch.setattr(pace_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    while now[0] < 100:
        now[0] += 0.05
        seen += pace.look(look) is not None
    assert 0.95 * SHARE < seen * 0.002 / now[0] < SHARE
