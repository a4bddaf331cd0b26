"""Run by test_several_processes.py under torchrun: loss and gradients of models whose rows two processes share,
against whole rows.

torchrun --nproc_per_node 2 rows_of_models.py MODEL_TYPE...
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups
import torch
import torch.distributed as dist
from test_varlen import IDS, POSITIONS, tiny_of
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt.distributed import leave_processes
from cpt.errors import RecipeError
from cpt.models.attention import (
    VARLEN,
    PartOfRows,
    add_document_bounds,
    attend_over_processes,
    check_shared_rows,
    keep_documents_apart,
    register_varlen,
)

PARTS = 2


def loss_and_gradients(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """One after the other in a row of numbers."""
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=IDS.numel()).loss
    loss.backward()
    gradients = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    return torch.cat([loss.detach()[None], *gradients])


def difference(model_type: str) -> str | float:
    """The largest one, or why there is none."""
    torch.manual_seed(1)
    config = tiny_of(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN).float().train()
    keep_documents_apart(model)
    batch = {"input_ids": IDS, "labels": IDS, "position_ids": POSITIONS}
    expected = loss_and_gradients(model, add_document_bounds(batch))
    check_shared_rows(model.config, PARTS, VARLEN)
    attend_over_processes(model.config, len(IDS), groups.get_sequence_parallel_group())
    try:
        found = loss_and_gradients(model, PartOfRows(dist.get_rank(), PARTS)(batch))
    finally:
        del ALL_ATTENTION_FUNCTIONS[VARLEN]
    dist.all_reduce(found)
    return float((found - expected).abs().max())


torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
groups.initialize_sequence_parallel(PARTS)
register_varlen()
for name in sys.argv[1:]:
    try:
        result = difference(name)
    except (RecipeError, AssertionError, RuntimeError, AttributeError, TypeError, ValueError, KeyError) as problem:
        result = f"{type(problem).__name__}: {problem}"
    if dist.get_rank() == 0:
        print(json.dumps({"model": name, "difference": result}), flush=True)
leave_processes()
