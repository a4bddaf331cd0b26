"""Two real processes: rows that they share teach the same as whole rows; ZeRO-3 and FSDP2 have the weights of one
process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import TINY, tiny_config
from tiny_models import tiny_model
from transformers import AttentionInterface, AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt.errors import RecipeError
from cpt.models.attention import (
    BOUNDS,
    PROVEN_SHARED,
    PartOfRows,
    attend_over_processes,
    check_shared_rows,
    document_bounds,
    register_varlen,
)

PROGRAM = Path(__file__).with_name("in_two_processes.py")
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
BATCH = {
    "input_ids": torch.arange(16).view(2, 8),
    "labels": torch.arange(16).view(2, 8),
    "position_ids": POSITIONS,
}


def results_of(*words: str) -> list[dict]:
    run = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(PROGRAM),
        *words,
    ]
    paths = {
        "PATH": [str(Path(sys.executable).parent), os.environ["PATH"]],
        "PYTHONPATH": [path for path in sys.path if path],
    }
    environment = os.environ | {name: os.pathsep.join(parts) for name, parts in paths.items()}
    done = subprocess.run(
        [sys.executable, *run], capture_output=True, text=True, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_each_token_has_the_label_of_the_next_also_where_that_lies_in_another_part():
    first, second = (PartOfRows(number, 2)(BATCH) for number in range(2))
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100], [13, 14, 15, -100]]
    assert torch.equal(first["labels"], first["shift_labels"]), (
        "models make a loss only where they are given labels"
    )
    assert all(torch.equal(part[BOUNDS], document_bounds(POSITIONS)) for part in (first, second)), (
        "of whole rows"
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
def test_rows_that_would_teach_something_else_in_parts_are_refused(model_type, parts, attention):
    with pytest.raises(RecipeError, match="sp_size"):
        check_shared_rows(AutoConfig.for_model(model_type, **TINY[model_type]), parts, attention)


@pytest.mark.parametrize(
    ("model_type", "changes", "parts", "named"),
    [
        ("qwen3_moe", {"output_router_logits": True}, 2, "the balance of experts"),
        ("llama", {}, 3, "is 3, which does not divide llama's 4 `num_attention_heads`"),
        ("llama", {}, 4, "is 4, which does not divide llama's 2 `num_key_value_heads`"),
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.0}, 2, None),
        ("qwen3_moe", {"output_router_logits": False}, 2, None),
    ],
)
def test_what_cannot_be_shared_is_named(model_type, changes, parts, named):
    config = AutoConfig.for_model(model_type, **TINY[model_type], **changes)
    if named is None:
        check_shared_rows(config, parts, "varlen")
        return
    with pytest.raises(RecipeError, match=named):
        check_shared_rows(config, parts, "varlen")


@pytest.mark.parametrize(("head_dim", "width"), [(None, 8), (10, 10)])
def test_attention_exchanges_heads_in_training_and_one_position(monkeypatch, head_dim, width):
    made = []

    class Exchange:
        def __init__(self, **options):
            made.append(options)

        def __call__(self, module, query, *others, **options):
            return module.training, others, options

    name = "deepspeed.runtime.sequence_parallel"
    for parent in ("deepspeed", "deepspeed.runtime"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
    of_deepspeed = SimpleNamespace(ulysses_sp=SimpleNamespace(UlyssesSPAttentionHF=Exchange))
    monkeypatch.setitem(sys.modules, name, of_deepspeed)
    register_varlen()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "varlen", "accelerate's")
    config = AutoConfig.for_model("llama", **TINY["llama"], head_dim=head_dim)
    config._attn_implementation = "varlen"
    attend_over_processes(config, 3, "a group")
    (options,) = made
    registered = options.pop("attn")
    assert registered is AttentionInterface()["varlen"]
    assert options == {
        "batch_size": 3,
        "attn_head_count": 4,
        "attn_head_size": width,
        "kv_head_count": 2,
        "num_hidden_layers": 2,
        "process_group": "a group",
        "seq_length_is_variable": True,
        "disable_in_eval": True,
    }
    attend = ALL_ATTENTION_FUNCTIONS["varlen"]
    positions = torch.arange(6)[None]
    query = torch.zeros(1, 2, 6, 8)
    given = {"position_ids": positions, "scaling": 0.3}
    training, others, kept = attend(torch.nn.ReLU().eval(), query, "key", "value", **given)
    assert (training, others, kept) == (False, ("key", "value"), given)
    training, others, kept = attend(torch.nn.ReLU(), query, "key", "value", **given)
    assert (training, others, kept["scaling"]) == (True, ("key", "value"), 0.3)
    assert kept["position_ids"].tolist() == [[0]]


@pytest.mark.long
def test_proven_models_learn_the_same_from_parts_of_rows():
    names = PROVEN_SHARED.split()
    found = [(line["model"], line["difference"]) for line in results_of("rows", *names)]
    assert {name for name, _ in found} == set(names)
    assert [(name, difference) for name, difference in found if difference > 2e-6] == []


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of `model:` sections: new weights with adapters, loaded experts, a grown vocabulary, buffers that are saved. And
    of a model of 200 MB."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("gpt2", "minimind2_moe"):
        tiny_model(name).save_pretrained(folder / name)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
    }
    tiny_model(tiny_config("llama", **sizes)).save_pretrained(folder / "large")
    sections = [
        {
            "from_scratch": True,
            "config": tiny_config("llama"),
            "lora": {"r": 2},
            "resize_embeddings": True,
        },
        {"path": str(folder / "minimind2_moe"), "resize_embeddings": True},
        {
            "path": str(folder / "gpt2"),
            "config": tiny_config("cpt-gpt2"),
            "resize_embeddings": True,
        },
        {"from_scratch": True, "config": tiny_config("deepseek_v3"), "resize_embeddings": True},
    ]
    large = {"path": str(folder / "large"), "resize_embeddings": True}
    lines = results_of(json.dumps({"memory": large, "fsdp": sections, "zero3": sections[:3]}))
    return lambda name: [line for line in lines if line["of"] == name]


@pytest.mark.slow
def test_each_process_gets_its_part_of_the_main_process_weights(results):
    assert results("fsdp") == 2 * 4 * [{"of": "fsdp", "different": []}]
    assert results("zero3") == 2 * 3 * [{"of": "zero3", "partitioned": True, "different": []}]


@pytest.mark.slow
def test_under_fsdp2_only_the_main_process_has_the_whole_model_in_memory(results):
    """Each of two processes keeps half."""
    main, other = sorted(results("memory"), key=lambda line: line["rank"])
    assert other["once"] < 0.8 and other["everywhere"] > 1.2 and main["once"] > 1.2
