"""Runs that are run again, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import zero_profile
from tiny import write_recipe

from cpt.errors import CheckpointError, DataError
from cpt.recipe.load import load_recipe
from cpt.reproduce.command import command
from cpt.train import train

ROOT = Path(__file__).parents[2]


def cpt(*words, processes=1, **environment):
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables = {**alone, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    program = [*start, "cpt/train.py"] if processes > 1 else [sys.executable, "-m", "cpt.cli"]
    return subprocess.run([*program, *map(str, words)], capture_output=True, text=True, cwd=ROOT, env=variables)


@pytest.fixture
def files(tiny_recipe, corpus, tmp_path):
    own = tmp_path / "domain.jsonl"
    own.write_bytes((corpus / "domain.jsonl").read_bytes())
    tiny_recipe["data"]["sources"][0]["path"] = str(own)
    return tiny_recipe, own


def trained(recipe, tmp_path, **launch):
    file = write_recipe(recipe, tmp_path / "r.yaml")
    ended = cpt(*(["train"] if launch.get("processes", 1) == 1 else []), file, **launch)
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "runs" / "tiny"


@pytest.mark.slow
def test_a_run_is_repeated_bit_for_bit_and_refused_when_a_byte_of_its_data_changed(
    files, tmp_path, monkeypatch, capsys
):
    recipe, own = files
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    train(load_recipe(write_recipe(recipe, tmp_path / "r.yaml")))
    run = tmp_path / "runs" / "tiny"
    command(run, steps=3)
    assert "Bit-equal: 3 logged losses" in capsys.readouterr().out
    assert [path.name for path in run.parent.iterdir()] == ["tiny"]
    content = bytearray(own.read_bytes())
    content[len(content) // 3] ^= 1
    own.write_bytes(content)
    with pytest.raises(DataError, match=f"{own} has changed"):
        command(run)


@pytest.mark.long
def test_the_whole_run_has_the_same_weights_and_another_loss_is_found_at_its_step(files, tmp_path):
    recipe, _ = files
    recipe["evaluation"] = {"held_out_share": 0.1}
    run = trained(recipe, tmp_path)
    again = cpt("reproduce", run, "--json", "--keep")
    found = json.loads(again.stdout)
    assert again.returncode == 0 and found["bit_equal"] and found["weights_differ"] == [] and found["logs"] == 8
    assert (Path(found["folder"]) / "final" / "model.safetensors").exists()
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    next(line for line in lines if line["step"] == 4 and "loss" in line)["loss"] += 1e-12
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    environment = json.loads((run / "environment.json").read_text())
    environment["versions"]["numpy"] = "1.0"
    (run / "environment.json").write_text(json.dumps(environment))
    other = cpt("reproduce", run, "--steps", 6)
    assert other.returncode == 3, other.stderr
    assert "NOT the same: loss of step 4 was" in other.stdout and "versions: numpy 1.0 -> " in other.stdout
    assert "cpt compare" in other.stdout and (run.parent / "tiny-reproduced" / "metrics.jsonl").exists()


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_two_processes_under_zero_are_repeated_bit_for_bit(files, tmp_path, stage):
    recipe, _ = files
    recipe["training"] |= {"deepspeed": zero_profile(tmp_path, stage)}
    run = trained(recipe, tmp_path, processes=2)
    again = cpt("reproduce", run, "--steps", 3)
    assert again.returncode == 0 and "Bit-equal: 3 logged losses" in again.stdout, again.stdout + again.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is no run's folder"):
        command(tmp_path)
