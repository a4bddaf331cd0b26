"""A checkpoint is there whole or not at all, whatever happens while it is written."""

import errno
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from full_disk import files_end_at
from publishing import contents, save
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from threads_as_ranks import on_ranks
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.checkpoints import transaction
from cpt.checkpoints.manifest import damages, hash_file, read_manifest, write_manifest
from cpt.checkpoints.snapshot import NotFiniteError, saved_parameters
from cpt.checkpoints.transaction import (
    STAGING,
    Agreement,
    Contents,
    SaveFailed,
    clear_leftovers,
    count_stored,
    finish,
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


def test_a_file_that_the_disk_does_not_take_is_no_part_of_a_checkpoint(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(transaction, "make_durable", fails)
    with pytest.raises(OSError, match="Input/output error"):
        hash_durably(tmp_path / "model.safetensors")


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


# --- ranks as threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks as threads, each of which knows its number: `ranks(work)` returns their results."""
    monkeypatch.setattr(transaction, "rank", lambda: dist.get_rank())
    monkeypatch.setattr(transaction, "world_size", lambda: dist.get_world_size())
    monkeypatch.setattr(transaction, "is_main_process", lambda: dist.get_rank() == 0)
    monkeypatch.setattr(transaction, "count_collectives", lambda: [7, 3])
    return partial(on_ranks, 3)


def test_what_fails_on_one_rank_fails_on_all_and_they_go_on_together(ranks):
    def work(rank):
        agreement = Agreement(timedelta(seconds=30))

        def fail_in_the_middle():
            if rank == 1:
                raise OSError(28, "No space left", "/x")
            return rank

        heard = [agreement.gather(10 * rank), agreement.on_main(lambda: dist.get_rank() + 5)]
        with pytest.raises(SaveFailed) as failed:
            agreement.together(fail_in_the_middle)
        heard += [failed.value.reason, str(failed.value), agreement.together(lambda: rank)]
        return heard

    expected = [[0, 10, 20], 5, "storage", "process 1: No space left (/x)", [0, 1, 2]]
    assert ranks(work) == [expected] * 3


def part_of_rank(rank, step=4):
    """The first rank writes the model, and each its random states."""
    whole = contents(step, 7)
    states = {f"rng_state_{rank}.pth": {"rank": torch.full((3,), float(rank))}}
    if rank == 0:
        return replace(whole, states=whole.states | states)
    return Contents(whole.manifest, whole.model, states=states)


def test_ranks_write_one_checkpoint_whose_manifest_lists_the_files_of_all(ranks, tmp_path):
    def work(rank):
        return publish(
            tmp_path, "checkpoint-4", part_of_rank(rank), Agreement(timedelta(seconds=30))
        )

    manifests = ranks(work)
    checkpoint = tmp_path / "checkpoint-4"
    assert manifests == [read_manifest(checkpoint)] * 3 and damages(checkpoint) == []
    states = [name for name in manifests[0].files if name.startswith("rng_state_")]
    assert states == [f"rng_state_{rank}.pth" for rank in range(3)]
    assert [
        torch.load(checkpoint / name, weights_only=True)["rank"].tolist() for name in states
    ] == [[rank] * 3 for rank in (0.0, 1.0, 2.0)]


@pytest.mark.parametrize(("more", "fits"), [(0, True), (-1, False)])
def test_the_disk_needs_room_for_the_parts_of_all_ranks(ranks, tmp_path, monkeypatch, more, fits):
    free = sum(part_of_rank(rank).num_bytes() for rank in range(3)) + 16 * 2**20 + more
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, free)
    )

    def work(rank):
        with nullcontext() if fits else pytest.raises(SaveFailed, match="^process 0: .*MiB free"):
            publish(tmp_path, "checkpoint-4", part_of_rank(rank), Agreement(timedelta(seconds=30)))

    ranks(work)
    assert names(tmp_path) == (["checkpoint-4"] if fits else [])


