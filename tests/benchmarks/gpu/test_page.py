from benchmarks.gpu.page import BEGIN, END, NOT_RUN, PAGE, draw, newest, tables


def result(case, system, **figures):
    found = {"case": case, "system": system, "device": "a GPU", "libraries": {"torch": "2.11"}, "parts": 1, "tokens_per_second": 1e5}
    found |= {"mfu": 0.5, "mfu_as_torchtitan": 0.55, "hfu": 0.5, "peak_allocated": 2**34, "peak_reserved": 2**34, "p50": 0.1, "p95": 0.2}
    return {**found, "cold_start_seconds": 30.0, "packing_efficiency": 1.0, "losses": [6.0], **figures}


def test_without_results_the_page_says_so():
    assert tables([]) == NOT_RUN
    text = PAGE.read_text()
    assert BEGIN in text and END in text


def test_a_row_for_each_result_and_each_failure():
    page = tables([result("A", "cpt"), {"case": "A", "system": "trainer", "failed": "out of memory"}])
    assert "| A: GPT-2 124M | cpt | 100,000 | 50.0 % | 55.0 % | 50.0 % | 16.0 | 16.0 | 100.0, 200.0 |" in page
    assert "| A: GPT-2 124M | Trainer | out of memory |" in page and "a GPU: torch 2.11" in page


def test_the_newest_result_counts_and_no_failure_hides_it():
    old, new = result("A", "cpt", hfu=0.1), result("A", "cpt", hfu=0.2)
    failed = {"case": "A", "system": "cpt", "failed": "exit code 1"}
    assert newest([old, new, failed]) == [new] and newest([failed, old]) == [old] and newest([failed]) == [failed]


def test_the_plot_shows_what_is_there(tmp_path):
    draw([result("A", "cpt"), result("A", "liger"), result("B", "cpt")], tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 1000
