"""What only a CUDA GPU can show of compiled layers and of activations that wait on the host."""

import pytest
import torch
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.models.layers import Compiling, OffloadedActivations, compile_layers, set_up_recomputing

pytestmark = pytest.mark.gpu
SHAPE = {
    **TINY_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "max_position_embeddings": 1024,
}


class Arguments:
    """What is read of a Trainer's arguments."""

    def __init__(self, **sub_keys):
        self.gradient_checkpointing = True
        self.gradient_checkpointing_kwargs = sub_keys


def built(*, compiles=False, **sub_keys):
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), attn_implementation="sdpa")
        .cuda()
        .train()
    )
    arguments = Arguments(**sub_keys)
    context = set_up_recomputing(model, arguments)
    if compiles:
        compile_layers(model, Compiling())
    options = dict(arguments.gradient_checkpointing_kwargs)
    every = options.pop("every_n_layers", 1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, every_n_layers=every)
    return model, context


def steps(model, context, count=3):
    """Losses, gradients of the last step, and bytes that are there at the end of its forward pass."""
    ids = torch.randint(4, 300, (4, 1024), generator=torch.Generator().manual_seed(1)).cuda()
    found, kept = [], 0
    for _ in range(count):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with context:
            loss = model(input_ids=ids, labels=ids).loss
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        found.append(loss.item())
    return found, [parameter.grad for parameter in model.parameters()], kept


@pytest.mark.parametrize("every", [1, 2])
def test_offloaded_activations_come_back_as_they_were(every):
    losses, gradients, kept = steps(*built(every_n_layers=every))
    model, context = built(every_n_layers=every, offload=True)
    assert isinstance(context, OffloadedActivations)
    found, others, here = steps(model, context)
    assert found == losses and all(
        torch.equal(gradient, other) for gradient, other in zip(gradients, others, strict=True)
    )
    assert here < kept - 2 * 4 * 1024 * 256 * 4, "the inputs of two layers at least are elsewhere"


@pytest.mark.parametrize(
    "sub_keys", [{}, {"selective": True}, {"every_n_layers": 2}, {"offload": True}], ids=str
)
def test_inductors_kernels_have_the_same_losses(sub_keys):
    losses, _, _ = steps(*built(**sub_keys))
    found, _, _ = steps(*built(compiles=True, **sub_keys))
    assert found == pytest.approx(losses, rel=1e-4)
