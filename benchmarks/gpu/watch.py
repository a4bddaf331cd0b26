"""The cost of a training step: its time on the GPU's clock, peak memory, kernels, waits of the host and idle time of
the GPU."""

import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from benchmarks.gpu.cases import INSPECTED, TRACED, WARMUP

GROUPS = 4
KERNELS = 12  # named in a result


class Watch(TrainerCallback):
    """Called at the end of each step, by a Trainer or by a loop.

    After the warm-up come the timed steps, then some under the profiler, then some in which waits are counted, then
    two that are saved as a trace, if `trace` names a file.
    """

    def __init__(
        self, *, on_gpu: bool, timed: int, warmup: int = WARMUP, trace: Path | None = None
    ) -> None:
        self.on_gpu, self.warmup, self.timed, self.trace = on_gpu, warmup, timed, trace
        self.began = time.perf_counter()
        self.marks: list[Any] = []
        self.losses: list[torch.Tensor] = []
        self.found: dict[str, Any] = {}
        self.waits = 0
        self.profiler: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end(state.global_step)

    def keep_losses_of(self, trainer: Any) -> None:
        """Keep the loss of each micro-batch on its device, without waiting for it."""
        step = trainer.training_step

        def training_step(*inputs: Any, **options: Any) -> torch.Tensor:
            loss = step(*inputs, **options)
            self.losses.append(loss.detach())
            return loss

        trainer.training_step = training_step

    def end(self, step: int) -> None:
        """Step `step`, counted from 1, has ended."""
        self.marks.append(self.mark())
        last = self.warmup + self.timed
        if step == 1:
            self.wait()
            self.found["cold_start_seconds"] = time.perf_counter() - self.began
        if step == last:
            self.note_memory()
        if self.on_gpu:
            self.inspect(step, last)
        if self.trace is not None:
            self.save_trace(step, last + 1 + 2 * INSPECTED, self.trace)

    def inspect(self, step: int, last: int) -> None:
        """Steps under the profiler, and steps in which waits are counted, after the `last` timed one."""
        if step == last + 1:
            self.wait()
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
        elif step == last + 1 + INSPECTED:
            self.wait()
            self.profiler.stop()
            self.found |= {
                "host_gap": host_gap(self.profiler),
                "kernels": kernels_of(self.profiler),
            }
            self.count_waits()
        elif step == last + 1 + 2 * INSPECTED:
            torch.cuda.set_sync_debug_mode("default")
            self.found["waits_per_step"] = self.waits / INSPECTED
            warnings.showwarning = self.shows

    def save_trace(self, step: int, first: int, path: Path) -> None:
        """The steps after step `first` as a trace, with the operators of the host."""
        if step == first:
            self.wait()
            device = [ProfilerActivity.CUDA] if self.on_gpu else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *device])
            self.profiler.start()
        elif step == first + TRACED:
            self.wait()
            self.profiler.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(path))

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def note_memory(self) -> None:
        """Peaks of all steps so far, and what nvidia-smi counts."""
        if self.on_gpu:
            self.found["peak_allocated"] = torch.cuda.max_memory_allocated()
            self.found["peak_reserved"] = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            self.found |= {
                "used_on_device": total - free,
                "nvidia_smi": nvidia_smi("clocks.sm,clocks.mem,power.draw,memory.used"),
            }
        self.found["host_memory"] = psutil.Process().memory_info().rss

    def count_waits(self) -> None:
        """Count torch's warnings, one for each operation that makes the host wait."""
        self.shows: Callable[..., Any] = warnings.showwarning

        def count(message: Any, *rest: Any, **options: Any) -> None:
            self.waits += "synchronizing" in str(message)

        warnings.showwarning = count
        warnings.filterwarnings("always", message=".*synchronizing.*")
        torch.cuda.set_sync_debug_mode("warn")

    def finish(self, *, micro_batches: int) -> dict[str, Any]:
        """All results.

        Args:
            micro_batches: in a step.
        """
        self.wait()
        seconds = [
            self.between(one, other) for one, other in zip(self.marks, self.marks[1:], strict=False)
        ]
        timed = seconds[self.warmup - 1 : self.warmup - 1 + self.timed]
        losses = (
            torch.stack([loss.float().cpu() for loss in self.losses])
            .view(-1, micro_batches)
            .sum(1)
            .tolist()
        )
        return {
            **self.found,
            **times_of(timed),
            "losses": [round(loss, 5) for loss in losses],
            "first_step": self.warmup,
        }

    def between(self, one: Any, other: Any) -> float:
        return float(one.elapsed_time(other) / 1e3 if self.on_gpu else other - one)


def times_of(seconds: Sequence[float]) -> dict[str, Any]:
    """The median of groups is the result; percentiles of single steps show how even they are."""
    size = max(1, len(seconds) // GROUPS)
    groups = [
        sum(seconds[at : at + size]) / size for at in range(0, size * (len(seconds) // size), size)
    ]
    return {
        "step_seconds": median(groups),
        "p50": median(seconds),
        "p95": quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0],
    }


def host_gap(profiler: Any) -> float:
    """The share of the time between the first kernel and the last in which none ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    return idle_share(spans)


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """The share of time outside of spans, which may overlap and are sorted by their beginnings."""
    busy, end = 0.0, spans[0][0] if spans else 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return float(1 - busy / (end - spans[0][0])) if spans else 0.0


def kernels_of(profiler: Any) -> list[tuple[str, int, float]]:
    """The kernels that take most of a step: name, calls, milliseconds."""
    total: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            total.setdefault(event.name[:80], []).append(
                event.time_range.end - event.time_range.start
            )
    longest = sorted(total.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    return [
        (name, round(len(times) / INSPECTED), round(sum(times) / INSPECTED / 1e3, 3))
        for name, times in longest
    ]


def limit_memory(gib: float | None) -> None:
    """Let this process use no more of the GPU's memory than that."""
    if gib is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
        )


def nvidia_smi(query: str) -> str:
    try:
        words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
