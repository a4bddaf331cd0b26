import torch
from torch.utils.data import Dataset

from cpt.data.loader import CPTDataLoader
from cpt.data.mixture import RowsOfSteps


class Numbers(Dataset):
    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index])}


def rows_read(steps, *, rows, world_size=1, micro_batch=2, first_step=0):
    """Global numbers of the rows of each step."""
    accumulation = rows.rows_per_step // (micro_batch * world_size)
    read = [[] for _ in range(steps)]
    for rank in range(world_size):
        loader = CPTDataLoader(
            Numbers(),
            micro_batch=micro_batch,
            rows_in_all=(first_step + steps) * rows.rows_per_step,
            rank=rank,
            world_size=world_size,
            first_row=first_step * rows.rows_per_step,
            left_out=rows.left_out,
        )
        for number, batch in enumerate(loader):
            read[number // accumulation] += batch["input_ids"][:, 0].tolist()
    return [sorted(step) for step in read]


def test_stretches_are_jumped_over_and_all_other_rows_are_read_once():
    rows = RowsOfSteps(8)
    rows.leave_out([(16, 24), (40, 48)])
    assert [rows.of(step) for step in range(5)] == [(0, 8), (8, 16), (24, 32), (32, 40), (48, 56)]
    rows.leave_out([rows.of(1)])
    assert rows.left_out == [(8, 24), (40, 48)]
    assert [rows.first(step) for step in range(4)] == [0, 24, 32, 48]


def test_the_loader_reads_the_rows_of_the_steps_on_any_number_of_processes_and_from_any_step():
    rows = RowsOfSteps(8, [(8, 24), (40, 48)])
    straight = rows_read(6, rows=rows)
    assert straight == [list(range(*rows.of(step))) for step in range(6)]
    assert rows_read(6, rows=rows, world_size=2) == rows_read(6, rows=rows, micro_batch=1) == straight
    assert rows_read(4, rows=rows, first_step=2) == straight[2:]
