"""`python -m benchmarks.gpu.roofline`: how long a step should take on one H100, item by item, before anything is
measured.

Writes benchmarks/results/gpu_forecast.json and prints it as a table. The first day on a GPU is a comparison with this
forecast: where a number is far off, either the model below or the code is wrong, and the parts say where to look.
Expect +-4 points of MFU.

The model adds up matrix products, attention, elementwise kernels, the head with its loss, and the optimizer. Nothing
overlaps.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, PEAK_FLOPS
from benchmarks.gpu.flops import matrices_of, strict

FORECAST = Path(__file__).parents[1] / "results" / "gpu_forecast.json"
BANDWIDTH = 2.85e12  # bytes a second that elementwise kernels read and write, of 3.35e12
LARGE_PRODUCT = 0.76  # share of the peak for a large product with long K; 8192^3 reaches 0.80
PROLOGUE = 220  # columns of K that the start and the end of a product cost
TILE, MULTIPROCESSORS = (128, 256), 132
LAUNCHES = {True: 1.5e-3, False: 3e-3}  # seconds of a step between kernels: compiled, eager
# FLOP/s of causal attention, forward and backward, by kernel and width of a head: papers of FlashAttention 2 and 3;
# cuDNN is like 3.
ATTENTION = {
    ("fa2", 64): (300e12, 235e12),
    ("fa2", 128): (370e12, 300e12),
    ("fa3", 64): (420e12, 360e12),
    ("fa3", 128): (560e12, 470e12),
}
# Bytes that a token moves through elementwise kernels in a layer, forward and backward, in numbers of each width: of
# the residual stream, of queries, keys and values, and of the MLP with and without a gate. Counted in traces of
# compiled and eager layers.
ELEMENTWISE = {True: (26, 6, 11, 8), False: (95, 20, 19, 26)}
LOSS_BYTES = {"eager": 42, "compiled": 14, "own": 8}  # a logit
CONVERTED_BYTES = 6  # a logit more where accelerate converts the outputs of autocast to fp32
# A weight. 8-bit: bitsandbytes' kernel over fp32 copies, which are rounded, as `cpt.planning.memory_parts` counts.
OPTIMIZER_BYTES = {"fp32": 38, "torch's master": 44, "master": 28, "8-bit": 80}
AUTOCAST_BYTES = 16  # a weight: cast to bfloat16 and back in each step


@dataclass(frozen=True)
class Setting:
    optimizer: str
    loss: str = "own"
    attention: str = "fa3"
    compiled: bool = True
    autocast: bool = False
    """fp32 weights and an fp32 residual stream."""


@dataclass(frozen=True)
class Step:
    """Milliseconds of a step's parts, and what they add up to."""

    matrices: float
    attention: float
    elementwise: float
    head_and_loss: float
    optimizer: float
    step: float
    tokens_per_second: float
    mfu: float


def settings_of(case: str) -> dict[str, Setting]:
    ours = Setting("8-bit" if case == "F" else "master")
    found = {"cpt": ours, "cpt with FA2 attention": replace(ours, attention="fa2")}
    if case != "F":
        found["default Trainer"] = Setting("fp32", loss="eager", compiled=False, autocast=True)
        found["bare loop"] = replace(ours, loss="compiled", optimizer="torch's master")
    return found


def share_of_peak(m: int, n: int, k: int) -> float:
    """The share of the peak that an [m, k] x [k, n] product reaches: less with short K, and if tiles do not fill the
    GPU."""
    waves = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) / MULTIPROCESSORS
    filled = (
        max(0.80, waves / math.ceil(waves)) if waves > 1 else 0.62
    )  # kernels that split K recover a part of a wave that is not full
    return LARGE_PRODUCT * k / (k + PROLOGUE) * (0.5 + 0.5 * filled)


def linear(tokens: int, inputs: int, outputs: int) -> float:
    """Seconds of a linear layer: forward, and the gradients of its inputs and weights."""
    products = ((tokens, outputs, inputs), (tokens, inputs, outputs), (inputs, outputs, tokens))
    return sum(2 * m * n * k / (PEAK_FLOPS * share_of_peak(m, n, k)) for m, n, k in products)


