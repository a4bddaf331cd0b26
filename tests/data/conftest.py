"""A tokenizer whose ids are bytes, so that a test sees the text in the ids, and a way to write sources."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cpt.recipe.schema import Source

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte, then `<|endoftext|>` 256, `<pad>` 257."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<pad>")


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    """`source("corpus", ["text", ...], weight=2)`: a jsonl file in the test's folder as a source."""

    def write(stem: str, texts: list[str], **options: object) -> Source:
        path = tmp_path / f"{stem}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return Source(path=str(path), **options)

    return write
