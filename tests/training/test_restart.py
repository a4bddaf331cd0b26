import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_run import save_checkpoint

from cpt.data.rows.mixture import RowsOfSteps
from cpt.errors import Interrupted, ResourceError, RestartNeeded
from cpt.recipe.schema import Recipe
from cpt.runs.events import read_events
from cpt.runs.history import read_learned
from cpt.training import restart as restarting
from cpt.training.guards import Decision
from cpt.training.loss_guard import SkipBudget, Skipped
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


def test_what_was_learned_takes_the_space_of_the_old_file_on_a_full_disk(
    tmp_path, monkeypatch, caplog
):
    own = Path.write_bytes

    def full(path, content):
        if path.name.endswith(".unfinished"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return own(path, content)

    restarting.remember(tmp_path, "fallbacks", "a text that is longer than the one after it")
    monkeypatch.setattr(Path, "write_bytes", full)
    restarting.remember(tmp_path, "fallbacks", "shorter")
    assert read_learned(tmp_path) == {"fallbacks": "shorter"} and caplog.messages == []
    restarting.remember(tmp_path, "fallbacks", "a long text" * 10_000)
    assert read_learned(tmp_path) == {"fallbacks": "shorter"}
    (message,) = caplog.messages
    assert message == f"{tmp_path}/learned.json cannot be written: No space left on device."


def out_of_memory(folder, micro_batch, *, handler="split_batch", can_split=True, processes=2):
    """What follows where step 7 of a run of two processes ran out of memory."""
    recipe = Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "some/model"},
            "data": {"sequence_length": 1024, "sources": [{"path": "a.txt"}]},
            "budget": {"tokens": 10**6, "global_batch_tokens": 8192},
            "safety": {"on_oom": handler},
        }
    )
    arguments = SimpleNamespace(
        world_size=processes,
        per_device_train_batch_size=micro_batch,
        output_dir=str(folder),
        device=torch.device("cpu"),
    )
    problem = torch.OutOfMemoryError("CUDA out of memory")
    return restart_after(problem, recipe, arguments, step=7, can_split=can_split)


def test_out_of_memory_is_learned_for_the_number_of_processes_and_is_an_event(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", "1")
    remember_micro_batch(tmp_path, 1, 5)
    needed = out_of_memory(tmp_path, 6)
    assert isinstance(needed, RestartNeeded)
    assert [learned_micro_batch(tmp_path, number) for number in (1, 2)] == [5, 3]
    (event,) = read_events(tmp_path)
    assert str(needed) == event["message"] and (event["kind"], event["step"]) == (
        "out_of_memory",
        7,
    )
    assert (event["micro_batch"], event["before"], event["restart"]) == (3, 6, True)
    begin = "Out of memory in step 7 on process 1 with micro-batches of 6: "
    assert event["message"] == f"{begin}the run restarts with micro-batches of 3."


@pytest.mark.parametrize(
    ("micro_batch", "how", "remedies"),
    [
        (1, {}, ("1 row(s) of 1,024 tokens. Set `training.gradient_ch", "DeepSpeed profile")),
        (6, {"handler": "abort"}, ("per_device_train_batch_size: 3`", "`safety.on_oom: split_")),
        (6, {"can_split": False}, ("per_device_train_batch_size: 3`", "`optimizer.release_grad")),
        (1, {"can_split": False}, ("gradient_checkpointing: true`", "`optimizer.release_gradi")),
        (2, {"handler": "abort"}, ("per_device_train_batch_size: 1`", "instead of `abort`.")),
    ],
)
def test_where_a_micro_batch_cannot_be_smaller_the_error_says_what_helps(
    micro_batch, how, remedies, tmp_path
):
    with pytest.raises(ResourceError) as problem:
        out_of_memory(tmp_path, micro_batch, **how)
    assert "out of memory in step 7 with micro-batches of " in str(problem.value)
    assert all(remedy in str(problem.value) for remedy in remedies)
    assert read_learned(tmp_path) == {} and read_events(tmp_path) == []


# --- roll-backs ---


def guard_of(left_out=()):
    """The part of a step's guard that a roll-back uses, for steps of four rows."""
    rows = RowsOfSteps(4, list(left_out))
    budget = SkipBudget(rows, window=8, skips=2, recent=[Skipped(3, (8, 12))], total=5, rollbacks=1)
    return SimpleNamespace(rows=rows, budget=budget)


ROLL_BACK = Decision(
    "roll_back", reason="too many", step=9, first_step=6, left_out=((20, 24), (32, 36))
)


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_roll_back_goes_to_the_last_checkpoint_before_the_first_bad_step(tmp_path, is_stopping):
    for step in (3, 5, 6, 8):
        save_checkpoint(tmp_path, step)
    guard = guard_of([(4, 8)])
    with pytest.raises(Interrupted if is_stopping else RestartNeeded) as problem:
        restarting.roll_back(ROLL_BACK, guard, tmp_path, is_stopping=is_stopping)
    sentence = "too many: the run resumes from checkpoint-5 without their rows."
    assert str(problem.value).startswith(sentence)
    assert str(problem.value).endswith("The same command continues.") is is_stopping
    rolled_back, aside = read_events(tmp_path)
    assert rolled_back["kind"] == "rolled_back" and rolled_back["message"] == sentence
    assert (rolled_back["step"], rolled_back["to_step"], rolled_back["rollbacks"]) == (9, 5, 1)
    assert rolled_back["left_out"] == [[20, 24], [32, 36]]
    assert "the run went back to checkpoint-5" in aside["message"]
    folders = sorted(path.name for path in (tmp_path / "set-aside").iterdir())
    assert folders == ["checkpoint-6", "checkpoint-8"]
    rows = [[4, 8], [20, 24], [32, 36]]
    assert read_learned(tmp_path)["rollback"] == {
        "to_step": 5,
        "left_out": rows,
        "budget": {"recent": [[3, 8, 12]], "total": 5, "rollbacks": 1},
    }


def test_without_an_older_checkpoint_nothing_is_left_for_the_next_start(tmp_path):
    save_checkpoint(tmp_path, 6)
    guard = guard_of()
    restarting.roll_back(ROLL_BACK, guard, tmp_path, is_stopping=False)
    (event,) = read_events(tmp_path)
    assert (
        event["to_step"] is None
        and "continues, because no checkpoint is older" in (event["message"])
    )
    assert guard.rows.left_out == [] and read_learned(tmp_path) == {}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("first_step", "is_taken", "is_kept"), [(4, False, False), (5, True, True), (6, False, True)]
)
def test_a_roll_back_is_taken_up_at_its_step_and_forgotten_before_it(
    first_step, is_taken, is_kept, rank, tmp_path, monkeypatch
):
    budget = {"recent": [[2, 4, 8]], "total": 7, "rollbacks": 2}
    back = {"to_step": 5, "left_out": [[20, 24], [32, 36]], "budget": budget}
    restarting.remember(tmp_path, "rollback", back)
    monkeypatch.setenv("RANK", str(rank))
    guard = guard_of([(0, 4)])
    assert restarting.take_up_roll_back(guard, tmp_path, first_step) is is_taken
    left_out = [(20, 24), (32, 36)] if is_taken else [(0, 4)]
    assert guard.rows.left_out == left_out
    assert guard.budget.state()["total"] == (7 if is_taken else 5)
    is_kept = is_kept or rank == 1
    assert read_learned(tmp_path) == {"rollback": back if is_kept else None}
    assert json.loads((tmp_path / "learned.json").read_text())["rollback"] == (
        back if is_kept else None
    )
