"""Rules of a GPU without one: which memory is where, which work is complete, and what makes the host wait.

Nothing runs in parallel here. Each stream and the host remember how much of each stream's work they have waited for
(vector clocks), so a missing wait is an error whenever it could be one on a GPU.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
Span = tuple[int, int]  # bytes of a storage
Stamp = tuple[int, int]  # stream and number of the operation
Clock = dict[int, int]  # number of a stream -> operations of it that are known to be complete
# Frames between a wait and the code that asks for it.
BETWEEN = (
    *(
        "/tests/emulated/",
        "/torch/_tensor.py",
        "/torch/overrides.py",
        "/torch/_ops.py",
        "/torch/utils/_contextlib.py",
    ),
    *(
        "/contextlib.py",
        "/torch/accelerator/",
        "/torch/cuda/",
        "/torch/functional.py",
        "/torch/_library/",
    ),
    *("/torch/_dynamo/", "/torch/_compile.py", "/torch/distributed/c10d_logger.py"),
    *("/deepspeed/accelerator/", "/deepspeed/utils/nvtx.py", "/torch/optim/optimizer.py"),
)


class MixedDevicesError(RuntimeError):
    """An operation got tensors of several devices, as CUDA would refuse them."""


class RaceError(RuntimeError):
    """Memory is used before the work of another stream on it is known to be complete."""


GPU: Any = None  # set by each `labelled_devices`


@dataclass
class Memory:
    """Where a storage is, and the last work on it."""

    gpu: "EmulatedGpu | None" = None
    device: torch.device = CPU
    is_pinned: bool = False
    written: dict[Span, Stamp] = field(default_factory=dict)
    read: dict[tuple[Span, int], int] = field(
        default_factory=dict
    )  # part and stream -> number of the operation


def memory_of(tensor: torch.Tensor) -> Memory:
    """Views share the memory of their storage, whose Python object lives as long as the storage."""
    storage = local_part(tensor).untyped_storage()
    memory: Memory | None = vars(storage).get("memory")
    if memory is None:
        memory = Memory()
        storage.memory = memory  # type: ignore[attr-defined]
    if memory.gpu is not GPU:  # a constant that outlived the GPU of another test
        memory.gpu = GPU
        memory.written.clear()
        memory.read.clear()
    return memory


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard, which has the memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Wait:
    """A call that waits for the GPU.

    Attributes:
        steps_late: steps between the work and the wait for it. The host does not wait for what ended long ago.
        micro_batch: index in its step; None outside of micro-batches.
    """

    kind: str
    place: str
    step: int
    micro_batch: int | None
    steps_late: int = 0


class EmulatedGpu:
    """The state of the emulated GPU, and the record of the host's waits."""

    def __init__(self) -> None:
        self.known_to_host: Clock = {}
        self.num_streams = 0
        self.threads = threading.local()
        self.default_stream = Stream(gpu=self)
        self.waits: list[Wait] = []
        self.step = 0
        self.micro_batch: int | None = None
        self.last_device = CPU

    @property
    def stream(self) -> "Stream":
        """This thread's current stream."""
        return vars(self.threads).get("stream", self.default_stream)

    def set_stream(self, stream: "Stream") -> None:
        self.threads.stream = stream

    def count(self, kind: str, *, steps_late: int = 0) -> None:
        place = calling_place()
        if not place.startswith(
            "torch/distributed/distributed_c10d.py"
        ):  # gloo's own; NCCL has none
            self.waits.append(Wait(kind, place, self.step, self.micro_batch, steps_late))

    def synchronize(self, kind: str) -> None:
        """The host waits for the current stream."""
        self.count(kind)
        merge(self.known_to_host, self.stream.known)

    def launch(
        self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], name: str
    ) -> None:
        """Start an operation on the current stream, after all that the host knows to be complete."""
        stream = self.stream
        merge(stream.known, self.known_to_host)
        stream.known[stream.number] = count = stream.known.get(stream.number, 0) + 1
        what = f"{name} on stream {stream.number}"
        for tensor in reads:
            memory, span = memory_of(tensor), span_of(tensor)
            check_written(memory, span, stream.known, what)
            memory.read[span, stream.number] = count
        for tensor in writes:
            memory, span = memory_of(tensor), span_of(tensor)
            check_written(memory, span, stream.known, what)
            check_read(memory, span, stream.known, what)
            note_write(memory, span, (stream.number, count))

    def host_uses(self, tensor: torch.Tensor, name: str, *, writes: bool = False) -> None:
        """The host reads or writes its memory directly."""
        memory = memory_of(tensor)
        if not memory.written and not memory.read:
            return
        check_written(memory, span_of(tensor), self.known_to_host, f"the host's {name}")
        if writes:
            check_read(memory, span_of(tensor), self.known_to_host, f"the host's {name}")

    @contextmanager
    def on(self, stream: "Stream | None") -> Any:
        before = self.stream
        self.set_stream(stream or before)
        try:
            yield stream
        finally:
            self.set_stream(before)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Check a copy between host and GPU, as torch's `copy_kernel_cuda` makes it."""
        to_gpu = memory_of(target).device == CUDA
        on_host = source if to_gpu else target
        is_direct = memory_of(on_host).is_pinned and on_host.is_contiguous()
        where = "to the GPU" if to_gpu else "to the host"
        if to_gpu and not is_direct:
            self.host_uses(on_host, f"copy {where}")  # into a staging buffer
        self.launch([source], [target], f"a copy {where}")
        if (
            not to_gpu
            and non_blocking
            and memory_of(target).is_pinned
            and not target.is_contiguous()
        ):
            raise RaceError(
                "torch copies to non-contiguous host memory through a temporary tensor, without waiting"
            )
        if not non_blocking:
            self.synchronize(f"copies {where}")
        elif not is_direct:
            self.synchronize(f"copies {where}, pageable memory")


