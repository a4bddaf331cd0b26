"""A tokenizer whose ids are bytes, so that a test sees the text in the ids; sources, and the rows made of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cpt.data.readers.documents import BadRow, Document
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.data.rows.build import PreparedData, build_data
from cpt.data.rows.open_sources import open_source
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource, make_shards
from cpt.recipe.schema import Component, Data, Evaluation, Source

CHAT_MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
PROMPTED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    + PROMPTED
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte, then `<|endoftext|>` 256, `<pad>` 257."""
    vocabulary = {
        character: number
        for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<pad>"
    )


@pytest.fixture(scope="session")
def talking(tokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    """`talking(template)`: the same with the special tokens of chats, and a few words as tokens of their own;
    `bos=True` puts `<s>` in front, with `strips=True` special tokens swallow blanks behind them."""

    def make(
        template: str | None = CHATML,
        *,
        bos: bool = False,
        eos: str = "<|endoftext|>",
        strips: bool = False,
    ) -> PreTrainedTokenizerFast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        merges = [("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s"), ("o", "k"), ("Ċ", "Ċ"), ("a", "a")]
        vocabulary = {
            **model["vocab"],
            **{"".join(pair): 1000 + number for number, pair in enumerate(merges)},
        }
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<pad>", bos_token="<s>"
        )
        marks = [
            AddedToken(mark, special=True, normalized=False, rstrip=strips) for mark in CHAT_MARKS
        ]
        made.add_tokens(marks, special_tokens=True)
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
def source(rows_file: Callable[..., Source]) -> Callable[..., Source]:
    """`source("corpus", ["text", ...], weight=2)`: a jsonl file of such texts as a source."""

    def write(stem: str, texts: list[str], **options: object) -> Source:
        return rows_file(stem, [{"text": text} for text in texts], **options)

    return write


@pytest.fixture
def read() -> Callable[..., list[Document | BadRow]]:
    """`read(path, template="{a}")`: everything that the reader of a file gives."""

    def run(path: Path | str, **options: object) -> list[Document | BadRow]:
        source = Source(path=str(path), **options)
        return [item for piece in pieces_of(source, "k") for item in read_piece(source, piece, "k")]

    return run


@pytest.fixture
def texts(read: Callable[..., list[Document | BadRow]]) -> Callable[..., list[str]]:
    """The texts of a file without a bad row."""

    def run(path: Path | str, **options: object) -> list[str]:
        items = read(path, **options)
        assert not [item for item in items if isinstance(item, BadRow)]
        return [item.text for item in items]

    return run


@pytest.fixture
def bad(read: Callable[..., list[Document | BadRow]]) -> Callable[..., BadRow]:
    """The one bad row of a file."""

    def run(path: Path | str, **options: object) -> BadRow:
        (found,) = [item for item in read(path, **options) if isinstance(item, BadRow)]
        return found

    return run


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
        opened = open_source(
            recipe, source, "data.sources[0]", DocumentEncoder(by), tmp_path / cache, seed=1
        )
        with pytest.MonkeyPatch.context() as patch:
            if workers is not None:
                patch.setattr(
                    "cpt.data.store.tokenized.workers_for", lambda num_bytes, num_jobs: workers
                )
            make_shards([(opened, number) for number in range(len(opened.plan.shards))])
        opened.finish()
        return opened

    return run


@pytest.fixture
def build(tokenizer, tmp_path: Path) -> Callable[..., PreparedData]:
    """`build(source, seed=2, packing="none")`: the rows of a run, with a store in the test's folder."""

    def run(
        *sources: Source,
        cache: str = "cache",
        by: object = tokenizer,
        evaluation: object = None,
        **options: object,
    ) -> PreparedData:
        given = {
            name: options.pop(name)
            for name in ("budget", "whole", "form", "earlier")
            if name in options
        }
        seed = options.pop("seed", 1)
        data = Data(sources=list(sources), **{"sequence_length": 64, **options})
        evaluation = evaluation or Evaluation()
        return build_data(
            data, by, seed=seed, evaluation=evaluation, cache_dir=tmp_path / cache, **given
        )

    return run
