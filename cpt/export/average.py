"""The mean of several checkpoints' weights, as LAWA and model soups take it (arXiv 2209.14981, 2203.05482); read
tensor by tensor."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import Tensors, kind_of, write_tensors
from cpt.checkpoints.resume import complete_checkpoints
from cpt.checkpoints.transaction import rename_over
from cpt.errors import CheckpointError
from cpt.export.export import finish, not_exported
from cpt.models.new_rows import EXTENSION, carry_extension
from cpt.ranks import is_main_process, main_process_first, tell
from cpt.recipe.schema import Recipe

AVERAGE = "average"  # folder of a run

# All that a model folder holds beside its weights, and nothing of a training.
BESIDE_THE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.py",
    EXTENSION,
)


def export_average(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, run: Path) -> None:
    """Write the mean of the last checkpoints to `average/` in the run's folder, if the recipe asks for it; every
    process must call it.

    Raises:
        CheckpointError: it cannot be written.
    """
    if recipe.checkpoints.average is None:
        return
    folders = complete_checkpoints(run)[-recipe.checkpoints.average :]
    if len(folders) < 2:  # the run is finished and its model written: not worth an error
        tell(f"warning: no average is written: {run} has {len(folders)} checkpoint. Save more often, or train longer.")
        return

    def write() -> None:
        if not is_main_process():
            return
        unfinished = run / f".{AVERAGE}.unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            write_average(folders, unfinished, dtype=None, max_shard_size="5GB")
            tokenizer.save_pretrained(unfinished)
            finish(unfinished)
            carry_extension(recipe.model.path, unfinished)
            rename_over(unfinished, run / AVERAGE)
        except (OSError, SafetensorError) as failure:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise not_exported(run / AVERAGE, failure) from failure
        tell(f"The mean of {', '.join(folder.name for folder in folders)} is in {run / AVERAGE}.")

    main_process_first(write)


def write_average(folders: Sequence[Path], output: Path, *, dtype: torch.dtype | None, max_shard_size: str) -> None:
    """Write the mean of the models' weights, with the last one's config and tokenizer.

    Args:
        dtype: of the written numbers; None: as the last model has them. Sums are made in float64.

    Raises:
        CheckpointError: fewer than two, not models, or of different shapes.
    """
    if len(folders) < 2:
        raise CheckpointError(
            "an average needs two checkpoints or more: cpt merge --method average runs/x/checkpoint-* --output FOLDER"
        )
    models = [open_model(folder) for folder in folders]
    last = models[-1]
    for other in models[:-1]:
        refuse_other_shapes(other, last)
    output.mkdir(parents=True, exist_ok=True)

    def mean(name: str) -> torch.Tensor:
        if not last.dtypes[name].is_floating_point:
            return last.read(name)
        total = torch.zeros(last.shapes[name], dtype=torch.float64)
        for model in models:
            total += model.read(name)
        return total / len(models)

    write_tensors(
        output,
        {name: (shape, written_dtype(last, name, dtype)) for name, shape in last.shapes.items()},
        mean,
        max_shard_size,
    )
    copy_beside(last.folder, output)


def open_model(folder: Path) -> Tensors:
    """The tensors of a whole model.

    Raises:
        CheckpointError: it is something else.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder (looked in {Path.cwd()}). Give folders of models or of a run's checkpoints."
        )
    match kind_of(folder):
        case "adapter":
            raise CheckpointError(f"{folder} is an adapter. Merge it first: cpt export {folder} --output FOLDER")
        case "zero":
            raise CheckpointError(
                f"{folder} holds ZeRO's parts. Put them together first: cpt export {folder} --output FOLDER"
            )
        case "nothing":
            raise CheckpointError(f"{folder} holds no weights. Give folders of models or of a run's checkpoints.")
    return Tensors(folder)


def refuse_other_shapes(one: Tensors, other: Tensors, apart_from: Sequence[str] = ()) -> None:
    """Weights can be added only where names and shapes are the same.

    Raises:
        CheckpointError: with the first tensors that differ.
    """
    names = sorted(set(one.shapes) ^ set(other.shapes))
    if names:
        holder = one if names[0] in one.shapes else other
        raise CheckpointError(
            f"{one.folder} and {other.folder} are of different architectures: {len(names)} tensors are in one alone, "
            f"as {names[0]} in {holder.folder}. Were they only written differently (an old file, a stored tied head), "
            "write both anew with `cpt export` and merge those."
        )
    for name, shape in one.shapes.items():
        if name not in apart_from and shape != other.shapes[name]:
            raise CheckpointError(
                f"{name} is {list(shape)} in {one.folder} and {list(other.shapes[name])} in {other.folder}: they are"
                " models of different shapes, and their weights cannot be added. Give checkpoints of one run."
            )


def written_dtype(tensors: Tensors, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Whole numbers and masks stay what they are."""
    stored = tensors.dtypes[name]
    return dtype if dtype is not None and stored.is_floating_point else stored


def copy_beside(folder: Path, output: Path) -> None:
    for pattern in BESIDE_THE_WEIGHTS:
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copy(file, output / file.name)
