import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import zero_profile
from safetensors.numpy import save_file
from tiny import write_recipe

from cpt.cli import main
from cpt.commands.reproduce import (
    changes,
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

ROOT = Path(__file__).parents[2]
LINES = [
    {"step": 0, "eval_domain_loss": 5.0, "eval_domain_runtime": 1.0},
    {"step": 1, "loss": 4.5, "grad_norm": 0.5, "tokens_per_second": 100.0},
    {"step": 2, "loss": 4.25, "grad_norm": float("nan"), "tokens_per_second": 100.0},
    {"step": 2, "train_loss": 4.4},
]


# --- results ---------------------------------------------------------------------------------------------------------


def write_results(folder, lines, weight=1.0):
    (folder / "final").mkdir(parents=True)
    save_file({"weight": np.full(3, weight, dtype=np.float32)}, folder / "final" / "model.safetensors")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def compared(tmp_path, lines, weight=1.0):
    then, now = write_results(tmp_path / "then", LINES), write_results(tmp_path / "now", lines, weight)
    return compare_results(RunRecord(then, {}, Metrics({})), now)


def changed(place, **figures):
    return [*LINES[:place], {**LINES[place], **figures}, *LINES[place + 1 :]]


def test_runs_that_differ_only_in_time_are_bit_equal(tmp_path):
    found = compared(tmp_path, changed(1, tokens_per_second=7.0))
    assert found.is_bit_equal and (found.logs, found.evaluations, found.last_step) == (2, 1, 2)


@pytest.mark.parametrize(
    ("place", "figures"), [(1, {"loss": 4.5 + 1e-15}), (2, {"grad_norm": 0.25}), (0, {"eval_domain_loss": 5.5})]
)
def test_the_first_figure_that_differs_in_its_last_bit_is_named(tmp_path, place, figures):
    found = compared(tmp_path, changed(place, **figures))
    assert found.difference is not None and not found.is_bit_equal
    assert (found.difference["step"], found.difference["figure"]) == (LINES[place]["step"], *figures)
    assert str(found.difference["now"]) in report(found, ["versions: numpy 1 -> 2"])[0]


def test_differing_weights_are_named(tmp_path):
    found = compared(tmp_path, LINES, weight=2.0)
    assert found.weights_differ == ["model.safetensors"] and not found.is_bit_equal


def test_what_changed_between_two_starts_is_listed():
    then = {
        "processes": 2,
        "versions": {"torch": "2.11", "peft": None},
        "hardware": {"cores": 4, "host_memory_gib": 8},
        "variables": {"NCCL_ALGO": "Ring"},
        "git": {"commit": "a" * 40, "diff": ""},
    }
    now = {**then, "processes": 1, "versions": {"torch": "2.12"}, "hardware": {"cores": 2}, "variables": {}}
    assert list(changes(then, now)) == [
        "versions: torch 2.11 -> 2.12",
        "versions: peft not installed -> none",
        "machine: processes 2 -> 1",
        "machine: cores 4 -> 2",
    ]


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tiny_recipe, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "corpus" / "domain.jsonl"), "name": "domain"}]
    judge = {"path": str(tmp_path / "corpus" / "held_out.jsonl"), "name": "judge"}
    tiny_recipe["evaluation"] = {"perplexity": [judge]}
    tiny_recipe["monitoring"] = {"trackers": ["tensorboard"]}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "archive": str(tmp_path / "archive")}
    tiny_recipe["training"]["gradient_checkpointing"] = "auto"
    return load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))


@pytest.fixture
def inputs(tmp_path):
    domain, judge = (str(tmp_path / "corpus" / name) for name in ("domain.jsonl", "held_out.jsonl"))
    sources = {"domain": {"files": {domain: size_and_hash(Path(domain))[1]}}}
    return {"data": {"sources": sources, "held_out": {"judge": {judge: size_and_hash(Path(judge))[1]}}}}


