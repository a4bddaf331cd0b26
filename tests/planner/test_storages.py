import torch

from cpt.planner.storages import PeakOfStorages, let_go


def test_what_is_let_go_is_no_longer_counted():
    with PeakOfStorages() as storages:
        first = torch.zeros(1000)
        view = first[:10]
        del first
        kept = storages.now
        del view
        assert (kept, storages.now, storages.peak) == (4000, 0, 4000)


def test_what_was_there_before_counts_for_nothing():
    before = torch.zeros(1000)
    with PeakOfStorages() as storages:
        storages.ignore(before.untyped_storage())
        before.add_(1)
        assert storages.peak == 0


def test_a_gradient_is_let_go_as_it_is_made():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(let_go)
    weight.sum().backward()
    assert weight.grad is None
