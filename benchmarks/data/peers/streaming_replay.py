"""Resuming a stream as transformers' Trainer does it: everything before the position is read and tokenised again, and
dropped."""

import json
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import datasets
from clock import BATCH, LENGTH, read_job
from transformers import PreTrainedTokenizerFast

POSITIONS = (0, 500, 1000, 2000, 4000)


def rows_of(corpus: str, tokenizer: PreTrainedTokenizerFast) -> Iterator[Any]:
    """Tokenised and cut into rows while they are read, as run_clm does it with `--streaming`."""

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"])

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*parts)) for name, parts in examples.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        return {name: [ids[at : at + LENGTH] for at in range(0, total, LENGTH)] for name, ids in joined.items()}

    rows: Any = datasets.load_dataset("json", data_files=corpus, split="train", streaming=True)
    return iter(rows.map(tokenize, batched=True, remove_columns=["text"]).map(group_texts, batched=True))


def main(action: str, raw: str) -> None:
    """Seconds to the first batch at each position; one going through passes them all."""
    job = read_job(raw)
    tokenizer = job.load_tokenizer()
    start, at, measured = time.perf_counter(), 0, {}
    rows = rows_of(str(job.corpus), tokenizer)
    for position in POSITIONS:
        passed = sum(1 for _ in islice(rows, position + BATCH - at))
        if passed < position + BATCH - at:
            break  # the corpus is smaller
        at = position + BATCH
        measured[str(position)] = time.perf_counter() - start
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
