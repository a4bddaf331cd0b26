"""How the processes that write a checkpoint shard the model: not at all, by FSDP2, or by DeepSpeed's ZeRO."""

import io
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from cpt.checkpoints.manifest import (
    FSDP_FOLDER,
    FSDP_PART,
    MANIFEST,
    Manifest,
    parts_in,
    read_manifest,
)
from cpt.checkpoints.model_folder import load_data, only_data
from cpt.deepspeed_internals import without_recovery_script
from cpt.errors import CheckpointError, ResourceError

# The FSDP2 part of a checkpoint is fsdp/part_0_of_2.pt: for each process its rows of every parameter and its moments,
# by parameter name. `fully_shard` distributes the rows in order, so any number of processes can read them.

PLAIN = "plain"
FSDP = "fsdp"
ZERO = "zero-"  # followed by the stage, if cpt wrote the checkpoint
LATEST = "latest"  # the file with the name of DeepSpeed's folder


def sharding_of(manifest: Manifest) -> str:
    """`plain`, `fsdp`, or `zero-` and DeepSpeed's stage."""
    if manifest.zero_stage is not None:
        return f"{ZERO}{manifest.zero_stage}"
    if parts_in(manifest.files):
        return FSDP
    return PLAIN


def sharding_in(checkpoint: Path) -> str:
    """Like `sharding_of`, but from the checkpoint's files if it has no manifest."""
    if (checkpoint / MANIFEST).exists():
        return sharding_of(read_manifest(checkpoint))
    if (checkpoint / FSDP_FOLDER).is_dir():
        return FSDP
    if (checkpoint / LATEST).exists():
        return ZERO
    return PLAIN


def is_zero(sharding: str) -> bool:
    return sharding.startswith(ZERO)


def name_sharding(sharding: str) -> str:
    """`DeepSpeed ZeRO-2`, for messages."""
    names = {PLAIN: "no sharding (one process or DDP)", FSDP: "FSDP2", ZERO: "DeepSpeed ZeRO"}
    return names.get(sharding, f"DeepSpeed ZeRO-{sharding.removeprefix(ZERO)}")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of this process, sharing memory."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


@torch.no_grad()
def part_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights = {}
    states = {}
    for name, parameter in trained_parameters(model).items():
        weights[name] = {"shape": list(parameter.shape), "rows": local_part(parameter.detach())}
        state = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor):
                value = {"shape": list(value.shape), "rows": local_part(value)}
            state[key] = value
        states[name] = state
    return {"format": 1, "weights": weights, "states": states}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name: the rows of this process, or all rows without sharding."""
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor) and parameter.placements != (Shard(0),):
            raise CheckpointError(
                f"{name} is sharded by {parameter.placements}; only sharding by rows can be saved."
            )
    return trained


@torch.no_grad()
def load_parts(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, trust: bool = False
) -> None:
    """Load this process's rows of weights and optimizer states, whatever number of processes wrote the parts."""
    parts = read_parts(checkpoint, trust=trust)
    parameters = trained_parameters(model)
    stored = parts[0]["weights"]
    differing = sorted(parameters.keys() ^ stored.keys())
    if differing:
        raise of_another_model(
            checkpoint, f"{len(differing)} trained parameters differ: {', '.join(differing[:3])}"
        )
    groups: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        groups |= dict.fromkeys(map(id, group["params"]), group)
    for name, parameter in parameters.items():
        local_part(parameter).copy_(
            rows_here(whole([part["weights"][name] for part in parts]), parameter)
        )
        states = {}
        for key, value in parts[0]["states"][name].items():
            if isinstance(value, dict):
                value = whole([part["states"][name][key] for part in parts])
            states[key] = value
        if states:
            group = groups[id(parameter)]
            for key, value in states.items():
                states[key] = placed(value, parameter, group)
            optimizer.state[parameter] = states


def read_parts(checkpoint: Path, *, trust: bool) -> list[dict[str, Any]]:
    matches = {}
    for path in (checkpoint / FSDP_FOLDER).glob("*.pt"):
        match = FSDP_PART.fullmatch(f"{FSDP_FOLDER}/{path.name}")
        if match is not None:
            matches[int(match[1])] = match
    processes = int(matches[0][2]) if 0 in matches else 0
    if not processes or sorted(matches) != list(range(processes)):
        raise CheckpointError(
            f"{checkpoint} lacks parts in {FSDP_FOLDER}/, one per process. Copy them all."
        )
    parts = []
    for rank in range(processes):
        parts.append(load_data(checkpoint / matches[rank][0], mmap=True, trust=trust))
    return parts


def whole(parts: list[dict[str, Any]]) -> torch.Tensor:
    """Concatenate the rows written by all processes."""
    return torch.cat([part["rows"].flatten() for part in parts]).view(parts[0]["shape"])


