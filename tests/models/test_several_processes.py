"""Rows in parts: what a process gets of them, which models learn the same from them, and who is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import TINY
from transformers import AutoConfig

from cpt.errors import RecipeError
from cpt.models.attention import (
    BOUNDS,
    LONGEST,
    PROVEN_SHARED,
    PartOfRows,
    add_document_bounds,
    check_shared_rows,
    document_bounds,
)

PROGRAM = Path(__file__).parent / "rows_of_models.py"
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
BATCH = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8), "position_ids": POSITIONS}


def test_each_token_has_the_label_of_the_next_also_where_that_lies_in_another_part():
    first, second = (PartOfRows(number, 2)(BATCH) for number in range(2))
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100], [13, 14, 15, -100]]
    assert torch.equal(first["labels"], first["shift_labels"]), "models make a loss only where they are given labels"


def test_every_part_knows_the_documents_of_whole_rows():
    for number in range(2):
        part = PartOfRows(number, 2)(BATCH)
        assert (
            torch.equal(part[BOUNDS], document_bounds(POSITIONS))
            and part[LONGEST] == add_document_bounds(BATCH)[LONGEST]
        )


@pytest.mark.parametrize(
    ("model_type", "parts", "attention"),
    [
        ("llama", 2, "sdpa"),
        ("deepseek_v3", 2, "varlen"),
        ("llama", 3, "varlen"),
        ("llama", 4, "varlen"),
    ],
)
def test_what_would_learn_something_else_is_refused(model_type, parts, attention):
    with pytest.raises(RecipeError, match="sp_size"):
        check_shared_rows(AutoConfig.for_model(model_type, **TINY[model_type]), parts, attention)


def differences(*model_types):
    """Of losses and gradients with two processes, by model."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(PROGRAM),
        *model_types,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=540)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]
    assert len(found) == len(model_types), done.stdout[-2000:] + done.stderr[-4000:]
    return {line["model"]: line["difference"] for line in found}


@pytest.mark.slow
@pytest.mark.long
def test_proven_models_learn_the_same_from_parts_of_rows():
    found = differences(*PROVEN_SHARED.split())
    assert {
        name: difference
        for name, difference in found.items()
        if not isinstance(difference, float) or difference > 2e-6
    } == {}
