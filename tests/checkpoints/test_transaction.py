"""A checkpoint is there whole or not at all, whatever happens while it is written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from publishing import save
from safetensors.torch import save_file
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.checkpoints.manifest import damages, hash_file
from cpt.checkpoints.snapshot import saved_parameters
from cpt.checkpoints.transaction import (
    STAGING,
    SaveFailed,
    clear_leftovers,
    count_stored,
    hash_durably,
    remove,
    write_state,
)


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


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    for leftover in (f"{STAGING}/checkpoint-2", ".del-checkpoint-0", "bad-checkpoint-0"):
        (tmp_path / leftover).mkdir(parents=True)
    assert clear_leftovers(tmp_path) == [".del-checkpoint-0", "checkpoint-2"]
    assert names(tmp_path) == ["bad-checkpoint-0", "checkpoint-1"]


def test_removing_never_leaves_half_a_checkpoint_under_its_name(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed right there
    remove(tmp_path / "checkpoint-1")
    assert names(tmp_path) == [".del-checkpoint-1"]


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
