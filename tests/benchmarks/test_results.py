import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = [path for path in sorted((ROOT / "benchmarks/results").glob("*.json")) if "measurements" in path.read_text()]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_their_device_and_whether_each_target_is_met(path):
    content = json.loads(path.read_text())
    assert content["device"] and content["measurements"]
    for row in content["measurements"]:
        assert {"name", "target", "measured", "unit", "met"} <= row.keys()
        assert (row["target"] is None) == (row["met"] is None)
