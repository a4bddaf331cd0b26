import json

import pytest

from benchmarks.optimizers.__main__ import main
from benchmarks.optimizers.page import PAGE, RESULTS, table
from benchmarks.optimizers.training import ARMS

pytest.importorskip("bitsandbytes")


@pytest.mark.slow
def test_each_arm_is_measured_at_each_rate(tmp_path):
    main(["--seeds", "1", "--steps", "3", "--rates", "1e-5", "1e-3", "--output", str(tmp_path / "r.json")])
    results = json.loads((tmp_path / "r.json").read_text())
    assert len(results["rows"]) == 2 * len(ARMS) and all(
        row["loss"] > 0 and -1 <= row["alike"] <= 1 for row in results["rows"]
    )
    assert len(table(results).splitlines()) == 2 + len(ARMS)


def test_the_page_shows_the_results_that_ship():
    results = json.loads(RESULTS.read_text())
    assert table(results) in PAGE.read_text(encoding="utf-8")
    at = {row["arm"]: abs(row["loss"] - row["fp32_loss"]) for row in results["rows"] if row["rate"] == 1e-5}
    assert at["bf16, adamw_8bit, kahan"] < 0.1 * at["bf16, torch's AdamW alone"]
