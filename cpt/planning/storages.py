"""Which memory is alive: storages count from the operation that returns them until they are freed."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakOfStorages(TorchDispatchMode):
    """Peak bytes of all storages that operations return, of real tensors or fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = 0
        self.peak = 0

    def ignore(self, storage: torch.UntypedStorage) -> None:
        self.alive[id(storage)] = (weakref.ref(storage), 0)

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Count it until it is freed."""
        key = id(storage)
        known = self.alive.get(key)
        if known is not None and known[0]() is storage:
            return
        size = storage.nbytes()
        self.alive[key] = (weakref.ref(storage, lambda _: self.gone(key, size)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def gone(self, key: int, size: int) -> None:
        self.alive.pop(key, None)
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf.untyped_storage())
        return result


def let_go(parameter: torch.Tensor) -> None:
    """Drop the gradient, like an engine that has taken it."""
    parameter.grad = None
