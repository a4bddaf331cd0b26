"""The first checkpoint of a run is read back before the run relies on its kind: what is on the disk, and whether a
model is in it."""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from cpt.checkpoints.agreement import SaveFailed
from cpt.checkpoints.manifest import damages, read_manifest
from cpt.checkpoints.verify import defects


def read_back(folder: Path, model: nn.Module) -> None:
    """Compare the disk with the manifest, and count the weights.

    Args:
        model: whose checkpoint it is.

    Raises:
        SaveFailed: a file is not what was written (a later try may do better), or the checkpoint holds no whole model.
    """
    forget_cached(path for path in folder.rglob("*") if path.is_file())
    manifest = read_manifest(folder)
    if found := damages(folder):
        raise SaveFailed("storage", f"the disk does not hold what was written: {'; '.join(map(str, found[:3]))}")
    if manifest.kind == "full" and (found := defects(folder)):
        raise SaveFailed("error", f"no run could go on from this checkpoint: {'; '.join(map(str, found[:3]))}")
    stored, needed = count_stored(folder), sum(numbers for _, numbers in saved_parameters(model))
    if stored < needed:
        text = (
            f"the checkpoint's weights are {stored:,} numbers of {needed:,}: no model could be loaded from it, nor"
            " exported"
        )
        raise SaveFailed("error", text)


def forget_cached(files: Iterable[Path]) -> None:
    """Ask the system to drop its copies, so that reading asks the disk; only what is durable can be dropped."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def count_stored(folder: Path) -> int:
    """How many numbers the weights' files hold, an adapter's or a model's."""
    total = 0
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118  # it is no mapping
    return total


def saved_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Each parameter that a checkpoint of the model must hold (of an adapter: the trained ones), and how many numbers
    it has.

    Of what ZeRO-3 keeps in parts it is the whole.
    """
    ignored = set(model._keys_to_ignore_on_save or ()) if isinstance(model, PreTrainedModel | PeftModel) else set()
    for name, parameter in model.named_parameters():
        if name not in ignored and (parameter.requires_grad or not isinstance(model, PeftModel)):
            yield parameter, int(vars(parameter).get("ds_numel", parameter.numel()))
