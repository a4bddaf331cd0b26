"""LoRA on a CUDA GPU: compiled layers give the loss and the gradients of eager ones under autocast."""

import pytest
import torch
from gpu_device import BACKEND, DEVICE
from tiny import TINY_LLAMA
from tiny_models import make_tokenizer
from torch import _dynamo as dynamo
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.models.build import build_model
from cpt.models.layers import Compiling, compile_layers
from cpt.recipe.schema import Model

pytestmark = pytest.mark.gpu
SHAPE = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
HALF_PRECISION = 2e-2  # relative, of all gradients together


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE), dtype=torch.bfloat16
    ).save_pretrained(tmp_path)
    return tmp_path


def loss_and_gradients(base, *, compiles):
    """Of adapters whose second matrix is not zero, so that both have gradients."""
    dynamo.reset()
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    model = build_model(
        Model(path=str(base), dtype="bfloat16", lora=lora), make_tokenizer(), seed=0
    )
    adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
    for number, weight in enumerate(adapters):
        torch.nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(number))
    model = model.to(DEVICE).train()
    if compiles:
        assert compile_layers(model, Compiling(BACKEND)) == 4
    ids = torch.randint(4, 300, (2, 128), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [
        weight.grad.float().flatten() for weight in model.parameters() if weight.requires_grad
    ]
    return loss.item(), torch.cat(gradients)


def test_compiled_adapters_have_the_loss_and_the_gradients_of_eager_ones(base):
    expected, gradients = loss_and_gradients(base, compiles=False)
    loss, compiled = loss_and_gradients(base, compiles=True)
    assert loss == pytest.approx(expected, rel=2e-3)
    assert (
        gradients.norm() > 0 and (compiled - gradients).norm() < HALF_PRECISION * gradients.norm()
    )
