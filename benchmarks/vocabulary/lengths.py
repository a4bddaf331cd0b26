"""Bytes per token of held-out code and prose under a tokenizer of prose, and with tokens added for code."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.library_corpus import Corpus
from cpt.data.readers.standard_library import Kind, Part
from cpt.data.store.tokenization import DocumentEncoder
from cpt.tokenizer.extend_vocabulary import extend_vocabulary

SIZES = (250, 500, 1000, 2000)


def texts_of(corpus: Corpus, kind: Kind, part: Part) -> list[str]:
    """The documents of one of the corpus' four files."""
    return [
        json.loads(line)["text"]
        for line in corpus.files[kind, part].read_text(encoding="utf-8").splitlines()
    ]


def bytes_per_token(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> float:
    """UTF-8 bytes of the texts over their tokens, without those at their ends."""
    _, lengths = DocumentEncoder(tokenizer).encode(texts)
    ends = 1 + (DocumentEncoder(tokenizer).bos is not None)
    return sum(len(text.encode()) for text in texts) / float(lengths.sum() - ends * len(texts))


def measure_lengths(
    corpus: Corpus, tokenizers: dict[str, Path], sizes: Sequence[int] = SIZES
) -> list[dict[str, float | str]]:
    """For each tokenizer, as it is and with so many tokens added: bytes per token of both held-out texts."""
    rows: list[dict[str, float | str]] = []
    code = texts_of(corpus, "domain", "train")
    for name, folder in tokenizers.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for size in (0, *sizes):
            used = tokenizer if size == 0 else extend_vocabulary(tokenizer, code, size).tokenizer
            found = {
                kind: bytes_per_token(used, texts_of(corpus, kind, "held_out"))
                for kind in ("domain", "general")
            }
            rows.append({"tokenizer": name, "added": size, "tokens": len(used), **found})
    return rows
