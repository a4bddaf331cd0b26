"""Run by test_several_processes.py under torchrun; each result is a line of JSON.

in_two_processes.py rows MODEL_TYPE...           loss and gradients of rows that both share, against whole rows
in_two_processes.py '{name: argument}'           one after the other, of
    memory, a model section      peak memory of building for FSDP2, against that of building everywhere; as the first
    fsdp, model sections         weights under FSDP2, against those of a plain model
    zero3, model sections        the same under ZeRO-3
"""

import gc
import json
import os
import resource
import sys
import tempfile
from types import SimpleNamespace

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups
import psutil
import torch
import torch.distributed as dist
from test_varlen import IDS, POSITIONS, tiny_of
from tiny_models import gradients, make_tokenizer
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt.distributed import leave_processes
from cpt.hardware import require_programs
from cpt.models.attention import (
    VARLEN,
    PartOfRows,
    add_document_bounds,
    attend_over_processes,
    check_shared_rows,
    keep_documents_apart,
    register_varlen,
)
from cpt.models.build import build_model
from cpt.models.inventory import count_parameters
from cpt.recipe.schema import Model
from cpt.training.engine import Engine

PROCESSES, NUM_TOKENS = 2, 150


def put(result: dict) -> None:
    os.write(
        1, (json.dumps(result) + "\n").encode()
    )  # in one piece: the two processes share the pipe


def loss_and_gradients(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """One after the other in a row of numbers."""
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=IDS.numel()).loss
    loss.backward()
    return torch.cat(
        [loss.detach()[None], *(gradient.flatten() for gradient in gradients(model).values())]
    )


def compare_rows(model_type: str) -> None:
    torch.manual_seed(1)
    model = (
        AutoModelForCausalLM.from_config(tiny_of(model_type), attn_implementation=VARLEN)
        .float()
        .train()
    )
    keep_documents_apart(model)
    batch = {"input_ids": IDS, "labels": IDS, "position_ids": POSITIONS}
    expected = loss_and_gradients(model, add_document_bounds(batch))
    check_shared_rows(model.config, PROCESSES, VARLEN)
    attend_over_processes(model.config, len(IDS), groups.get_sequence_parallel_group())
    found = loss_and_gradients(model, PartOfRows(dist.get_rank(), PROCESSES)(batch))
    del ALL_ATTENTION_FUNCTIONS[VARLEN]
    dist.all_reduce(found)
    put({"model": model_type, "difference": float((found - expected).abs().max())})


def build(section: dict, **options: bool):
    return build_model(Model.model_validate(section), make_tokenizer(NUM_TOKENS), seed=7, **options)


def shard(model: torch.nn.Module) -> torch.nn.Module:
    Engine(SimpleNamespace(model=model)).shard(lambda _: fully_shard(model), None)
    return model


def compare_fsdp(sections: list[dict]) -> None:
    for section in sections:
        plain, model = build(section), shard(build(section, is_sharded_later=True))
        found = {name: value.full_tensor() for name, value in model.named_parameters()} | dict(
            model.named_buffers()
        )
        expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
        different = [
            name
            for name in expected.keys() & found.keys()
            if not torch.equal(expected[name], found[name])
        ]
        put({"of": "fsdp", "different": sorted([*different, *(expected.keys() ^ found.keys())])})


def measure_memory(section: dict) -> None:
    """Growth of this process's peak, first as for FSDP2."""
    before, growth = psutil.Process().memory_info().rss, []
    for once in (True, False):
        model = shard(build(section, is_sharded_later=once))
        growth.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        del model
        gc.collect()
    put(
        {
            "of": "memory",
            "rank": dist.get_rank(),
            "once": growth[0] / size,
            "everywhere": growth[1] / size,
        }
    )


def compare_zero3(sections: list[dict]) -> None:
    plain_models = [dict(build(section).named_parameters()) for section in sections]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    profile = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": PROCESSES,
        "zero_optimization": zero,
    }
    folder = tempfile.gettempdir()
    kept = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=1, use_cpu=True, deepspeed=profile
    )
    for section, plain in zip(sections, plain_models, strict=True):
        model = build(section)
        count_parameters(model.config)  # must neither partition nor communicate
        parameters = dict(model.named_parameters())
        different = sorted(plain.keys() ^ parameters.keys())
        partitioned = all(p.numel() == 0 for name, p in parameters.items() if "lora_" not in name)
        for name, parameter in parameters.items():
            with deepspeed.zero.GatheredParameters([parameter]):
                if not torch.equal(parameter, plain[name]):
                    different.append(name)
        put({"of": "zero3", "partitioned": partitioned, "different": different})
    assert kept.deepspeed == profile


torch.set_num_threads(1)
require_programs("g++", "ninja", reason="DeepSpeed on a CPU compiles its communication")
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
if sys.argv[1] == "rows":
    groups.initialize_sequence_parallel(PROCESSES)
    register_varlen()
    for name in sys.argv[2:]:
        compare_rows(name)
else:
    for name, given in json.loads(sys.argv[1]).items():
        {"zero3": compare_zero3, "fsdp": compare_fsdp, "memory": measure_memory}[name](given)
leave_processes()
