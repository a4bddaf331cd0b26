"""That a GGUF file says what the model says: read back by transformers in a process of its own, and by llama.cpp where
it is installed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from cpt.checkpoints.proof import ProofText, reason_of
from cpt.errors import CheckpointError

RELOAD = Path(__file__).with_name("reload_gguf.py")


def logits_read_back(file: Path, text: ProofText) -> torch.Tensor:
    """[T, V] in fp32, as plain transformers reads the file, tokenizer and metadata included, where this package cannot
    be imported.

    Raises:
        CheckpointError: it cannot be read, or gives other tokens.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, output = Path(scratch) / "job.json", Path(scratch) / "logits.safetensors"
        content = {
            "file": str(file),
            "text": text.text,
            "tokens": len(text.ids),
            "ids": text.ids,
            "output": str(output),
        }
        job.write_text(json.dumps(content))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        ended = subprocess.run(
            [sys.executable, "-I", str(RELOAD), str(job)], env=environment, capture_output=True, text=True
        )
        if ended.returncode != 0:
            raise CheckpointError(
                f"plain transformers, in a process without cpt, cannot read {file.name}: {reason_of(ended.stderr)}. A"
                f" newer one than {transformers.__version__} may; otherwise take another way out, such as --quantize."
            )
        return load_file(output)["logits"]


class LlamaCpp:
    """llama.cpp itself, through llama-cpp-python."""

    def __init__(self, file: Path, num_tokens: int) -> None:
        from llama_cpp import GGML_TYPE_F32, Llama

        size = {"n_ctx": num_tokens + 1, "n_batch": num_tokens + 1}
        threads = {"n_threads": torch.get_num_threads(), "n_threads_batch": torch.get_num_threads()}
        exact = {
            "type_k": GGML_TYPE_F32,
            "type_v": GGML_TYPE_F32,
            "n_gpu_layers": 0,
        }  # its keys and values are in 16 bits otherwise
        self._model = Llama(str(file), logits_all=True, verbose=False, **size, **threads, **exact)

    def tokens(self, text: str) -> list[int]:
        """As the file's tokenizer reads it, without a begin token."""
        return list(self._model.tokenize(text.encode(), add_bos=False, special=True))

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[T, V] in fp32."""
        self._model.reset()
        self._model.eval(ids)
        return torch.tensor(self._model.scores[: len(ids)], dtype=torch.float32)

    def close(self) -> None:
        """Give its memory back."""
        self._model.close()


def llama_cpp(file: Path, num_tokens: int) -> LlamaCpp | None:
    """The file in llama.cpp; None where that is not installed.

    Raises:
        CheckpointError: llama.cpp does not load it.
    """
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        return None
    try:
        return LlamaCpp(file, num_tokens)
    except ValueError as problem:
        raise CheckpointError(f"llama.cpp does not load {file.name}: {problem}") from problem


def refuse_other_tokens(reader: LlamaCpp, tokenizer: PreTrainedTokenizerBase, text: ProofText) -> str:
    """The text, and each added token in the middle of it.

    Returns:
        what there is to know of the tokens.

    Raises:
        CheckpointError: llama.cpp reads it otherwise.
    """
    refuse_other(reader.tokens(text.text), ids_of(tokenizer, text.text), text.text)
    spaced = False
    for token in tokenizer.get_added_vocab():
        sample = f"one{token}two"
        ours, theirs = ids_of(tokenizer, sample), reader.tokens(sample)
        if ours != theirs == [*ids_of(tokenizer, f"one{token}"), *ids_of(tokenizer, "two")]:
            spaced = True  # llama.cpp begins anew after each added token, as older SentencePiece tokenizers did
        else:
            refuse_other(theirs, ours, sample)
    return (
        "the same tokens (after an added token it puts a space that the tokenizer does not)"
        if spaced
        else "the same tokens"
    )


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Without begin and end."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def refuse_other(theirs: list[int], ours: list[int], sample: str) -> None:
    """Name the first token that differs.

    Raises:
        CheckpointError: one does.
    """
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
        found = f"{theirs[at : at + 5]} from number {at} on, not {ours[at : at + 5]}"
        raise CheckpointError(
            f"llama.cpp reads {sample[:40]!r} as other tokens: {found}. Take another way out: cpt export --quantize"
        )