def merge(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        clock[number] = max(clock.get(number, 0), count)


def span_of(tensor: torch.Tensor) -> Span:
    """First and last byte of a tensor in its storage."""
    tensor = local_part(tensor)
    start = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return start, start
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def check_written(memory: Memory, span: Span, known: Clock, what: str) -> None:
    for other, (stream, count) in memory.written.items():
        if known.get(stream, 0) < count and overlap(span, other):
            raise RaceError(
                f"{what} uses memory before stream {stream}, which writes it, was waited for"
            )


def check_read(memory: Memory, span: Span, known: Clock, what: str) -> None:
    for (other, stream), count in memory.read.items():
        if known.get(stream, 0) < count and overlap(span, other):
            raise RaceError(
                f"{what} overwrites memory before stream {stream}, which reads it, was waited for"
            )


def note_write(memory: Memory, span: Span, stamp: Stamp) -> None:
    """Forget what the write covers: whoever waits for it waits for the work before it, too."""
    for other in [other for other in memory.written if covers(span, other)]:
        del memory.written[other]
    for key in [key for key in memory.read if covers(span, key[0])]:
        del memory.read[key]
    memory.written[span] = stamp


def covers(span: Span, other: Span) -> bool:
    return span[0] <= other[0] and other[1] <= span[1]


def calling_place() -> str:
    """File and function of the innermost frame that is not torch's or ours."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in BETWEEN):
        frame = frame.f_back
    if frame is None:
        return "?"
    file = frame.f_code.co_filename.split("/site-packages/")[-1]
    file = file[file.rfind("/cpt/") + 1 :] if "/cpt/" in file else file
    return f"{file}:{frame.f_code.co_name}"


class Stream:
    """Stands in for torch.Stream and torch.cuda.Stream. Like those, it does not wait for the default stream."""

    def __init__(
        self, device: Any = None, priority: int = 0, gpu: EmulatedGpu | None = None, **_: Any
    ) -> None:
        self.gpu = gpu or GPU
        self.number = self.stream_id = self.cuda_stream = self.gpu.num_streams
        self.gpu.num_streams += 1
        self.device, self.device_index, self.priority = CUDA, 0, priority
        self.known: Clock = dict(self.gpu.known_to_host)

    def wait_event(self, event: "Event") -> None:
        merge(self.known, event.known)

    def wait_stream(self, stream: "Stream") -> None:
        merge(self.known, stream.known)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.count("synchronizes a stream")
        merge(self.gpu.known_to_host, self.known)

    def query(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "Stream":
        self.before = self.gpu.stream
        self.gpu.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.set_stream(self.before)


class Event:
    """Stands in for torch.Event and torch.cuda.Event."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device, self.known, self.step = CUDA, Clock(), 0

    def record(self, stream: Stream | None = None) -> None:
        self.known, self.step = dict((stream or GPU.stream).known), GPU.step

    def wait(self, stream: Stream | None = None) -> None:
        (stream or GPU.stream).wait_event(self)

    def synchronize(self) -> None:
        GPU.count("synchronizes an event", steps_late=GPU.step - self.step)
        merge(GPU.known_to_host, self.known)

    def query(self) -> bool:
        """True, which never waits."""
        merge(GPU.known_to_host, self.known)
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


def start_gpu() -> EmulatedGpu:
    global GPU
    GPU = EmulatedGpu()
    return GPU


def summary(waits: Iterable[Wait]) -> Counter[str]:
    return Counter(f"{wait.place} ({wait.kind})" for wait in waits)
