from types import SimpleNamespace

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from one_process_group import alone_in_a_group
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer

from cpt.stages.steps.fully_sharded import FullySharded, give_up_gathered, shard_on_cpu


def test_a_forward_pass_alone_leaves_nothing_gathered_behind():
    with alone_in_a_group():
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(layers, reshard_after_forward=False)
        with torch.no_grad():
            layers(torch.ones(1, 4))
        assert not any(isinstance(parameter, DTensor) for parameter in layers.parameters())
        give_up_gathered(layers)
        assert all(isinstance(parameter, DTensor) for parameter in layers.parameters())


def test_accelerate_shards_on_the_cpu_too(monkeypatch):
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_CPU)
    state = SimpleNamespace()
    shard_on_cpu(SimpleNamespace(state=state), {"fsdp_version": 2, "reshard_after_forward": False})
    assert state.fsdp_plugin.fsdp_version == 2 and not state.fsdp_plugin.reshard_after_forward
    assert state.distributed_type == PartialState._shared_state["distributed_type"] == DistributedType.FSDP


class Dividing(nn.Linear):
    """A model that divides its loss by the step's labels, as those of transformers do."""

    def forward(self, inputs, num_items_in_batch):
        return super().forward(inputs).float().sum() / num_items_in_batch, num_items_in_batch


class Sharded(FullySharded):
    """As far as counting goes."""

    is_fsdp_enabled = True

    def __init__(self):
        """Nothing is trained."""


def test_half_precision_does_not_round_the_number_of_labels(monkeypatch):
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda *_: torch.tensor(449.0))
    with alone_in_a_group():
        model = Dividing(2, 1)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        assert model(torch.ones(1, 2), torch.tensor(449.0))[1] == 448, "what it is for"
        assert model(torch.ones(1, 2), Sharded()._get_num_items_in_batch([], torch.device("cpu")))[1] == 449
