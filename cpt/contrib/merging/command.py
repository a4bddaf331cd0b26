"""`cpt merge`: merge an adapter into its base, add a chat vector to a trained model, average checkpoints, or
interpolate between base and trained model."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Column, Table
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from cpt.analysis.page import Curve, curves
from cpt.checkpoints.model_folder import config_json, weight_files
from cpt.command_line import refuse_ignored, show_log
from cpt.contrib.merging.interpolate import Line, LinePoint, best_point, compare_points, conclusion
from cpt.contrib.merging.task_arithmetic import write_chat_vector
from cpt.errors import CheckpointError, RecipeError
from cpt.evaluation.evaluate import held_out_sets, model_at
from cpt.evaluation.kinds import general_sets
from cpt.export.export import finish, new_folder, write_average
from cpt.export.proof import (
    check_vocabulary,
    logits_in_another_process,
    model_warnings,
    proof_text,
    write_seal,
)
from cpt.export.trained import TOKENIZER_FILES, find_trained, stored_dtype
from cpt.export.write import (
    ExportOptions,
    check_output,
    export_whole,
    name_of,
)
from cpt.files import write_atomic
from cpt.formatting import open_console
from cpt.models.build import DTYPES
from cpt.models.config import weights_folder
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import result_of_run
from cpt.runs.folder import INPUTS, RECIPE, read_object

MergeMethod = Literal["lora", "task_arithmetic", "average"]
MergedDtype = Literal["stored", "bfloat16", "float16", "float32"]
POINTS = 9


def command(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New folder.")] = None,
    method: Annotated[MergeMethod | None, typer.Option(help="Merge method.")] = None,
    models: Annotated[
        list[Path] | None,
        typer.Argument(help="lora: BASE ADAPTER. average: two or more. --interpolate: a run."),
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
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="Evaluate points between two models.")
    ] = False,
    points: Annotated[
        int, typer.Option(min=3, help="--interpolate: points, with both ends.")
    ] = POINTS,
    point: Annotated[
        float | None, typer.Option(min=0, max=1, help="--interpolate: point to write.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="--interpolate: recipe with the held-out sets.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="--interpolate: a set, name=path. Repeatable.")
    ] = None,
) -> None:
    """Merge an adapter into its base, add a chat vector, average checkpoints, or interpolate between two models.

    Incompatible models are refused before anything is written.

    Example: cpt merge --method lora base-model runs/my-run/final/adapter --output merged
    """
    disable_progress_bar()
    folders = models or []
    weights_dtype = None if dtype == "stored" else DTYPES[dtype]
    arithmetic = (after, base, chat)
    if method != "task_arithmetic" and (any(arithmetic) or scale != 1.0):
        raise RecipeError("--after, --base, --chat and --scale need --method task_arithmetic.")
    if method != "lora" and tolerance is not None:
        raise RecipeError("--tolerance needs --method lora: other merges have no reference logits.")
    of_line = {
        "--points": points != POINTS,
        "--point": point is not None,
        "--recipe": recipe is not None,
    }
    refuse_ignored({} if interpolate else of_line | {"--text": bool(text)}, "without --interpolate")
    refuse_ignored({"--method": method is not None} if interpolate else {}, "with --interpolate")
    of_output = {"--point": point is not None, "--dtype": weights_dtype is not None}
    refuse_ignored(of_output if output is None else {}, "without --output")
    if output is not None:
        check_output(output)
    if interpolate:
        lines = walk_line(folders, output, points, point, recipe, text or [], weights_dtype)
    elif output is None or method is None:
        raise RecipeError(
            "--method or --output is missing: cpt merge --method METHOD ... --output FOLDER"
        )
    elif method == "lora":
        lines = merge_adapter(folders, output, weights_dtype, tolerance)
    elif method == "average":
        lines = written(output, partial(average, folders, dtype=weights_dtype))
    elif after is None or base is None or chat is None or folders:
        raise RecipeError(
            "--method task_arithmetic takes --after CPT --base BASE --chat CHAT , and no folders."
        )
    else:
        add = partial(write_chat_vector, scale=scale, dtype=weights_dtype)
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
        raise CheckpointError(
            f"{adapter} is not a peft adapter. The order is: cpt merge --method lora BASE ADAPTER"
        )
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
        path.write_text(
            json.dumps(config | {"dtype": name_of(dtype)}, indent=2, sort_keys=True) + "\n"
        )
        finish(unfinished)
        notes = [
            "NOT LOADED BACK: a tokenizer is missing. Copy one into the folder, then: cpt serve"
        ]
        if any((unfinished / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(unfinished)
            loaded = AutoConfig.from_pretrained(unfinished)
            vocabulary = check_vocabulary(loaded.vocab_size, tokenizer)
            logits = logits_in_another_process(unfinished, proof_text(tokenizer, loaded), dtype)
            if not logits.isfinite().all():
                raise CheckpointError(
                    "the merged model's logits are not finite. Use --dtype float32."
                )
            largest = f"largest logit {logits.abs().max():.3g}"
            notes = [
                f"Reloaded with plain transformers, in a process without cpt: {largest}.",
                vocabulary,
            ]
            notes += model_warnings(unfinished, tokenizer)
        shards = len(weight_files(unfinished))
    yield from notes
    yield f"Wrote {output}: {name_of(dtype)} in {shards} safetensors file{'s' if shards > 1 else ''}."


def walk_line(
    models: list[Path],
    output: Path | None,
    count: int,
    share: float | None,
    recipe: Path | None,
    texts: list[str],
    dtype: torch.dtype | None,
) -> Iterator[str]:
    """Print and draw what each point keeps; write the best point, or that of `share`, to `output`."""
    show_log()
    run = models[-1] if models and (models[-1] / RECIPE).is_file() else None
    file = recipe or (run / RECIPE if run else None)
    recipe_of_run = load_recipe(file) if file else None
    if len(models) == 1 and recipe_of_run is not None and not recipe_of_run.model.from_scratch:
        models = [Path(str(recipe_of_run.model.path)), *models]
    ends = [model_at(str(path), recipe_of_run.model if recipe_of_run else None) for path in models]
    if len(ends) == 2:
        held = held_out_sets(recipe_of_run, texts, None, ends, None if recipe else run)
    else:
        held = None
    if held is None:
        usage = "cpt merge --interpolate BASE TRAINED --text domain=a.jsonl --text general=b.jsonl"
        raise RecipeError(
            f"--interpolate takes a run that has a base, or two models and held-out sets: {usage}"
        )
    recorded = read_object(run / INPUTS) if run else {}
    general = {
        *general_sets(
            recipe_of_run.model_dump(mode="json", by_alias=True) if recipe_of_run else {}, recorded
        ),
        *(text.partition("=")[0] for text in texts if text.startswith("general")),
    }
    shares = {number / (count - 1) for number in range(count)} | (
        {share} if share is not None else set()
    )
    line = Line(*ends)
    folder = run or Path()
    losses = line.walk(held, sorted(shares), general, folder / "interpolation")
    points = compare_points(losses, general)
    print_points(points)
    yield conclusion(points)
    best = best_point(points)
    share = best.share if best and share is None else share
    if output is not None and share is not None:
        report = list(written(output, partial(line.write, share=share, dtype=dtype)))
        write_seal(output, report)
        yield from report
    yield save_points(folder, points)
    if output is not None and share is None:
        raise CheckpointError(
            f"{output} is not written: no point is best. Choose one, such as --point 0.5"
        )


def print_points(points: Sequence[LinePoint]) -> None:
    titles = (
        "domain",
        "against base (95 % interval)",
        "general",
        "against base (95 % interval)",
        "on the frontier",
    )
    table = Table(
        "point", *(Column(title, justify="right") for title in titles), title="Bits per byte"
    )
    for point in points:
        cells = [f"{point.share:g}{' base' * (point.share == 0)}{' trained' * (point.share == 1)}"]
        for kind in (point.domain, point.general):
            change, low, high = kind["base"].decides.percents if kind else (0, 0, 0)
            cells.append(f"{kind['base'].after:.4f}" if kind else "not evaluated")
            cells.append(
                f"{change:+.1f} % ({low:+.1f} to {high:+.1f})" if kind and point.share else ""
            )
        table.add_row(*cells, "yes" * (point.general is not None and point.is_on_frontier(points)))
    open_console().print(table)


def save_points(folder: Path, points: Sequence[LinePoint]) -> str:
    rows = [
        {**asdict(point), "helps": point.helps, "is_on_frontier": point.is_on_frontier(points)}
        for point in points
    ]
    best = best_point(points)
    content = {"conclusion": conclusion(points), "points": rows}
    write_atomic(folder / "interpolation.json", json.dumps(content, indent=2) + "\n")
    curves_by_name = {
        "points": points,
        "base": points[:1],
        "trained": points[-1:],
        "best": [best] if best else [],
    }
    curves_by_name["on the frontier"] = [point for point in points if point.is_on_frontier(points)]
    lines = []
    for name, points_of_curve in curves_by_name.items():
        x = [point.place[1] if point.general else point.share for point in points_of_curve]
        lines.append(Curve(name, x, [point.place[0] for point in points_of_curve]))
    over = "general text, bits per byte" if points[0].general else "point"
    (plot,) = curves("From base to trained", "domain, bits per byte", lines, over=over)
    write_atomic(folder / "interpolation.svg", plot.svg)
    return f"Wrote {folder / 'interpolation.svg'} and interpolation.json."
