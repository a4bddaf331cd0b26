"""Rows for all systems: words drawn at random, in documents that fill a row, or in documents of lognormal lengths."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.cases import Case

WORDS = 500
MEAN_LENGTH, SPREAD = 700, 1.0  # tokens, and sigma of their logarithm
IGNORED = -100
SEED = 7


def prepare(case: Case, folder: Path) -> None:
    """A tokenizer of whole words, and documents for all steps of the case."""
    words = {"<unk>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder / "tokenizer")
    draw = random.Random(SEED)
    names = list(words)[2:]
    with (folder / "corpus.jsonl").open("w") as file:
        for length in lengths_of(case, draw):
            file.write(json.dumps({"text": " ".join(draw.choices(names, k=length - 1))}) + "\n")  # the last token ends the document


def lengths_of(case: Case, draw: random.Random) -> list[int]:
    """Of documents that make up all rows, and a tenth more."""
    needed = int(1.1 * case.steps * case.rows * case.tokens) + case.tokens
    lengths: list[int] = []
    mean = min(MEAN_LENGTH, case.tokens // 4)
    while needed > 0:
        drawn = round(draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)) if case.packed else case.tokens
        lengths.append(min(max(2, drawn), case.tokens))
        needed -= lengths[-1]
    return lengths


@dataclass(frozen=True)
class Content:
    """What a row holds."""

    lengths: list[int]
    """Of its documents."""

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(self.lengths)


def content_of(row: dict[str, torch.Tensor]) -> Content:
    """A document begins where positions do; one without labels is padding."""
    begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["input_ids"])]
    pieces = zip(begins, begins[1:], strict=False)
    return Content([after - begin for begin, after in pieces if (row["labels"][begin:after] != IGNORED).any()])


class WholeRows(Dataset[dict[str, torch.Tensor]]):
    """The first rows as the Trainer takes them, which knows neither positions nor documents."""

    def __init__(self, rows: Any, count: int) -> None:
        self.rows = [{name: rows[number][name] for name in ("input_ids", "labels")} for number in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.rows[number]


class SingleDocuments(WholeRows):
    """The documents of the same rows, each by itself."""

    def __init__(self, rows: Any, count: int) -> None:
        self.rows = []
        for number in range(count):
            row, at = rows[number], 0
            for length in content_of(row).lengths:
                self.rows.append({name: row[name][at : at + length] for name in ("input_ids", "labels")})
                at += length


def padded(documents: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest of the batch, as transformers' collators do."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([document["input_ids"] for document in documents], batch_first=True)
    labels = pad([document["labels"] for document in documents], batch_first=True, padding_value=IGNORED)
    masks = pad([torch.ones_like(document["input_ids"]) for document in documents], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": masks}