def forecast(config: Mapping[str, Any], tokens: int, row: int, setting: Setting) -> Step:
    """The parts of a step.

    Args:
        tokens: of the step.
        row: tokens of a row, which is one document.
    """
    is_gpt2 = config["model_type"] == "gpt2"
    width = config["n_embd" if is_gpt2 else "hidden_size"]
    layers = config["n_layer" if is_gpt2 else "num_hidden_layers"]
    heads = config["n_head" if is_gpt2 else "num_attention_heads"]
    head_width = config.get("head_dim", width // heads)
    queries, keys = (
        heads * head_width,
        (heads if is_gpt2 else config["num_key_value_heads"]) * head_width,
    )
    inner = 4 * width if is_gpt2 else config["intermediate_size"]
    vocabulary = config["vocab_size"]

    shapes = (
        (width, queries + 2 * keys),
        (queries, width),
        (width, inner if is_gpt2 else 2 * inner),
        (inner, width),
    )
    matrices = layers * sum(linear(tokens, inputs, outputs) for inputs, outputs in shapes)
    attention = layers * attention_seconds(
        setting.attention, head_width, 2 * queries * row * tokens
    )
    residual, states, gated, ungated = ELEMENTWISE[setting.compiled]
    moved = (
        (4 if setting.autocast else 2) * width * residual
        + 2 * (queries + 2 * keys) * states
        + 2 * inner * (ungated if is_gpt2 else gated)
    )
    elementwise = layers * tokens * moved / BANDWIDTH
    weights = matrices_of(config)[0] + (
        0 if is_gpt2 or config["tie_word_embeddings"] else vocabulary * width
    )
    optimizer = (
        weights
        * (OPTIMIZER_BYTES[setting.optimizer] + AUTOCAST_BYTES * setting.autocast)
        / BANDWIDTH
    )
    head = head_and_loss(tokens, width, vocabulary, setting)
    seconds = matrices + attention + elementwise + head + optimizer + LAUNCHES[setting.compiled]
    parts = (
        round(1e3 * part, 1)
        for part in (matrices, attention, elementwise, head, optimizer, seconds)
    )
    speed = tokens / seconds
    return Step(
        *parts,
        tokens_per_second=round(speed),
        mfu=round(speed * strict(config, row) / PEAK_FLOPS, 3),
    )


def attention_seconds(kernel: str, head_width: int, operations: float) -> float:
    """Forward and backward pass.

    Args:
        operations: of the causal forward pass.
    """
    forward, backward = ATTENTION[kernel, head_width]
    return operations / forward + 2 * operations / backward


def head_and_loss(tokens: int, width: int, vocabulary: int, setting: Setting) -> float:
    """Seconds of the output head, of the cross entropy and of their gradients."""
    converted = CONVERTED_BYTES if setting.loss == "eager" and setting.autocast else 0
    of_logits = tokens * vocabulary * (LOSS_BYTES[setting.loss] + converted) / BANDWIDTH
    return linear(tokens, width, vocabulary) * (1.04 if setting.loss == "own" else 1) + of_logits


def main() -> None:
    """Write and print the forecast."""
    results = []
    print(
        f"{'':28}{'GEMM':>7}{'attn':>7}{'elem':>7}{'loss':>7}{'optim':>7}{'step':>8} ms{'tokens/s':>11}{'MFU':>8}"
    )
    for name in ("A", "B", "C", "F"):
        case = CASES[name]
        for label, setting in settings_of(name).items():
            one = forecast(case.config, case.tokens * case.rows, case.tokens, setting)
            results.append(
                {
                    "name": f"{name}: {label}",
                    "measured": one.mfu,
                    "unit": "strict MFU, forecast",
                    **asdict(one),
                }
            )
            times = "".join(
                f"{part:7.0f}"
                for part in (
                    one.matrices,
                    one.attention,
                    one.elementwise,
                    one.head_and_loss,
                    one.optimizer,
                )
            )
            print(
                f"{f'{name}: {label}':28}{times}{one.step:8.0f}   {one.tokens_per_second:11,.0f}{100 * one.mfu:6.1f} %"
            )
    content = {"device": "H100 or H200, a model of it", "unit": "milliseconds", "results": results}
    FORECAST.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
