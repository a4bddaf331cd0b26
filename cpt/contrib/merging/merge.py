"""Write a merged model so that other programs load it, or evaluate the points between two models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from transformers import AutoConfig, AutoTokenizer

from cpt.analysis.page import Curve, curves
from cpt.checkpoints.model_folder import weight_files
from cpt.command_line import show_log
from cpt.contrib.merging.interpolate import Line, LinePoint, best_point, compare_points, conclusion
from cpt.errors import CheckpointError, RecipeError
from cpt.evaluation.evaluate import held_out_sets, model_at
from cpt.evaluation.kinds import general_sets
from cpt.export.export import finish, new_folder, write_average
from cpt.export.older_readers import rewrite_json
from cpt.export.proof import (
    check_vocabulary,
    logits_in_another_process,
    model_warnings,
    proof_text,
    write_seal,
)
from cpt.export.trained import TOKENIZER_FILES, find_trained, stored_dtype
from cpt.export.write import ExportOptions, export_whole, name_of
from cpt.files import write_atomic
from cpt.formatting import open_console
from cpt.models.config import weights_folder
from cpt.recipe.load import load_recipe, saved_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.folder import INPUTS, RECIPE, read_object
from cpt.runs.record import write_json


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


def walk_line(
    models: list[Path],
    output: Path | None,
    count: int,
    share: float | None,
    recipe: Path | None,
    texts: list[str],
    dtype: torch.dtype | None,
) -> Iterator[str]:
    """Evaluate, print and draw the points between two models.

    Args:
        models: the base and the model trained from it, or a run.
        output: where to write the best point, or that of `share`.
        count: number of points, with both ends.
        recipe: has the held-out sets; by default the run's.
        texts: held-out sets, as `name=path`.
    """
    show_log()
    run = None
    if models and (models[-1] / RECIPE).is_file():
        run = models[-1]
    own_recipe = None
    if recipe is not None:
        own_recipe = load_recipe(recipe)
    elif run is not None:
        own_recipe = saved_recipe(run)
    own_model = None if own_recipe is None else own_recipe.model
    if len(models) == 1 and own_model is not None and not own_model.from_scratch:
        models = [Path(str(own_model.path)), *models]
    ends = [model_at(str(path), own_model) for path in models]
    held_out = None
    if len(ends) == 2:
        held_out = held_out_sets(own_recipe, texts, None, ends, run if recipe is None else None)
    if held_out is None:
        usage = "cpt merge --interpolate BASE TRAINED --text domain=a.jsonl --text general=b.jsonl"
        raise RecipeError(
            f"--interpolate takes a run that has a base, or two models and held-out sets: {usage}"
        )
    shares = {number / (count - 1) for number in range(count)}
    if share is not None:
        shares.add(share)
    line = Line(*ends)
    folder = run or Path()
    general = names_of_general(own_recipe, run, texts)
    losses = line.walk(held_out, sorted(shares), general, folder / "interpolation")
    points = compare_points(losses, general)
    print_points(points)
    yield conclusion(points)
    best = best_point(points)
    if share is None and best is not None:
        share = best.share
    if output is not None and share is not None:
        report = list(write_merged(output, partial(line.write, share=share, dtype=dtype)))
        write_seal(output, report)
        yield from report
    yield save_points(folder, points)
    if output is not None and share is None:
        raise CheckpointError(
            f"{output} is not written: no point is best. Choose one, such as --point 0.5"
        )


def names_of_general(recipe: Recipe | None, run: Path | None, texts: list[str]) -> set[str]:
    """Names of the held-out sets with general text."""
    content = {} if recipe is None else recipe.model_dump(mode="json", by_alias=True)
    recorded = {} if run is None else read_object(run / INPUTS)
    names = set(general_sets(content, recorded))
    for text in texts:
        if text.startswith("general"):
            names.add(text.partition("=")[0])
    return names


def print_points(points: Sequence[LinePoint]) -> None:
    headings = (
        "domain",
        "against base (95 % interval)",
        "general",
        "against base (95 % interval)",
        "on the frontier",
    )
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table("point", *columns, title="Bits per byte")
    for point in points:
        name = f"{point.share:g}"
        if point.share == 0:
            name += " base"
        elif point.share == 1:
            name += " trained"
        cells = [name]
        for measured in (point.domain, point.general):
            if not measured:
                cells += ["not evaluated", ""]
                continue
            against_base = measured["base"]
            cells.append(f"{against_base.after:.4f}")
            change, low, high = against_base.decides.percents
            cells.append(f"{change:+.1f} % ({low:+.1f} to {high:+.1f})" if point.share else "")
        is_on_frontier = point.general is not None and point.is_on_frontier(points)
        table.add_row(*cells, "yes" if is_on_frontier else "")
    open_console().print(table)


def with_dtype(dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    config.pop("torch_dtype", None)
    return config | {"dtype": dtype}


def save_points(folder: Path, points: Sequence[LinePoint]) -> str:
    """Write interpolation.json and interpolation.svg."""
    best = best_point(points)
    frontier = [point for point in points if point.is_on_frontier(points)]
    rows = []
    for point in points:
        is_on_frontier = point.is_on_frontier(points)
        rows.append({**asdict(point), "helps": point.helps, "is_on_frontier": is_on_frontier})
    content = {"conclusion": conclusion(points), "points": rows}
    write_json(folder / "interpolation.json", content)
    drawn = {
        "points": points,
        "base": points[:1],
        "trained": points[-1:],
        "best": [] if best is None else [best],
        "on the frontier": frontier,
    }
    lines = []
    for name, of_line in drawn.items():
        x = [point.place[1] if point.general else point.share for point in of_line]
        lines.append(Curve(name, x, [point.place[0] for point in of_line]))
    over = "general text, bits per byte" if points[0].general else "point"
    (plot,) = curves("From base to trained", "domain, bits per byte", lines, over=over)
    write_atomic(folder / "interpolation.svg", plot.svg)
    return f"Wrote {folder / 'interpolation.svg'} and interpolation.json."
