"""`cpt export`: the ways out of a run, and the options that choose among them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils.logging import disable_progress_bar

from cpt.checkpoints.own_code import import_own_code, refuse_unknown_code
from cpt.checkpoints.proven_export import DTYPES, DtypeName, Wish, export_adapter, export_whole, refuse_odd_wishes
from cpt.checkpoints.trained import find_trained
from cpt.command_line import refuse_ignored
from cpt.errors import RecipeError
from cpt.exporting.gguf_export import export_gguf
from cpt.exporting.gguf_types import GgufType, check_gguf
from cpt.exporting.hub import check_push, push
from cpt.exporting.quantised import Method, check_quantising
from cpt.exporting.quantised_export import export_quantised
from cpt.exporting.sealed import refuse_unsealed, seal_export

LARGEST_FILE = "5GB"
SERVE = "Serve it: cpt serve"


@dataclass(frozen=True)
class Way:
    """Which way out was chosen."""

    quantize: Method | None
    gguf: GgufType | None
    adapter_only: bool
    pth: Path | None
    max_rise: float | None

    def check(self, dtype: torch.dtype) -> None:
        """What can be said before anything is read.

        Raises:
            RecipeError: options that exclude each other.
            ResourceError: a package or a GPU is missing.
        """
        chosen = {"--quantize": self.quantize, "--gguf": self.gguf, "--adapter-only": self.adapter_only or None}
        given = [name for name, value in chosen.items() if value is not None]
        if len(given) > 1:
            raise RecipeError(
                f"{' and '.join(given)} are different ways out. Choose one; each takes its own --output."
            )
        if self.pth is not None and given:
            raise RecipeError(f"--pth holds a whole model, {given[0]} writes none. Leave one of them out.")
        if self.max_rise is not None and self.quantize is None and self.gguf is None:
            raise RecipeError("--max-rise belongs to --quantize and --gguf: the others lose nothing.")
        if self.quantize is not None:
            check_quantising(self.quantize, dtype)
        if self.gguf is not None:
            check_gguf()

    def dtype(self, stated: DtypeName | None) -> torch.dtype:
        """What the weights are rounded to: for GGUF in 32 or 16 bits straight from fp32."""
        if stated is not None:
            return DTYPES[stated]
        return torch.float32 if self.gguf in ("f32", "f16") else torch.bfloat16


def command(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run, one of its checkpoints, a model or an adapter.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new folder. Without it only --push-to-hub.")
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(help="What the weights are written in.", show_default="bfloat16; float32 for --gguf f32 and f16"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file: 5GB, 500MB.")] = LARGEST_FILE,
    quantize: Annotated[
        Method | None, typer.Option(help="Linear layers in 8 or 4 bits: torchao; nf4: bitsandbytes.")
    ] = None,
    gguf: Annotated[GgufType | None, typer.Option(help="One file for llama.cpp and Ollama, of this type.")] = None,
    max_rise: Annotated[
        float | None,
        typer.Option(
            help="Of --quantize and --gguf: bits per byte may rise by this share.", show_default="by size and gain"
        ),
    ] = None,
    pth: Annotated[Path | None, typer.Option(help="Write all weights to this .pth file too.")] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Of a LoRA run: the adapter, not merged.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Compare on this text file instead of our passage or the run's held-out text.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest difference allowed, as a share of the largest logit.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the proven export to the Hugging Face Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Of --push-to-hub: only its owner sees it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Of --push-to-hub: publish without asking.")] = False,
    module: Annotated[
        str | None, typer.Option("--import", help="Your own package.module that registers the model's family.")
    ] = None,
) -> None:
    """Write a model that transformers, vLLM and llama.cpp read, and prove that it is the one that was trained.

    Example: cpt export runs/my-run --output model
    """
    disable_progress_bar()
    if (private or yes) and push_to_hub is None:
        raise RecipeError("--private and --yes belong to --push-to-hub OWNER/NAME.")
    of_adapters = {"--text": text is not None, "--import": module is not None}
    of_models = {
        "--dtype": dtype is not None,
        "--tolerance": tolerance is not None,
        "--max-shard-size": max_shard_size != LARGEST_FILE,
    }
    of_ways = {
        "--quantize": quantize,
        "--gguf": gguf,
        "--max-rise": max_rise,
        "--pth": pth,
        "--adapter-only": adapter_only or None,
    }
    if output is None and push_to_hub is not None:
        refuse_ignored(
            of_adapters | of_models | {name: value is not None for name, value in of_ways.items()}, "without --output"
        )
    refuse_ignored(of_models if adapter_only else {}, "with --adapter-only")
    refuse_ignored(
        {"--max-shard-size": of_models["--max-shard-size"] and gguf is not None}, "with --gguf, which writes one file"
    )
    if push_to_hub is not None:
        check_push(push_to_hub, private=private, sure=yes)
    if output is not None:
        way = Way(quantize, gguf, adapter_only, pth, max_rise)
        numbers = way.dtype(dtype)
        refuse_odd_wishes(output, max_shard_size, pth, adapter_only)
        way.check(numbers)
        import_own_code(path, module)
        write(path, output, way, Wish(numbers, max_shard_size, pth, text, tolerance), module)
    elif push_to_hub is None:
        raise RecipeError("--output is missing: cpt export RUN --output FOLDER")
    if push_to_hub is not None:
        folder = refuse_unsealed(path if output is None else output)
        for line in push(folder, push_to_hub, private=private, sure=yes):
            typer.echo(line)


def write(path: Path, output: Path, way: Way, wish: Wish, module: str | None = None) -> None:
    """One way out, told as it goes, and sealed in the end; `module` registers the model's family."""
    trained = find_trained(path)
    refuse_unknown_code(trained.folder)
    typer.echo(f"Taking {trained.folder} ({'adapter' if trained.is_adapter else 'model'}).")
    if way.adapter_only:
        lines = export_adapter(trained, output, wish.text)
    elif way.quantize is not None:
        lines = export_quantised(trained, output, wish, way.quantize, way.max_rise)
    elif way.gguf is not None:
        lines = export_gguf(trained, output, wish, way.gguf, way.max_rise)
    else:
        lines = export_whole(trained, output, wish)
    own = module or (None if trained.recipe is None else trained.recipe.model.import_)
    told = []
    for line in lines:
        typer.echo(f"{line} --import {own}" if own is not None and line.startswith(SERVE) else line)
        told.append(line)
    seal_export(output, told)
