"""`cpt export --quantize`: linear layers in 8 or 4 bits by torchao or bitsandbytes, with verification and loss."""

import math
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TorchAoConfig,
)

from cpt.checkpoints.model_folder import LARGEST_FILE, weight_files
from cpt.errors import CheckpointError, CptError, DataError, ResourceError, install_line
from cpt.evaluation.sets import data_of_recipe, open_evaluation_sets
from cpt.export.export import copy_model_files, new_folder
from cpt.export.older_readers import write_older_keys
from cpt.export.proof import CARD, TEXT, logits_of, proof_text, read_text, reload_and_compare
from cpt.export.trained import Trained
from cpt.export.write import ExportOptions, QuantizedTo, export_whole, name_of
from cpt.files import write_atomic
from cpt.models.adapters import Quantization
from cpt.models.config import value_of

NF4_BLOCK = 64  # weights that share a scale in bitsandbytes
GROUPS = (128, 64, 32)  # weights that share a scale: smaller is more accurate
WINDOW = 256  # tokens per forward pass
MOST_TOKENS = 8192
BEGINNING = 4000  # characters per document, so that no long document dominates


@dataclass(frozen=True)
class EvaluationText:
    where: str
    windows: list[list[int]]
    num_bytes: int  # UTF-8 bytes of the predicted tokens

    @property
    def num_predicted(self) -> int:
        """Number of tokens that have a token before them."""
        return sum(len(window) - 1 for window in self.windows)


def check_quantising(method: QuantizedTo, dtype: torch.dtype) -> None:
    package, extra = (
        ("bitsandbytes", "bitsandbytes") if method == "nf4" else ("torchao", "quantize")
    )
    try:
        import_module(package)
    except ImportError as problem:
        raise ResourceError(
            f"--quantize {method} needs {package}: {install_line(extra)}"
        ) from problem
    if method != "int4":
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ResourceError(
            "--quantize int4 needs a GPU (Ampere or newer), which this machine lacks. Use nf4."
        )
    if dtype != torch.bfloat16:
        raise ResourceError(
            "--quantize int4 computes in bfloat16 only. Remove --dtype, or use --quantize nf4."
        )


