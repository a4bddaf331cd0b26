"""The clock that every program beside this file reads: `python PROGRAM ACTION JOB` does one thing and prints what was
measured as JSON.

A program says how its batches come from the job; all its imports are done before the clock starts. The actions:
cold: nothing is prepared; from the jsonl file to the first and to the last batch of one time through the corpus.
warm: what the cold start left on the disk is there; to the first batch, and how fast others follow.
waste: go through all batches and count tokens, padding and pieces of documents.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

BATCH, LENGTH = 8, 2048
STEADY_BATCHES, STEADY_SECONDS = 1500, 5.0
Measured = dict[str, Any]


@dataclass(frozen=True)
class Job:
    corpus: Path
    """A jsonl file with one document a line, under `text`."""
    parts: Path
    """A folder with the same documents in one file for each worker, for programs that share out files."""
    tokenizer: Path
    folder: Path
    """For all that is kept from a cold start to a warm one."""
    workers: int
    variant: str = ""

    def as_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer; by its class, since transformers 4 does not know the name that 5 writes into the folder."""
        return PreTrainedTokenizerFast.from_pretrained(self.tokenizer)


Batches = Callable[[Job], Iterable[Any]]


def read_job(raw: str) -> Job:
    fields: dict[str, Any] = json.loads(raw)
    return Job(
        **{
            **fields,
            **{name: Path(fields[name]) for name in ("corpus", "parts", "tokenizer", "folder")},
        }
    )


def run_program(batches_of: Batches) -> None:
    """What a program does when it is started."""
    action, job = sys.argv[1:]
    measured = ACTIONS[action](batches_of, read_job(job))
    print("\n" + json.dumps({**measured, "peak_memory_mb": peak_memory_mb()}), flush=True)


def cold(batches_of: Batches, job: Job) -> Measured:
    """To the first batch, and to the last."""
    start = time.perf_counter()
    first, batches, tokens = 0.0, 0, 0
    for batch in batches_of(job):
        first = first or time.perf_counter() - start
        batches += 1
        tokens += input_ids_of(batch).numel()
    total = time.perf_counter() - start
    return {
        "first_batch_seconds": first,
        "total_seconds": total,
        "batches": batches,
        "positions": tokens,
    }


def warm(batches_of: Batches, job: Job) -> Measured:
    """To the first batch, and how fast the next ones come."""
    start = time.perf_counter()
    batches = iter(batches_of(job))
    next(batches)
    first = time.perf_counter() - start
    begin, tokens = time.perf_counter(), 0
    for batch in islice(batches, STEADY_BATCHES):
        tokens += input_ids_of(batch).numel()
        if time.perf_counter() - begin > STEADY_SECONDS:
            break
    return {
        "first_batch_seconds": first,
        "steady_tokens_per_second": tokens / (time.perf_counter() - begin),
    }


def waste(batches_of: Batches, job: Job) -> Measured:
    """Rows, tokens without padding, and pieces of documents: each ends with the token that ends a document or with its
    row."""
    tokenizer = job.load_tokenizer()
    rows = tokens = pieces = 0
    for batch in batches_of(job):
        ids = input_ids_of(batch)
        if (
            ids.shape[1] != LENGTH
        ):  # rows laid end to end without their padding: the positions tell where a piece begins
            rows += -(-ids.numel() // LENGTH)
            tokens += ids.numel()
            pieces += int((batch["position_ids"] == 0).sum())
        else:
            real = torch.flip(
                torch.cumsum(torch.flip(ids != tokenizer.pad_token_id, [1]), 1) > 0, [1]
            )  # all but padding at the end
            ends = (ids == tokenizer.eos_token_id) & real
            last = real.sum(1, keepdim=True) - 1
            rows += len(ids)
            tokens += int(real.sum())
            pieces += int(ends.sum()) + int((~ends.gather(1, last)).sum())
    return {
        "rows": rows,
        "tokens": tokens,
        "padding": 1 - tokens / (rows * LENGTH),
        "pieces": pieces,
    }


ACTIONS: dict[str, Callable[[Batches, Job], Measured]] = {
    "cold": cold,
    "warm": warm,
    "waste": waste,
}


def with_labels(batches: Iterable[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """What a causal language model takes, for loaders that give nothing but ids."""
    for batch in batches:
        ids = input_ids_of(batch)
        yield {"input_ids": ids, "labels": ids.clone()}


def input_ids_of(batch: Any) -> torch.Tensor:
    """The ids of a batch, whatever else is in it."""
    ids: torch.Tensor = batch["input_ids"] if isinstance(batch, dict) else batch
    return ids


def peak_memory_mb() -> float:
    """The most memory that this process had; files that it maps count where it touched them."""
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        * 1024
        / 1e6
    )
