"""A tokenizer whose ids are bytes, so that a test sees the text in the ids, and a way to write sources."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cpt.data.rows.open_sources import open_source
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource, make_shards
from cpt.recipe.schema import Component, Data, Source

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
CHAT_MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte, then `<|endoftext|>` 256, `<pad>` 257."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<pad>")


@pytest.fixture(scope="session")
def talking(tokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    """`talking(template)`: the same with the marks of chats, and a few words as tokens of their own; `bos=True` puts
    `<s>` in front."""

    def make(template: str | None, *, bos: bool = False, eos: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        merges = [("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s"), ("o", "k"), ("Ċ", "Ċ"), ("a", "a")]
        vocabulary = {**model["vocab"], **{"".join(pair): 1000 + number for number, pair in enumerate(merges)}}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<pad>", bos_token="<s>"
        )
        made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in CHAT_MARKS], special_tokens=True)
        made.eos_token, made.chat_template = eos, template
        if bos:
            made.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
            )
        return made

    return make


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Source]:
    """`rows_file("talks", [{"messages": [...]}, ...], weight=2)`: a jsonl file of such rows as a source."""

    def write(stem: str, rows: list[dict[str, object]], **options: object) -> Source:
        path = tmp_path / f"{stem}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Source(path=str(path), **options)

    return write


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    """`source("corpus", ["text", ...], weight=2)`: a jsonl file in the test's folder as a source."""

    def write(stem: str, texts: list[str], **options: object) -> Source:
        path = tmp_path / f"{stem}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return Source(path=str(path), **options)

    return write


@pytest.fixture
def tokenized(tokenizer, tmp_path: Path) -> Callable[..., TokenizedSource]:
    """`tokenized(source, filter, cache="folder", workers=2, on_bad_row="skip")`: all of a source, in a store in the
    test's folder."""

    def run(
        source: Source,
        *filters: Component,
        cache: str = "cache",
        workers: int | None = None,
        by: object = tokenizer,
        **data: object,
    ) -> TokenizedSource:
        recipe = Data(sources=[source], filters=list(filters), **data)
        opened = open_source(recipe, source, "data.sources[0]", DocumentEncoder(by), tmp_path / cache, seed=1)
        make_shards([(opened, number) for number in range(len(opened.plan.shards))], workers)
        opened.finish()
        return opened

    return run
