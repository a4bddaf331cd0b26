"""`cpt export --gguf`: the whole export first, then one file made of it for llama.cpp and Ollama, read back and
judged."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cpt.checkpoints.proof import ProofText, difference, logits_of, proof_text
from cpt.checkpoints.proven_export import Wish, export_whole, written_whole_or_not
from cpt.checkpoints.trained import Trained
from cpt.errors import CheckpointError
from cpt.exporting.card import CARD, add_section, replace_serving
from cpt.exporting.gguf_families import family_of
from cpt.exporting.gguf_file import write_gguf
from cpt.exporting.gguf_proof import LlamaCpp, llama_cpp, logits_read_back, refuse_other_tokens
from cpt.exporting.gguf_types import UNQUANTISED, GgufType
from cpt.exporting.judged_text import judged_text
from cpt.exporting.judging import Judge, gain_of_run
from cpt.exporting.quantised import refuse_costly
from cpt.exporting.quantised_export import OF_THE_WHOLE

LLAMA_CPP_TOLERANCES = {"f32": 1e-3, "f16": 1e-2, "bf16": 5e-2}
"""Share of the largest logit: for files in 16 bits llama.cpp rounds activations to 16 bits, too; it takes exponentials
from a table."""


def export_gguf(trained: Trained, output: Path, wish: Wish, kind: GgufType, max_rise: float | None) -> Iterator[str]:
    """Yields what there is to tell as it becomes known.

    Raises:
        CheckpointError: it has no place in GGUF, cannot be proven, or costs too much; then no folder is left behind.
    """
    scratch = output.with_name(f".{output.name}.whole")
    whole = scratch / output.name  # the card takes its name from the folder's
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for line in export_whole(trained, whole, wish):
            if not line.startswith(OF_THE_WHOLE):
                yield line
        with written_whole_or_not(output) as unfinished:
            unfinished.mkdir(parents=True)
            file = unfinished / f"{output.name}-{kind.upper()}.gguf"
            shutil.copy(whole / CARD, unfinished / CARD)
            told = list(converted(trained, whole, file, wish, kind, max_rise))
            yield from told
            add_section(unfinished, "GGUF", told)
            replace_serving(
                unfinished,
                [f"llama-server -m {file.name} --port 8080", f"llama-cli -m {file.name} -p 'Once upon a time' -n 64"],
            )
            size = file.stat().st_size
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    yield f"Wrote {output / file.name}: {size / 1e6:,.1f} MB, with README.md."
    yield f"Serve it: llama-server -m {output / file.name}"


def converted(
    trained: Trained, whole: Path, file: Path, wish: Wish, kind: GgufType, max_rise: float | None
) -> Iterator[str]:
    """Write the file, read it back, judge it."""
    tokenizer, config = AutoTokenizer.from_pretrained(whole), AutoConfig.from_pretrained(whole)
    family = family_of(config, "FOLDER")
    text = proof_text(tokenizer, config, wish.text)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    judge = Judge(judged_text(trained, tokenizer, config, wish.text), torch.float32, gain_of_run(trained), max_rise)
    judge.parameters = sum(parameter.numel() for parameter in model.parameters())
    before = judge.logits(model)
    vocabulary = write_gguf(model, tokenizer, family, file, kind, file.stem)
    yield f"Written as llama.cpp's `{family.arch}`; the tokenizer: {vocabulary}."
    expected = logits_of(model, text)  # of the numbers that the file holds
    found = difference(expected, logits_read_back(file, text), torch.float32)
    if not found.is_allowed:
        raise CheckpointError(
            f"{file.name} read back by plain transformers says something else: largest difference of logits {found}."
        )
    yield (
        "Read back by plain transformers, in a process without cpt: the same tokens, largest difference of logits"
        f" {found}."
    )
    reader = llama_cpp(file, max(len(text.ids), *(len(window) for window in judge.text.windows)))
    num_bytes = file.stat().st_size
    if reader is not None:
        yield read_by_llama_cpp(reader, tokenizer, text, expected, kind)
    else:
        yield (
            "NOT CHECKED in llama.cpp itself: llama-cpp-python is not installed. pip install llama-cpp-python (it"
            " compiles llama.cpp)."
        )
    if kind not in UNQUANTISED:
        yield refuse_costly(judge.cost(before, model if reader is None else reader.logits, num_bytes), kind)
        computed = "transformers, with the file's numbers" if reader is None else "llama.cpp"
        yield f"Judged on {judge.text.num_predicted:,} tokens of {judge.text.where}, computed by {computed}."
        yield f"Size: {num_bytes / 1e6:,.1f} MB, {num_bytes / (2 * judge.parameters):.0%} of 16 bits a parameter."
    if reader is not None:
        reader.close()


def read_by_llama_cpp(
    reader: LlamaCpp, tokenizer: PreTrainedTokenizerBase, text: ProofText, expected: torch.Tensor, kind: str
) -> str:
    """The same tokens and, of unquantised files, the same logits; of the others llama.cpp rounds activations, too, and
    they are judged.

    Raises:
        CheckpointError: it says something else.
    """
    tokens = refuse_other_tokens(reader, tokenizer, text)
    found = difference(expected, reader.logits(text.ids), torch.float32, LLAMA_CPP_TOLERANCES.get(kind))
    if kind in UNQUANTISED and not found.is_allowed:
        raise CheckpointError(
            f"llama.cpp computes something else from the file: largest difference of logits {found}."
        )
    if kind in UNQUANTISED:
        return f"Read by llama.cpp: {tokens}, largest difference of logits {found}."
    return (
        f"Read by llama.cpp, which rounds activations, too: {tokens}, largest difference of logits"
        f" {found.largest:.2g}."
    )
