"""Do the tokens have the shares that were asked for, however long the documents are? `python -m
benchmarks.data.mixture shares JOB`.

Three sources of the same text: its lines, its files, and books of many files, mixed by `build_data`; beside it,
documents drawn with these probabilities by `datasets.interleave_datasets`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset, interleave_datasets
from transformers import PreTrainedTokenizerBase

from benchmarks.data.corpus import texts_of, write_texts
from benchmarks.data.peers.clock import BATCH, LENGTH, Measured, read_job
from cpt.data.rows.build import build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.recipe.schema import Data, Source

WEIGHTS = {"lines": 0.5, "files": 0.3, "books": 0.2}
TOKENS = 50_000_000
CHARACTERS = 12_000_000  # of each source
BOOK = 500_000  # characters, at least


def shares(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, folder: Path, tokens: int = TOKENS
) -> Measured:
    """Asked and realised shares of the first `tokens` tokens, and what the other way gives."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = write_sources(corpus, folder)
    lengths = {name: lengths_of(path, tokenizer) for name, path in sources.items()}
    return {
        "tokens": tokens,
        "asked": WEIGHTS,
        "mean_document_tokens": {name: float(some.mean()) for name, some in lengths.items()},
        "ours": realised(sources, tokenizer, folder / "store", tokens),
        "interleave_datasets": interleaved(lengths, tokens),
    }


def write_sources(corpus: Path, folder: Path) -> dict[str, Path]:
    texts = texts_of(corpus, 20_000)
    kinds = {
        "lines": (line for text in texts for line in text.splitlines() if line.strip()),
        "files": iter(texts),
        "books": books(texts),
    }
    paths = {name: folder / f"{name}.jsonl" for name in kinds}
    for name, some in kinds.items():
        write_texts(paths[name], up_to(some, CHARACTERS))
    return paths


def books(texts: list[str]) -> Iterator[str]:
    pages: list[str] = []
    for text in texts:
        pages.append(text)
        if sum(map(len, pages)) >= BOOK:
            yield "\n".join(pages)
            pages = []


def up_to(texts: Iterator[str], characters: int) -> Iterator[str]:
    """The first texts, until so many characters came."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def lengths_of(path: Path, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    return np.array(
        [
            len(e.ids)
            for e in tokenizer.backend_tokenizer.encode_batch_fast(
                texts_of(path), add_special_tokens=False
            )
        ]
    )


def realised(
    sources: dict[str, Path], tokenizer: PreTrainedTokenizerBase, cache_dir: Path, tokens: int
) -> dict[str, float]:
    """Each source's share of the tokens in the rows as they are read, padding left out."""
    mixture = [
        Source(path=str(path), name=name, weight=WEIGHTS[name]) for name, path in sources.items()
    ]
    prepared = build_data(
        Data(sequence_length=LENGTH, sources=mixture), tokenizer, seed=0, cache_dir=cache_dir
    )
    counts = dict.fromkeys(sources, 0)
    names, rows = list(sources), tokens // LENGTH // BATCH * BATCH
    for number, batch in enumerate(
        CPTDataLoader(prepared.rows, micro_batch=BATCH, rows_in_all=rows)
    ):
        is_token = np.flip(
            np.maximum.accumulate(
                np.flip(batch["input_ids"].numpy() != tokenizer.pad_token_id, 1), axis=1
            ),
            1,
        )
        for row, count in enumerate(is_token.sum(1).tolist()):
            counts[names[prepared.rows.turn(number * BATCH + row)[0]]] += count
    return {name: count / sum(counts.values()) for name, count in counts.items()}


def interleaved(lengths: dict[str, np.ndarray], tokens: int) -> dict[str, float]:
    sources = [
        Dataset.from_dict({"source": [name] * len(some), "tokens": some})
        for name, some in lengths.items()
    ]
    mixed = interleave_datasets(
        sources, list(WEIGHTS.values()), seed=0, stopping_strategy="all_exhausted"
    ).with_format("numpy")[:]
    first = np.cumsum(mixed["tokens"]) <= tokens
    counts = {
        name: int(mixed["tokens"][first & (mixed["source"] == name)].sum()) for name in lengths
    }
    return {name: count / sum(counts.values()) for name, count in counts.items()}


def main(action: str, raw: str) -> None:
    job = read_job(raw)
    print(json.dumps(shares(job.corpus, job.load_tokenizer(), job.folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
