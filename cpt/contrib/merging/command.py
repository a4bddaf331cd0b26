"""`cpt merge`: merge an adapter into its base, add a chat vector to a trained model, or average checkpoints."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from cpt.command_line import hide_transformers_bars
from cpt.errors import RecipeError
from cpt.recipe.paths import result_of_run

MergeMethod = Literal["lora", "task_arithmetic", "average"]
MergedDtype = Literal["stored", "bfloat16", "float16", "float32"]


def command(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New folder.")] = None,
    method: Annotated[MergeMethod | None, typer.Option(help="Merge method.")] = None,
    models: Annotated[
        list[Path] | None,
        typer.Argument(help="lora: BASE ADAPTER. average: two or more."),
    ] = None,
    after: Annotated[
        Path | None, typer.Option(help="task_arithmetic: the continued model, or its run.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="task_arithmetic: the base of both, a path or Hub id.")
    ] = None,
    chat: Annotated[
        Path | None, typer.Option(help="task_arithmetic: the chat model of the base.")
    ] = None,
    scale: Annotated[float, typer.Option(help="task_arithmetic: factor of (chat - base).")] = 1.0,
    dtype: Annotated[MergedDtype, typer.Option(help="Data type of the weights.")] = "stored",
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="lora: allowed difference, as a share.")
    ] = None,
) -> None:
    """Merge an adapter into its base, add a chat vector, or average checkpoints.

    Incompatible models are refused before anything is written.

    Example: cpt merge --method lora base-model runs/my-run/final/adapter --output merged
    """
    folders = models or []
    if method != "task_arithmetic" and (after or base or chat or scale != 1.0):
        raise RecipeError("--after, --base, --chat and --scale need --method task_arithmetic.")
    if method != "lora" and tolerance is not None:
        raise RecipeError("--tolerance needs --method lora: other merges have no reference logits.")
    if output is None or method is None:
        raise RecipeError(
            "--method or --output is missing: cpt merge --method METHOD ... --output FOLDER"
        )

    # Imported after the options are checked: they import torch, which takes seconds.
    from cpt.contrib.merging.merge import average, merge_adapter, write_merged
    from cpt.contrib.merging.task_arithmetic import write_chat_vector
    from cpt.export.write import check_output
    from cpt.models.build import DTYPES
    from cpt.models.config import weights_folder

    hide_transformers_bars()
    torch_dtype = None if dtype == "stored" else DTYPES[dtype]
    check_output(output)
    if method == "lora":
        lines = merge_adapter(folders, output, torch_dtype, tolerance)
    elif method == "average":
        lines = write_merged(output, partial(average, folders, dtype=torch_dtype))
    elif after is None or base is None or chat is None or folders:
        raise RecipeError(
            "--method task_arithmetic takes --after CPT --base BASE --chat CHAT , and no folders."
        )
    else:
        of_after, of_base, of_chat = (
            weights_folder(str(result_of_run(str(path)))) for path in (after, base, chat)
        )
        write = partial(
            write_chat_vector, of_after, of_base, of_chat, scale=scale, dtype=torch_dtype
        )
        lines = write_merged(output, write)
    for line in lines:
        typer.echo(line)
