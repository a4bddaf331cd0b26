"""Write a merged model so that other programs load it, or evaluate the points between two models."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Column, Table
from transformers import AutoConfig, AutoTokenizer

from cpt.analysis.page import Curve, curves
from cpt.checkpoints.model_folder import config_json, weight_files
from cpt.command_line import show_log
from cpt.contrib.merging.interpolate import Line, LinePoint, best_point, compare_points, conclusion
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
from cpt.export.write import ExportOptions, export_whole, name_of
from cpt.files import write_atomic
from cpt.formatting import open_console
from cpt.models.config import weights_folder
from cpt.recipe.load import load_recipe
from cpt.runs.folder import INPUTS, RECIPE, read_object


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
            tokenizer, loaded = (
                AutoTokenizer.from_pretrained(unfinished),
                AutoConfig.from_pretrained(unfinished),
            )
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
    own = load_recipe(file) if file else None
    if len(models) == 1 and own is not None and not own.model.from_scratch:
        models = [Path(str(own.model.path)), *models]
    ends = [model_at(str(path), own.model if own else None) for path in models]
    held = (
        held_out_sets(own, texts, None, ends, None if recipe else run) if len(ends) == 2 else None
    )
    if held is None:
        usage = "cpt merge --interpolate BASE TRAINED --text domain=a.jsonl --text general=b.jsonl"
        raise RecipeError(
            f"--interpolate takes a run that has a base, or two models and held-out sets: {usage}"
        )
    recorded = read_object(run / INPUTS) if run else {}
    general = {
        *general_sets(own.model_dump(mode="json", by_alias=True) if own else {}, recorded),
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
    for one in points:
        cells = [f"{one.share:g}{' base' * (one.share == 0)}{' trained' * (one.share == 1)}"]
        for kind in (one.domain, one.general):
            change, low, high = kind["base"].decides.percents if kind else (0, 0, 0)
            cells.append(f"{kind['base'].after:.4f}" if kind else "not evaluated")
            cells.append(
                f"{change:+.1f} % ({low:+.1f} to {high:+.1f})" if kind and one.share else ""
            )
        table.add_row(*cells, "yes" * (one.general is not None and one.is_on_frontier(points)))
    open_console().print(table)


def save_points(folder: Path, points: Sequence[LinePoint]) -> str:
    rows = [
        {**asdict(one), "helps": one.helps, "is_on_frontier": one.is_on_frontier(points)}
        for one in points
    ]
    best, content = best_point(points), {"conclusion": conclusion(points), "points": rows}
    write_atomic(folder / "interpolation.json", json.dumps(content, indent=2) + "\n")
    some = {
        "points": points,
        "base": points[:1],
        "trained": points[-1:],
        "best": [best] if best else [],
    }
    some["on the frontier"] = [one for one in points if one.is_on_frontier(points)]
    lines = []
    for name, shown in some.items():
        x = [one.place[1] if one.general else one.share for one in shown]
        lines.append(Curve(name, x, [one.place[0] for one in shown]))
    over = "general text, bits per byte" if points[0].general else "point"
    (plot,) = curves("From base to trained", "domain, bits per byte", lines, over=over)
    write_atomic(folder / "interpolation.svg", plot.svg)
    return f"Wrote {folder / 'interpolation.svg'} and interpolation.json."
