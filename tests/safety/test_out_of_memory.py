import json

import pytest
import torch

from cpt.safety.out_of_memory import (
    OtherRankOutOfMemoryError,
    is_out_of_memory,
    learned_micro_batch,
    remember_micro_batch,
    smaller_micro_batch,
)


def test_the_micro_batch_is_halved_or_goes_to_the_next_size_that_divides_it():
    assert [smaller_micro_batch(size) for size in (8, 6, 9, 7, 2, 1)] == [4, 3, 3, 1, 1, None]


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.OutOfMemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
            " bytes."
        ),
        OtherRankOutOfMemoryError("another process is out of memory"),
    ],
)
def test_what_allocators_say_counts(problem):
    assert is_out_of_memory(problem)


@pytest.mark.parametrize(
    "problem", [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_errors_do_not(problem):
    assert not is_out_of_memory(problem)


def test_what_was_learned_holds_for_its_number_of_processes(tmp_path):
    assert learned_micro_batch(tmp_path, 1) is None
    remember_micro_batch(tmp_path, 1, 4)
    remember_micro_batch(tmp_path, 2, 2)
    remember_micro_batch(tmp_path, 1, 2)
    assert json.loads((tmp_path / "learned.json").read_text()) == {"micro_batch": {"1": 2, "2": 2}}
    assert [learned_micro_batch(tmp_path, processes) for processes in (1, 2, 4)] == [2, 2, None]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"micro_batch": {"1": "two"}}', '{"micro_batch": {"1": 0}}'])
def test_a_file_that_says_nothing_is_not_believed(tmp_path, content):
    (tmp_path / "learned.json").write_text(content)
    assert learned_micro_batch(tmp_path, 1) is None
