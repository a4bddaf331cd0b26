import numpy as np
import pytest
from saved_runs import trainer_of
from tiny_models import make_tokenizer, tiny_config
from transformers import TrainingArguments

from cpt.models.build import build_model
from cpt.models.inventory import build_on_meta, flops_per_token
from cpt.monitoring.utilization import attended_length, peak_flops, precision_of
from cpt.recipe.schema import Model
from cpt.runs.folder import read_metrics


def test_attention_is_counted_over_a_tokens_own_document():
    assert attended_length([np.array([64])] * 3) == 64
    assert attended_length([np.array([32, 32]), np.array([64])]) == 48, "half of the tokens are in the long one"


@pytest.mark.parametrize(
    ("gpu", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "half", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(gpu, precision, peak):
    assert peak_flops(gpu, precision) == peak


def test_who_is_not_in_the_table_has_no_peak():
    assert peak_flops(None, "half") is None and peak_flops("Some Accelerator 9", "half") is None


@pytest.mark.parametrize(
    ("dtype", "arguments", "precision"),
    [
        ("float32", {"bf16": True}, "half"),
        ("bfloat16", {}, "half"),
        ("float32", {}, "fp32"),
    ],
)
def test_the_precision_is_that_of_the_matrices(dtype, arguments, precision, tmp_path):
    model = build_model(Model(from_scratch=True, config=tiny_config("llama"), dtype=dtype), make_tokenizer())
    assert precision_of(TrainingArguments(str(tmp_path), use_cpu=True, **arguments), model) == precision


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"packing": "none"}, marks=pytest.mark.slow)], ids=["full rows", "padded rows"]
)
def test_the_figure_is_operations_of_real_tokens_over_the_peak(layout, tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.monitoring.utilization.peak_flops", lambda *_: 1e9)
    monkeypatch.setattr("cpt.monitoring.utilization.ROWS_MEASURED", 600)
    trainer = trainer_of({**tiny_recipe, "data": {**tiny_recipe["data"], **layout}}, tmp_path)
    trainer.train()
    lengths = np.concatenate([trainer.rows.documents_in(row) for row in range(600)])
    of_token = flops_per_token(build_on_meta(trainer.model.config), (lengths**2).sum() / lengths.sum())
    metrics = read_metrics(trainer.run_folder)
    speed, filled = metrics.curve("tokens_per_second")[1], lengths.sum() / (600 * 64)
    assert metrics.curve("mfu")[1] == pytest.approx(speed * filled * of_token / 1e9, rel=0.02)


@pytest.mark.slow
def test_on_a_cpu_there_is_none(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer.train()
    assert "mfu" not in read_metrics(trainer.run_folder).names


def test_a_model_whose_operations_nobody_can_count_trains_without_the_figure(
    tiny_recipe, tmp_path, monkeypatch, caplog
):
    def refuse(config):
        raise ValueError("code of its own")

    caplog.set_level("INFO", "cpt")
    monkeypatch.setattr("cpt.monitoring.utilization.peak_flops", lambda *_: 1e9)
    monkeypatch.setattr("cpt.monitoring.utilization.build_on_meta", refuse)
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer.train()
    assert "mfu" not in read_metrics(trainer.run_folder).names
    assert caplog.text.count("code of its own") == 1
