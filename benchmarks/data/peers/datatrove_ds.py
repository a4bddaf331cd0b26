"""datatrove: DocumentTokenizer on a LocalPipelineExecutor with a task for each core, read by
DatatroveFolderDataset."""

from collections.abc import Iterable
from typing import Any

from clock import BATCH, LENGTH, Job, run_program, with_labels
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.dataset import DatatroveFolderDataset
from loguru import logger
from torch.utils.data import DataLoader


def batches(job: Job) -> Iterable[Any]:
    """Tokenised where it was not; tasks share out the files. Forked, so that workers need not import torch and
    transformers anew."""
    logger.disable("datatrove")
    tokens, tokenizer = job.folder / "tokens", job.load_tokenizer()
    if not (job.folder / "logs" / "completions").exists():
        path = str(job.tokenizer / "tokenizer.json")
        pipeline = [
            JsonlReader(str(job.parts)),
            DocumentTokenizer(str(tokens), path, eos_token=tokenizer.eos_token),
        ]
        LocalPipelineExecutor(
            pipeline, tasks=job.workers, logging_dir=str(job.folder / "logs"), start_method="fork"
        ).run()
    token_size = 2 if len(tokenizer) <= 2**16 else 4
    # It gives one token more than seq_len, for labels that are shifted outside of the model.
    dataset = DatatroveFolderDataset(str(tokens), LENGTH - 1, token_size=token_size)
    return with_labels(DataLoader(dataset, batch_size=BATCH))


if __name__ == "__main__":
    run_program(batches)
