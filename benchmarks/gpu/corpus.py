"""The rows that all systems train on: Python's own standard library, word by word.

Random words would do for speed, but their loss falls no lower than ln W: errors of rounding in the loss or its
gradient would not show.
"""

import hashlib
import json
import math
import random
import re
import sysconfig
from collections import Counter
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerFast

from benchmarks.gpu.cases import Case

MOST_WORDS = 16_000  # in the vocabulary; all others are <unk>
MEAN_LENGTH, SPREAD = (
    700,
    1.0,
)  # of packed documents: tokens, and the standard deviation of their logarithm
IGNORED = -100
SEED = 7
Row = dict[str, torch.Tensor]


def prepare(case: Case, folder: Path) -> None:
    """Write a tokenizer of whole words, and documents for all steps of the case."""
    lengths = lengths_of(case, random.Random(SEED))
    words = words_of_python()
    common = Counter(words).most_common(min(MOST_WORDS, case.config["vocab_size"]) - 2)
    vocabulary = {"<unk>": 0, "<eos>": 1} | {
        word: number for number, (word, _) in enumerate(common, 2)
    }
    text = list(islice(cycle([word for word in words if word in vocabulary]), sum(lengths)))
    plain = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder / "tokenizer")
    at = 0
    with (folder / "corpus.jsonl").open("w") as file:
        for length in lengths:
            file.write(
                json.dumps({"text": " ".join(text[at : at + length - 1])}) + "\n"
            )  # <eos> is the last token
            at += length
    (folder / "corpus.hash").write_text(hashlib.sha256(" ".join(text).encode()).hexdigest()[:16])


@cache
def words_of_python() -> list[str]:
    """Words and punctuation of the standard library's source, in the order of its files' names."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "__pycache__",
    }
    files = sorted(
        path
        for path in library.rglob("*.py")
        if not skipped.intersection(path.relative_to(library).parts)
    )
    return [
        word
        for path in files
        for word in re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8", errors="ignore"))
    ]


def lengths_of(case: Case, draw: random.Random) -> list[int]:
    """Lengths of documents that fill all rows, and a tenth more. Unpacked rows hold one document."""
    needed = int(1.1 * case.steps * case.rows * case.tokens) + case.tokens
    lengths: list[int] = []
    mean = min(MEAN_LENGTH, case.tokens // 4)
    while needed > 0:
        drawn = (
            round(draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))
            if case.packed
            else case.tokens
        )
        lengths.append(min(max(2, drawn), case.tokens))
        needed -= lengths[-1]
    return lengths


def split(row: Row) -> list[Row]:
    """Split a row at its documents, which begin where positions are 0. The last one may be padding, which has no
    labels."""
    begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["input_ids"])]
    return [
        {name: row[name][at:end] for name in ("input_ids", "labels")}
        for at, end in zip(begins, begins[1:], strict=False)
    ]


def has_labels(document: Row) -> bool:
    return bool((document["labels"] != IGNORED).any())


def lengths_in(row: Row) -> list[int]:
    return [len(document["input_ids"]) for document in split(row) if has_labels(document)]


def whole_rows(rows: Any, count: int) -> list[Any]:
    return [
        {name: rows[number][name] for name in ("input_ids", "labels")} for number in range(count)
    ]


def single_documents(rows: Any, count: int) -> list[Any]:
    """The documents of packed rows, one at a time."""
    return [
        document
        for number in range(count)
        for document in split(rows[number])
        if has_labels(document)
    ]


def packed_rows(rows: Any, count: int) -> list[Any]:
    """Packed rows as lists of documents; padding stays as one more, so that all batches have the same shape."""
    return [split(rows[number]) for number in range(count)]


def padded(documents: list[Row]) -> Row:
    """Pad to the longest document of the batch, as transformers' collators do."""
    ids = pad_sequence([document["input_ids"] for document in documents], batch_first=True)
    labels = pad_sequence(
        [document["labels"] for document in documents], batch_first=True, padding_value=IGNORED
    )
    masks = pad_sequence(
        [torch.ones_like(document["input_ids"]) for document in documents], batch_first=True
    )
    return {"input_ids": ids, "labels": labels, "attention_mask": masks}


class Flattened:
    """Join packed rows to one sequence without padding, with transformers' own collator.

    Args:
        tokens: the length of a row, passed as the longest document: a number that changed would compile the model
            again.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.collate = (
            tokens,
            DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        )

    def __call__(self, rows: list[list[Row]]) -> dict[str, Any]:
        batch = self.collate([document for row in rows for document in row])
        return {**batch, "max_length_q": self.tokens, "max_length_k": self.tokens}
