"""How well are rows shuffled? `python -m benchmarks.data.shuffle distances JOB`.

Documents carry their number in the corpus as their first line, so a row that is read tells where it is from. It is
measured how far apart in the corpus the neighbours in training are, beside a permutation drawn at random, and beside
the shuffle buffer of streaming datasets.
"""

import json
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from benchmarks.data.corpus import texts_of, write_texts
from benchmarks.data.ours import batches
from benchmarks.data.peers.clock import Job, Measured, read_job

NUMBERED = re.compile(r"document (\d+)\n")
HEAD = 24  # tokens that hold the first line
CHARACTERS = 6000  # at most, so that most documents are whole in their row
NEAR = 0.01
BUFFERS = (1_000, 10_000)


def distances(job: Job, tokenizer: PreTrainedTokenizerBase) -> Measured:
    """Statistics of ours, of a permutation and of shuffle buffers, over equally many places."""
    numbered = job.folder / "numbered.jsonl"
    job.folder.mkdir(parents=True, exist_ok=True)
    write_texts(numbered, numbered_texts(job.corpus))
    measured, size = {}, 0
    for name, variant in {"ours": "", "ours_one_window": "one_window"}.items():
        origins = origins_read(
            Job(numbered, job.parts, job.tokenizer, job.folder / "store", job.workers, variant), tokenizer
        )
        measured[name], size = statistics(origins), len(origins)
    measured["permutation"] = statistics(np.random.default_rng(0).permutation(size))
    for buffer in BUFFERS:
        stream = Dataset.from_dict({"number": range(size)}).to_iterable_dataset().shuffle(seed=0, buffer_size=buffer)
        measured[f"buffer of {buffer:,}"] = statistics(np.array([row["number"] for row in stream]))
    return {"megabytes": numbered.stat().st_size / 1e6, "rows": size, "orders": measured}


def numbered_texts(corpus: Path) -> Iterator[str]:
    """The corpus in documents of at most CHARACTERS, each with its number on top."""
    number = count()
    for text in texts_of(corpus):
        for at in range(0, len(text), CHARACTERS):
            yield f"document {next(number)}\n{text[at : at + CHARACTERS]}"


def origins_read(job: Job, tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
    """The number of each row's first document, in the order of training; rows that begin with the rest of a document
    are left out."""
    heads = (row[:HEAD].tolist() for batch in batches(job) for row in batch["input_ids"])
    found = (NUMBERED.match(text) for text in tokenizer.batch_decode(list(heads)))
    return np.array([int(match[1]) for match in found if match])


def statistics(origins: NDArray[np.int64]) -> dict[str, float]:
    """Of the places of neighbours.

    mean: distance of two neighbours, where 1 is what a permutation gives, a third of the corpus.
    near: how many times as many neighbours as in a permutation are within NEAR of the corpus of each other.
    largest_difference: between the distribution of distances and a permutation's (Kolmogorov-Smirnov).
    order: correlation of the place in training with the place in the corpus.
    """
    places = (origins - origins.min()) / (origins.max() - origins.min())
    apart = np.sort(np.abs(np.diff(places)))
    expected = 1 - (1 - apart) ** 2  # of the distance of two places drawn at random
    reached = np.arange(1, len(apart) + 1) / len(apart)
    return {
        "mean": float(apart.mean() * 3),
        "near": float((apart < NEAR).mean() / (1 - (1 - NEAR) ** 2)),
        "largest_difference": float(np.abs(reached - expected).max()),
        "order": float(np.corrcoef(np.arange(len(places)), places)[0, 1]),
    }


def main(action: str, raw: str) -> None:
    """Measure, and print JSON."""
    job = read_job(raw)
    print(json.dumps(distances(job, job.load_tokenizer())))


if __name__ == "__main__":
    main(*sys.argv[1:])
