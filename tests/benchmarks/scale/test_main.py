import json

import pytest

from benchmarks.scale import __main__ as main
from benchmarks.scale import page


def a_cell(tokens, factor):
    """Of a size, each of whose costs is so many times that of the smallest."""
    off = {"0.001": 0.2 if tokens < 10**10 else 0.05, "0.01": 0.02, "0.1": 0.03, "1.0": 0.05}
    counts = {
        "rows": tokens // 4096,
        "windows": tokens // 10**8,
        "shards": tokens // 10**6,
        "files": 9,
        "documents": tokens // 1000,
    }
    index = {
        "packing": tokens // 40,
        "documents": tokens // 50,
        "tokens": 4 * tokens,
        "manifests": 100,
        "windows": 50,
        "tables": 20,
    }
    seconds = {"copy": 0.01, "start": 0.2 * factor, "first_batch": 0.02, "lookup_anywhere": 0.01, "lookup_next": 1e-4}
    by_files = {"copy": 0.01, "start": 0.5 * factor, "memory_start": 20_000_000 * factor}
    memory = {"memory_start": 10_000_000 * factor, "memory_read": 11_000_000 * factor}
    return {
        "tokens": tokens,
        **counts,
        "state": 1500,
        "off_points": off,
        "index": index,
        **seconds,
        **memory,
        "resume": [0.05] * 20,
        "by_files": by_files,
    }


CELLS = [a_cell(2 * 10**9, 1), a_cell(2 * 10**12, 12)]


def test_results_say_what_was_asked_and_whether_it_was_met():
    results = main.results_of(CELLS)
    measured = {row["name"]: row for row in results["measurements"]}
    assert measured["first batch at any row, 1,000 times as many tokens"]["measured"] == 1.0
    assert measured["shares of tokens, largest difference from those asked, after 10,000 rows"]["measured"] == 0.05
    assert all(row["met"] for row in measured.values())
    worse = main.results_of([CELLS[0], {**CELLS[1], "resume": [0.05] * 15 + [0.2] * 5}])
    assert [row["met"] for row in worse["measurements"]] == [True, True, False, True, True]


@pytest.mark.slow
def test_the_page_tells_times_beside_the_smallest_size(tmp_path, monkeypatch):
    results, docs, picture = tmp_path / "scale.json", tmp_path / "scaling.md", tmp_path / "scaling.png"
    results.write_text(json.dumps(main.results_of(CELLS)))
    docs.write_text(f"before\n{page.BEGIN}old\n{page.END}after\n")
    for name, path in (("RESULTS", results), ("PAGE", docs), ("PICTURE", picture)):
        monkeypatch.setattr(page, name, path)
    page.write_page()
    written = docs.read_text()
    assert (
        "| start of a process | 1 x | 12 x |" in written
        and "| the same, were each window's file read | 2.5 x | 30 x |" in written
    )
    assert "| memory of a process after its start | 10 MiB | 114 MiB |" in written and "old" not in written
    assert written.startswith("before\n") and written.endswith("after\n") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(("num_bytes", "expected"), [(12, "12 B"), (3.25e6, "3.25 MB"), (8.04e12, "8.04 TB")])
def test_sizes_are_told_in_units(num_bytes, expected):
    assert page.in_units(num_bytes) == expected