@pytest.mark.parametrize(
    ("steps", "collectives", "fail", "answer"),
    [
        ((4, 4, 4), (7, 7, 7), (0, 1, 2), ""),
        ((4, 4, 5), (7, 7, 7), (0, 1, 2), "the processes failed at different points of a step"),
        ((4, 4, 4), (7, 8, 7), (0, 1, 2), "the processes failed at different points of a step"),
        (
            (4, 4, 4),
            (7, 7, 7),
            (0,),
            "process 1, 2 did not fail within 0 s, and may wait for it",
        ),
        ((4, 4, 4), (7, 7, 7), (0, 2), "process 1 did not fail within 0 s, and may wait for it"),
    ],
)
def test_ranks_save_together_only_after_an_error_at_the_same_point(
    ranks, monkeypatch, steps, collectives, fail, answer
):
    store = dist.HashStore()
    monkeypatch.setattr(transaction, "default_store", lambda: store)
    monkeypatch.setattr(transaction, "count_collectives", lambda: [collectives[dist.get_rank()], 3])
    monkeypatch.setattr(transaction, "SECONDS_FOR_THE_SAME_ERROR", 0.3 if len(fail) < 3 else 20)

    def work(rank):
        agreement = Agreement(timedelta(seconds=30))
        return agreement.after_error((steps[rank], 9)) if rank in fail else answer

    assert ranks(work) == [answer] * 3


def test_a_lost_store_is_that_of_process_0(ranks, monkeypatch):
    waits = []

    class Lost(dist.HashStore):
        def wait(self, keys, timeout):
            waits.append(timeout)
            raise dist.DistNetworkError("connection reset")

    store = Lost()
    monkeypatch.setattr(transaction, "default_store", lambda: store)
    answers = ranks(lambda rank: Agreement(timedelta(seconds=30)).after_error((4, 5)))
    assert answers == ["process 0 is gone"] * 3 and waits == [timedelta(seconds=30)] * 3


def test_files_of_other_processes_may_appear_later_but_not_never(tmp_path, monkeypatch):
    staging = tmp_path / STAGING / "checkpoint-3"
    staging.mkdir(parents=True)
    (staging / "late.pt").write_text("here")
    files = {"late.pt": hash_file(staging / "late.pt")}
    (staging / "late.pt").unlink()
    manifest = replace(contents(3).manifest, files=files)
    waited = []

    def appear(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            (staging / "late.pt").write_text("here")

    monkeypatch.setattr(transaction.time, "sleep", appear)
    assert finish(staging, tmp_path / "checkpoint-3", manifest, None) == manifest
    assert len(waited) == 3 and names(tmp_path) == ["checkpoint-3"]
    staging.mkdir(parents=True)
    monkeypatch.setattr(transaction, "SECONDS_FOR_FILES_TO_APPEAR", -1.0)
    with pytest.raises(CheckpointError, match="late.pt, written by another process, is not in"):
        finish(staging, tmp_path / "checkpoint-3", manifest, None)
    assert (tmp_path / "checkpoint-3" / "late.pt").exists()


def test_after_a_failed_task_no_further_one_starts():
    begun = []

    def task(number):
        begun.append(number)
        if number == 0:
            raise OSError("full")
        time.sleep(0.05)
        return {}

    with pytest.raises(OSError, match="full"):
        transaction.all_at_once([partial(task, number) for number in range(50)])
    assert len(begun) < 20


def test_an_error_of_torch_alone_is_not_one_of_the_disk(tmp_path, monkeypatch):
    def fail(content, file):
        raise RuntimeError("not picklable")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="not picklable"):
        write_state(tmp_path / "optimizer.pt", {})


def test_a_process_alone_in_its_group_agrees_with_itself_without_another_one():
    (group,) = on_ranks(1, lambda rank: Agreement(timedelta(seconds=9)).group)
    assert group is None
