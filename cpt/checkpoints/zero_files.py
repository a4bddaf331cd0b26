"""Read ZeRO's files, one per process, with DeepSpeed's functions: as whole weights, or for another number of
processes."""

import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torch import nn

from cpt.checkpoints.safe_load import only_data
from cpt.errors import CheckpointError, ResourceError

UNIVERSAL = ".universal-"
SMALL = ("*.json", "scheduler.pt", "rng_state*.pth")  # files of the checkpoint itself, for the Trainer
PROBLEMS = (OSError, ValueError, RuntimeError, EOFError, KeyError, AssertionError, NotImplementedError)


@contextmanager
def reading(checkpoint: Path, what: str, *, trust: bool = False) -> Iterator[None]:
    """Read data only, and turn every error of DeepSpeed's into one that names the checkpoint."""
    try:
        with only_data(checkpoint, trust=trust):
            yield
    except (*PROBLEMS, CheckpointError) as problem:
        raise CheckpointError(f"{checkpoint} {what}: {' '.join(str(problem).split())[:300]}") from problem


def consolidated_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The fp32 master weights of a ZeRO-1, 2 or 3 checkpoint under the names of the run; frozen ones if it saved them.

    Raises:
        CheckpointError: a part is missing or damaged, or holds more than data.
        ResourceError: DeepSpeed is not installed.
    """
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as problem:
        raise ResourceError(
            f"{checkpoint} holds ZeRO's parts, which DeepSpeed reads: {problem}. pip install deepspeed"
        ) from problem
    what = "needs the parts of all processes, copy them or choose another checkpoint"
    with reading(checkpoint, what):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))


def load_consolidated(model: nn.Module, checkpoint: Path) -> None:
    """Fill the model, built as the run built it, with a ZeRO checkpoint's weights.

    Raises:
        CheckpointError: they belong to another model.
    """
    state = consolidated_state(checkpoint)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as problem:
        raise CheckpointError(f"{checkpoint} is of another model: {' '.join(str(problem).split())[:300]}") from problem
    # Frozen weights are left out of a LoRA run's parts; a tied head is listed once, under its embedding's name.
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lacking := sorted(trained.intersection(missing)) or sorted(unexpected):
        raise CheckpointError(
            f"{checkpoint} is of another model: {len(lacking)} tensors do not match ({', '.join(lacking[:3])}). Choose"
            " another."
        )


def make_universal(checkpoint: Path, folder: Path, *, trust: bool = False) -> Path:
    """Convert to a checkpoint that any number of processes can load with `checkpoint: {load_universal: true}`.

    Only the main process calls it.

    Args:
        folder: of the run; the new checkpoint is written into it, and serves one start.

    Raises:
        CheckpointError: it cannot be converted.
    """
    from deepspeed.checkpoint.ds_to_universal import main as convert  # seconds to import, and only for this

    tag = (checkpoint / "latest").read_text().strip()
    target = folder / f"{UNIVERSAL}{checkpoint.name.rpartition('-')[2]}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    output = io.StringIO()
    arguments = Namespace(
        input_folder=str(checkpoint / tag),
        output_folder=str(target / f"{tag}_universal"),
        num_extract_workers=1,  # in this process: a fork would copy its connections to the others
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    what = "cannot be converted, resume with as many processes as wrote it"
    try:
        with reading(checkpoint, what, trust=trust), redirect_stdout(output), redirect_stderr(output):
            convert(arguments)
    finally:
        if not (target / "latest_universal").exists():  # DeepSpeed writes it last
            shutil.rmtree(target, ignore_errors=True)
    for pattern in SMALL:
        for path in checkpoint.glob(pattern):
            shutil.copy2(path, target)
    return target


def remove_parts(universal: Path) -> None:
    """Free the space of the parts once they are loaded."""
    shutil.rmtree(universal / (universal / "latest_universal").read_text().strip(), ignore_errors=True)


def remove_universal(folder: Path) -> None:
    """Remove all converted checkpoints, also those of a killed process; only the main process calls it."""
    for path in folder.glob(f"{UNIVERSAL}*"):
        shutil.rmtree(path, ignore_errors=True)