def rows_here(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The rows of a whole tensor that belong to this process."""
    if not isinstance(parameter, DTensor):
        return tensor
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    begin = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0])
    return tensor[begin : begin + parameter.to_local().shape[0]]


def placed(value: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """A parameter's state on the device and in the dtype that the optimizer expects."""
    if not isinstance(value, torch.Tensor):
        return value
    device = local_part(parameter).device
    if value.dim() == 0:  # a step counter
        return value.to(
            device if group.get("fused") or group.get("capturable") else "cpu", copy=True
        )
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    rows = rows_here(value.view(parameter.shape), parameter).to(device, dtype, copy=True)
    if not isinstance(parameter, DTensor):
        return rows
    mesh = parameter.device_mesh
    shape = parameter.shape
    stride = parameter.stride()
    return DTensor.from_local(
        rows, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def full_weights(model: nn.Module, *, only_trained: bool) -> dict[str, torch.Tensor]:
    """The whole weights in host memory on the main process, empty on the others; every process must call it."""
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained
    )
    return get_model_state_dict(model, options=options)  # type: ignore[return-value]


UNIVERSAL = ".universal-"
SMALL = (
    "*.json",
    "scheduler.pt",
    "rng_state*.pth",
)  # files for the Trainer, outside DeepSpeed's folder
PROBLEMS = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    KeyError,
    AssertionError,
    NotImplementedError,
)


@contextmanager
def reading(checkpoint: Path, failure: str, *, trust: bool = False) -> Iterator[None]:
    """Read data only; errors of DeepSpeed become a CheckpointError that names the checkpoint."""
    try:
        with only_data(checkpoint, trust=trust):
            yield
    except (*PROBLEMS, CheckpointError) as problem:
        raise CheckpointError(
            f"{checkpoint} {failure}: {' '.join(str(problem).split())[:300]}"
        ) from problem


@contextmanager
def capture_states(engine: Any, folder: str) -> Iterator[dict[str, Any]]:
    """Make a DeepSpeed engine assemble its state, in step with the other processes, without writing it.

    Inside, `engine.save_checkpoint(folder, save_latest=False)` adds what it would write to the yielded mapping, by
    path relative to the folder, which does not have to exist.
    """
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    states: dict[str, Any] = {}

    class Capturing(CheckpointEngine):  # type: ignore[misc]
        def create(self, info: object) -> None:
            pass

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

        def save(self, state_dict: Any, path: str) -> None:
            states[Path(os.path.relpath(path, folder)).as_posix()] = state_dict

        def load(self, path: str, map_location: Any = None) -> Any:
            raise NotImplementedError

        def commit(self, info: object) -> bool:
            return True

    before = engine.checkpoint_engine
    engine.checkpoint_engine = Capturing()
    try:
        with without_recovery_script(engine):
            yield states
    finally:
        engine.checkpoint_engine = before


def scripts_of_deepspeed() -> dict[str, str]:
    """Programs that DeepSpeed adds to its checkpoints, to convert the weights without DeepSpeed."""
    utils = files("deepspeed.utils")
    scripts = {}
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        scripts[name] = (utils / name).read_text("utf-8")
    return scripts


def consolidated_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The fp32 master weights of a ZeRO checkpoint by the run's names; frozen ones if they were saved."""
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as problem:
        raise ResourceError(
            f"{checkpoint} has ZeRO's parts, which need DeepSpeed: {problem}. Run: pip install deepspeed"
        ) from problem
    with reading(
        checkpoint, "needs the parts of all processes; copy them or choose another checkpoint"
    ):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))


def load_consolidated(model: nn.Module, checkpoint: Path) -> None:
    """Load a ZeRO checkpoint's weights into a model built as in the run."""
    state = consolidated_state(checkpoint)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as problem:
        raise of_another_model(checkpoint, " ".join(str(problem).split())[:300]) from problem
    # A LoRA run's parts lack frozen weights; a tied head is listed once, under the embedding's name.
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    lacking = sorted(trained.intersection(missing)) or sorted(unexpected)
    if lacking:
        raise of_another_model(
            checkpoint, f"{len(lacking)} tensors differ: {', '.join(lacking[:3])}"
        )


def of_another_model(checkpoint: Path, details: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} is of another model ({details}). Choose a checkpoint of this run."
    )


def make_universal(checkpoint: Path, folder: Path, *, trust: bool = False) -> Path:
    """Convert to a checkpoint that any number of processes can load with `checkpoint: {load_universal: true}`.

    Only the main process calls it. The new checkpoint is in the run's folder, and is removed after it was loaded.
    """
    from deepspeed.checkpoint.ds_to_universal import (
        main as convert,
    )  # slow import, only needed here

    tag = (checkpoint / LATEST).read_text().strip()
    target = folder / f"{UNIVERSAL}{checkpoint.name.rpartition('-')[2]}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    output = io.StringIO()
    arguments = Namespace(
        input_folder=str(checkpoint / tag),
        output_folder=str(target / f"{tag}_universal"),
        num_extract_workers=1,  # in this process: a fork would copy its connections
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    failure = "cannot be converted; resume with as many processes as wrote it"
    try:
        with (
            reading(checkpoint, failure, trust=trust),
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            convert(arguments)
    finally:
        if not (target / "latest_universal").exists():  # DeepSpeed writes it last
            shutil.rmtree(target, ignore_errors=True)
    for pattern in SMALL:
        for path in checkpoint.glob(pattern):
            shutil.copy2(path, target)
    return target


def remove_parts(universal: Path) -> None:
    """Free the disk space of the parts after they were loaded."""
    shutil.rmtree(
        universal / (universal / "latest_universal").read_text().strip(), ignore_errors=True
    )


def remove_universal(folder: Path) -> None:
    """Remove all converted checkpoints, including those of a killed process; only the main process calls it."""
    for path in folder.glob(f"{UNIVERSAL}*"):
        shutil.rmtree(path, ignore_errors=True)
