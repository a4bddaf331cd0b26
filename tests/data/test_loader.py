import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from cpt.data.rows.build import build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.packing import stack_rows
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
