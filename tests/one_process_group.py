"""A process group of this process alone, for what asks torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def alone_in_a_group() -> Iterator[None]:
    """It is there within."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
