import errno
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cpt.data.rows.build import build_data
from cpt.data.rows.loader import MOST_REPLACEMENTS, CPTDataLoader, shared
from cpt.data.rows.packing import stack_rows
from cpt.errors import DataError
from cpt.recipe.schema import Data

WORKERS = pytest.param({"num_workers": 2}, marks=pytest.mark.heavy)


@pytest.fixture(scope="module")
def rows(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    for name in "ab":
        lines = [f"{name}{number} {'x' * (number % 23)}\n" for number in range(200)]
        (folder / f"{name}.csv").write_text("text\n" + "".join(lines))
    sources = [{"path": str(folder / "a.csv"), "weight": 2}, {"path": str(folder / "b.csv")}]
    return build_data(
        Data(sources=sources, sequence_length=16), tokenizer, seed=7, cache_dir=folder
    ).rows


def batches(rows, **options):
    return list(CPTDataLoader(rows, **{"micro_batch": 2, "rows_in_all": 48, **options}))


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in a
    )


def with_first_positions(batch):
    return {**batch, "first": batch["position_ids"][:, 0]}


@pytest.mark.parametrize("options", [{}, WORKERS, {"collate_fn": lambda some: stack_rows(some)}])
def test_batches_are_the_rows_completed_where_they_are_made(rows, options):
    state, completed = (
        torch.get_rng_state(),
        batches(rows, complete=with_first_positions, **options),
    )
    assert same([stack_rows([rows[n], rows[n + 1]]) for n in range(0, 48, 2)], completed)
    assert all(batch["first"].tolist() == [0, 0] for batch in completed)
    assert torch.equal(torch.get_rng_state(), state), "reading leaves the global random state alone"


class SmallSharedMemory:
    """Fails as torch does in a worker whose third batch does not fit into /dev/shm."""

    made = 0

    def __call__(self, batch):
        self.made += 1
        if get_worker_info() is not None and self.made == 3:
            raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>")
        return batch


@pytest.mark.slow
def test_without_shared_memory_for_workers_the_process_itself_goes_on(rows, caplog):
    loaded = batches(rows, complete=SmallSharedMemory(), num_workers=2)
    assert same(batches(rows), loaded)
    (warning,) = caplog.messages
    assert "dataloader_num_workers falls back to 0" in warning and "--shm-size" in warning


@pytest.mark.gpu
def test_batches_are_pinned_on_a_machine_with_a_gpu(rows):
    for batch in CPTDataLoader(rows, micro_batch=2, rows_in_all=8, pin_memory=True):
        assert all(values.is_pinned() for values in batch.values())


def test_an_error_in_the_thread_reaches_the_loop():
    class Broken(Dataset):
        def __getitem__(self, number):
            if number == 5:
                raise OSError("the disk is gone")
            return {"input_ids": torch.tensor([number])}

    batches = iter(CPTDataLoader(Broken(), micro_batch=1, rows_in_all=9))
    assert [int(next(batches)["input_ids"]) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_it_knows_how_many_batches_come(rows):
    loader = CPTDataLoader(rows, micro_batch=2, rows_in_all=48, first_row=8, world_size=4, rank=3)
    assert len(list(loader)) == 5 and loader.batch_size == 2
    assert len(loader) == 6, "of the whole run: the Trainer derives its steps from it"
    assert batches(rows, first_row=48) == batches(rows, first_row=50) == []
    assert {len(batches(rows, rows_in_all=47, rank=rank, world_size=4)) for rank in range(4)} == {5}


@pytest.mark.parametrize(("most_bytes", "num_ahead"), [(2**20, 16), (8 * 5 + 7, 5), (8, 2)])
def test_micro_batches_are_made_ahead_up_to_a_number_and_a_size(monkeypatch, most_bytes, num_ahead):
    monkeypatch.setattr("cpt.data.rows.loader.MOST_BYTES_AHEAD", most_bytes)
    made = []

    class Counted(Numbers):
        def __getitem__(self, number):
            made.append(number)
            return super().__getitem__(number)

    batches = iter(CPTDataLoader(Counted(), micro_batch=1, rows_in_all=99))
    for expected in (2, 2 + num_ahead, 3 + num_ahead):
        next(batches)
        deadline = time.monotonic() + 20
        while len(made) < expected and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.01)
        assert made == list(range(expected))
    batches.close()


