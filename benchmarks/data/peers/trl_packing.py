"""TRL's packing: tokenised by datasets.map, packed by best fit with `bfd_split`, collated as SFTTrainer does it (rows
laid end to end)."""

from collections.abc import Iterable
from typing import Any

import datasets
from clock import BATCH, LENGTH, Job, run_program
from torch.utils.data import DataLoader
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def batches(job: Job) -> Iterable[Any]:
    """Tokenised in batches, which SFTTrainer itself does not do, so that it is not slowed by one call for each
    document."""
    datasets.disable_progress_bars()
    tokenizer = job.load_tokenizer()
    rows: Any = datasets.load_dataset(
        "json", data_files=str(job.corpus), split="train", cache_dir=str(job.folder)
    )

    def tokenize(examples: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(examples["text"], add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]}

    rows = rows.map(tokenize, batched=True, num_proc=job.workers, remove_columns=["text"])
    rows = pack_dataset(rows, LENGTH, "bfd_split", {"num_proc": job.workers})
    collator = DataCollatorForLanguageModeling(tokenizer.pad_token_id, padding_free=True)
    return DataLoader(rows, batch_size=BATCH, collate_fn=collator)


if __name__ == "__main__":
    run_program(batches)
