"""Metrics added to the logs: tokens and time, cost, smoothed loss, realized shares, FLOPs utilization, memory, GPU."""

import importlib.util
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from cpt.data.rows.build import PreparedData
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import RowsOfSteps
from cpt.formatting import MIB
from cpt.hardware import GIB, known_gpu
from cpt.models.freezing import freeze_base
from cpt.models.inventory import build_on_meta, flops_per_token
from cpt.recipe.schema import Model
from cpt.runs.events import read_heartbeats
from cpt.runs.folder import read_metrics

log = logging.getLogger("cpt")
LAST_STEPS = 100
ACCEPTABLE_WAIT = 0.01  # share of a step's time
DECAY = 0.9  # weight of a log relative to the next one: the last ten have two thirds of the weight
COST = "cost"
ROWS_MEASURED = 32
TOKENS_PER_SECOND = "tokens_per_second"
SECONDS_BETWEEN_LOOKS = 30.0  # at processes, NVML and heartbeats, which take some milliseconds each
PEAK = "gpu_memory_peak_gib"


class TrainingClock(TrainerCallback):
    """Adds `tokens`, `tokens_per_second`, `data_wait`, `step_seconds_p50`, `step_seconds_p95` and `seconds_to_go`.

    Excludes evaluation and saving, except in `seconds_to_go`. Warns once if the last 100 steps waited for data.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.since = self.seconds = self.waited = self.first_step_ended = 0.0
        self.steps = self.steps_in_all = 0  # since the last log; since the start of this process
        # seconds of each step, and total seconds waited by then
        self.last_steps: deque[tuple[float, float]] = deque(maxlen=LAST_STEPS)
        self.has_warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.since = time.perf_counter()
        self.steps_in_all = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        seconds_now = time.perf_counter()
        self.seconds += seconds_now - self.since
        self.last_steps.append((seconds_now - self.since, waited_by(more.get("train_dataloader"))))
        self.since = seconds_now
        self.steps += 1
        if not self.steps_in_all:  # the first step is a warm-up
            self.first_step_ended = seconds_now
        self.steps_in_all += 1
        # The Trainer counts epochs from this process's start; ours is the share of the whole run.
        state.epoch = state.global_step / state.max_steps
        if self.has_warned or state.global_step % LAST_STEPS or len(self.last_steps) < LAST_STEPS:
            return
        seconds = sum(seconds for seconds, _ in self.last_steps) - self.last_steps[0][0]
        share = (self.last_steps[-1][1] - self.last_steps[0][1]) / seconds
        if share > ACCEPTABLE_WAIT:
            self.has_warned = True
            log.warning(
                f"the model waited for data {share:.1%} of the last {LAST_STEPS} steps. Run `cpt prepare` first,"
                " set CPT_CACHE to a local folder, or `training.dataloader_num_workers: 2` for slow custom datasets."
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs["logs"]
        seconds_now = time.perf_counter()
        if "loss" in logs and self.steps:
            seconds = self.seconds + seconds_now - self.since
            before = self.waited
            self.waited = waited_by(kwargs["train_dataloader"])
            logs["tokens_per_second"] = round(self.steps * self.tokens_per_step / seconds, 1)
            logs["data_wait"] = round((self.waited - before) / seconds, 5)
            logs["tokens"] = state.global_step * self.tokens_per_step
            steps = [last_step for last_step, _ in self.last_steps]
            if len(steps) > 1:
                twentieths = statistics.quantiles(steps, n=20, method="inclusive")
            else:
                twentieths = steps * 19
            logs["step_seconds_p50"], logs["step_seconds_p95"] = (
                round(twentieths[9], 6),
                round(twentieths[18], 6),
            )
            self.seconds = 0.0
            self.steps = 0
            if self.steps_in_all > 1:
                of_one = (seconds_now - self.first_step_ended) / (self.steps_in_all - 1)
                logs["seconds_to_go"] = round(of_one * (state.max_steps - state.global_step), 1)
        self.since = time.perf_counter()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Exclude the time of evaluations and saves."""
        self.since = time.perf_counter()

    on_save = on_prediction_step = on_evaluate


def waited_by(loader: object) -> float:
    """Seconds waited since the loader started; 0 for custom loaders, which do not count them."""
    if isinstance(loader, CPTDataLoader):
        return loader.waited_seconds
    return 0.0


