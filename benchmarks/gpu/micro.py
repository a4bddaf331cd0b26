"""`python -m benchmarks.gpu.micro RESULTS`: single kernels and copies, each with its prediction; about 90 seconds.

Appends a line to RESULTS for each measurement. One that fails says why, and the next one follows. `--dry-run` uses tiny shapes on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, REACHED_BY_MATRICES, Case, tiny
from benchmarks.gpu.page import read_lines
from benchmarks.gpu.roofline import ATTENTION, BANDWIDTH, OPTIMIZER_BYTES, Setting, head_and_loss
from benchmarks.gpu.systems import loss_of_head
from cpt.models.compiled import Compiling, compile_layers
from cpt.models.config import config_from
from cpt.models.fused_loss import LinearCrossEntropy
from cpt.models.varlen_attention import torch_kernel
from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Optimizer

PINNED = 55e9  # bytes a second over PCIe 5, one way
COMPILE_SECONDS = 25.0  # of a first step with compiled layers


@dataclass(frozen=True)
class Measurement:
    """Something to measure."""

    name: str
    unit: str
    predicted: float | None
    measure: Callable[[], float]


@dataclass(frozen=True)
class Bench:
    """The device, and whether shapes are tiny."""

    is_dry: bool

    @property
    def device(self) -> str:
        """The GPU, or in a dry run the CPU."""
        return "cpu" if self.is_dry else "cuda"

    def case(self, name: str) -> Case:
        """The shapes of a case."""
        return tiny(CASES[name]) if self.is_dry else CASES[name]

    def random(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """bfloat16 numbers."""
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device, requires_grad=grad)

    def seconds(self, function: Callable[[], Any], *, warmup: int = 3, repeats: int = 10) -> float:
        """The median time of a call."""
        for _ in range(warmup):
            function()
        times = []
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def wait(self) -> None:
        """Wait for the GPU. The launch of a kernel is in the time: 10 microseconds, of a millisecond and more."""
        if not self.is_dry:
            torch.cuda.synchronize()


def all_measurements(bench: Bench) -> Iterator[Measurement]:
    """In the order in which they run."""
    size, megabytes = (64, 1) if bench.is_dry else (8192, 2048)
    yield Measurement(f"product {size}^3", "TFLOP/s", REACHED_BY_MATRICES / 1e12, lambda: product(bench, size))
    yield Measurement("copy on the device", "TB/s, read and written", BANDWIDTH / 1e12, lambda: copy(bench, megabytes))
    for name in ("A", "B", "C", "F"):
        yield from attention_measurements(bench, bench.case(name))
    for name in ("A", "B", "C"):
        yield from loss_measurements(bench, bench.case(name))
    for optimizer, moved in {"adamw": "master", "adamw_8bit": "8-bit"}.items():
        predicted = 1e9 * OPTIMIZER_BYTES[moved] / BANDWIDTH
        yield Measurement(f"{optimizer}, bf16 weights", "ns a weight", predicted, lambda optimizer=optimizer: update(bench, optimizer))
    for way, factor in {"to the device": 1.0, "to the host": 1.0, "both ways": 1.7}.items():
        yield Measurement(f"pinned copy {way}", "GB/s", factor * PINNED / 1e9, lambda way=way: pinned(bench, megabytes, way))
    yield Measurement("first step of compiled layers (C)", "s", COMPILE_SECONDS, lambda: first_compiled_step(bench))
    yield Measurement("graphs of compiled layers (C)", "", 1.0, lambda: float(torch._dynamo.utils.counters["stats"]["unique_graphs"]))


def product(bench: Bench, size: int) -> float:
    """A square matrix product of random numbers."""
    left, right = bench.random(size, size), bench.random(size, size)
    return 2 * size**3 / bench.seconds(lambda: left @ right) / 1e12


def copy(bench: Bench, megabytes: int) -> float:
    """A copy in the device's memory."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / bench.seconds(lambda: target.copy_(source)) / 1e12


def attention_measurements(bench: Bench, case: Case) -> Iterator[Measurement]:
    """Forward and backward pass of one layer's causal attention over whole rows, by each kernel."""
    config = config_from(dict(case.config))
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    operations = 2 * heads * width * case.tokens * case.rows * case.tokens
    backends = {"cuDNN": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}

    def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != groups)

    def flat(kernel: Callable[..., torch.Tensor]) -> float:
        tensors = [bench.random(case.rows * case.tokens, count, width, grad=True) for count in (heads, groups, groups)]
        bounds = torch.arange(0, case.rows * case.tokens + 1, case.tokens, dtype=torch.int32, device=bench.device)
        return timed_both_ways(bench, lambda: kernel(*tensors, bounds, case.tokens, width**-0.5, None), tensors)

    def rows(backend: list[SDPBackend] | None) -> float:
        tensors = [bench.random(case.rows, count, case.tokens, width, grad=True) for count in (heads, groups, groups)]
        if backend is None:
            return timed_both_ways(bench, lambda: sdpa(*tensors), tensors)
        with sdpa_kernel(backend):
            return timed_both_ways(bench, lambda: sdpa(*tensors), tensors)

    def choice() -> float:
        tensors = [bench.random(case.rows, count, case.tokens, width) for count in (heads, groups, groups)]
        return float(torch._fused_sdp_choice(*tensors, is_causal=True, enable_gqa=heads != groups))

    def predicted(kernel: str) -> float | None:
        rates = ATTENTION.get((kernel, width))
        return None if rates is None else 1e3 * (operations / rates[0] + 2 * operations / rates[1])

    of = f"attention {case.name}"
    yield Measurement(f"{of}, varlen FA2", "ms", predicted("fa2"), lambda: flat(torch_kernel))
    yield Measurement(f"{of}, SDPA by default", "ms", predicted("fa3"), lambda: rows(None))
    yield Measurement(f"{of}, SDPA's choice", "(0 math, 1 flash, 2 efficient, 3 cuDNN)", float(SDPBackend.CUDNN_ATTENTION.value), choice)
    for label, backend in backends.items():
        yield Measurement(
            f"{of}, SDPA {label}", "ms", predicted("fa3" if label == "cuDNN" else "fa2"), lambda backend=backend: rows(backend)
        )
    yield Measurement(f"{of}, varlen cuDNN", "ms", predicted("fa3"), lambda: flat(cudnn_varlen))


