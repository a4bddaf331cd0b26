"""Turn what was trained into a folder that plain transformers loads, whole or not at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, Trainer

from cpt.checkpoints.model_folder import HEADS, Tensors, write_tensors
from cpt.checkpoints.retention import published_in
from cpt.checkpoints.transaction import in_words, rename_over
from cpt.errors import CheckpointError
from cpt.export.merge_lora import BASE_WEIGHTS, merge_into_base
from cpt.export.model_card import write_model_card
from cpt.models.families import export_native
from cpt.models.new_rows import carry_extension
from cpt.ranks import is_main_process, main_process_decides, same_command
from cpt.recipe.schema import Recipe
from cpt.runs.folder import INPUTS, RECIPE, read_object
from cpt.runs.record import write_json

ADAPTER = "adapter"
ONLY_FOR_TRAINING = {
    "use_cache": True,
    "output_router_logits": False,
}  # value of the configs that a served model needs instead
CONFIGS = ("config.json", "generation_config.json")


def export_model(
    trainer: Trainer,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    seal: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the trained model, its tokenizer and configs to `folder`, which is there whole or not at all.

    Families of our own are written as the native architecture that they equal, so that nobody needs this package to
    load them. A LoRA adapter is merged into its base, and kept beside in `adapter/`. Every process must call it:
    ZeRO-3 gathers from all.

    Args:
        seal: called with the complete folder before it gets its name, by the main process.

    Raises:
        CheckpointError: the disk is full or read-only; raised on all processes.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    adapted = trainer.model if isinstance(trainer.model, PeftModel) else None
    problem: OSError | SafetensorError | None = None
    try:
        if is_main_process():
            shutil.rmtree(unfinished, ignore_errors=True)
        trainer.save_model(str(unfinished / ADAPTER if adapted else unfinished))
    except (
        OSError,
        SafetensorError,
    ) as failure:  # of the main process, which writes last: the others wait to hear of it below
        problem = failure

    def publish_export() -> None:
        try:
            if problem is not None:
                raise problem
            complete(unfinished, adapted, recipe, tokenizer, run=folder.parent)
            seal(unfinished)
            rename_over(unfinished, folder)
        except (OSError, SafetensorError) as failure:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise not_exported(folder, failure) from failure

    main_process_decides(publish_export)


def complete(
    unfinished: Path, adapted: PeftModel | None, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, run: Path
) -> None:
    """Add to the saved weights what others need to load and understand them."""
    if adapted:
        record_base_weights(run, unfinished / ADAPTER)
        dtype = next(adapted.get_base_model().parameters()).dtype
        model = merge_into_base(unfinished / ADAPTER, recipe.model, tokenizer, seed=recipe.seed, dtype=dtype)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    finish(unfinished)
    carry_extension(recipe.model.path, unfinished)
    if (run / RECIPE).is_file():
        write_model_card(unfinished, run, run.name)


def not_exported(folder: Path, failure: OSError | SafetensorError) -> CheckpointError:
    """What went wrong, and that nothing of the training is lost."""
    newest = published_in(folder.parent)[-1:]
    kept = f"{newest[0].folder} holds all that was trained: " if newest else ""
    remedy = (
        f"make room. {same_command()} goes on from there and only exports."
        if newest
        else "Mend that, and start the run again."
    )
    return CheckpointError(f"the model could not be written to {folder}: {in_words(failure)}. {kept}{remedy}")


def record_base_weights(run: Path, adapter: Path) -> None:
    """Put the base's hashes beside the adapter, so that it is never merged into another model."""
    if weights := read_object(run / INPUTS, []).get("weights"):
        write_json(adapter / BASE_WEIGHTS, weights)


def finish(folder: Path) -> None:
    """Make a saved model of a run one that others load: native architecture, a tied head stored once, no leftovers of
    the training."""
    for leftover in folder.rglob("training_args.bin"):  # a pickle, which nobody should have to trust
        leftover.unlink()
    export_native(folder)
    store_tied_head_once(folder)
    for path in (folder / name for name in CONFIGS if (folder / name).is_file()):
        config = json.loads(path.read_text())
        config |= {key: value for key, value in ONLY_FOR_TRAINING.items() if key in config}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def store_tied_head_once(folder: Path) -> None:
    """Leave out a head that is the embedding over again, as saved under ZeRO-1 and 2: accelerate clones what it saves,
    and so unties it."""
    if not json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        return
    tensors = Tensors(folder)
    copies = {head for head in tensors.files if head.endswith(HEADS) and has_twin(tensors, head)}
    if not copies:
        return
    kept = {name: (shape, tensors.dtypes[name]) for name, shape in tensors.shapes.items() if name not in copies}
    old = [*set(tensors.files.values()), *folder.glob("*.safetensors.index.json")]
    with TemporaryDirectory(dir=folder.parent) as scratch:
        write_tensors(Path(scratch), kept, tensors.read, max(file.stat().st_size for file in old))
        for file in old:
            file.unlink()
        for file in Path(scratch).iterdir():
            shutil.move(file, folder / file.name)


def has_twin(tensors: Tensors, name: str) -> bool:
    alike = [other for other, shape in tensors.shapes.items() if other != name and shape == tensors.shapes[name]]
    return any(torch.equal(tensors.read(other), tensors.read(name)) for other in alike)
