"""The way of transformers' run_clm.py: datasets.map to tokenise, and again to concatenate and cut; variant `torch`
reads by with_format."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import datasets
from clock import BATCH, LENGTH, Job, run_program
from torch.utils.data import DataLoader
from transformers import default_data_collator


def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """The script's own: join what came together, cut it into rows, leave out the rest."""
    joined = {name: list(chain(*parts)) for name, parts in examples.items()}
    total = len(joined["input_ids"]) // LENGTH * LENGTH
    cut = {
        name: [ids[at : at + LENGTH] for at in range(0, total, LENGTH)]
        for name, ids in joined.items()
    }
    return {**cut, "labels": cut["input_ids"].copy()}


def batches(job: Job) -> Iterable[Any]:
    """As the script makes them, with preprocessing_num_workers on all cores; a second start finds its caches."""
    datasets.disable_progress_bars()
    tokenizer = job.load_tokenizer()
    rows: Any = datasets.load_dataset(
        "json", data_files=str(job.corpus), split="train", cache_dir=str(job.folder)
    )

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"])

    rows = rows.map(tokenize, batched=True, num_proc=job.workers, remove_columns=["text"])
    rows = rows.map(group_texts, batched=True, num_proc=job.workers)
    if job.variant == "torch":
        return DataLoader(rows.with_format("torch"), batch_size=BATCH)
    return DataLoader(rows, batch_size=BATCH, collate_fn=default_data_collator)


if __name__ == "__main__":
    run_program(batches)
