"""Turn what was trained into a folder that plain transformers loads, whole or not at all."""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, Trainer

from cpt.checkpoints.merge_lora import BASE_WEIGHTS, merge_into_base
from cpt.checkpoints.model_card import write_model_card
from cpt.models.families.native import export_native
from cpt.ranks import is_main_process
from cpt.recipe.schema import Recipe
from cpt.runs.record import INPUTS, RECIPE, write_json

ADAPTER = "adapter"
ONLY_FOR_TRAINING = {"use_cache": True, "output_router_logits": False}  # config value that a served model needs instead


def export_model(trainer: Trainer, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the trained model, its tokenizer and configs to `folder`.

    Families of our own are written as the native architecture that they equal, so that nobody needs this package to load them.
    A LoRA adapter is merged into its base, and kept beside in `adapter/`. Every process must call it: ZeRO-3 gathers from all.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if is_main_process():
        shutil.rmtree(unfinished, ignore_errors=True)
    adapted = trainer.model if isinstance(trainer.model, PeftModel) else None
    trainer.save_model(str(unfinished / ADAPTER if adapted else unfinished))
    if is_main_process():
        if adapted:
            record_base_weights(folder.parent, unfinished / ADAPTER)
            dtype = next(adapted.get_base_model().parameters()).dtype
            model = merge_into_base(unfinished / ADAPTER, recipe.model, tokenizer, seed=recipe.seed, dtype=dtype)
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        finish(unfinished)
        if (folder.parent / RECIPE).is_file():
            write_model_card(unfinished, folder.parent, folder.parent.name)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    if dist.is_initialized():
        dist.barrier()


def record_base_weights(run: Path, adapter: Path) -> None:
    """Put the base's hashes beside the adapter, so that it is never merged into another model."""
    record = run / INPUTS
    if record.is_file():
        write_json(adapter / BASE_WEIGHTS, json.loads(record.read_text())["weights"])


def finish(folder: Path) -> None:
    """Make a saved model of a run one that others load: native architecture, no leftovers of the training."""
    for leftover in folder.rglob("training_args.bin"):  # a pickle, which nobody should have to trust
        leftover.unlink()
    export_native(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {key: value for key, value in ONLY_FOR_TRAINING.items() if key in config}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
