"""`cpt export`: write a trained model for other programs: full, quantized or an adapter; upload it to the Hub. `cpt
merge`: merge an adapter into its base, add a chat vector to a trained model, or average checkpoints."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from cpt.checkpoints.model_folder import config_json, weight_files
from cpt.command_line import refuse_ignored
from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import finish, new_folder, write_average
from cpt.export.proof import (
    check_seal,
    check_vocabulary,
    logits_in_another_process,
    model_warnings,
    proof_text,
    write_seal,
)
from cpt.export.quantize import MAX_RISE, Method, check_quantising, export_quantised
from cpt.export.task_arithmetic import write_chat_vector
from cpt.export.trained import TOKENIZER_FILES, find_trained, import_own_code, refuse_unknown_code, stored_dtype
from cpt.export.write import (
    DtypeName,
    ExportOptions,
    check_output,
    check_push,
    export_adapter,
    export_whole,
    name_of,
    push,
)
from cpt.models.build import DTYPES
from cpt.models.config import weights_folder
from cpt.recipe.paths import result_of_run

DTYPE: DtypeName = "bfloat16"
SERVE = "Serve it: cpt serve"
MergeMethod = Literal["lora", "task_arithmetic", "average"]
MergedDtype = Literal["stored", "bfloat16", "float16", "float32"]


def command(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run, checkpoint, model or adapter.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New folder; or only --push-to-hub.")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Data type of the weights.")] = DTYPE,
    quantize: Annotated[Method | None, typer.Option(help="Linear layers in 8 or 4 bits, nf4 by bitsandbytes.")] = None,
    max_rise: Annotated[float, typer.Option(help="With --quantize: allowed rise of bits per byte.")] = MAX_RISE,
    adapter_only: Annotated[bool, typer.Option("--adapter-only", help="Export the adapter, not merged.")] = False,
    text: Annotated[Path | None, typer.Option(help="File to compare logits on; default: held-out text.")] = None,
    tolerance: Annotated[float | None, typer.Option(min=0, help="Allowed difference of logits, as a share.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the Hub.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-to-hub: a private repository.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --push-to-hub: no confirmation.")] = False,
    module: Annotated[str | None, typer.Option("--import", help="Module that registers the model's family.")] = None,
) -> None:
    """Export a model for other programs, and prove that it equals the trained one.

    Example: cpt export runs/my-run --output model
    """
    disable_progress_bar()
    of_push = {"--private": private, "--yes": yes}
    refuse_ignored(of_push if push_to_hub is None else {}, "without --push-to-hub")
    refuse_ignored({"--max-rise": max_rise != MAX_RISE and quantize is None}, "without --quantize")
    if output is None and push_to_hub is None:
        raise RecipeError("--output is missing: cpt export RUN --output FOLDER")
    of_models = {
        "--dtype": dtype != DTYPE,
        "--tolerance": tolerance is not None,
        "--quantize": quantize is not None,
    }
    refuse_ignored(of_models if adapter_only else {}, "with --adapter-only")
    of_export = {"--text": text is not None, "--import": module is not None, "--adapter-only": adapter_only}
    refuse_ignored(of_models | of_export if output is None else {}, "without --output")
    if push_to_hub is not None:
        check_push(push_to_hub, private=private, sure=yes)
    if output is not None:
        wish = ExportOptions(DTYPES[dtype], text, tolerance)
        check_output(output)
        if quantize is not None:
            check_quantising(quantize, wish.dtype)
        import_own_code(path, module)
        trained = find_trained(path)
        refuse_unknown_code(trained.folder)
        typer.echo(f"Reading {trained.folder} ({'adapter' if trained.is_adapter else 'model'}).")
        if adapter_only:
            lines = export_adapter(trained, output, wish.text)
        elif quantize is not None:
            lines = export_quantised(trained, output, wish, quantize, max_rise)
        else:
            lines = export_whole(trained, output, wish)
        own = module or (None if trained.recipe is None else trained.recipe.model.import_)
        report = []
        for line in lines:
            typer.echo(f"{line} --import {own}" if own is not None and line.startswith(SERVE) else line)
            report.append(line)
        write_seal(output, report)
    if push_to_hub is not None:
        folder = check_seal(path if output is None else output)
        for line in push(folder, push_to_hub, private=private, sure=yes):
            typer.echo(line)


def merge(
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder.")],
    method: Annotated[MergeMethod, typer.Option(help="Merge method.")],
    models: Annotated[list[Path] | None, typer.Argument(help="lora: BASE ADAPTER. average: two or more.")] = None,
    after: Annotated[Path | None, typer.Option(help="task_arithmetic: the continued model, or its run.")] = None,
    base: Annotated[Path | None, typer.Option(help="task_arithmetic: the base of both, a path or Hub id.")] = None,
    chat: Annotated[Path | None, typer.Option(help="task_arithmetic: the chat model of the base.")] = None,
    scale: Annotated[float, typer.Option(help="task_arithmetic: factor of (chat - base).")] = 1.0,
    dtype: Annotated[MergedDtype, typer.Option(help="Data type of the weights.")] = "stored",
    tolerance: Annotated[float | None, typer.Option(min=0, help="lora: allowed difference, as a share.")] = None,
) -> None:
    """Merge an adapter into its base, add a chat vector, or average checkpoints.

    Incompatible models are refused before anything is written.

    Example: cpt merge --method lora base-model runs/my-run/final/adapter --output merged
    """
    disable_progress_bar()
    check_output(output)
    folders = models or []
    arithmetic = (after, base, chat)
    if method != "task_arithmetic" and (any(arithmetic) or scale != 1.0):
        raise RecipeError(f"--after, --base, --chat and --scale need --method task_arithmetic, got {method}.")
    if method != "lora" and tolerance is not None:
        raise RecipeError("--tolerance needs --method lora: other merges have no reference logits.")
    chosen = None if dtype == "stored" else DTYPES[dtype]
    if method == "lora":
        lines = merge_adapter(folders, output, chosen, tolerance)
    elif method == "average":
        lines = written(output, partial(average, folders, dtype=chosen))
    else:
        if after is None or base is None or chat is None or folders:
            raise RecipeError("--method task_arithmetic takes --after CPT --base BASE --chat CHAT , and no folders.")
        add = partial(write_chat_vector, scale=scale, dtype=chosen)
        places = [weights_folder(str(result_of_run(str(path)))) for path in (after, base, chat)]
        lines = written(output, partial(add, *places))
    for line in lines:
        typer.echo(line)


def merge_adapter(
    folders: list[Path], output: Path, dtype: torch.dtype | None, tolerance: float | None
) -> Iterator[str]:
    if len(folders) != 2:
        raise RecipeError(f"--method lora takes two folders, BASE and ADAPTER, not {len(folders)}.")
    base, adapter = folders
    trained = find_trained(adapter)
    if trained.kind != "adapter":
        raise CheckpointError(f"{adapter} is not a peft adapter. The order is: cpt merge --method lora BASE ADAPTER")
    wish = ExportOptions(dtype or stored_dtype(weights_folder(str(base))), tolerance=tolerance)
    return export_whole(replace(trained, stated_base=base), output, wish)


def average(folders: list[Path], output: Path, *, dtype: torch.dtype | None) -> list[str]:
    write_average(folders, output, dtype=dtype)
    return [f"The mean of {len(folders)} models: {', '.join(map(str, folders))}."]


def written(output: Path, write: Callable[[Path], list[str]]) -> Iterator[str]:
    """Write the model, make it loadable by other programs, and load it in another process."""
    with new_folder(output) as unfinished:
        yield from write(unfinished)
        dtype = stored_dtype(unfinished)
        path = unfinished / "config.json"
        config = config_json(unfinished)
        config.pop("torch_dtype", None)
        path.write_text(json.dumps(config | {"dtype": name_of(dtype)}, indent=2, sort_keys=True) + "\n")
        finish(unfinished)
        notes = ["NOT LOADED BACK: a tokenizer is missing. Copy one into the folder, then: cpt serve"]
        if any((unfinished / name).is_file() for name in TOKENIZER_FILES):
            tokenizer, loaded = AutoTokenizer.from_pretrained(unfinished), AutoConfig.from_pretrained(unfinished)
            vocabulary = check_vocabulary(loaded.vocab_size, tokenizer)
            logits = logits_in_another_process(unfinished, proof_text(tokenizer, loaded), dtype)
            if not logits.isfinite().all():
                raise CheckpointError("the merged model's logits are not finite. Use --dtype float32.")
            largest = f"largest logit {logits.abs().max():.3g}"
            notes = [f"Reloaded with plain transformers, in a process without cpt: {largest}.", vocabulary]
            notes += model_warnings(unfinished, tokenizer)
        shards = len(weight_files(unfinished))
    yield from notes
    yield f"Wrote {output}: {name_of(dtype)} in {shards} safetensors file{'s' if shards > 1 else ''}."
