"""litdata: `optimize` with a TokensLoader and a worker for each core, read by a StreamingDataset, as its page on
pre-training does it."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clock import BATCH, LENGTH, Job, run_program, with_labels
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from transformers import PreTrainedTokenizerFast


def tokens_of(file: str, tokenizer: PreTrainedTokenizerFast) -> Iterator[torch.Tensor]:
    """Each document of a file with its end."""
    with Path(file).open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
            yield torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int)


def batches(job: Job) -> Iterable[Any]:
    """Tokenised where it was not; workers share out the files. Forked, so that they need not import torch and
    transformers anew."""
    tokens = job.folder / "tokens"
    if not (tokens / "index.json").exists():
        optimize(
            fn=partial(tokens_of, tokenizer=job.load_tokenizer()),
            inputs=[str(file) for file in sorted(job.parts.iterdir())],
            output_dir=str(tokens),
            chunk_size=LENGTH * 8012,  # the page's
            item_loader=TokensLoader(),
            num_workers=job.workers,
            start_method="fork",
            verbose=False,
        )
    dataset = StreamingDataset(
        str(tokens), item_loader=TokensLoader(block_size=LENGTH), shuffle=True
    )
    return with_labels(StreamingDataLoader(dataset, batch_size=BATCH))


if __name__ == "__main__":
    run_program(batches)