class SmoothedLoss(TrainerCallback):
    """Adds `loss_smoothed`: an exponential moving average of all logged losses.

    It is computed from the Trainer's history, which each checkpoint has, so that a resumed run continues exactly.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.weight = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.total = 0.0
        self.weight = 0.0
        self.add(float(line["loss"]) for line in state.log_history if "loss" in line)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.add([logs["loss"]])
            if self.weight:
                logs["loss_smoothed"] = self.total / self.weight

    def add(self, losses: Iterable[float]) -> None:
        """Ignores non-finite losses."""
        for loss in losses:
            if math.isfinite(loss):
                self.total = DECAY * self.total + loss
                self.weight = DECAY * self.weight + 1


class RealisedShares(TrainerCallback):
    """Adds `share_<source>` and `tokens_<source>`: tokens so far, computed from the step's number.

    If each example is a row, shares count examples, and tokens are not logged.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data = data
        self.rows = rows

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs["logs"]
        if "loss" in logs and state.global_step and len(self.data.sources) > 1:
            tokens = self.data.tokens(self.rows.first(state.global_step))
            total = sum(tokens.values())
            logs.update(
                {f"share_{name}": round(number / total, 6) for name, number in tokens.items()}
            )
            if not self.data.chunked[0].layout.is_one_a_row:
                logs.update({f"tokens_{name}": round(number) for name, number in tokens.items()})


class Cost(TrainerCallback):
    """Adds `cost` so far and `cost_to_go`, in the currency of the price.

    It counts from the first step of each start to its last log, with evaluations, saves and lost steps.

    Args:
        run: the run's folder, whose metrics.jsonl has the cost of earlier starts.
        dollars_per_gpu_hour: per GPU; per process on a CPU.
    """

    # It must run after TrainingClock, which adds `seconds_to_go`, and before MetricsFile, which cuts metrics.jsonl.
    def __init__(self, run: Path, *, dollars_per_gpu_hour: float) -> None:
        self.run = run
        self.price = dollars_per_gpu_hour
        self.before = 0.0
        self.began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.began = time.perf_counter()
        if state.global_step and state.is_world_process_zero:
            self.before = read_metrics(self.run, [COST]).last(COST) or 0.0

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            per_second = self.price * max(1, args.world_size * args.n_gpu) / 3600
            logs[COST] = round(self.before + per_second * (time.perf_counter() - self.began), 4)
            if "seconds_to_go" in logs:
                logs["cost_to_go"] = round(per_second * logs["seconds_to_go"], 4)


class ModelFlopsUtilization(TrainerCallback):
    """Adds `mfu`: tokens per second x operations that training on a token needs / peak of all GPUs.

    Padding, attention to other documents and recomputation do not count (arXiv 2204.02311, appendix B). It is not
    logged on CPUs, nor on GPUs without a known data sheet.

    Args:
        gpu: name in the driver; None on a CPU.
        section: of the recipe; it says which weights are trained.
    """

    def __init__(
        self, data: PreparedData, rows: RowsOfSteps, gpu: str | None, section: Model
    ) -> None:
        self.data = data
        self.rows = rows
        self.gpu = gpu
        self.section = section
        self.peak: float | None = None
        self.since = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        self.since = state.global_step
        weights_dtype = next(
            parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
        )
        is_half = args.bf16 or args.fp16 or weights_dtype in (torch.bfloat16, torch.float16)
        precision = "tf32" if args.tf32 else "fp32"
        if is_half:
            precision = "half"
        of_one = peak_flops(self.gpu, precision) if state.is_world_process_zero else None
        if of_one is None:
            return
        first = self.rows.first(state.global_step)
        try:
            config: Any = next(
                part for part in model.modules() if isinstance(part, PreTrainedModel)
            ).config
            documents = list(map(self.data.rows.documents_in, range(first, first + ROWS_MEASURED)))
            lengths = np.concatenate(documents).astype(np.float64)
            attended = float(
                (lengths**2).sum() / lengths.sum()
            )  # mean length of a token's document
            base = build_on_meta(config)
            freeze_base(base, self.section.lora, self.section.train_only)
            self.flops = flops_per_token(base, attended)
        except Exception as problem:  # errors in custom model code must not stop the run
            log.info(f"mfu is not logged: cannot count the operations of this model: {problem!r}.")
            return
        self.peak = of_one * max(1, args.world_size * args.n_gpu)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Computed since the last log, like `tokens_per_second`."""
        logs = kwargs["logs"]
        if self.peak is None or TOKENS_PER_SECOND not in logs:
            return
        filled = self.data.filled(
            self.rows.first(state.global_step), first=self.rows.first(self.since)
        )
        logs["mfu"] = round(logs[TOKENS_PER_SECOND] * filled * self.flops / self.peak, 4)
        self.since = state.global_step


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Operations per second on dense matrices, from the data sheet; None if unknown."""
    kind = known_gpu(gpu) if gpu is not None else None
    tflops = kind.tflops(precision) if kind is not None else None
    if tflops is None:
        return None
    return 1e12 * tflops


