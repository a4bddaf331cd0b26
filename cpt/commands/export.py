"""`cpt export`: write a trained model for other programs: full, quantized or an adapter; upload it to the Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cpt.command_line import hide_transformers_bars, refuse_ignored
from cpt.errors import RecipeError
from cpt.plugins import import_named

if TYPE_CHECKING:
    from cpt.export.write import ExportOptions

DtypeName = Literal["bfloat16", "float16", "float32"]
DTYPE: DtypeName = "bfloat16"
MAX_RISE = 0.05  # relative increase of bits per byte by quantizing
QUANTIZE = "cpt.contrib.merging.quantize"
SERVE = "Serve it: cpt serve"


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run, checkpoint, model or adapter."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder; or only --push-to-hub.")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Data type of the weights.")] = DTYPE,
    quantize: Annotated[
        Literal["int8", "int4", "nf4"] | None,
        typer.Option(help="Linear layers in 8 or 4 bits, nf4 by bitsandbytes."),
    ] = None,
    max_rise: Annotated[
        float, typer.Option(help="With --quantize: allowed rise of bits per byte.")
    ] = MAX_RISE,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Export the adapter, not merged.")
    ] = False,
    pth: Annotated[
        bool, typer.Option("--pth", help="Also write model.pth, a state dict for torch.load.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="File to compare logits on; default: held-out text.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Allowed difference of logits, as a share.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the Hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push-to-hub: a private repository.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --push-to-hub: no confirmation.")
    ] = False,
    module: Annotated[
        str | None, typer.Option("--import", help="Module that registers the model's family.")
    ] = None,
) -> None:
    """Export a model for other programs, and prove that it equals the trained one.

    Example: cpt export runs/my-run --output model
    """
    of_models = {
        "--dtype": dtype != DTYPE,
        "--tolerance": tolerance is not None,
        "--quantize": quantize is not None,
        "--pth": pth,
    }
    of_export = {
        "--text": text is not None,
        "--import": module is not None,
        "--adapter-only": adapter_only,
    }
    if push_to_hub is None:
        refuse_ignored({"--private": private, "--yes": yes}, "without --push-to-hub")
    if quantize is None:
        refuse_ignored({"--max-rise": max_rise != MAX_RISE}, "without --quantize")
    else:
        refuse_ignored({"--pth": pth}, "with --quantize")
    if output is None and push_to_hub is None:
        raise RecipeError("--output is missing: cpt export RUN --output FOLDER")
    if adapter_only:
        refuse_ignored(of_models, "with --adapter-only")
    if output is None:
        refuse_ignored(of_models | of_export, "without --output")

    # Imported after the options are checked: they import torch, which takes seconds.
    from cpt.export.proof import check_seal
    from cpt.export.write import ExportOptions, check_output, check_push, push
    from cpt.models.build import DTYPES

    hide_transformers_bars()
    if push_to_hub is not None:
        check_push(push_to_hub, private=private, sure=yes)
    if output is not None:
        options = ExportOptions(dtype=DTYPES[dtype], text=text, tolerance=tolerance, pth=pth)
        check_output(output)
        if quantize is not None:
            import_named(f"{QUANTIZE}:check_quantising")(quantize, options.dtype)
        export_model(
            path,
            output,
            options,
            quantize=quantize,
            max_rise=max_rise,
            adapter_only=adapter_only,
            module=module,
        )
    if push_to_hub is not None:
        folder = check_seal(path if output is None else output)
        for line in push(folder, push_to_hub, private=private, sure=yes):
            typer.echo(line)


def export_model(
    path: Path,
    output: Path,
    options: "ExportOptions",
    *,
    quantize: str | None,
    max_rise: float,
    adapter_only: bool,
    module: str | None,
) -> None:
    """Export to `output`, print the lines of the report, and seal the folder with them."""
    from cpt.export.proof import write_seal
    from cpt.export.trained import find_trained, import_own_code, refuse_unknown_code
    from cpt.export.write import export_adapter, export_whole

    import_own_code(path, module)
    trained = find_trained(path)
    refuse_unknown_code(trained.folder)
    typer.echo(f"Reading {trained.folder} ({'adapter' if trained.is_adapter else 'model'}).")
    if adapter_only:
        lines = export_adapter(trained, output, options.text)
    elif quantize is not None:
        export_quantised = import_named(f"{QUANTIZE}:export_quantised")
        lines = export_quantised(trained, output, options, quantize, max_rise)
    else:
        lines = export_whole(trained, output, options)
    if module is None and trained.recipe is not None:
        module = trained.recipe.model.import_
    report = []
    for line in lines:
        report.append(line)
        # This machine's module is printed, and is not a part of the sealed report.
        if module is not None and line.startswith(SERVE):
            line += f" --import {module}"
        typer.echo(line)
    write_seal(output, report)
