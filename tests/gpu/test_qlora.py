"""QLoRA on a CUDA GPU: bitsandbytes' kernels train adapters over a base in 4 bit."""

import pytest
import torch
from gpu_device import DEVICE
from tiny import TINY_LLAMA
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.models.build import build_model
from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Model, Optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.quantized]
SHAPE = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 1024}
QLORA = {"r": 8, "quantize": "nf4", "double_quantize": True}


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE), dtype=torch.bfloat16
    ).save_pretrained(tmp_path)
    return tmp_path


def course(base, lora, *, recomputes=False):
    """Losses of a few steps, and the model."""
    model = build_model(
        Model(path=str(base), dtype="bfloat16", lora=lora), make_tokenizer(), seed=0
    ).to(DEVICE)
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = build_optimizer(Optimizer(name="adamw", learning_rate=1e-2), model)
    ids = torch.randint(4, 300, (2, 128), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = []
    for _ in range(6):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("recomputes", [False, True])
def test_adapters_over_4_bit_learn_as_over_the_whole_base(base, recomputes):
    losses, model = course(base, QLORA, recomputes=recomputes)
    expected, _ = course(base, {"r": 8})
    assert losses[0] == pytest.approx(expected[0], rel=1e-2)
    assert losses[-1] < losses[0] and losses[-1] == pytest.approx(expected[-1], rel=5e-2)
    packed = [weight for weight in model.parameters() if weight.dtype == torch.uint8]
    assert len(packed) == 2 * 7 and all(weight.device.type == DEVICE for weight in packed)
