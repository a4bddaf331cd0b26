import pytest

from benchmarks.data.results import measurements, results_of

CORPORA = {320: {"text_megabytes": 320.0, "documents": 10}, 64: {"text_megabytes": 64.0, "documents": 2}}


MEMORY = {"own_memory_mb": 300.0, "worker_own_memory_mb": 200.0}


def cold(total, first=1.0):
    return {"total_seconds": total, "first_batch_seconds": first, **MEMORY}


def sample(megabytes, total, first=1.0, steady=0.0):
    warm = [{"first_batch_seconds": 0.1, "steady_tokens_per_second": steady, **MEMORY}] if steady else []
    return {"megabytes": megabytes, "cold": [cold(total, first)] * 3, "warm": warm, "failed": ""}


def rows(systems, **more):
    found = results_of({"systems": systems, "growth": [], **more}, CORPORA, 1.0)
    return {row["name"]: row for row in found["measurements"]}


def test_speeds_are_compared_for_each_megabyte():
    found = rows({"ours": sample(320, 2.0), "hugging_face": sample(64, 5.0)})
    ratio = found["cold, jsonl to the last batch / tokenizers `encode_batch_fast`"]
    assert ratio["measured"] == pytest.approx((320 / 2) / (64 / 5))
    assert ratio["met"] is True


def test_the_median_of_the_repetitions_counts():
    ours = sample(320, 2.0)
    ours["cold"] = [cold(seconds) for seconds in (2.0, 90.0, 4.0)]
    found = results_of({"systems": {"ours": ours}, "growth": []}, CORPORA, 1.0)["systems"]["ours"]
    assert found["megabytes_per_second"] == 80
    assert found["spread"] == 45
    assert found["repetitions"] == 3


def test_a_system_that_failed_is_in_no_ratio_and_keeps_its_reason():
    broken = {**sample(64, 5.0), "failed": "cold: it crashed"}
    systems = {"ours": sample(320, 2.0), "run_clm": broken}
    found = results_of({"systems": systems, "growth": []}, CORPORA, 1.0)
    assert found["systems"]["run_clm"]["failed"] == "cold: it crashed"
    assert not any("run_clm" in row["name"] for row in found["measurements"])


def test_what_no_repetition_measured_is_told():
    unmeasured = {"megabytes": 64, "cold": [], "warm": [], "failed": ""}
    assert (
        results_of({"systems": {"trl": unmeasured}, "growth": []}, CORPORA, 1.0)["systems"]["trl"]["failed"]
        == "not measured"
    )


def test_a_slower_warm_reader_misses_its_target():
    found = rows({"ours": sample(320, 2.0, steady=5e7), "litdata": sample(64, 5.0, steady=1e8)})
    row = found["warm, batches in a row / litdata `TokensLoader`"]
    assert (row["measured"], row["met"]) == (0.5, False)


def test_what_failed_beside_the_systems_is_told():
    growth = [{"system": "ours", "megabytes": 20, "failed": "disk full"}]
    found = results_of({"systems": {}, "growth": growth, "shuffle": {"failed": "it crashed"}}, CORPORA, 1.0)
    assert found["failures"] == {"growth of ours to 20 MB": "disk full", "shuffle": "it crashed"}
    assert found["growth"] == []


def test_lost_tokens_count_the_ends_of_documents():
    counts = {
        "ours": {"tokens": 1010, "padding": 0.001, "pieces": 14},
        "run_clm": {"tokens": 900, "padding": 0.0, "pieces": 9},
    }
    waste = {"systems": counts, "encoded": {"tokens": 1000, "documents": 10, "unavoidable_cuts": 4}}
    found = results_of({"systems": {}, "growth": [], "waste": waste}, CORPORA, 1.0)["waste"]["systems"]
    assert found["ours"] == {"padding": 0.001, "lost": 0.0, "cuts": 4}
    assert found["run_clm"]["lost"] == pytest.approx(0.1)
    assert found["run_clm"]["cuts"] is None, "it marks no ends, so nobody can tell"


def test_the_largest_error_of_a_share_is_told_in_points():
    mixture = {"asked": {"a": 0.7, "b": 0.3}, "ours": {"a": 0.702, "b": 0.298}, "tokens": 50_000_000}
    row = next(r for r in measurements({"systems": {}, "waste": {"systems": {}}, "growth": [], "mixture": mixture}))
    assert row["measured"] == pytest.approx(0.2)
    assert row["met"] is False


def test_memory_and_the_first_batch_are_judged_on_the_largest_corpora():
    def point(size, first, memory):
        keys = ("peak_memory_mb", "own_memory_mb", "worker_peak_memory_mb", "worker_own_memory_mb")
        return {
            "system": "ours",
            "megabytes": size,
            "first_batch_seconds": first,
            "total_seconds": 9,
            **dict.fromkeys(keys, memory),
        }

    growth = [point(1280, 2.0, 700), point(20, 0.1, 200), point(320, 1.0, 500)]
    found = {row["name"]: row for row in results_of({"systems": {}, "growth": growth}, CORPORA, 1.0)["measurements"]}
    assert found["cold time to the first batch of 1280 MB / of 320 MB"]["measured"] == 2
    assert found["most memory of a process, 1280 MB"]["met"] is False
