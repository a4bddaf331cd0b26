"""mosaicml-streaming: an MDSWriter for each core, their indices merged, read by a StreamingDataset: its page on
parallel conversion."""

import json
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from clock import BATCH, LENGTH, Job, run_program, with_labels

# Its readers of pictures need torchvision, whose wheel on PyPI does not load beside a CPU build of torch.
sys.modules["streaming.vision"] = ModuleType("streaming.vision")
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory, merge_index  # noqa: E402


def write_part(arguments: tuple[Job, Path, Path]) -> None:
    """One file's documents with their ends, laid end to end and cut into rows, as LLM Foundry's ConcatTokensDataset
    does it."""
    job, file, out = arguments
    with MDSWriter(out=str(out), columns={"tokens": "ndarray:int32"}) as writer:
        for row in rows_of(file, job):
            writer.write({"tokens": row})


def rows_of(file: Path, job: Job) -> Iterator[Any]:
    """Rows of a file; what is left over at its end is too short for one."""
    tokenizer, buffer = job.load_tokenizer(), []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            buffer += [*tokenizer.encode(json.loads(line)["text"], add_special_tokens=False), tokenizer.eos_token_id]
            whole = len(buffer) // LENGTH * LENGTH
            for at in range(0, whole, LENGTH):
                yield np.array(buffer[at : at + LENGTH], np.int32)
            buffer = buffer[whole:]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch; its arrays may not be written to, so they are copied."""
    return {"input_ids": torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))}


def batches(job: Job) -> Iterable[Any]:
    """Tokenised where it was not; each process writes the rows of one file."""
    tokens = job.folder / "tokens"
    if not (tokens / "index.json").exists():
        files = sorted(job.parts.iterdir())
        with Pool(job.workers) as pool:
            pool.map(write_part, [(job, file, tokens / file.stem) for file in files])
        merge_index(str(tokens), keep_local=True)
    clean_stale_shared_memory()  # of a process that was killed
    dataset = StreamingDataset(local=str(tokens), batch_size=BATCH, shuffle=True)
    return with_labels(StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=collate))


if __name__ == "__main__":
    run_program(batches)
