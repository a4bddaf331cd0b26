"""Run by test_optimizers.py: DeepSpeed's Muon, with our scale by shape, against ours in one process.

Writes for each stage of ZeRO: the relative difference of the matrices' updates without clipping, the norm that is
clipped, and how much smaller the updates are with `gradient_clipping: 1.0`.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed compiles its Newton-Schulz

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from tiny_training import tiny_llama
from torch import nn

from cpt.distributed import leave_processes
from cpt.optim.build import build_optimizer
from cpt.optim.groups import MATRICES, parameter_groups
from cpt.process import free_port
from cpt.recipe.schema import Optimizer

ROWS, RATE, DECAY, STEPS = 4, 1e-2, 0.1, 3
IDS = torch.arange(1, 1 + STEPS * ROWS * 16).view(STEPS, ROWS, 16) % 90


def updates_of(model: nn.Module, before: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the matrices in layers, one after the other in a row of numbers."""
    updates = []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else nullcontext():
            if ".layers." in name and parameter.dim() == 2:
                updates.append((parameter.detach() - before[name]).flatten())
    return torch.cat(updates)


def muon_of_deepspeed(model: nn.Module) -> torch.optim.Optimizer:
    groups = []
    for group in parameter_groups(model, matrices_apart=True):
        is_muon = group.pop(MATRICES)
        for width in sorted({parameter.shape[-1] for parameter in group["params"]}):
            # its scale is sqrt(max(1, rows / columns)), ours 0.2 sqrt(max(rows, columns))
            scale = 0.2 * width**0.5 if is_muon else 1.0
            parameters = [parameter for parameter in group["params"] if parameter.shape[-1] == width]
            for parameter in parameters:
                parameter.use_muon = is_muon
            options = {"momentum": 0.95, "ns_method": "standard"} if is_muon else {"betas": (0.9, 0.95), "eps": 1e-8}
            rates = {"lr": RATE * scale, "weight_decay": group.get("weight_decay", DECAY) / scale}
            groups.append({"params": parameters, "use_muon": is_muon, **rates, **options})
    return MuonWithAuxAdam(groups)


def train(stage: int, clipping: float) -> tuple[torch.Tensor, float]:
    model, rows = tiny_llama(), ROWS // dist.get_world_size()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": rows, "gradient_clipping": clipping}
    config["zero_optimization"] = {"stage": stage, "reduce_scatter": False, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=muon_of_deepspeed(model), config=config)
    for step in range(STEPS):
        ids = IDS[step, dist.get_rank() * rows :][:rows]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return updates_of(model, before), float(engine.get_global_grad_norm())


if "RANK" not in os.environ:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()))
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
model = tiny_llama()
before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
optimizer = build_optimizer(Optimizer(name="muon", learning_rate=RATE, weight_decay=DECAY), model)
for step in range(STEPS):
    model(input_ids=IDS[step], labels=IDS[step]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
ours, found = updates_of(model, before), []
for stage in (1, 2, 3):
    theirs, norm = train(stage, clipping=0.0)
    clipped, _ = train(stage, clipping=1.0)
    difference, smaller = float((theirs - ours).norm() / ours.norm()), float(theirs.norm() / clipped.norm())
    found.append({"difference": difference, "norm": norm, "smaller": smaller})
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
leave_processes()