class MachineUse(TrainerCallback):
    """Adds GPU memory to each log of the training loss, and the other metrics every 30 seconds.

    `gpu_memory_allocated_gib` and `gpu_memory_reserved_gib` are the main process's current values; the peak is the
    maximum over all processes, from their heartbeats. `cpu_percent` and the traffic of disks
    and network are the machine's means since the last call. NVML provides the GPU's temperature, power and
    utilization.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.next_look = -math.inf
        self.largest_peak = 0.0
        # bytes since the machine's start
        self.traffic = dict[str, int]()
        self.counted_at = 0.0
        self.has_nvml = importlib.util.find_spec("pynvml") is not None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        psutil.cpu_percent()  # the next call returns the mean since this one
        self.traffic_per_second()  # counted from here

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs or not state.is_world_process_zero:
            return
        has_gpu = args.device.type == "cuda"
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
            this = psutil.Process()
            memory = this.memory_info().rss  # pages that several processes share count for each
            for process in this.children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    memory += process.memory_info().rss
            logs.update(
                {"host_memory_gib": round(memory / GIB, 3), "cpu_percent": psutil.cpu_percent()}
            )
            logs.update(self.traffic_per_second())
            if has_gpu:
                logs.update(self.gpu_state())
                # higher ranks are from an earlier start
                signs = [sign for sign in read_heartbeats(self.run) if sign.rank < args.world_size]
                self.largest_peak = max(
                    [self.largest_peak, *(sign.gpu_peak_gib or 0.0 for sign in signs)]
                )
        if has_gpu:
            stats = torch.cuda.memory_stats()  # of this process's GPU, without a synchronization
            for kind in ("allocated", "reserved"):
                logs[f"gpu_memory_{kind}_gib"] = round(
                    stats.get(f"{kind}_bytes.all.current", 0) / GIB, 3
                )
            logs[PEAK] = max(
                round(stats.get("allocated_bytes.all.peak", 0) / GIB, 3), self.largest_peak
            )

    def traffic_per_second(self) -> dict[str, float]:
        """MiB per second of the machine's disks and network since the last call."""
        before = self.traffic
        seconds = time.monotonic() - self.counted_at
        self.traffic = count_traffic()
        self.counted_at = time.monotonic()
        rates = {}
        for name, number in self.traffic.items():
            if name in before and seconds > 0:
                rates[f"{name}_mib_per_second"] = round((number - before[name]) / MIB / seconds, 3)
        return rates

    def gpu_state(self) -> dict[str, float]:
        """Empty if NVML does not answer, as in some containers and on GPU slices; do not retry then."""
        if not self.has_nvml:
            return {}
        from pynvml import NVMLError

        try:
            return {
                "gpu_temperature_celsius": torch.cuda.temperature(),
                "gpu_power_watts": torch.cuda.power_draw() / 1000,
                "gpu_utilization_percent": torch.cuda.utilization(),
            }
        except (NVMLError, RuntimeError):
            self.has_nvml = False
            return {}


def count_traffic() -> dict[str, int]:
    """Bytes read, written, received and sent since the machine's start, as far as the system counts them."""
    traffic = dict[str, int]()
    disks = psutil.disk_io_counters()  # None in some containers
    if disks is not None:
        traffic |= {"disk_read": disks.read_bytes, "disk_written": disks.write_bytes}
    links = [link for name, link in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    if links:
        traffic["network_received"] = sum(link.bytes_recv for link in links)
        traffic["network_sent"] = sum(link.bytes_sent for link in links)
    return traffic
