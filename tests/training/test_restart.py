import pytest
import torch

from cpt.errors import RestartNeeded
from cpt.training import restart as restarting
from cpt.training.restart import (
    MOST_WITHOUT_PROGRESS,
    is_out_of_memory,
    learned_micro_batch,
    learned_rollback,
    restart,
    smaller_micro_batch,
)


def test_the_micro_batch_is_halved_or_goes_to_the_next_size_that_divides_it():
    assert [smaller_micro_batch(size) for size in (8, 6, 9, 7, 2, 1)] == [4, 3, 3, 1, 1, None]


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"
        ),
    ],
)
def test_errors_of_the_allocators_of_gpu_and_host_are_out_of_memory(problem):
    assert is_out_of_memory(problem) and not is_out_of_memory(RuntimeError("shapes"))


def test_an_error_without_a_message_is_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError(torch.ops.aten.nonzero.default))


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_without_what_was_learned_is_ignored(tmp_path, content):
    (tmp_path / "learned.json").write_text(content)
    assert learned_micro_batch(tmp_path, 1) is None and learned_rollback(tmp_path) is None


def test_one_process_restarts_itself_at_most_three_times_for_the_same_reason(monkeypatch):
    commands = []
    monkeypatch.setattr(restarting.os, "execv", lambda program, words: commands.append(words[1:]))
    monkeypatch.setenv("CPT_RESTARTS", "0 ")
    for _ in range(MOST_WITHOUT_PROGRESS):
        restart(RestartNeeded("micro-batches of 2"), ["r.yaml", "name=x"])
    assert commands == MOST_WITHOUT_PROGRESS * [["-m", "cpt", "train", "r.yaml", "name=x"]]
    with pytest.raises(RestartNeeded):
        restart(RestartNeeded("micro-batches of 2"), ["r.yaml"])
    restart(RestartNeeded("micro-batches of 1"), ["r.yaml"])
    assert len(commands) == MOST_WITHOUT_PROGRESS + 1


@pytest.mark.parametrize("variable", [("WORLD_SIZE", "2"), ("CPT_SUPERVISED", "1")])
def test_several_processes_and_supervised_ones_are_restarted_by_others(monkeypatch, variable):
    monkeypatch.setenv(*variable)
    with pytest.raises(RestartNeeded) as problem:
        restart(RestartNeeded("micro-batches of 2"), ["r.yaml"])
    assert problem.value.exit_code == 76
