import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import LINEAR_BLOCKS, RowsOfSteps, asked_shares, cut_documents
from cpt.data.rows.packing import IGNORED
from cpt.data.store.shards import shuffled
from cpt.recipe.schema import Data, Phase, Source


@pytest.mark.parametrize("size", [1, 2, 3, 100, 65_535, 65_536, 100_000])
def test_an_epoch_is_a_permutation_and_not_the_identity(size):
    places = [shuffled(place, size, seed=5) for place in range(size)]
    assert sorted(places) == list(range(size))
    if size >= 100:
        assert sum(place == number for number, place in enumerate(places)) < 10
        assert abs(sum(places[: size // 2]) / (size // 2) - size / 2) < 0.2 * size


def test_long_documents_are_cut_and_short_ones_are_left_as_they_are():
    positions = np.concatenate([np.arange(7), np.arange(3), np.arange(2)])
    labels = np.arange(100, 112)
    labels[[0, 7, 10]] = IGNORED
    labels[10:] = IGNORED  # padding
    cut_documents(positions, labels, 3)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 0, 1]
    assert labels.tolist() == [-100, 101, 102, -100, 104, 105, -100, -100, 108, 109, -100, -100]


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


def asked(*phases, tokens=(1, 1), **options):
    sources = [Source(path="a/code"), Source(path="a/prose")]
    changes = asked_shares(Data(sources=sources, sequence_length=10, phases=list(phases), **options), tokens)
    return [(first, shares.round(6).tolist()) for first, shares in changes]


def test_a_linear_change_goes_from_one_phase_to_its_own_weights_in_equal_blocks():
    first, *blocks, last = asked(
        Phase(until=1000, weights={"code": 1.0}), Phase(until=7400, change="linear", weights={"prose": 1.0})
    )
    assert first == (0, [1, 0]) and last == (740, [0, 1]) and len(blocks) == LINEAR_BLOCKS
    assert [first for first, _ in blocks] == list(range(100, 740, 10))
    assert blocks[0][1] == pytest.approx([1 - 0.5 / 64, 0.5 / 64], abs=1e-5)
    assert blocks[-1][1] == pytest.approx([0.5 / 64, 1 - 0.5 / 64], abs=1e-5)
    assert np.diff([shares[1] for _, shares in blocks]) == pytest.approx(1 / 64, abs=1e-5)
