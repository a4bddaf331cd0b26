"""Write a merged model so that other programs load it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from cpt.checkpoints.model_folder import weight_files
from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import finish, new_folder, write_average
from cpt.export.older_readers import rewrite_json
from cpt.export.proof import (
    check_vocabulary,
    logits_in_another_process,
    model_warnings,
    proof_text,
)
from cpt.export.trained import TOKENIZER_FILES, find_trained, stored_dtype
from cpt.export.write import ExportOptions, export_whole, name_of
from cpt.models.config import weights_folder


def merge_adapter(
    folders: list[Path], output: Path, dtype: torch.dtype | None, tolerance: float | None
) -> Iterator[str]:
    if len(folders) != 2:
        raise RecipeError(f"--method lora takes two folders, BASE and ADAPTER, not {len(folders)}.")
    base, adapter = folders
    trained = find_trained(adapter)
    if trained.kind != "adapter":
        raise CheckpointError(
            f"{adapter} is not a peft adapter. The order is: cpt merge --method lora BASE ADAPTER"
        )
    dtype = dtype or stored_dtype(weights_folder(str(base)))
    options = ExportOptions(dtype=dtype, tolerance=tolerance)
    return export_whole(replace(trained, stated_base=base), output, options)


def average(folders: list[Path], output: Path, *, dtype: torch.dtype | None) -> list[str]:
    write_average(folders, output, dtype=dtype)
    return [f"The mean of {len(folders)} models: {', '.join(map(str, folders))}."]


def write_merged(output: Path, write: Callable[[Path], list[str]]) -> Iterator[str]:
    """Write the model, make it loadable by other programs, and load it in another process."""
    with new_folder(output) as unfinished:
        yield from write(unfinished)
        dtype = stored_dtype(unfinished)
        rewrite_json(unfinished / "config.json", partial(with_dtype, name_of(dtype)))
        finish(unfinished)
        notes = [
            "NOT LOADED BACK: a tokenizer is missing. Copy one into the folder, then: cpt serve"
        ]
        if any((unfinished / name).is_file() for name in TOKENIZER_FILES):
            notes = reload_merged(unfinished, dtype)
        num_files = len(weight_files(unfinished))
    yield from notes
    files = "files" if num_files > 1 else "file"
    yield f"Wrote {output}: {name_of(dtype)} in {num_files} safetensors {files}."


def reload_merged(folder: Path, dtype: torch.dtype) -> list[str]:
    """Load the model in another process; CheckpointError if its logits are not finite."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    vocabulary = check_vocabulary(config.vocab_size, tokenizer)
    logits = logits_in_another_process(folder, proof_text(tokenizer, config), dtype)
    if not logits.isfinite().all():
        raise CheckpointError("the merged model's logits are not finite. Use --dtype float32.")
    largest = f"largest logit {logits.abs().max():.3g}"
    return [
        f"Reloaded with plain transformers, in a process without cpt: {largest}.",
        vocabulary,
        *model_warnings(folder, tokenizer),
    ]


def with_dtype(dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    config.pop("torch_dtype", None)
    return config | {"dtype": dtype}
