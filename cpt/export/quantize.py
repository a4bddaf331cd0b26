"""`cpt export --quantize`: linear layers in 8 or 4 bits by torchao or bitsandbytes, with its proof and its cost."""

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

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

from cpt.checkpoints.model_folder import weight_files
from cpt.errors import CheckpointError, CptError, DataError, ResourceError
from cpt.evaluation.sets import judges_of_recipe, open_judged_sets
from cpt.export.proof import CARD, TEXT, ProofText, difference, logits_in_another_process, logits_of, proof_text
from cpt.export.trained import Trained
from cpt.export.write import Wish, export_whole, name_of, written_whole_or_not
from cpt.files import write_atomic
from cpt.models.config import value_of
from cpt.recipe.schema import Recipe

WINDOW = 256  # tokens that are read together
MOST_TOKENS = 8192
MOST_LOGITS = 2**28  # 1 GiB of them in fp32
BEGINNING = 4000  # characters read of a document, so that one long document does not decide


@dataclass(frozen=True)
class JudgedText:
    """Pieces of text as tokens.

    Attributes:
        where: what the text is, for the report.
        num_bytes: UTF-8 bytes of the text of the predicted tokens.
    """

    where: str
    windows: list[list[int]]
    num_bytes: int

    @property
    def num_predicted(self) -> int:
        """Tokens with a token before them."""
        return sum(len(window) - 1 for window in self.windows)


def judged_text(
    trained: Trained, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, file: Path | None
) -> JudgedText:
    """The user's file (`--text`), else the documents that the run held out, else our own passage."""
    if file is not None:
        try:
            return in_windows(f"the text of {file}", [file.read_text(encoding="utf-8")], tokenizer, config)
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"--text {file} cannot be read: {problem}") from problem
    if trained.run is not None and trained.recipe is not None:
        with suppress(CptError):  # the data may not be on this machine; the report names the text that was used
            documents = held_out_documents(trained.recipe, tokenizer)
            return in_windows(f"documents that the run `{trained.recipe.name}` held out", documents, tokenizer, config)
    return in_windows(
        "our own passage, which is short: --text FILE gives a page of your domain", [TEXT], tokenizer, config
    )


def held_out_documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """One of every set in turn, so that each set counts."""
    texts = [judged.texts() for judged in open_judged_sets(judges_of_recipe(recipe), tokenizer).values()]
    while texts:
        for one in list(texts):
            if (document := next(one, None)) is None:
                texts.remove(one)
            else:
                yield document.text