def export_quantised(
    trained: Trained, output: Path, options: ExportOptions, method: QuantizedTo, max_rise: float
) -> Iterator[str]:
    """Export the whole model into a scratch folder, and quantise it from there; yields lines of the report. Raises
    CheckpointError if the verification fails or the loss is too high; then no folder remains."""
    scratch = output.with_name(f".{output.name}.whole")
    full_precision = scratch / output.name  # the model card's title is the folder's name
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for line in export_whole(trained, full_precision, options):
            if not line.startswith(("Wrote", "Serve")):  # these lines name the scratch folder
                yield line
        with new_folder(output) as unfinished:
            unfinished.mkdir(parents=True)
            copy_model_files(
                full_precision, unfinished
            )  # saving the quantised model completes the configs
            report = []
            for line in write_quantised(
                trained, full_precision, unfinished, options, method, max_rise
            ):
                yield line
                report.append(f"- {line}\n")
            before = sum(file.stat().st_size for file in weight_files(full_precision))
            after = sum(file.stat().st_size for file in weight_files(unfinished))
            megabytes = (
                f"{before / 1e6:,.1f} MB of {name_of(options.dtype)} -> {after / 1e6:,.1f} MB"
            )
            sizes = f"{megabytes} ({after / before:.0%})"
            above, limits, below = (
                (full_precision / CARD).read_text(encoding="utf-8").partition("## Limits\n")
            )
            section = f"## Quantised\n\n{''.join(report)}- Size: {sizes}.\n\n"
            write_atomic(unfinished / CARD, f"{above}{section}{limits}{below}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    yield f"Wrote {output}: {method}, {sizes}, with {CARD}."
    yield f"Serve it: cpt serve {output}"


def write_quantised(
    trained: Trained,
    unquantized: Path,
    folder: Path,
    options: ExportOptions,
    method: QuantizedTo,
    max_rise: float,
) -> Iterator[str]:
    dtype = options.dtype
    device = "cuda" if method == "int4" else None
    tokenizer = AutoTokenizer.from_pretrained(unquantized)
    config = AutoConfig.from_pretrained(unquantized)
    text = evaluation_text(trained, tokenizer, config, options.text)
    proof = proof_text(tokenizer, config, options.text)
    plain = AutoModelForCausalLM.from_pretrained(unquantized, dtype=dtype, device_map=device)
    before = bits_per_byte((logits_of(plain, window) for window in text.windows), text)
    quantized = {"quantization_config": quantisation(method, plain, dtype)}
    del plain
    model = AutoModelForCausalLM.from_pretrained(
        unquantized, dtype=dtype, device_map=device, **quantized
    )
    yield describe_layers(model, method)
    expected = logits_of(model, proof.ids)
    model.save_pretrained(folder, max_shard_size=LARGEST_FILE)
    write_older_keys(folder)
    yield reload_and_compare(folder, proof, expected, dtype, device=device)
    after = bits_per_byte((logits_of(model, window) for window in text.windows), text)
    yield report_cost(before, after, method, max_rise)
    yield f"Measured on {text.num_predicted:,} tokens of {text.where}."


def quantisation(
    method: QuantizedTo, model: PreTrainedModel, dtype: torch.dtype
) -> TorchAoConfig | BitsAndBytesConfig:
    """The library's config; by its defaults, embeddings, head and norms are not quantised."""
    head = model.get_output_embeddings()
    layers = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            layers.append(layer)
    widths = sorted({layer.in_features for layer in layers})
    if method == "nf4":
        # On the CPU, bitsandbytes 0.50 returns wrong numbers if a row ends inside a block.
        odd = [str(width) for width in widths if width % NF4_BLOCK]
        if odd:
            wide = f"layers are {', '.join(odd)} wide"
            raise CheckpointError(
                f"nf4 needs widths divisible by {NF4_BLOCK}, but {wide}. Use --quantize int8."
            )
        return Quantization("nf4", double=True).config(dtype)
    if method == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from torchao.quantization.granularity import PerRow

        return TorchAoConfig(Int8WeightOnlyConfig(granularity=PerRow()))
    # torchao silently skips layers whose width the group size does not divide.
    size = next((size for size in GROUPS if all(width % size == 0 for width in widths)), None)
    if size is None:
        raise CheckpointError(
            f"int4 needs widths divisible by 32, but a layer is {min(widths)} wide. Use int8."
        )
    from torchao.quantization import Int4WeightOnlyConfig

    return TorchAoConfig(
        Int4WeightOnlyConfig(group_size=size, int4_packing_format="tile_packed_to_4d")
    )


def describe_layers(model: PreTrainedModel, method: QuantizedTo) -> str:
    """List the quantised and the other layers; CheckpointError if nothing was quantised."""
    libraries = ("torchao", "bitsandbytes")
    weights = []
    for name, weight in model.named_parameters():
        if type(weight).__module__.startswith(libraries):
            weights.append(name)
    quantised = {name.rpartition(".")[0] for name in weights}
    if not quantised:
        no_layer = f"{type(model).__name__} has no layer supported by --quantize {method}"
        raise CheckpointError(
            f"{no_layer}. Export it unquantised, and quantise it with llama.cpp (docs/howto/exporting.md)."
        )
    other_layers = []
    for name, _ in model.named_parameters():
        if name.rpartition(".")[0] not in quantised:
            other_layers.append(name)
    skipped = ", ".join(
        dict.fromkeys(re.sub(r"\.\d+|\.weight$", "", name) for name in other_layers)
    )
    return f"Quantised to {method}: {len(quantised)} linear layers. Unchanged: {skipped}."


def evaluation_text(
    trained: Trained,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    file: Path | None,
) -> EvaluationText:
    """The user's file (`--text`), else the documents that the run held out, else our passage."""
    if file is not None:
        return in_windows(f"the text of {file}", [read_text(file)], tokenizer, config)
    if trained.run is not None and trained.recipe is not None:
        with suppress(CptError):  # the data may be missing here; the report names the text used
            sets = open_evaluation_sets(data_of_recipe(trained.recipe), tokenizer).values()
            in_turn = zip_longest(
                *(of_set.texts() for of_set in sets)
            )  # alternate, so that each set counts
            documents = (
                document.text for row in in_turn for document in row if document is not None
            )
            return in_windows(
                f"documents that the run `{trained.recipe.name}` held out",
                documents,
                tokenizer,
                config,
            )
    passage = "our short passage (--text FILE uses a text of your domain)"
    return in_windows(passage, [TEXT], tokenizer, config)


def in_windows(
    where: str,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
) -> EvaluationText:
    """The beginnings of documents, in windows of tokens, until there are enough."""
    length = min(WINDOW, value_of(config, "max_position_embeddings") or WINDOW)
    rest = MOST_TOKENS
    windows: list[list[int]] = []
    num_bytes = 0
    for document in documents:
        ids = tokenizer(document[:BEGINNING], add_special_tokens=False)["input_ids"][:rest]
        for start in range(0, len(ids), length):
            window = ids[start : start + length]
            if len(window) > 1:
                windows.append(window)
                num_bytes += len(str(tokenizer.decode(window[1:])).encode())
                rest -= len(window)
        if rest < 2:
            break
    if not windows:
        raise DataError(f"{where}: fewer than two tokens. Use a longer text: --text FILE")
    return EvaluationText(where, windows, max(1, num_bytes))


def bits_per_byte(logits: Iterable[torch.Tensor], text: EvaluationText) -> float:
    """The bits per byte of a model's logits, [T, V] per window."""
    pairs = zip(logits, text.windows, strict=True)
    nats = 0.0
    for document, window in pairs:
        loss = F.cross_entropy(document[:-1], torch.tensor(window[1:]), reduction="sum")
        nats += loss.item()
    return nats / math.log(2) / text.num_bytes


def report_cost(before: float, after: float, method: str, max_rise: float) -> str:
    """The line for the report; CheckpointError if bits per byte rise by more than this share."""
    rise = after / before - 1
    change = f"{before:.4f} -> {after:.4f} bits per byte ({rise:+.2%})"
    if not rise <= max_rise:  # also catches NaN
        limit = f"{method} exceeds --max-rise {max_rise:g}"
        raise CheckpointError(
            f"{limit}: {change}. Use --quantize int8, --text FILE, or a higher limit."
        )
    return f"Loss from {method}: {change}."
