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
from cpt.models.attention import (
    BOUNDS,
    LONGEST,
    PROVEN_SHARED,
    PartOfRows,
    add_document_bounds,
    check_shared_rows,
    document_bounds,
)

HERE = Path(__file__).parent
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
BATCH = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8), "position_ids": POSITIONS}


def results_of(program: str, *words: str) -> list[dict]:
    """The lines of JSON that two processes print."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(HERE / program), *words]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# --- rows that processes share ---------------------------------------------------------------------------------------


def test_each_token_has_the_label_of_the_next_also_where_that_lies_in_another_part():
    first, second = (PartOfRows(number, 2)(BATCH) for number in range(2))
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100], [13, 14, 15, -100]]
    assert torch.equal(first["labels"], first["shift_labels"]), "models make a loss only where they are given labels"
    for part in (first, second):
        assert torch.equal(part[BOUNDS], document_bounds(POSITIONS)), "of whole rows"
        assert part[LONGEST] == add_document_bounds(BATCH)[LONGEST]


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
    found = {line["model"]: line["difference"] for line in results_of("rows_of_models.py", *names)}
    assert found.keys() == set(names)
    assert {name: found[name] for name in names if not isinstance(found[name], float) or found[name] > 2e-6} == {}


# --- ZeRO-3 ----------------------------------------------------------------------------------------------------------


def assert_zero3_builds_the_same(sections: list[dict], num_tokens: int, folder: Path, *options: str) -> None:
    results = results_of("zero3_weights.py", json.dumps(sections), str(num_tokens), str(folder), *options)
    assert len(results) == 2 * len(sections)
    for result in results:
        assert result["partitioned"] and result["different"] == [] and result["left"] == []


@pytest.mark.slow
def test_a_seed_means_the_same_weights_with_and_without_zero3(tmp_path):
    sections = [{"from_scratch": True, "config": tiny_config(name)} for name in ("llama", "cpt-gpt2", "minimind2_moe")]
    assert_zero3_builds_the_same([*sections, sections[0] | {"lora": {"r": 2}}], 96, tmp_path)


@pytest.mark.long
def test_loaded_and_grown_weights_are_the_same_with_and_without_zero3(tmp_path):
    for name in ("llama", "gpt2", "minimind2_moe"):
        tiny_model(name).save_pretrained(tmp_path / name)
    grown = {name: {"path": str(tmp_path / name), "resize_embeddings": True} for name in os.listdir(tmp_path)}
    sections = [*grown.values(), grown["gpt2"] | {"config": tiny_config("cpt-gpt2")}]
    assert_zero3_builds_the_same(sections, 150, tmp_path)
    assert_zero3_builds_the_same([*sections, grown["llama"] | {"lora": {"r": 2}}], 96, tmp_path, "bf16")
