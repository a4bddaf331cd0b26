"""Two real processes: rows that they share teach the same as whole rows, and ZeRO-3 builds the same weights as one
process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import TINY, tiny_config, tiny_model
from transformers import AutoConfig

from cpt.errors import RecipeError
from cpt.models.attention import BOUNDS, PROVEN_SHARED, PartOfRows, check_shared_rows, document_bounds

PROGRAM = Path(__file__).with_name("in_two_processes.py")
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
BATCH = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8), "position_ids": POSITIONS}


def results_of(*words: str) -> list[dict]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(PROGRAM), *words]
    paths = {
        "PATH": [str(Path(sys.executable).parent), os.environ["PATH"]],
        "PYTHONPATH": [path for path in sys.path if path],
    }
    environment = os.environ | {name: os.pathsep.join(parts) for name, parts in paths.items()}
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_each_token_has_the_label_of_the_next_also_where_that_lies_in_another_part():
    first, second = (PartOfRows(number, 2)(BATCH) for number in range(2))
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100], [13, 14, 15, -100]]
    assert torch.equal(first["labels"], first["shift_labels"]), "models make a loss only where they are given labels"
    assert all(torch.equal(part[BOUNDS], document_bounds(POSITIONS)) for part in (first, second)), "of whole rows"


@pytest.mark.parametrize(
    ("model_type", "parts", "attention"),
    [("llama", 2, "sdpa"), ("deepseek_v3", 2, "varlen"), ("llama", 3, "varlen"), ("llama", 4, "varlen")],
)
def test_rows_that_would_teach_something_else_in_parts_are_refused(model_type, parts, attention):
    with pytest.raises(RecipeError, match="sp_size"):
        check_shared_rows(AutoConfig.for_model(model_type, **TINY[model_type]), parts, attention)


@pytest.mark.long
def test_proven_models_learn_the_same_from_parts_of_rows():
    names = PROVEN_SHARED.split()
    found = [(line["model"], line["difference"]) for line in results_of("rows", *names)]
    assert {name for name, _ in found} == set(names)
    assert [(name, difference) for name, difference in found if difference > 2e-6] == []


@pytest.mark.slow
def test_new_loaded_and_grown_weights_are_the_same_with_and_without_zero3(tmp_path):
    for name in ("gpt2", "minimind2_moe"):
        tiny_model(name).save_pretrained(tmp_path / name)
    sections = [
        {"from_scratch": True, "config": tiny_config("llama"), "lora": {"r": 2}},
        {"path": str(tmp_path / "minimind2_moe")},
        {"path": str(tmp_path / "gpt2"), "config": tiny_config("cpt-gpt2")},
    ]
    results = results_of("zero3", json.dumps([{**section, "resize_embeddings": True} for section in sections]))
    assert results == 2 * len(sections) * [{"partitioned": True, "different": []}]
