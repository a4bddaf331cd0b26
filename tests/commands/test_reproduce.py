"""`cpt reproduce`; whole repetitions: tests/promises/test_around.py."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import write_recipe

from cpt.commands.reproduce import (
    compare_results,
    empty_folder,
    environment_of,
    refuse_changed_inputs,
    repetition_of,
    report,
)
from cpt.errors import DataError, ResourceError
from cpt.files import size_and_hash
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.runs.folder import Metrics, RunRecord

LINES = [
    {"step": 0, "eval_domain_loss": 5.0, "eval_domain_runtime": 1.0},
    {"step": 1, "loss": 4.5, "grad_norm": 0.5, "tokens_per_second": 100.0},
    {"step": 2, "loss": 4.25, "grad_norm": float("nan"), "tokens_per_second": 100.0},
    {"step": 2, "train_loss": 4.4},
]


# --- results ---------------------------------------------------------------------------------------------------------


def write_results(folder, lines, weight=1.0):
    (folder / "final").mkdir(parents=True)
    save_file(
        {"weight": np.full(3, weight, dtype=np.float32)}, folder / "final" / "model.safetensors"
    )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture
def compared(tmp_path):
    """Compare the lines above with the same where one line has other figures."""

    def compare(place, weight=1.0, **figures):
        lines = [*LINES[:place], {**LINES[place], **figures}, *LINES[place + 1 :]]
        then, now = (
            write_results(tmp_path / "then", LINES),
            write_results(tmp_path / "now", lines, weight),
        )
        return compare_results(RunRecord(then, {}, Metrics({})), now)

    return compare


@pytest.mark.parametrize(
    ("place", "figures"),
    [(1, {"loss": 4.5 + 1e-15}), (2, {"grad_norm": 0.25}), (0, {"eval_domain_loss": 5.5})],
)
def test_the_first_figure_that_differs_in_its_last_bit_is_named(compared, place, figures):
    found = compared(place, **figures)
    assert found.difference is not None and not found.is_bit_equal
    assert (found.difference["step"], found.difference["metric"]) == (
        LINES[place]["step"],
        *figures,
    )
    assert str(found.difference["now"]) in report(found, ["versions: numpy 1 -> 2"])[0]


def test_differing_weights_are_named(compared):
    found = compared(0, weight=2.0)
    assert found.weights_differ == ["model.safetensors"] and not found.is_bit_equal


# --- the repetition --------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tiny_recipe, tmp_path):
    for name in ("domain", "judge"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "the model reads"}) + "\n")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "domain.jsonl"), "name": "domain"}]
    tiny_recipe["evaluation"] = {
        "perplexity": [{"path": str(tmp_path / "judge.jsonl"), "name": "judge"}]
    }
    tiny_recipe["monitoring"] = {"trackers": ["tensorboard"]}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "archive": str(tmp_path / "archive")}
    tiny_recipe["training"]["gradient_checkpointing"] = "auto"
    return load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))


def test_all_changed_inputs_are_reported_at_once(recipe, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"other")
    files = {
        name: {str(path): size_and_hash(path)[1]}
        for path in tmp_path.glob("*.jsonl")
        for name in [path.stem]
    }
    recorded = {
        "data": {
            "sources": {"domain": {"files": files["domain"]}},
            "held_out": {"judge": files["judge"]},
        },
        "tokenizer": {"path": "its/folder", "xxh3": "0" * 32},
        "weights": {"path": str(base), "sha256": {"model.safetensors": "1" * 64}},
        "teacher": {"path": str(tmp_path / "nowhere"), "sha256": {"model.safetensors": "1" * 64}},
    }
    for name in ("domain", "judge"):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(path.read_bytes().replace(b"reads", b"reeds"))
    with pytest.raises(DataError) as refused:
        refuse_changed_inputs(tmp_path, recipe, recorded)
    for name in ("domain.jsonl", "judge.jsonl", "its/folder", "base/model.safetensors", "nowhere"):
        assert name in str(refused.value)


@pytest.fixture
def record(tmp_path):
    environment = {
        "variables": {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5"},
        "hardware": {"gpus": []},
    }
    inputs = {
        "training": {
            "gradient_checkpointing": True,
            "deepspeed": {"zero_optimization": {"stage": 2}},
        }
    }
    return RunRecord(tmp_path / "runs" / "tiny", {}, Metrics({}), environment, inputs=inputs)


def test_the_repetition_has_the_chosen_values_and_no_trackers_or_archive(record, recipe):
    again = repetition_of(record, recipe, record.inputs)
    assert (again.name, again.output_dir, again.tags) == (
        "tiny-reproduced",
        record.folder.parent,
        ["reproduces tiny"],
    )
    assert again.training["gradient_checkpointing"] is True and again.training["use_cpu"] is True
    assert again.training["deepspeed"] == {"zero_optimization": {"stage": 2}}
    assert (again.data, again.budget, again.seed) == (recipe.data, recipe.budget, recipe.seed)
    assert again.checkpoints.every_steps == 4 and again.checkpoints.archive is None
    assert again.monitoring.trackers == []


def test_variables_that_decide_figures_are_as_they_were(record, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    variables = environment_of(record)
    assert variables["OMP_NUM_THREADS"] == "3" and variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUBLAS_WORKSPACE_CONFIG" not in variables and variables["PATH"]


def test_only_an_earlier_repetition_is_deleted(record, recipe):
    again = repetition_of(record, recipe, record.inputs)
    folder = empty_folder(again)
    folder.mkdir(parents=True)
    (folder / "precious").write_text("something else")
    with pytest.raises(ResourceError, match=folder.name):
        empty_folder(again)
    (folder / "recipe.yaml").write_text(dump_recipe(again))
    assert empty_folder(again) == folder and not folder.exists()
