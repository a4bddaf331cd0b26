"""The same micro-batches, bit for bit, however a run is started, interrupted and fed: real processes of torchrun, real
windows."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import BIN, ROOT, launch, losses
from safetensors.torch import load_file
from tiny import write_documents, write_recipe

from cpt.commands.prepare import prepare_recipe
from cpt.recipe.load import load_recipe

PROGRAM = Path(__file__).with_name("batches_of_rank.py")
STEPS = 12
ROWS_PER_STEP = 8


@pytest.fixture
def windowed(tiny_recipe, tmp_path):
    """The tiny run with sources of several windows, and held-out documents."""
    for name, count in (("domain", 400), ("general", 300)):
        write_documents(tmp_path / f"{name}.jsonl", count, seed=count)
    sources = [
        {"path": str(tmp_path / "domain.jsonl"), "weight": 0.7},
        {"path": str(tmp_path / "general.jsonl"), "weight": 0.3},
    ]
    tiny_recipe["data"] |= {"sources": sources, "window_bytes": 20_000}
    tiny_recipe["evaluation"] = {"held_out_share": 0.05}
    return tiny_recipe


@pytest.fixture
def read(windowed, tmp_path):
    """Read some steps with some processes, workers and store; gives the steps' rows in their global order."""
    recipe = write_recipe(windowed, tmp_path / "r.yaml")

    def run(first=0, steps=STEPS, *, processes=1, workers=0, cache="cache"):
        out = tmp_path / f"out-{processes}-{workers}-{first}"
        start = (
            [str(BIN / "torchrun"), "--standalone", f"--nproc_per_node={processes}"]
            if processes > 1
            else [sys.executable]
        )
        words = [*start, str(PROGRAM), str(recipe), str(out), str(first), str(steps), "--workers", str(workers)]
        environment = {
            **os.environ,
            "CPT_CACHE": str(tmp_path / cache),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        ended = subprocess.run(
            words, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        ranks = [torch.load(f"{out}-{rank}.pt") for rank in range(processes)]
        return [batch for together in zip(*ranks, strict=True) for batch in together]

    return run


def same(first, second):
    """Equal by ids, labels, positions and source."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (
            one.keys() == other.keys() == {"input_ids", "labels", "position_ids", "source"}
            and one["source"] == other["source"]
        )
        assert all(torch.equal(one[name], other[name]) for name in ("input_ids", "labels", "position_ids"))
    return True


@pytest.mark.long
def test_two_processes_read_what_one_does_cold_or_warm(read):
    alone = read()
    assert same(read(processes=2), alone), "warm"
    assert same(read(processes=2, cache="other"), alone), "cold"
    assert len({tuple(batch["input_ids"][0].tolist()) for batch in alone}) == len(alone)


@pytest.mark.long
def test_any_number_of_processes_and_workers_reads_the_same(read):
    straight = read()
    for processes, workers in ((1, 2), (1, 4), (2, 0), (2, 2), (4, 0), (4, 2)):
        assert same(read(processes=processes, workers=workers, cache=f"cache{processes}{workers}"), straight), (
            processes,
            workers,
        )


@pytest.mark.slow
def test_2_then_1_then_4_processes_read_what_one_does_straight(read):
    straight = read()
    parts = [*read(0, 5, processes=2), *read(5, 3, processes=1), *read(8, 4, processes=4)]
    assert same(parts, straight)


@pytest.mark.long
def test_resumed_at_every_step_it_reads_the_same_also_where_nothing_is_stored(read):
    straight = read()
    for step in range(1, STEPS):
        assert same(read(step, STEPS - step, cache=f"cold{step}"), straight[step * ROWS_PER_STEP :]), step


def straight_run(sections, tmp_path, name="straight"):
    """A whole run in a store of its own: its losses, and its weights."""
    recipe = write_recipe(
        {**sections, "name": name, "checkpoints": {"every_steps": 1, "keep": None}}, tmp_path / f"{name}.yaml"
    )
    ended = launch(recipe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs" / name
    return recipe, run, losses(run), load_file(run / "final" / "model.safetensors")


@pytest.mark.long
def test_a_run_over_windows_goes_on_with_an_empty_store_and_a_bounded_disk(windowed, tmp_path, monkeypatch):
    windowed["budget"]["tokens"] = 24 * 256
    _, _, expected, weights = straight_run(windowed, tmp_path)
    bounded = {**windowed, "data": {**windowed["data"], "disk_bytes": 160_000}}
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "bounded"))
    recipe, run, found, _ = straight_run(bounded, tmp_path, "bounded")
    assert found == expected
    for folder in [run / "final", *(run / f"checkpoint-{step}" for step in range(19, 25))]:
        shutil.rmtree(folder)
    (run / "status.json").unlink()
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "empty"))
    assert json.loads((run / "checkpoint-18" / "data_position.json").read_text())["row"] == 18 * 4
    again = launch(recipe)
    assert again.returncode == 0, again.stdout + again.stderr
    resumed = load_file(run / "final" / "model.safetensors")
    assert losses(run) == expected and all(torch.equal(resumed[name], weights[name]) for name in weights)


def store_of(recipe, cache):
    """Every file of the store but locks, once `cpt prepare` has completed what the run did not come to."""
    prepare_recipe(load_recipe(recipe), cache)
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ten", [1, 2])
def test_killed_at_twice_ten_moments_of_a_cold_start_the_run_and_the_store_end_the_same(
    windowed, tmp_path, monkeypatch, ten
):
    windowed["budget"]["tokens"] = 16 * 256
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "straight"))
    straight, _, _, weights = straight_run(windowed, tmp_path)
    whole = store_of(straight, tmp_path / "straight")
    draw = random.Random(ten)
    for number in range(10):
        cache = tmp_path / f"cache{number}"
        recipe = write_recipe({**windowed, "name": f"killed{number}"}, tmp_path / f"{number}.yaml")
        environment = {**os.environ, "CPT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [sys.executable, "cpt/train.py", str(recipe)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while not (cache / "tokens").exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 2.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        monkeypatch.setenv("CPT_CACHE", str(cache))
        again = launch(recipe)
        run = tmp_path / "runs" / f"killed{number}"
        assert again.returncode == 0, again.stdout + again.stderr
        ended = load_file(run / "final" / "model.safetensors")
        assert all(torch.equal(ended[name], weights[name]) for name in weights), number
        assert store_of(recipe, cache) == whole, number
