import pytest

from benchmarks.verifying.__main__ import measure, measure_all, results_of, write_checkpoint


@pytest.mark.parametrize("cold", [True, False])
def test_a_checkpoint_is_read_and_verified_in_pairs(tmp_path, cold):
    folder = write_checkpoint(tmp_path / "c", [3 << 20, 1 << 20])
    assert sum(path.stat().st_size for path in folder.glob("*.pt")) == 4 << 20
    pairs = measure(folder, 3, cold=cold)
    assert len(pairs) == 3 and all(pair["verify"] > 0 and pair["cat"] > 0 for pair in pairs)


def test_a_damaged_checkpoint_is_no_measurement(tmp_path):
    folder = write_checkpoint(tmp_path / "c", [100])
    (folder / "0.pt").write_bytes(bytes(100))
    with pytest.raises(AssertionError):
        measure(folder, 2, cold=False)


def test_each_shape_is_measured_cold_and_warm(tmp_path):
    assert list(measure_all(tmp_path, 0.001, 2)) == [
        f"{shape}, {state}" for shape in ("one file", "as of two processes") for state in ("warm", "cold")
    ]


@pytest.mark.parametrize(("verify", "met"), [(0.9, True), (1.1, False)])
def test_verifying_may_take_as_long_as_cat(verify, met):
    pairs = [
        {"cat": slow, "verify": verify * slow, "cat_processor": 1.0, "verify_processor": 1.0}
        for slow in (1.0, 2.0, 3.0)
    ]
    first = results_of({"one file, warm": pairs}, 1.2)["measurements"][0]
    assert first["met"] is met and first["measured"] == pytest.approx(verify)
