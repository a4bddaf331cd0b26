"""What only a CUDA GPU can show of attention by documents' bounds: the kernels give what the reference gives, and
nothing waits."""

import pytest
import torch
from gpu_device import BACKEND, DEVICE, no_waits
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from cpt.models.attention import (
    BOUNDS,
    BY_PACKAGE,
    VARLEN,
    attend_each,
    document_bounds,
    keep_documents_apart,
    package_kernel,
    register_varlen,
    torch_kernel,
)
from cpt.models.layers import Compiling, compile_layers

pytestmark = pytest.mark.gpu
LENGTHS = ((300, 1, 83, 128), (512,), (17, 495))
TOKENS = 512
HALF_PRECISION = 1e-2  # relative, of a whole tensor
PACKAGES = {
    "flash_attention_2": pytest.mark.skipif(
        not is_flash_attn_2_available(), reason="flash-attn is not installed"
    ),
    "flash_attention_3": pytest.mark.skipif(
        not is_flash_attn_3_available(), reason="flash-attn 3 is not installed"
    ),
}


def positions():
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def outputs_and_gradients(attend, heads, grouped, width, value_width, window, dtype):
    torch.manual_seed(0)
    shapes = ((heads, width), (grouped, width), (grouped, value_width))
    states = [torch.randn(len(LENGTHS) * TOKENS, *shape, device="cuda") for shape in shapes]
    states = [of.to(torch.bfloat16).to(dtype).requires_grad_() for of in states]
    output = attend(*states, document_bounds(positions()).cuda(), TOKENS, width**-0.5, window)[
        ..., :value_width
    ]
    weights = torch.randn(
        output.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    )
    return [output, *torch.autograd.grad((output.float() * weights).sum(), states)]


def attend_by(package):
    return torch_kernel if package is None else lambda *given: package_kernel(package, *given)


@pytest.mark.parametrize(
    "package", [None, *(pytest.param(name, marks=mark) for name, mark in PACKAGES.items())]
)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("heads", "grouped", "width", "value_width"),
    [(8, 8, 64, 64), (8, 2, 128, 128), (4, 1, 100, 100), (4, 4, 192, 128), (4, 1, 256, 256)],
)
def test_the_kernel_gives_what_the_reference_gives(
    heads, grouped, width, value_width, window, package
):
    shape = (heads, grouped, width, value_width, window)
    ours = outputs_and_gradients(attend_by(package), *shape, torch.bfloat16)
    for mine, exact in zip(
        ours, outputs_and_gradients(attend_each, *shape, torch.float32), strict=True
    ):
        assert (mine.float() - exact).norm() < HALF_PRECISION * exact.norm()


SHAPE = {**TINY_LLAMA, "hidden_size": 256, "max_position_embeddings": TOKENS}
GEMMA = {**SHAPE, "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 100}
"""Heads of 256 columns; one layer sees a window, the other all of a document."""
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}


def model_with(attention, shape=SHAPE):
    register_varlen()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, use_cache=False)
    model = (
        AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        .to(DEVICE, torch.bfloat16)
        .train()
    )
    if attention != "sdpa":
        keep_documents_apart(model)
    return model


def batch(places=None):
    places = positions() if places is None else places
    ids = torch.randint(3, 300, (len(LENGTHS), TOKENS), generator=torch.Generator().manual_seed(0))
    labels = torch.where(places == 0, -100, ids)
    given = {
        "input_ids": ids,
        "position_ids": places,
        "labels": labels,
        BOUNDS: document_bounds(places),
    }
    return {name: values.to(DEVICE) for name, values in given.items()}


@pytest.mark.parametrize(
    "attention",
    [VARLEN, *(pytest.param(BY_PACKAGE[name], marks=mark) for name, mark in PACKAGES.items())],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_losses_are_those_of_masks_and_no_pass_waits_for_the_gpu(attention, compiles):
    expected = model_with("sdpa")(
        **{name: values for name, values in batch().items() if name != BOUNDS}
    ).loss.item()
    model, given = model_with(attention), batch()
    if compiles:
        compile_layers(model, Compiling(BACKEND))
    model(**given).loss.backward()  # what is done once, such as loading kernels, may wait
    with no_waits():
        loss = model(**given).loss
        loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("compiles", [False, True])
def test_gemmas_wide_heads_and_windows_have_the_gradients_of_masks(compiles):
    masked, model = model_with("sdpa", GEMMA), model_with(VARLEN, GEMMA)
    masked(**{name: values for name, values in batch().items() if name != BOUNDS}).loss.backward()
    if compiles:
        compile_layers(model, Compiling(BACKEND))
    model(**batch()).loss.backward()
    found, wanted = (
        torch.cat([weight.grad.float().flatten() for weight in of.parameters()])
        for of in (model, masked)
    )
    assert found.isfinite().all() and (found - wanted).norm() < 3 * HALF_PRECISION * wanted.norm()
