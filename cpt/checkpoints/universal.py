"""Make ZeRO's parts fit another number of processes: DeepSpeed's universal checkpoint, made beside the run for one
start."""

import io
import shutil
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from cpt.checkpoints.safe_load import only_data
from cpt.errors import CheckpointError, ResourceError

FOLDER = ".universal-"
SMALL = ("*.json", "scheduler.pt", "rng_state*.pth")  # of the checkpoint itself, for the Trainer
COPIES = 2  # the fragments of each process, and the parameters put together, lie on the disk at the same time


def make_universal(checkpoint: Path, folder: Path, *, trust: bool = False) -> Path:
    """A checkpoint folder that any number of processes can load with `checkpoint: {load_universal: true}`; for the
    main process.

    Args:
        folder: the run's, which is written into.

    Raises:
        CheckpointError: it cannot be converted.
        ResourceError: the disk is too small.
    """
    from deepspeed.checkpoint.ds_to_universal import main as convert  # seconds to import, and only for this

    tag = (checkpoint / "latest").read_text().strip()
    needed = COPIES * sum(path.stat().st_size for path in (checkpoint / tag).glob("*optim_states.pt"))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{checkpoint} was written by another number of processes. Converting it takes {needed / 2**30:.1f} GiB"
            f" beside it, and {folder} has {free / 2**30:.1f} GiB free. Make room, or go on with as many processes as"
            " before."
        )
    target = folder / f"{FOLDER}{checkpoint.name.rpartition('-')[2]}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    said = io.StringIO()
    words = Namespace(
        input_folder=str(checkpoint / tag),
        output_folder=str(target / f"{tag}_universal"),
        num_extract_workers=1,  # in this process: a fork of it would also copy what connects it with the others
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with only_data(checkpoint, trust=trust), redirect_stdout(said), redirect_stderr(said):
            convert(words)
    except (OSError, ValueError, RuntimeError, KeyError, AssertionError, NotImplementedError) as problem:
        raise CheckpointError(
            f"{checkpoint} cannot be converted for another number of processes: {' '.join(str(problem).split())[:300]}"
            " Go on with as many processes as wrote it."
        ) from problem
    finally:
        if not (target / "latest_universal").exists():  # DeepSpeed writes it last
            shutil.rmtree(target, ignore_errors=True)
    for pattern in SMALL:
        for path in checkpoint.glob(pattern):
            shutil.copy2(path, target)
    return target


def remove_parts(universal: Path) -> None:
    """What takes space, once it is in memory."""
    shutil.rmtree(universal / (universal / "latest_universal").read_text().strip(), ignore_errors=True)


def remove_universal(folder: Path) -> None:
    """All that was converted, also by a process that was killed; for the main process."""
    for path in folder.glob(f"{FOLDER}*"):
        shutil.rmtree(path, ignore_errors=True)
