"""Which memory is alive: storages are seen when an operation gives them, and when nobody holds them any more."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakOfStorages(TorchDispatchMode):
    """Bytes of all storages that any operation gave, at their most; works on real tensors as on fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = 0
        self.peak = 0

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """What was there before."""
        self.alive[id(storage)] = (weakref.ref(storage), 0)

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Count it until it goes."""
        key = id(storage)
        known = self.alive.get(key)
        if known is not None and known[0]() is storage:
            return
        size = storage.nbytes()
        self.alive[key] = (weakref.ref(storage, lambda _: self.gone(key, size)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def gone(self, key: int, size: int) -> None:
        """A storage that nobody holds any more."""
        self.alive.pop(key, None)
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Each operation, after which its results are there."""
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf.untyped_storage())
        return result


def let_go(parameter: torch.Tensor) -> None:
    """As an engine that has taken the gradient."""
    parameter.grad = None
