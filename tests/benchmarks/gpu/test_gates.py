from types import SimpleNamespace

import pytest

from benchmarks.gpu.gates import all_gates, format_gates, gates_of


def result(case, system, **figures):
    return {
        "case": case,
        "system": system,
        "parts": 1,
        "tokens_per_second": 100.0,
        "losses": [6.0, 5.0],
        "corpus": "x",
        **figures,
    }


def named(results, case, name):
    gate, measured = next(one for one in gates_of(results) if (one[0].case, one[0].name) == (case, name))
    return SimpleNamespace(measured=measured, status=gate.status(measured))


def test_a_gate_is_not_run_where_a_result_is_missing_or_failed():
    ours, theirs = result("A", "cpt", tokens_per_second=210.0), result("A", "trainer")
    speed = "speed / default Trainer, each at its best"
    assert named([ours, theirs], "A", speed).status == "reached" and named([ours, theirs], "A", speed).measured == 2.1
    assert named([ours], "A", speed).status == "not run"
    assert named([ours, {"case": "A", "system": "trainer", "failed": "out of memory"}], "A", speed).status == "not run"
    assert format_gates(gates_of([])) == f"gates not run: {len(all_gates())} of {len(all_gates())}"


def test_speed_is_compared_at_the_best_and_memory_at_equal_rows():
    best = result("C", "cpt", tokens_per_second=300.0, peak_allocated=60.0)
    equal = result("C", "cpt", parts=4, peak_allocated=20.0)
    theirs = result("C", "trainer", parts=4, peak_allocated=50.0)
    memory = "memory / default Trainer, equal rows"
    assert named([best, theirs], "C", memory).status == "not run", "60 of 8 rows against 50 of 2 rows says nothing"
    assert named([best, equal, theirs], "C", memory).measured == pytest.approx(0.4)
    assert named([best, equal, theirs], "C", "speed / default Trainer, each at its best").measured == 3.0
    assert named([best, equal, theirs], "C", "speed / default Trainer, equal rows").status == "MISSED"


def test_packed_rows_are_compared_with_whole_ones_of_another_case():
    results = [result("C", "cpt", mfu=0.5), result("D", "cpt", mfu=0.48)]
    assert named(results, "D", "FLOP rate / whole rows (C)").measured == pytest.approx(0.96)


def test_losses_of_the_same_text_may_be_a_percent_apart():
    near, far = result("A", "bare", losses=[6.05, 5.0]), result("A", "bare", losses=[6.0, 5.06])
    assert named([result("A", "cpt"), near], "A", "losses apart from bare").status == "reached"
    assert named([result("A", "cpt"), far], "A", "losses apart from bare").status == "MISSED"
    assert named([result("A", "cpt"), {**near, "corpus": "y"}], "A", "losses apart from bare").status == "not run"
