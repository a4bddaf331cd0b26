from types import SimpleNamespace

import pytest
import torch

from cpt.errors import ResourceError, RestartNeeded
from cpt.runs.history import read_learned
from cpt.training import restart as restarting
from cpt.training.restart import (
    MOST_WITHOUT_PROGRESS,
    is_out_of_memory,
    learned_micro_batch,
    refuse_evaluation,
    remember_micro_batch,
    restart,
    restart_after,
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


@pytest.mark.parametrize(
    ("processes", "learned", "is_restarted"),
    [(2, 4, True), (2, 8, False), (2, None, False), (1, 4, False)],
)
def test_an_error_of_another_kind_restarts_where_another_process_ran_out_of_memory(
    tmp_path, processes, learned, is_restarted
):
    if learned is not None:
        remember_micro_batch(tmp_path, processes, learned)
    arguments = SimpleNamespace(
        world_size=processes, per_device_train_batch_size=8, output_dir=str(tmp_path)
    )
    closed = RuntimeError("a peer closed its connection")
    with pytest.raises((RuntimeError, RestartNeeded)) as problem:
        restart_after(closed, None, arguments, step=7, can_split=True)
    assert isinstance(problem.value, RestartNeeded) is is_restarted
    if is_restarted:
        assert "in step 7" in str(problem.value) and "micro-batches of 4 " in str(problem.value)


@pytest.mark.parametrize(
    ("batch", "remedy"), [(3, "training.per_device_eval_batch_size"), (1, "data.sequence_length")]
)
def test_out_of_memory_in_an_evaluation_names_what_helps(batch, remedy):
    refuse_evaluation(RuntimeError("shapes"), step=6, batch_size=batch)
    with pytest.raises(ResourceError, match=rf"step 6 with {batch} row.*`{remedy}`"):
        refuse_evaluation(torch.OutOfMemoryError(), step=6, batch_size=batch)


def test_what_was_learned_is_kept_for_each_number_of_processes_and_key(tmp_path):
    remember_micro_batch(tmp_path, 1, 4)
    remember_micro_batch(tmp_path, 2, 8)
    back = {"to_step": 5, "left_out": [[1, 3]], "budget": {}}
    restarting.remember(tmp_path, restarting.ROLLBACK, back)
    assert [learned_micro_batch(tmp_path, count) for count in (1, 2, 3)] == [4, 8, None]
    assert read_learned(tmp_path)[restarting.ROLLBACK] == back


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_without_what_was_learned_is_ignored(tmp_path, content):
    (tmp_path / "learned.json").write_text(content)
    assert learned_micro_batch(tmp_path, 1) is None
    assert restarting.take_up_roll_back(None, tmp_path, 3) is False


def test_one_process_restarts_itself_at_most_three_times_for_the_same_reason(monkeypatch):
    commands = []
    monkeypatch.setattr(restarting, "replace_process", commands.append)
    monkeypatch.setenv(restarting.RESTARTS, "[]")
    for _ in range(MOST_WITHOUT_PROGRESS):
        restart(RestartNeeded("micro-batches of 2"), ["r.yaml", "name=x"])
    assert commands == MOST_WITHOUT_PROGRESS * [["cpt", "train", "r.yaml", "name=x"]]
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