def cudnn_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, tokens: int, scale: float, window: None
) -> torch.Tensor:
    """cuDNN's attention within documents, which no public function of torch calls with `is_causal`."""
    forward = torch.ops.aten._cudnn_attention_forward
    return forward(query, key, value, None, bounds, bounds, tokens, tokens, True, 0.0, True, False, scale=scale)[0]  # type: ignore[no-any-return]


def timed_both_ways(bench: Bench, forward: Callable[[], torch.Tensor], tensors: list[torch.Tensor]) -> float:
    """Milliseconds of a forward and a backward pass."""
    gradient = torch.randn_like(forward())
    return 1e3 * bench.seconds(lambda: torch.autograd.grad(forward(), tensors, gradient))


def loss_measurements(bench: Bench, case: Case) -> Iterator[Measurement]:
    """The head and its cross entropy, forward and backward, over the tokens of a step."""
    config = config_from(dict(case.config))
    tokens, width, vocabulary = case.rows * case.tokens, config.hidden_size, config.vocab_size

    def liger(chunk_mem_const: int) -> Callable[..., torch.Tensor]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # an extra

        def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return liger_fused_linear_cross_entropy(hidden, weight, targets, chunk_mem_const=chunk_mem_const)  # type: ignore[no-any-return]

        return loss

    def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def own(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scale = torch.full((), 1 / tokens, device=bench.device)
        return LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, None)[0]  # type: ignore[no-any-return]

    def compiled(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        backend = "aot_eager" if bench.is_dry else "inductor"
        return torch.compile(loss_of_head, dynamic=False, backend=backend)(hidden[None], weight, targets[None])  # type: ignore[no-any-return]

    def measure(make: Callable[[], Callable[..., torch.Tensor]]) -> float:
        loss = make()
        hidden, weight = bench.random(tokens, width, grad=True), bench.random(vocabulary, width, grad=True)
        targets = torch.randint(vocabulary, (tokens,), device=bench.device)
        return 1e3 * bench.seconds(lambda: torch.autograd.grad(loss(hidden, weight, targets), [hidden, weight]), warmup=2, repeats=5)

    ways: dict[str, tuple[str | None, Callable[[], Callable[..., torch.Tensor]]]] = {
        "eager": ("eager", lambda: eager),
        "compiled": ("compiled", lambda: compiled),
        "Liger": ("liger", lambda: liger(1)),
        "Liger, chunk_mem_const 16": (None, lambda: liger(16)),
        "own": ("own", lambda: own),
    }
    for label, (kind, make) in ways.items():
        predicted = None if kind is None else 1e3 * head_and_loss(tokens, width, vocabulary, Setting("master", loss=kind))
        yield Measurement(f"loss {case.name}, {label}", "ms", predicted, lambda make=make: measure(make))


def update(bench: Bench, name: str) -> float:
    """An optimizer's step over bfloat16 matrices."""
    size, count = ((64, 256), 2) if bench.is_dry else ((2048, 8192), 16)
    model = nn.Sequential(*(nn.Linear(*size, bias=False, dtype=torch.bfloat16, device=bench.device) for _ in range(count)))
    optimizer = build_optimizer(Optimizer(name=name, learning_rate=1e-5), model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return 1e9 * bench.seconds(optimizer.step, repeats=5) / (count * size[0] * size[1])


def pinned(bench: Bench, megabytes: int, way: str) -> float:
    """Copies between the device and pinned memory, one way or both ways at the same time."""
    size = megabytes * 2**20
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=not bench.is_dry) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2)]
    streams = [None, None] if bench.is_dry else [torch.cuda.Stream(), torch.cuda.Stream()]
    copies = []
    if way != "to the host":
        copies.append((devices[0], hosts[0], streams[0]))
    if way != "to the device":
        copies.append((hosts[1], devices[1], streams[1]))

    def run() -> None:
        for target, source, stream in copies:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return len(copies) * size / bench.seconds(run, repeats=5) / 1e9


def first_compiled_step(bench: Bench) -> float:
    """Seconds until the first step of a model with compiled layers has ended. A warm cache makes it shorter."""
    case = bench.case("C")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config_from(dict(case.config)), dtype=torch.bfloat16).train()
        ids = torch.randint(case.config["vocab_size"], (1, case.tokens))
    compile_layers(model, Compiling("aot_eager" if bench.is_dry else "inductor"))
    return bench.seconds(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(), warmup=0, repeats=1)


def main() -> None:
    """Measure what RESULTS does not have yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.micro", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.dry_run)
    known = {line["name"] for line in read_lines(options.results) if line.get("step") == "micro" and "measured" in line}
    for one in all_measurements(bench):
        if one.name in known:
            continue
        line = {"step": "micro", "name": one.name, "unit": one.unit, "predicted": one.predicted, "dry_run": bench.is_dry}
        try:
            line["measured"] = one.measure()
        except Exception as problem:  # whatever it is, the others are still worth their time
            line["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(one.name, line.get("measured", line.get("failed")), flush=True)
        if not bench.is_dry:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
