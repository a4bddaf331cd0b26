"""A trainer whose processes share rows: who reads which, what divides the loss, and how DeepSpeed averages."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import nn

from cpt.models.shared_rows import PartOfRows
from cpt.stages.steps import sequence_parallel
from cpt.stages.steps.sequence_parallel import SharedRows, average_over_all
from tests.tiny_faults import trainer_of


@pytest.fixture
def shared() -> SharedRows:
    """The sixth of eight processes, where four share each row."""
    trainer = SharedRows.__new__(SharedRows)
    config = ParallelismConfig(sp_size=4, dp_replicate_size=2)
    trainer.args = SimpleNamespace(
        parallelism_config=config, process_index=5, world_size=8, device=torch.device("cpu")
    )
    return trainer


def test_a_process_has_its_part_of_its_groups_rows(shared):
    assert shared.part_of_rows == PartOfRows(1, 4) and shared.sharing_rows == 4


def test_labels_of_a_step_are_those_of_all_processes(shared, monkeypatch):
    monkeypatch.setattr(sequence_parallel.dist, "all_reduce", lambda count: count.mul_(8))
    batch = {"shift_labels": torch.tensor([[1, 2, -100], [-100, -100, 3]])}
    assert shared._get_num_items_in_batch([batch, batch], torch.device("cpu")) == 2 * 3 * 8


def test_the_mean_of_the_losses_over_processes_is_that_of_the_step(shared):
    class Summed(nn.Module):
        def forward(self, labels, num_items_in_batch):
            return SimpleNamespace(loss=labels.sum() / num_items_in_batch)

    losses = [
        shared.compute_loss(Summed(), {"labels": torch.full((3,), float(rank))}, num_items_in_batch=24)
        for rank in range(8)
    ]
    assert torch.stack(losses).mean() == pytest.approx(3 * sum(range(8)) / 24)


def test_deepspeed_averages_over_all_processes_and_names_its_files_so():
    engine = SimpleNamespace(
        sequence_parallel_size=4, checkpoint_mp_rank=3, optimizer=SimpleNamespace(sequence_parallel_size=4)
    )
    average_over_all(engine)
    assert vars(engine) == {
        "sequence_parallel_size": 1,
        "checkpoint_mp_rank": 0,
        "optimizer": SimpleNamespace(sequence_parallel_size=1),
    }


def test_a_trainer_that_shares_nothing_is_as_before(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    assert trainer.part_of_rows is None and trainer.sharing_rows == 1 and trainer.args.parallelism_config is None
