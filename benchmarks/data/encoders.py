"""Encoders alone, from strings in memory to ids, as a measure for everything else: `python -m benchmarks.data.encoders
NAME JOB`."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gigatoken
import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks.data.corpus import texts_of
from benchmarks.data.peers.clock import LENGTH, peak_memory_mb, read_job

Lengths = NDArray[np.int64]  # of documents, in tokens
DOCUMENTS_AT_ONCE = 1000  # datasets.map's batch; more at once are no faster


def hugging_face(texts: list[str], tokenizer: Path) -> Lengths:
    backend = AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer
    parts = (
        texts[first : first + DOCUMENTS_AT_ONCE]
        for first in range(0, len(texts), DOCUMENTS_AT_ONCE)
    )
    return np.array(
        [
            len(encoding.ids)
            for part in parts
            for encoding in backend.encode_batch_fast(part, add_special_tokens=False)
        ]
    )


def gigatoken_alone(texts: list[str], tokenizer: Path) -> Lengths:
    return np.diff(
        np.asarray(
            gigatoken.Tokenizer(str(tokenizer / "tokenizer.json"))
            .encode_batch(texts)
            .layout.offsets
        )
    )


ENCODERS: dict[str, Callable[[list[str], Path], Lengths]] = {
    "hugging_face": hugging_face,
    "gigatoken": gigatoken_alone,
}


def main(name: str, raw: str) -> None:
    """Encode all, and say how long the encoder took and how long parsing on one core."""
    job = read_job(raw)
    start = time.perf_counter()
    texts = texts_of(job.corpus)
    parsed = time.perf_counter()
    lengths = ENCODERS[name](texts, job.tokenizer)
    seconds = time.perf_counter() - parsed
    # A document that is longer than a row with its end is cut, whatever the packing.
    cuts = int((-(-(lengths + 1) // LENGTH) - 1).sum())
    counts = {"tokens": int(lengths.sum()), "documents": len(texts), "unavoidable_cuts": cuts}
    print(
        json.dumps(
            {
                "total_seconds": seconds,
                "json_seconds": parsed - start,
                **counts,
                "peak_memory_mb": peak_memory_mb(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
