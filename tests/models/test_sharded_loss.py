"""The fused loss under FSDP2: the gradients of the model's own loss, and one gather of the head per micro-batch."""

import copy

import pytest
import torch
from one_process_group import alone_in_a_group
from sharded_models import shard
from threads_as_ranks import on_ranks
from tiny import tiny_config
from tiny_models import assert_same_gradients, gradients, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.models.fused_loss import FusedLoss

CAP = {"final_logit_softcapping": 5.0}
FAMILIES = {  # with and without a soft cap, tied and not, and our own
    "gemma2 capped and tied": ("gemma2", CAP),
    "gemma2 capped": ("gemma2", {**CAP, "tie_word_embeddings": False}),
    "gemma3 tied": ("gemma3_text", {}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "cpt-gpt2": ("cpt-gpt2", {}),
    "minimind3": ("minimind3", {}),
}
ADAPTED = {
    "an adapter on the head": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    "a trained copy of the head": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
    },
}
LABELS = torch.tensor(46)  # of a micro-batch of two rows


def built(name):
    if name in ADAPTED:
        capped = {
            **tiny_config("qwen3"),
            "model_type": "gemma2",
            "tie_word_embeddings": False,
            **CAP,
        }
        return tiny_model(capped, lora=ADAPTED[name]).train()
    family, changes = FAMILIES[name]
    config = tiny_config("qwen3" if family.startswith("gemma") else family)
    return tiny_model({**config, "model_type": family, **changes}).train()


def micro_batch(rank, number):
    return torch.randint(
        4, 96, (2, 24), generator=torch.Generator().manual_seed(10 * rank + number)
    )


def accumulate(model, rank, micro_batches):
    for number in range(micro_batches):
        ids = micro_batch(rank, number)
        model(input_ids=ids, labels=ids, num_items_in_batch=LABELS).loss.backward()


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("family", [*FAMILIES, *ADAPTED])
def test_gradients_are_those_of_the_models_own_loss(family, processes, micro_batches):
    plain = built(family)
    models = [copy.deepcopy(plain) for _ in range(processes)]
    for rank in range(processes):
        accumulate(plain, rank, micro_batches)
    expected = {name: gradient / processes for name, gradient in gradients(plain).items()}

    def train(rank):
        FusedLoss(models[rank])
        gathers = shard(models[rank], processes)
        accumulate(models[rank], rank, micro_batches)
        return gathers.count, {
            name: whole.full_tensor() for name, whole in gradients(models[rank]).items()
        }

    for gathers, found in on_ranks(processes, train):
        assert_same_gradients(found, expected)
        assert gathers == (micro_batches if processes > 1 else 0)


class Losses(TorchDispatchMode):
    """Counts calls of the loss kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        self.count += operation is torch.ops.cpt.cross_entropy_in_place.default
        return operation(*inputs, **(options or {}))


@pytest.mark.parametrize("family", ["llama", "cpt-gpt2"])
def test_a_sharded_head_still_uses_the_kernel(family):
    model = built(family)
    FusedLoss(model)
    with alone_in_a_group(), Losses() as losses:
        shard(model, 1)
        accumulate(model, rank=0, micro_batches=2)
    assert losses.count == 2
