"""One system on one corpus in a process of its own: `python -m benchmarks.data.systems NAME CORPUS TOKENIZER FOLDER` prints JSON.

Clocks start when torch and transformers are imported, and stop at the [8, 2048] batch that is meant.
"""

import json
import logging
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, default_data_collator

from benchmarks.data.corpus import texts_of
from cpt.data.build import build_data
from cpt.data.loader import CPTDataLoader
from cpt.data.mixture import MixtureRows
from cpt.data.parallel import num_workers
from cpt.recipe.schema import Data, Source

BATCH, LENGTH, STEADY_BATCHES = 8, 2048, 1500
POSITIONS = (0, 10**5, 10**6, 10**7, 10**8, 5 * 10**8, 9 * 10**8, 10**9 - 16)
Measured = dict[str, float]


def hugging_face(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """`encode_batch_fast` of tokenizers on all cores, from strings in memory."""
    texts, backend = texts_of(corpus), AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(texts), 1000):
        tokens += sum(len(encoding.ids) for encoding in backend.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False))
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def gigatoken(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """`encode_batch` of gigatoken on the same strings, all at once."""
    import gigatoken

    texts, encoder = texts_of(corpus), gigatoken.Tokenizer(str(tokenizer / "tokenizer.json"))
    start = time.perf_counter()
    tokens = len(encoder.encode_batch(texts).layout.content.data)
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def json_alone(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """Only parsing: what a single core needs to get the strings out of the file."""
    start = time.perf_counter()
    return {"documents": len(texts_of(corpus)), "seconds": time.perf_counter() - start}


def run_clm(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """As transformers' run_clm.py does it: datasets.map to tokenise, then again to concatenate and cut."""
    import datasets

    datasets.disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    start = time.perf_counter()
    rows: Any = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder / "run_clm"))
    rows = rows.map(lambda some: loaded(some["text"]), batched=True, num_proc=num_workers(), remove_columns=["text"])

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*parts)) for name, parts in examples.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        cut = {name: [ids[at : at + LENGTH] for at in range(0, total, LENGTH)] for name, ids in joined.items()}
        return {**cut, "labels": cut["input_ids"]}

    rows = rows.map(group_texts, batched=True, num_proc=num_workers())
    return timed(DataLoader(rows, batch_size=BATCH, drop_last=True, collate_fn=default_data_collator), start)


def ours_cold(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """`build_data` with an empty store, then a CPTDataLoader."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    return ours_warm(corpus, tokenizer, folder)


def ours_warm(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """`build_data` with the tokens in the store, then a CPTDataLoader."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    start = time.perf_counter()
    data = Data(sequence_length=LENGTH, sources=[Source(path=str(corpus))])
    prepared = build_data(data, loaded, seed=0, cache_dir=folder / "store")
    rows = sum(report.rows for report in prepared.sources)
    ready = time.perf_counter() - start
    measured = timed(CPTDataLoader(prepared.rows, micro_batch=BATCH, rows_in_all=rows), start)
    padding = 1 - prepared.num_tokens / (rows * LENGTH)
    return {**measured, "store_ready_seconds": ready, "tokens": prepared.num_tokens, "padding": padding}


def timed(loader: Iterator[Any] | Any, start: float) -> Measured:
    """When the first batch came, how fast others followed, and when all of the epoch would be there."""
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    begin, count = time.perf_counter(), sum(1 for _ in islice(batches, STEADY_BATCHES))
    steady = count * BATCH * LENGTH / (time.perf_counter() - begin)
    return {"first_batch_seconds": first, "steady_tokens_per_second": steady}


class SyntheticRows(Sequence[Any]):
    """10^9 rows that are nowhere, to measure what finding a place costs."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, number: Any) -> Any:
        return self.row(number, 0)

    def row(self, number: int, epoch: int) -> Any:
        """Row `number` in the order of an epoch."""
        return {"input_ids": torch.full((LENGTH,), number)}


def resume(corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    """A loader made at a position of a mixture of two sources of 10^9 rows each, to its first batch; the median of 5."""
    measured = {}
    for position in POSITIONS:
        seconds = []
        for seed in range(5):
            start = time.perf_counter()
            rows = MixtureRows([SyntheticRows(), SyntheticRows()], [0.7, 0.3], seed)  # type: ignore[list-item]
            next(iter(CPTDataLoader(rows, micro_batch=BATCH, rows_in_all=10**9, first_row=position)))
            seconds.append(time.perf_counter() - start)
        measured[str(position)] = sorted(seconds)[2]
    return measured


SYSTEMS: dict[str, Callable[[Path, Path, Path], Measured]] = {
    "hugging_face": hugging_face,
    "gigatoken": gigatoken,
    "json_alone": json_alone,
    "run_clm": run_clm,
    "ours_cold": ours_cold,
    "ours_warm": ours_warm,
    "resume": resume,
}


def main(name: str, corpus: str, tokenizer: str, folder: str) -> None:
    """Run one system and print what was measured, with the memory that it and its largest child had at most."""
    logging.disable(logging.WARNING)
    measured = SYSTEMS[name](Path(corpus), Path(tokenizer), Path(folder))
    for who, key in ((resource.RUSAGE_SELF, "peak_memory_mb"), (resource.RUSAGE_CHILDREN, "peak_memory_of_a_worker_mb")):
        measured[key] = resource.getrusage(who).ru_maxrss / 1000
    print(json.dumps(measured))
    for thread in threading.enumerate():
        if thread.name == "data-prefetch":  # one in the middle of a tensor makes the interpreter's end an abort
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