@pytest.mark.parametrize("name", ["domain.jsonl", "held_out.jsonl"])
def test_a_file_with_one_changed_byte_is_named(recipe, inputs, tmp_path, name):
    path = tmp_path / "corpus" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        refuse_changed_inputs(tmp_path, recipe, inputs)
    _, line, _ = str(refused.value).splitlines()
    assert str(path) in line


def test_all_changed_inputs_are_reported_at_once(recipe, inputs, tmp_path):
    weights = tmp_path / "base"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"other")
    (tmp_path / "corpus" / "domain.jsonl").write_text(json.dumps({"text": "other"}) + "\n")
    recorded = {
        **inputs,
        "tokenizer": {"path": "its/folder", "xxh3": "0" * 32},
        "weights": {"path": str(weights), "sha256": {"model.safetensors": "1" * 64}},
        "teacher": {"path": str(tmp_path / "nowhere"), "sha256": {"model.safetensors": "1" * 64}},
    }
    with pytest.raises(DataError) as refused:
        refuse_changed_inputs(tmp_path, recipe, recorded)
    for name in ("domain.jsonl", "its/folder", "base/model.safetensors", "nowhere"):
        assert name in str(refused.value)


# --- the repetition --------------------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path):
    environment = {"variables": {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5"}, "hardware": {"gpus": []}}
    inputs = {"training": {"gradient_checkpointing": True, "deepspeed": {"zero_optimization": {"stage": 2}}}}
    return RunRecord(tmp_path / "runs" / "tiny", {}, Metrics({}), environment, inputs=inputs)


def test_the_repetition_has_the_chosen_values_and_no_trackers_or_archive(record, recipe):
    again = repetition_of(record, recipe)
    assert (again.name, again.output_dir, again.tags) == (
        "tiny-reproduced",
        record.folder.parent,
        ["reproduces tiny"],
    )
    assert again.training["gradient_checkpointing"] is True and again.training["use_cpu"] is True
    assert again.training["deepspeed"] == {"zero_optimization": {"stage": 2}}
    assert (again.data, again.budget, again.seed) == (recipe.data, recipe.budget, recipe.seed)
    assert again.checkpoints.every_steps == 4 and again.monitoring.trackers == []
    assert again.checkpoints.archive is None


def test_variables_that_decide_figures_are_as_they_were(record, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    variables, dropped = environment_of(record)
    assert variables["OMP_NUM_THREADS"] == "3" and "CUDA_VISIBLE_DEVICES" not in variables
    assert "CUBLAS_WORKSPACE_CONFIG" in dropped and "CUDA_VISIBLE_DEVICES" not in dropped


def test_only_an_earlier_repetition_is_deleted(record, recipe):
    again = repetition_of(record, recipe)
    folder = empty_folder(again)
    folder.mkdir(parents=True)
    (folder / "precious").write_text("something else")
    with pytest.raises(ResourceError, match=folder.name):
        empty_folder(again)
    (folder / "recipe.yaml").write_text(dump_recipe(again))
    assert empty_folder(again) == folder and not folder.exists()


# --- the command -----------------------------------------------------------------------------------------------------


def cpt(*words, processes=1):
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables = {**alone, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    program = [*torchrun, "cpt/train.py"] if processes > 1 else [sys.executable, "-m", "cpt.cli"]
    return subprocess.run([*program, *map(str, words)], capture_output=True, text=True, cwd=ROOT, env=variables)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_under_zero_are_repeated_bit_for_bit(tiny_recipe, tmp_path, stage):
    tiny_recipe["training"] |= {"deepspeed": zero_profile(tmp_path, stage)}
    ended = cpt(write_recipe(tiny_recipe, tmp_path / "r.yaml"), processes=2)
    assert ended.returncode == 0, ended.stderr
    again = cpt("reproduce", tmp_path / "runs" / "tiny", "--steps", 3)
    assert again.returncode == 0 and "Bit-equal: 3 logged losses" in again.stdout, again.stdout + again.stderr


def test_a_run_without_losses_is_refused(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(SystemExit) as code:
        main(["reproduce", str(tmp_path)])
    assert code.value.code == 2 and "metrics.jsonl" in capsys.readouterr().err
