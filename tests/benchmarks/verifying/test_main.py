import json

from benchmarks.verifying.__main__ import main, measure, write_checkpoint


def test_a_checkpoint_is_read_and_verified_cold_and_warm(tmp_path):
    folder = write_checkpoint(tmp_path / "c", [3 << 20, 1 << 20])
    files = sorted(folder.glob("*.pt"))
    assert sum(path.stat().st_size for path in files) == 4 << 20
    for cold in (True, False):
        assert measure(folder, files, cold)["verify_over_cat"] > 0


def test_each_shape_has_a_line_cold_and_warm(tmp_path, capsys):
    main(tmp_path, 0.001)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4 and {line["cold"] for line in lines} == {True, False} and not list(tmp_path.iterdir())
