import random
from dataclasses import replace
from statistics import mean

import torch

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.corpus import IGNORED, Flattened, lengths_in, lengths_of, packed_rows, padded, single_documents


def row(lengths, size):
    ids = torch.arange(1, size + 1)
    positions = torch.cat([torch.arange(length) for length in (*lengths, size - sum(lengths)) if length])
    labels = torch.where((positions == 0) | (torch.arange(size) >= sum(lengths)), IGNORED, ids)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def test_padding_does_not_count_as_a_document():
    assert lengths_in(row([3, 4], 10)) == [3, 4] and lengths_in(row([3, 7], 10)) == [3, 7]


def test_packed_documents_have_the_mean_length_and_fill_all_rows():
    case = CASES["D"]
    lengths = lengths_of(case, random.Random(1))
    assert (
        abs(mean(lengths) - 700) < 35
        and max(lengths) <= case.tokens
        and sum(lengths) > case.steps * case.rows * case.tokens
    )
    assert set(lengths_of(replace(CASES["C"], steps=2), random.Random(1))) == {4096}


def test_the_default_trainer_pads_single_documents():
    documents = single_documents([row([3, 4], 10), row([5], 10)], 2)
    assert [len(documents[number]["input_ids"]) for number in range(len(documents))] == [3, 4, 5]
    batch = padded([documents[0], documents[2]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]] and batch["attention_mask"].sum(
        1
    ).tolist() == [3, 5]
    assert batch["labels"][0].tolist() == [IGNORED, 2, 3, IGNORED, IGNORED]


def test_the_expert_gets_the_same_tokens_in_one_shape_without_a_mask():
    source = [row([3, 4], 10), row([5], 10)]
    batch = Flattened(10)(packed_rows(source, 2))
    assert batch["input_ids"][0].tolist() == [*range(1, 11)] * 2 and "attention_mask" not in batch
    assert batch["labels"][0].tolist() == torch.cat([one["labels"] for one in source]).tolist()
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 10, 15, 20] and batch["max_length_q"] == 10
