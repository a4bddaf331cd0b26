"""A checkpoint is there whole or not at all, whatever happens while it is written."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from publishing import contents, save
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.checkpoints.manifest import damages, hash_file, read_manifest, write_manifest
from cpt.checkpoints.snapshot import NotFiniteError, saved_parameters
from cpt.checkpoints.transaction import (
    STAGING,
    Agreement,
    Contents,
    SaveFailed,
    clear_leftovers,
    count_stored,
    hash_durably,
    publish,
    read_back,
    write_state,
)
from cpt.errors import CheckpointError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_same_step_saved_again_replaces_the_first(tmp_path):
    first, second = save(tmp_path, 4, 1000), save(tmp_path, 4, 1001)
    assert first.files != second.files
    assert names(tmp_path) == ["checkpoint-4"] and damages(tmp_path / "checkpoint-4") == []


@pytest.mark.parametrize("numbers", [0, 3, 3_000_000])
def test_a_state_is_hashed_as_it_is_written(tmp_path, numbers):
    state = {"m": torch.arange(float(numbers)), "step": 3}
    entry = write_state(tmp_path / "below" / "optimizer.pt", state)
    assert (
        entry
        == hash_file(tmp_path / "below" / "optimizer.pt")
        == hash_durably(tmp_path / "below" / "optimizer.pt")
    )
    read = torch.load(tmp_path / "below" / "optimizer.pt", weights_only=True)
    assert torch.equal(read["m"], state["m"]) and read["step"] == 3


def test_a_checkpoint_is_all_that_it_was_given_and_its_manifest_lists_it(tmp_path):
    manifest = save(tmp_path, 3, 11)
    checkpoint = tmp_path / "checkpoint-3"
    found = {
        path.relative_to(checkpoint).as_posix(): path
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert set(found) == {
        *("model.safetensors", "config.json", "optimizer.pt", "global_step/part.pt"),
        *("scheduler.pt", "rng_state.pth", "trainer_state.json"),
    }
    assert manifest.files == {name: hash_file(path) for name, path in found.items()}
    assert read_manifest(checkpoint) == manifest and names(tmp_path) == ["checkpoint-3"]
    assert found["trainer_state.json"].read_text() == '{"global_step": 3, "log_history": []}'
    assert torch.load(found["global_step/part.pt"])["v"].tolist() == [3.0] * 11
    assert load_file(found["model.safetensors"])["weight"].tolist() == [3.0] * 11


def test_the_size_of_a_checkpoint_counts_states_texts_and_the_model():
    states = {"a": {"m": torch.zeros(5)}, "b": [torch.zeros(3, dtype=torch.uint8)]}
    sized = Contents(
        contents().manifest,
        torch.nn.Linear(1, 1),
        states=states,
        texts={"a": "12", "b": "345"},
        model_bytes=1000,
    )
    assert sized.num_bytes() == 20 + 3 + 5 + 1000


# --- a save that fails -----------------------------------------------------------------------------------------------


# Not even the small files; neither torch's nor the model's; not those with headers
@pytest.mark.parametrize("room", [100, 2000, 3900])
def test_a_disk_that_is_full_costs_this_save_alone(tmp_path, room):
    save(tmp_path, 1)
    with files_end_at(room), pytest.raises(SaveFailed, match="File too large") as failed:
        save(tmp_path, 2)
    assert failed.value.reason == "storage"
    assert names(tmp_path) == ["checkpoint-1"] and damages(tmp_path / "checkpoint-1") == []
    save(tmp_path, 2)
    assert damages(tmp_path / "checkpoint-2") == []


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 1000)
    )
    with pytest.raises(SaveFailed, match="MiB free") as failed:
        save(tmp_path)
    assert failed.value.reason == "storage" and names(tmp_path) == []
    needs = "the checkpoint needs 0 MiB and the run's other files 16 MiB, but"
    assert str(failed.value) == f"{needs} {tmp_path}/.saving/checkpoint-1 has 0 MiB free"


@pytest.mark.parametrize(("more", "fits"), [(0, True), (-1, False)])
def test_a_disk_needs_room_for_the_checkpoint_and_a_reserve(tmp_path, monkeypatch, more, fits):
    free = contents(1, 1000).num_bytes() + 16 * 2**20 + more
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, free)
    )
    with nullcontext() if fits else pytest.raises(SaveFailed, match="16 MiB free"):
        save(tmp_path, 1, 1000)


@pytest.mark.parametrize(
    ("problem", "reason", "words"),
    [
        (OSError(28, "No space left", "/x"), "storage", "No space left (/x)"),
        (OSError(5, "Input/output error"), "storage", "Input/output error"),
        (OSError("gone"), "storage", "gone"),
        (NotFiniteError("NaN: w"), "not finite", "NaN: w"),
        (CheckpointError("a file lacks"), "error", "a file lacks"),
        (SaveFailed("not finite", "as before"), "not finite", "as before"),
        (SafetensorError("Os Error 28"), "storage", "SafetensorError: Os Error 28"),
        (SafetensorError("header"), "error", "SafetensorError: header"),
        (ValueError("a  b\n" + "c" * 400), "error", f"ValueError: a b {'c' * 296}"),
    ],
)
def test_a_failure_has_a_reason_and_words(tmp_path, problem, reason, words):
    def fail(_):
        raise problem

    with pytest.raises(SaveFailed) as failed:
        save(tmp_path, 2, read_back=fail)
    assert (failed.value.reason, str(failed.value)) == (reason, words)
    assert names(tmp_path) == [], "nothing half written stays"


def test_a_first_checkpoint_is_read_back_and_counted(tmp_path):
    model = torch.nn.Linear(10, 1, bias=False)
    save(tmp_path, 1, 10, read_back=lambda folder: read_back(folder, model))
    larger = torch.nn.Linear(11, 1, bias=False)
    with pytest.raises(SaveFailed, match="has 10 of 11 weights: a model cannot be lo") as failed:
        save(tmp_path, 2, 10, read_back=lambda folder: read_back(folder, larger))
    assert failed.value.reason == "error" and names(tmp_path) == ["checkpoint-1"]
    checkpoint = tmp_path / "checkpoint-1"
    content = (checkpoint / "scheduler.pt").read_bytes()
    (checkpoint / "scheduler.pt").write_bytes(content[::-1])
    with pytest.raises(SaveFailed, match="other data than was written: scheduler.pt: ha") as failed:
        read_back(checkpoint, model)
    assert failed.value.reason == "storage"
    (checkpoint / "scheduler.pt").write_bytes(content)
    write_manifest(checkpoint, replace(read_manifest(checkpoint), step=2))
    with pytest.raises(SaveFailed, match="cannot resume from .*trainer_state.json: an") as failed:
        read_back(checkpoint, model)
    assert failed.value.reason == "error"
    write_manifest(checkpoint, replace(read_manifest(checkpoint), kind="weights"))
    read_back(checkpoint, model)


def test_weights_that_must_not_be_published_are_not_written(tmp_path):
    def refuse(weights):
        raise NotFiniteError(f"NaN: {sorted(weights)}")

    checked = replace(contents(3), check=refuse, weights={"w": torch.zeros(1)})
    alone = Agreement(timedelta(seconds=9))
    with pytest.raises(SaveFailed, match="NaN: ..w") as failed:
        publish(tmp_path, "checkpoint-3", checked, alone)
    assert failed.value.reason == "not finite" and names(tmp_path) == []
    assert alone.gather(3) == [3] and alone.after_error((1, 2)) == ""
    assert alone.together(lambda: 4) == [4] and alone.on_main(lambda: 5) == 5


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    for leftover in (f"{STAGING}/checkpoint-2", ".del-checkpoint-0", "bad-checkpoint-0"):
        (tmp_path / leftover).mkdir(parents=True)
    assert clear_leftovers(tmp_path) == [".del-checkpoint-0", "checkpoint-2"]
    assert names(tmp_path) == ["bad-checkpoint-0", "checkpoint-1"]


def test_the_weights_of_shards_are_counted_together_and_a_tied_head_once(tmp_path):
    for shard in (1, 2):
        save_file({f"w{shard}": torch.zeros(2, 3)}, tmp_path / f"model-{shard}.safetensors")
    assert count_stored(tmp_path) == 12
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**TINY_LLAMA, "tie_word_embeddings": True})
    )
    assert sum(numbers for _, numbers in saved_parameters(model)) == model.num_parameters()


# --- several processes -----------------------------------------------------------------------------------------------

PROGRAM = """
import os, threading
from datetime import timedelta
import torch, torch.distributed as dist
from cpt.checkpoints.transaction import Agreement, SaveFailed
dist.init_process_group("gloo")
agreement, rank = Agreement(timedelta(seconds=60)), dist.get_rank()
def full():
    if rank == 1:
        raise OSError(28, "No space left on device", "/runs/x")
heard = []
def save():
    for number in range(50):
        heard.append(agreement.gather((rank, number)))
    try:
        agreement.together(full)
    except SaveFailed as failure:
        heard.append((failure.reason, str(failure)))
    heard.append(agreement.on_main(lambda: rank + 10))
thread = threading.Thread(target=save)
thread.start()
for number in range(50):  # what training does meanwhile
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total[0] == 2
thread.join()
expected = [[(0, number), (1, number)] for number in range(50)]
assert heard == [*expected, ("storage", "process 1: No space left on device (/runs/x)"), 10], heard
dist.barrier()
print("agreed", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_what_fails_on_one_process_fails_on_all_while_training_continues(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--standalone", "--nproc_per_node=2", tmp_path / "program.py"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0 and done.stdout.count("agreed") == 2, done.stderr