class Numbers(Dataset):
    def __getitem__(self, number):
        return {"input_ids": torch.tensor([number])}


def numbers_until(monkeypatch, problems, *, rows=11):
    """Rows that a loader gives whose workers have these problems, each after two more micro-batches; and the error."""
    left = list(problems)

    def by_torch(self):  # torch's iteration, in this process
        for number, rows in enumerate(self.batch_sampler):
            if left and number == 2:
                raise left.pop(0)
            yield self.collate_fn([self.dataset[row] for row in rows])

    monkeypatch.setattr(DataLoader, "__iter__", by_torch)
    loader = CPTDataLoader(
        Numbers(), micro_batch=1, rows_in_all=rows, num_workers=3, collate_fn=lambda rows: rows[0]
    )
    found, error = [], None
    try:
        found += [int(batch["input_ids"]) for batch in loader]
    except Exception as problem:
        found, error = None, problem
    return found, error, loader


DIED = RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed.")
FULL = OSError(errno.ENOSPC, "No space left on device")
UNALLOCATED = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>")


@pytest.mark.parametrize(
    ("problems", "num_warnings"),
    [
        ([], 0),
        ([DIED], 1),
        ([EOFError(), ConnectionResetError("reset"), DIED], 3),
        ([FULL], 1),
        ([UNALLOCATED], 1),
        ([DIED, FULL], 2),
    ],
)
def test_workers_that_die_are_replaced_and_each_row_is_read_once(
    monkeypatch, caplog, problems, num_warnings
):
    found, error, loader = numbers_until(monkeypatch, problems)
    assert error is None and found == list(range(11))
    assert len(caplog.messages) == num_warnings
    is_full = bool(problems) and problems[-1] in (FULL, UNALLOCATED)
    assert loader.num_workers == (0 if is_full else 3)
    assert [int(batch["input_ids"]) for batch in loader] == list(range(11)), "again from the start"


def test_workers_that_die_again_and_again_end_the_run(monkeypatch, caplog):
    _, error, _ = numbers_until(monkeypatch, [DIED] * MOST_REPLACEMENTS, rows=50)
    assert error is None and len(caplog.messages) == MOST_REPLACEMENTS
    assert f"({MOST_REPLACEMENTS} of {MOST_REPLACEMENTS} times)" in caplog.messages[-1]
    _, error, _ = numbers_until(monkeypatch, [DIED] * (MOST_REPLACEMENTS + 1), rows=50)
    assert error is DIED


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("Caught RuntimeError in DataLoader worker process 0."),
        RuntimeError("shapes differ"),
        OSError("Caught OSError in DataLoader worker process 0.\nOSError: the disk is gone"),
    ],
)
def test_an_error_in_a_row_is_not_one_of_a_worker(monkeypatch, caplog, problem):
    assert numbers_until(monkeypatch, [problem])[1] is problem and caplog.messages == []


def test_an_error_of_cpt_in_a_worker_keeps_its_message_only(monkeypatch):
    text = "Caught DataError in worker 0.\nTraceback:\ncpt.errors.DataError: a.jsonl:3: bad\n"
    _, error, _ = numbers_until(monkeypatch, [DataError(text)])
    assert type(error) is DataError and str(error) == "a.jsonl:3: bad"
    assert str(error.__cause__) == text


def test_only_workers_move_batches_to_shared_memory(monkeypatch):
    batch = {"input_ids": torch.ones(3)}
    assert shared(lambda rows: rows, batch) is batch
    assert not batch["input_ids"].is_shared()
    monkeypatch.setattr("cpt.data.rows.loader.get_worker_info", lambda: "a worker")
    assert shared(lambda rows: rows, batch)["input_ids"].is_shared()
