"""An optimizer's states in host memory: one pinned arena, from which pieces come to the GPU while it computes, and go
back.

Two streams, one each way, and two buffers on the GPU: a piece comes while the one before it goes back, and while the
GPU computes a backward pass. The host never waits. Which piece is next is known from the last step, so it is fetched
before it is asked for.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from cpt.errors import ResourceError
from cpt.hardware import host_memory
from cpt.optim.adamw_update import part

ALIGNED = 512  # bytes: states begin as torch's allocations do
BUFFER = 2**25  # bytes of a piece's states
BUFFERS = 2
PIECES_OF = 4096  # numbers: a piece is a multiple, so that blocks stay whole and loads wide
Arrays = dict[str, torch.Tensor]
Key = tuple[int, int]
"""A parameter's number, and where a piece of it begins."""


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Arena:
    """Host memory for all states. torch's pinned allocations would each take a power of two."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.used = 0
        try:
            self.memory = host_memory(size, device)
        except (torch.cuda.CudaError, OSError) as problem:
            raise ResourceError(
                f"`optimizer.name`: {size / 2**30:.1f} GiB of host memory for states could not be page-locked"
                f" ({problem}). Free host memory, raise `ulimit -l`, or take adamw_8bit, whose states are on the GPU."
            ) from problem

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The next free part of it."""
        size = shape.numel() * dtype.itemsize
        found = self.memory[self.used : self.used + size].view(dtype).view(shape)
        self.used += aligned(size)
        return found


class Streams:
    """CUDA's; tests replace them."""

    def __init__(self, device: torch.device) -> None:
        self.to_gpu, self.to_host = (torch.cuda.Stream(device) for _ in range(2))

    def current(self) -> Any:
        """The stream that the update is launched on."""
        return torch.cuda.current_stream(self.to_gpu.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


@dataclass(frozen=True)
class Fetched:
    """A piece on its way to the GPU, or there."""

    key: Key
    buffer: int
    arrays: Arrays
    arrived: Any


class Pages:
    """Pieces of states, one after the other on the GPU."""

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.streams: Any = Streams(device) if streams is None else streams
        self.buffers = [torch.empty(BUFFER, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.free = [self.streams.current().record_event()] * BUFFERS
        self.back: dict[Key, Any] = {}
        """When a piece was last back on the host."""
        self.hosts: dict[Key, Arrays] = {}
        self.next_of: dict[Key | None, Key] = {}
        self.last: Key | None = None
        self.coming: Fetched | None = None
        self.fetched = 0

    def pieces(self, parameter: int, arrays: Arrays) -> Iterator[tuple[int, int, Arrays]]:
        """First and end of each piece, and its states on the GPU, which are written back when the next one is asked
        for.

        Args:
            parameter: its number.
            arrays: flat states on the host; those called `_scale` have a number for each block.
        """
        numbers = len(arrays["exp_avg"])
        bytes_each = sum(array.nbytes for array in arrays.values()) / numbers
        size = int((BUFFER - len(arrays) * ALIGNED) / bytes_each) // PIECES_OF * PIECES_OF
        for first, end in pairwise([*range(0, numbers, size), numbers]):
            key = parameter, first
            self.hosts[key] = {name: part(name, array, first, end) for name, array in arrays.items()}
            if self.coming is None or self.coming.key != key:
                self.coming = self.fetch(key)
            here = self.coming
            self.streams.current().wait_event(here.arrived)
            yield first, end, here.arrays
            self.write_back(here)
            self.next_of[self.last], self.last = key, key
            self.coming = self.fetch(self.next_of[key]) if key in self.next_of else None

    def fetch(self, key: Key) -> Fetched:
        """Begin to copy a piece to the GPU."""
        number, self.fetched = self.fetched % BUFFERS, self.fetched + 1
        stream, start, arrays = self.streams.to_gpu, 0, {}
        stream.wait_event(self.free[number])
        if key in self.back:
            stream.wait_event(self.back[key])
        with self.streams.on(stream):
            for name, host in self.hosts[key].items():
                arrays[name] = self.buffers[number][start : start + host.nbytes].view(host.dtype)
                arrays[name].copy_(host, non_blocking=True)
                start += aligned(host.nbytes)
        return Fetched(key, number, arrays, stream.record_event())

    def write_back(self, piece: Fetched) -> None:
        """Begin to copy it to the host, once it is updated."""
        stream = self.streams.to_host
        stream.wait_event(self.streams.current().record_event())
        with self.streams.on(stream):
            for name, host in self.hosts[piece.key].items():
                host.copy_(piece.arrays[name], non_blocking=True)
        self.free[piece.buffer] = self.back[piece.key] = stream.record_event()

    def wait(self) -> None:
        """Until all is on the host, and no copy uses the buffers."""
        for stream in (self.streams.to_gpu, self.streams.to_host):
            stream.synchronize()
