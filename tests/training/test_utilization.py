import numpy as np
import pytest
from saved_runs import trainer_of

from cpt.models.inventory import build_on_meta, flops_per_token
from cpt.runs.folder import read_metrics


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"packing": "none"}, marks=pytest.mark.slow)], ids=["full rows", "padded rows"]
)
def test_the_figure_is_operations_of_real_tokens_over_the_peak(layout, tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.training.metrics.peak_flops", lambda *_: 1e9)
    monkeypatch.setattr("cpt.training.metrics.ROWS_MEASURED", 600)
    trainer = trainer_of({**tiny_recipe, "data": {**tiny_recipe["data"], **layout}}, tmp_path)
    trainer.train()
    lengths = np.concatenate([trainer.rows.documents_in(row) for row in range(600)])
    of_token = flops_per_token(build_on_meta(trainer.model.config), (lengths**2).sum() / lengths.sum())
    metrics = read_metrics(trainer.run_folder)
    speed, filled = metrics.curve("tokens_per_second")[1], lengths.sum() / (600 * 64)
    assert metrics.curve("mfu")[1] == pytest.approx(speed * filled * of_token / 1e9, rel=0.02)
