"""`python -m benchmarks.gpu.micro RESULTS`: single kernels and copies, each with its prediction; about 90 seconds.

Appends a line to RESULTS for each measurement. One that fails says why, and the next one follows. `--dry-run` uses
tiny shapes on a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, REACHED_BY_MATRICES, Case, tiny
from benchmarks.gpu.processes import append, read_lines
from benchmarks.gpu.roofline import (
    ATTENTION,
    BANDWIDTH,
    OPTIMIZER_BYTES,
    Setting,
    attention_seconds,
    head_and_loss,
)
from benchmarks.gpu.systems import loss_of_head
from cpt.models.attention import torch_kernel
from cpt.models.config import config_from
from cpt.models.fused_loss import LinearCrossEntropy
from cpt.models.layers import Compiling, compile_layers
from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Optimizer

PINNED = {"to the device": 55, "to the host": 55, "both ways": 94}  # GB/s over PCIe 5
COMPILE_SECONDS = 25.0  # of a first step with compiled layers
Measurement = tuple[str, str, float | None, Callable[[], float]]  # its name, unit, prediction


class Bench:
    def __init__(self, is_dry: bool) -> None:
        self.is_dry, self.device = is_dry, "cpu" if is_dry else "cuda"
        self.backend = "aot_eager" if is_dry else "inductor"

    def case(self, name: str) -> Case:
        return tiny(CASES[name]) if self.is_dry else CASES[name]

    def random(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device, requires_grad=grad)

    def seconds(self, function: Callable[[], Any], *, warmup: int = 3, repeats: int = 10) -> float:
        """The median time of a call, the launch of its kernels included: 10 microseconds, of a millisecond and
        more."""
        times = []
        for _ in range(warmup + repeats):
            self.wait()
            began = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[warmup:])

    def wait(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()


def all_measurements(bench: Bench) -> Iterator[Measurement]:
    size, megabytes = (64, 1) if bench.is_dry else (8192, 2048)
    yield f"product {size}^3", "TFLOP/s", REACHED_BY_MATRICES / 1e12, lambda: product(bench, size)
    yield (
        "copy on the device",
        "TB/s, read and written",
        BANDWIDTH / 1e12,
        lambda: copy(bench, megabytes),
    )
    for name in ("A", "B", "C", "F"):
        yield from attention_measurements(bench, bench.case(name))
    for name in ("A", "B", "C"):
        yield from loss_measurements(bench, bench.case(name))
    for name, moved in {"adamw": "master", "adamw_8bit": "8-bit"}.items():
        yield (
            f"{name}, bf16 weights",
            "ns a weight",
            1e9 * OPTIMIZER_BYTES[moved] / BANDWIDTH,
            partial(update, bench, name),
        )
    for way, predicted in PINNED.items():
        yield f"pinned copy {way}", "GB/s", predicted, partial(pinned, bench, megabytes, way)
    yield (
        "first step of compiled layers (C)",
        "s",
        COMPILE_SECONDS,
        lambda: first_compiled_step(bench),
    )
    yield (
        "graphs of compiled layers (C)",
        "",
        1.0,
        lambda: float(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
    )


def product(bench: Bench, size: int) -> float:
    left, right = bench.random(size, size), bench.random(size, size)
    return 2 * size**3 / bench.seconds(lambda: left @ right) / 1e12


def copy(bench: Bench, megabytes: int) -> float:
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / bench.seconds(lambda: target.copy_(source)) / 1e12


def attention_measurements(bench: Bench, case: Case) -> Iterator[Measurement]:
    """Forward and backward pass of one layer's causal attention over whole rows, by each kernel."""
    config = config_from(dict(case.config))
    heads, groups = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", config.num_attention_heads),
    )
    width, rows, tokens = (
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        case.rows,
        case.tokens,
    )
    bounds = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=bench.device)

    def states(shape: Callable[[int], tuple[int, ...]]) -> list[torch.Tensor]:
        return [bench.random(*shape(count), width, grad=True) for count in (heads, groups, groups)]

    def both_ways(forward: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> float:
        gradient = torch.randn_like(forward(*tensors))
        return 1e3 * bench.seconds(
            lambda: torch.autograd.grad(forward(*tensors), tensors, gradient)
        )

    def flat(kernel: Callable[..., torch.Tensor]) -> float:
        return both_ways(
            lambda *given: kernel(*given, bounds, tokens, width**-0.5, None),
            states(lambda count: (rows * tokens, count)),
        )

    def sdpa(*backends: SDPBackend) -> float:
        forward = partial(
            F.scaled_dot_product_attention, is_causal=True, enable_gqa=heads != groups
        )
        with sdpa_kernel(list(backends)) if backends else nullcontext():
            return both_ways(forward, states(lambda count: (rows, count, tokens)))

    def choice() -> float:
        return float(
            torch._fused_sdp_choice(
                *states(lambda count: (rows, count, tokens)),
                is_causal=True,
                enable_gqa=heads != groups,
            )
        )

    def predicted(kernel: str) -> float | None:
        return (
            1e3 * attention_seconds(kernel, width, 2 * heads * width * tokens**2 * rows)
            if (kernel, width) in ATTENTION
            else None
        )

    of = f"attention {case.name}"
    yield f"{of}, varlen FA2", "ms", predicted("fa2"), lambda: flat(torch_kernel)
    yield f"{of}, varlen cuDNN", "ms", predicted("fa3"), lambda: flat(cudnn_varlen)
    yield f"{of}, SDPA by default", "ms", predicted("fa3"), sdpa
    yield (
        f"{of}, SDPA's choice",
        "(0 math, 1 flash, 2 efficient, 3 cuDNN)",
        float(SDPBackend.CUDNN_ATTENTION.value),
        choice,
    )
    yield f"{of}, SDPA cuDNN", "ms", predicted("fa3"), lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
    yield f"{of}, SDPA flash", "ms", predicted("fa2"), lambda: sdpa(SDPBackend.FLASH_ATTENTION)


def cudnn_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    tokens: int,
    scale: float,
    window: None,
) -> torch.Tensor:
    """cuDNN's attention within documents, which no public function of torch calls with `is_causal`."""
    forward = torch.ops.aten._cudnn_attention_forward
    return forward(
        query, key, value, None, bounds, bounds, tokens, tokens, True, 0.0, True, False, scale=scale
    )[0]  # type: ignore[no-any-return]