def in_windows(
    where: str, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> JudgedText:
    """Beginnings of documents in windows of tokens, until there are enough."""
    length = min(WINDOW, value_of(config, "max_position_embeddings") or WINDOW)
    left = min(MOST_TOKENS, MOST_LOGITS // value_of(config, "vocab_size"))
    windows: list[list[int]] = []
    num_bytes = 0
    for document in documents:
        ids = tokenizer(document[:BEGINNING], add_special_tokens=False)["input_ids"][:left]
        for start in range(0, len(ids), length):
            window = ids[start : start + length]
            if len(window) > 1:
                windows.append(window)
                num_bytes += len(str(tokenizer.decode(window[1:])).encode())
                left -= len(window)
        if left < 2:
            break
    if not windows:
        raise DataError(f"{where}: fewer than two tokens. Give a page of text: --text FILE")
    return JudgedText(where, windows, max(1, num_bytes))


@dataclass(frozen=True)
class QuantizationCost:
    """A quantised model compared with the unquantised one, on the same text.

    Attributes:
        before, after: bits per byte.
        divergence: mean Kullback-Leibler divergence of the quantised model's probabilities, in nats a token.
        agreement: share of the tokens with the same most probable successor.
    """

    before: float
    after: float
    divergence: float
    agreement: float

    @property
    def rise(self) -> float:
        """As a share of the unquantised model's bits per byte."""
        return self.after / self.before - 1

    def __str__(self) -> str:
        return (
            f"{self.before:.4f} -> {self.after:.4f} bits per byte ({self.rise:+.2%}); mean KL divergence"
            f" {self.divergence:.2g} nats a token, same first choice for {self.agreement:.1%} of the tokens"
        )


def cost(before: Sequence[torch.Tensor], after: nn.Module, text: JudgedText) -> QuantizationCost:
    """Compare two models window by window.

    Args:
        before: the unquantised model's logits, [T, V] a window.
        after: the quantised model.
    """
    nats = torch.zeros(2, dtype=torch.float64)
    divergence, same = 0.0, 0
    for window, logits in zip(text.windows, before, strict=True):
        targets = torch.tensor(window[1:])
        old, new = logits[:-1].log_softmax(-1), logits_of_ids(after, window)[:-1].log_softmax(-1)
        nats += torch.tensor(
            [F.nll_loss(one, targets, reduction="sum").item() for one in (old, new)], dtype=torch.float64
        )
        divergence += F.kl_div(new, old, reduction="sum", log_target=True).item()
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
    tokens = text.num_predicted
    old_bits, new_bits = (nats / math.log(2) / text.num_bytes).tolist()
    return QuantizationCost(old_bits, new_bits, divergence / tokens, same / tokens)


def logits_of_ids(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """[T, V] in fp32, on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
    return logits.float().cpu()


Method = Literal["int8", "int4", "nf4"]
MAX_RISE = 0.05  # of bits per byte, as a share
NF4_BLOCK = 64  # weights that share a scale in bitsandbytes
GROUPS = (128, 64, 32)  # weights that share a scale: the fewer, the closer
NEEDS = {"int8": "torchao", "int4": "torchao", "nf4": "bitsandbytes"}
OF_THE_WHOLE = ("Wrote", "Serve")  # lines about the scratch folder of the unquantised export


def export_quantised(trained: Trained, output: Path, wish: Wish, method: Method, max_rise: float) -> Iterator[str]:
    """Export the whole model into a scratch folder, quantise it from there; yields lines of the report.

    Raises:
        CheckpointError: the proof failed, or it costs too much; then no folder is left behind.
    """
    scratch = output.with_name(f".{output.name}.whole")
    whole = scratch / output.name  # the model card's title is the folder's name
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for line in export_whole(trained, whole, wish):
            if not line.startswith(OF_THE_WHOLE):
                yield line
        tokenizer, config = AutoTokenizer.from_pretrained(whole), AutoConfig.from_pretrained(whole)
        text = judged_text(trained, tokenizer, config, wish.text)
        with written_whole_or_not(output) as unfinished:
            copy_beside(whole, unfinished)
            report = []
            proof = proof_text(tokenizer, config, wish.text)
            for line in write_quantised(whole, unfinished, method, wish, text, proof, max_rise):
                yield line
                report.append(line)
            sizes = (
                f"{bytes_of(whole) / 1e6:,.1f} MB of {name_of(wish.dtype)} -> {bytes_of(unfinished) / 1e6:,.1f} MB "
                f"({bytes_of(unfinished) / bytes_of(whole):.0%})"
            )
            add_to_card(unfinished / CARD, [*report, f"Size: {sizes}."])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    yield f"Wrote {output}: {method}, {sizes}, with {CARD}."
    yield f"Serve it: cpt serve {output}"


def copy_beside(whole: Path, folder: Path) -> None:
    """Copy everything but the weights: tokenizer, configs (saving the quantised model completes them), model card."""
    folder.mkdir(parents=True)
    weights = {file.name for file in weight_files(whole)}
    for file in whole.iterdir():
        if file.name not in weights and not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)


def add_to_card(card: Path, lines: Sequence[str]) -> None:
    """Add the section "Quantised" before the limits."""
    section = "## Quantised\n\n" + "\n".join(f"- {line}" for line in lines) + "\n\n"
    before, limits, after = card.read_text(encoding="utf-8").partition("## Limits\n")
    write_atomic(card, f"{before}{section}{limits}{after}")


def check_quantising(method: Method, dtype: torch.dtype) -> None:
    """Check what can be checked before anything is read."""
    package = NEEDS[method]
    try:
        import_module(package)
    except ImportError as problem:
        extra = {"torchao": "quantize", "bitsandbytes": "bitsandbytes"}[package]
        raise ResourceError(f"--quantize {method} needs {package}: pip install 'cpt[{extra}]'") from problem
    if method != "int4":
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ResourceError(
            "--quantize int4 packs weights for the tensor cores of a GPU (Ampere or newer), and there is none. On a"
            " machine without one: --quantize nf4."
        )
    if dtype != torch.bfloat16:
        raise ResourceError(
            "the kernels of --quantize int4 compute in bfloat16 only. Leave --dtype out, or use --quantize nf4."
        )


def write_quantised(
    whole: Path,
    folder: Path,
    method: Method,
    wish: Wish,
    text: JudgedText,
    proof: ProofText,
    max_rise: float,
) -> Iterator[str]:
    """Quantise a whole export into another folder, prove what was stored, and measure what it costs."""
    device = "cuda" if method == "int4" else None
    plain = AutoModelForCausalLM.from_pretrained(whole, dtype=wish.dtype, device_map=device)
    before = [logits_of_ids(plain, window) for window in text.windows]
    config = quantisation(method, plain, wish.dtype)
    del plain
    model = AutoModelForCausalLM.from_pretrained(
        whole, dtype=wish.dtype, quantization_config=config, device_map=device
    )
    yield describe_layers(model, method)
    expected = logits_of(model, proof)
    model.save_pretrained(folder, max_shard_size=wish.max_shard_size)
    found = difference(expected, logits_in_another_process(folder, proof, wish.dtype, device=device), wish.dtype)
    if not found.is_allowed:
        raise CheckpointError(
            f"the quantised model has other logits when it is loaded again: largest difference {found}."
        )
    yield (
        "The quantised model loaded back by plain transformers, in a process without cpt: largest difference of"
        f" logits {found}."
    )
    yield refuse_costly(cost(before, model, text), method, max_rise)
    yield f"Measured on {text.num_predicted:,} tokens of {text.where}."


def quantisation(method: Method, model: PreTrainedModel, dtype: torch.dtype) -> TorchAoConfig | BitsAndBytesConfig:
    """The library's config; embeddings, head and norms stay as they are by its defaults."""
    if method == "nf4":
        refuse_narrow(model)
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    from torchao.quantization.granularity import PerRow

    if method == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(granularity=PerRow()))
    return TorchAoConfig(Int4WeightOnlyConfig(group_size=group_size(model), int4_packing_format="tile_packed_to_4d"))


def refuse_narrow(model: PreTrainedModel) -> None:
    """On the CPU bitsandbytes 0.50 gives back other numbers where a row ends inside one of its blocks."""
    if odd := [str(width) for width in sorted(widths_of(model)) if width % NF4_BLOCK]:
        raise CheckpointError(
            f"nf4 takes weights in blocks of {NF4_BLOCK}, and layers are {', '.join(odd)} wide:"
            " bitsandbytes would give back other numbers on a CPU. Use --quantize int8."
        )


def widths_of(model: PreTrainedModel) -> set[int]:
    """Inputs of the layers that are quantised."""
    head = model.get_output_embeddings()
    return {layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head}


def group_size(model: PreTrainedModel) -> int:
    """The largest that divides every linear layer's input: torchao leaves the others out without a word."""
    widths = widths_of(model)
    for size in GROUPS:
        if all(width % size == 0 for width in widths):
            return size
    raise CheckpointError(
        f"int4 takes weights in groups of 32 or more, and a layer is {min(widths)} wide. Use --quantize int8."
    )


def describe_layers(model: PreTrainedModel, method: Method) -> str:
    """What was quantised and what was not."""
    quantised = {name for name, layer in model.named_modules() if is_quantised(layer)}
    if not quantised:
        raise CheckpointError(
            f"{type(model).__name__} has no layer that --quantize {method} knows: it takes torch's linear layers."
            " Export the whole model, and quantise it with llama.cpp (docs/export.md)."
        )
    left = {part_of(name) for name, _ in model.named_parameters() if name.rpartition(".")[0] not in quantised}
    return f"Quantised to {method}: {len(quantised)} linear layers. Left as they were: {', '.join(sorted(left))}."


def is_quantised(layer: nn.Module) -> bool:
    """Whether its weight is one of the libraries' kinds of tensor."""
    weight: Any = layer._parameters.get("weight")
    return weight is not None and type(weight).__module__.startswith(("torchao", "bitsandbytes"))


def part_of(parameter: str) -> str:
    """`model.layers.3.mlp.experts.down_proj` -> `experts.down_proj`."""
    words = [word for word in parameter.split(".") if not word.isdigit() and word not in ("weight", "bias")]
    return ".".join(words[-2:]) if "experts" in words[-2:] else words[-1]


def bytes_of(folder: Path) -> int:
    """Of the weights."""
    return sum(file.stat().st_size for file in weight_files(folder))


def refuse_costly(found: QuantizationCost, method: str, max_rise: float) -> str:
    """The report's line."""
    if not found.rise <= max_rise:  # NaN is not
        raise CheckpointError(
            f"{method} costs more than --max-rise {max_rise:g}: {found}. Use --quantize int8, measure on text of your"
            " domain (--text FILE), or set a higher limit."
        )
    return f"What {method} costs: {found}."
