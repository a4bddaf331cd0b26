"""Read a folder of weights (a model, an adapter, or ZeRO's parts): its kind, completeness, tensors one at a time, and
pickles as data only."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cpt.errors import CheckpointError

Kind = Literal["model", "adapter", "zero", "nothing"]
LARGEST_FILE = "5GB"
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in WHOLE)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
HEADS = ("lm_head.weight", "embed_out.weight")
"""Name endings of a head's weights."""


def kind_of(folder: Path) -> Kind:
    if (folder / ADAPTER_CONFIG).is_file():
        return "adapter"
    if any((folder / name).is_file() for name in (*WHOLE, *INDEXES)):
        return "model"
    if (folder / "latest").is_file() and list(folder.glob("*/*optim_states.pt")):
        return "zero"
    return "nothing"


def config_json(folder: Path) -> dict[str, Any]:
    """The content of config.json; CheckpointError if it is damaged."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as problem:
        raise CheckpointError(
            f"{path} is damaged: {problem}. Copy it again, or choose another model."
        ) from problem
    return content


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model, safetensors before pickles; CheckpointError if some are missing."""
    for file, index in zip(WHOLE, INDEXES, strict=True):
        if (folder / index).is_file():
            names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise CheckpointError(
                    f"{folder} is incomplete: {index} lists missing files: {', '.join(missing)}. Copy the folder"
                    " again, or choose another checkpoint."
                )
            return [folder / name for name in names]
        if (folder / file).is_file():
            return [folder / file]
    raise CheckpointError(
        f"{folder} has no weights, expected one of {', '.join((*WHOLE, *INDEXES))}. Give the folder of a model."
    )


class Tensors:
    """The tensors of a model folder by name, each read on access; CheckpointError if one is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._pickled: dict[Path, dict[str, torch.Tensor]] = {}
        for file in weight_files(folder):
            with damage_reported(file):
                self._list(file)

    def _list(self, file: Path) -> None:
        if file.suffix != ".safetensors":
            self._pickled[file] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            for name, tensor in self._pickled[file].items():
                self.files[name] = file
                self.shapes[name] = tuple(tensor.shape)
                self.dtypes[name] = tensor.dtype
            return
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # the file is not a mapping
                part = opened.get_slice(name)
                self.files[name], self.shapes[name] = file, tuple(part.get_shape())
                self.dtypes[name] = (
                    part[:0].dtype if self.shapes[name] else opened.get_tensor(name).dtype
                )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype."""
        file = self.files[name]
        if file in self._pickled:
            return self._pickled[file][name]
        with damage_reported(file), safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)


@contextmanager
def damage_reported(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as problem:
        raise CheckpointError(
            f"{file} is damaged: {' '.join(str(problem).split())[:200]}. Copy it again, or choose another checkpoint."
        ) from problem


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    compute: Callable[[str], torch.Tensor],
    max_shard_size: int | str = LARGEST_FILE,
) -> None:
    """Compute each tensor once and write all as safetensors, in shards of at most `max_shard_size`, like
    transformers; `shapes` has the (shape, dtype) of the results."""
    planned = {}
    for name, (shape, dtype) in shapes.items():
        planned[name] = torch.empty(shape, dtype=dtype, device="meta")
    plan = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = {name: compute(name).to(shapes[name][1]).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )


# --- pickles ---
# A pickle that would call a function is rejected. DeepSpeed uses torch's unrestricted unpickler in a dozen places; a
# setting of torch overrides it for resuming, for universal checkpoints and for consolidating ZeRO's parts.


FORCE_DATA = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORCE_CODE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
HARMLESS = {  # classes in DeepSpeed's files; instantiating them is safe
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}

BEFORE_CUDA = 9  # torch's restore order; its first entry has 10
CALLED = re.compile(r"GLOBAL (\w+(?:\.\w+)+)")  # in torch's message; nonsense for a damaged file
trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def only_data(path: Path, *, trust: bool = False) -> Iterator[None]:
    """Inside, `torch.load` reads data only, even if the caller requests more; CheckpointError names `path`. With
    `trust`, pickles may call functions, even if a caller requests data only."""
    if trust or trusted.get():
        before_it = trusted.set(True)
        try:
            yield
        finally:
            trusted.reset(before_it)
        return
    before = {name: os.environ.pop(name, None) for name in (FORCE_DATA, FORCE_CODE)}
    os.environ[FORCE_DATA] = "1"
    try:
        with torch.serialization.safe_globals(harmless_classes()):
            yield
    except UnpicklingError as problem:
        called = CALLED.search(str(problem))
        if called is None:
            # The text before this word advises to allow code.
            reason = " ".join(str(problem).split()).rpartition("WeightsUnpickler error: ")[2]
            raise CheckpointError(f"{path}: a file is damaged: {reason[:300]}") from problem
        raise CheckpointError(
            f"{path}: a file has more than tensors and numbers: reading it would call {called[1]}. It was not read. "
            "If you know who wrote it: cpt train --resume PATH --trust-checkpoint."
        ) from problem
    finally:
        del os.environ[FORCE_DATA]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def harmless_classes() -> list[Any]:
    """numpy arrays, as in random states, and DeepSpeed's classes if this process uses DeepSpeed."""
    rebuild = np.empty(0).__reduce__()[0]  # called by an array's pickle
    arrays: list[Any] = [rebuild, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    if "deepspeed" not in sys.modules:
        return arrays
    harmless = list(arrays)
    for module, names in HARMLESS.items():
        for name in names:
            harmless.append(vars(import_module(module))[name])
    return harmless


def load_data(
    path: Path, *, map_location: Any = "cpu", mmap: bool = False, trust: bool = False
) -> Any:
    """`torch.load` of one checkpoint file, data only; CheckpointError if it has more."""
    with only_data(path, trust=trust):
        return torch.load(
            path, map_location=map_location, mmap=mmap, weights_only=not trusted.get()
        )


@cache
def know_indexed_cpu() -> None:
    """Let torch restore to `cpu:0`, which transformers 5.17 requests in runs of several CPU processes; 5.18 requests
    `cpu`."""

    def restore(storage: Any, location: str) -> Any:
        if location.startswith("cpu:"):
            return storage
        return None

    torch.serialization.register_package(BEFORE_CUDA, lambda storage: None, restore)