def loss_measurements(bench: Bench, case: Case) -> Iterator[Measurement]:
    """The head and its cross entropy, forward and backward, over the tokens of a step."""
    config = config_from(dict(case.config))
    tokens, width, vocabulary = case.rows * case.tokens, config.hidden_size, config.vocab_size
    Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # noqa: N806

    def liger() -> Loss:
        from liger_kernel.transformers.functional import (
            liger_fused_linear_cross_entropy,
        )  # an extra

        return liger_fused_linear_cross_entropy  # type: ignore[no-any-return]

    def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def own(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scale = torch.full((), 1 / tokens, device=bench.device)
        return LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, None)[0]  # type: ignore[no-any-return]

    def compiled() -> Loss:
        loss = torch.compile(loss_of_head, dynamic=False, backend=bench.backend)
        return lambda hidden, weight, targets: loss(hidden[None], weight, targets[None])  # type: ignore[no-any-return]

    def measure(make: Callable[[], Loss]) -> float:
        loss = make()
        hidden, weight = (
            bench.random(tokens, width, grad=True),
            bench.random(vocabulary, width, grad=True),
        )
        targets = torch.randint(vocabulary, (tokens,), device=bench.device)
        return 1e3 * bench.seconds(
            lambda: torch.autograd.grad(loss(hidden, weight, targets), [hidden, weight]),
            warmup=2,
            repeats=5,
        )

    losses: Mapping[str, Callable[[], Loss]] = {
        "eager": lambda: eager,
        "compiled": compiled,
        "liger": liger,
        "own": lambda: own,
    }
    for kind, make in losses.items():
        predicted = (
            None
            if kind == "liger"
            else 1e3 * head_and_loss(tokens, width, vocabulary, Setting("master", loss=kind))
        )
        yield f"loss {case.name}, {kind}", "ms", predicted, partial(measure, make)


def update(bench: Bench, name: str) -> float:
    """An optimizer's step over bfloat16 matrices."""
    size, count = ((64, 256), 2) if bench.is_dry else ((2048, 8192), 16)
    model = nn.Sequential(
        *(
            nn.Linear(*size, bias=False, dtype=torch.bfloat16, device=bench.device)
            for _ in range(count)
        )
    )
    optimizer = build_optimizer(Optimizer(name=name, learning_rate=1e-5), model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return 1e9 * bench.seconds(optimizer.step, repeats=5) / (count * size[0] * size[1])


def pinned(bench: Bench, megabytes: int, way: str) -> float:
    """Copies between the device and pinned memory, one way or both ways at the same time."""
    size = megabytes * 2**20
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=not bench.is_dry) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2)]
    copies = [(devices[0], hosts[0]), (hosts[1], devices[1])]
    pairs = {"to the device": copies[:1], "to the host": copies[1:]}.get(way, copies)
    streams = [None if bench.is_dry else torch.cuda.Stream() for _ in pairs]

    def run() -> None:
        for (target, source), stream in zip(pairs, streams, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return len(pairs) * size / bench.seconds(run, repeats=5) / 1e9


def first_compiled_step(bench: Bench) -> float:
    """Seconds until the first step of a model with compiled layers has ended. A warm cache makes it shorter."""
    case = bench.case("C")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            config_from(dict(case.config)), dtype=torch.bfloat16
        ).train()
        ids = torch.randint(case.config["vocab_size"], (1, case.tokens))
    compile_layers(model, Compiling(bench.backend))
    return bench.seconds(
        lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(),
        warmup=0,
        repeats=1,
    )


def main() -> None:
    """Measure what RESULTS does not have yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.micro", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.dry_run)
    known = {
        line["name"]
        for line in read_lines(options.results)
        if line.get("step") == "micro" and "measured" in line
    }
    for name, unit, predicted, measure in all_measurements(bench):
        if name in known:
            continue
        line = {
            "step": "micro",
            "name": name,
            "unit": unit,
            "predicted": predicted,
            "dry_run": bench.is_dry,
        }
        try:
            line["measured"] = measure()
        except Exception as problem:  # whatever it is, the others are still worth their time
            line["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        append(line, options.results)
        print(name, line.get("measured", line.get("failed")), flush=True)
        if not bench.is_dry:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
