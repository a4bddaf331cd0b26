from benchmarks.gpu.page import BEGIN, END, PAGE, format_results


def result(case, system, **figures):
    found = {
        "case": case,
        "system": system,
        "parts": 1,
        "tokens_per_second": 1e5,
        "mfu": 0.5,
        "peak_allocated": 2**34,
        "losses": [6.0],
    }
    return {**found, **figures}


def test_the_page_has_a_place_for_results():
    assert BEGIN in PAGE.read_text() and END in PAGE.read_text()


def test_the_table_has_runs_failures_and_predictions():
    small = {"step": "micro", "name": "copy", "unit": "TB/s", "predicted": 2.85}
    lines = [
        {**small, "failed": "busy"},
        {**small, "measured": 3.0},
        result("A", "cpt"),
        {"step": "problem", "name": "tests", "failed": "why"},
    ]
    text = format_results([*lines, {"case": "A", "system": "trainer", "parts": 1, "failed": "out of memory"}])
    assert "2.85" in text and "TB/s" in text and "busy" not in text
    assert (
        "100,000" in text
        and "50.0%" in text
        and "16.0" in text
        and "out of memory" in text
        and "problem, tests: why" in text
    )
