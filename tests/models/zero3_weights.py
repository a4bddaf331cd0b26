"""Run by test_several_processes.py under torchrun: build models plain and under ZeRO-3, and compare every weight.

torchrun --nproc_per_node 2 zero3_weights.py '[model sections as JSON]' TOKENS FOLDER [bf16]
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
import torch
from tiny_models import make_tokenizer
from transformers import PreTrainedModel, TrainingArguments

from cpt.distributed import leave_processes
from cpt.hardware import require_programs
from cpt.models.build import build_model
from cpt.models.inventory import count_parameters
from cpt.recipe.schema import Model

run_dtype = torch.bfloat16 if len(sys.argv) > 4 else torch.float32
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "train_batch_size": 2,
    "bf16": {"enabled": run_dtype == torch.bfloat16},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def build(section: dict, num_tokens: int) -> PreTrainedModel:
    return build_model(Model.model_validate(section), make_tokenizer(num_tokens), seed=7, dtype=run_dtype)


def compare(plain: dict[str, torch.Tensor], model: PreTrainedModel) -> dict:
    different = []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            expected = plain.pop(name)
            if parameter.dtype != expected.dtype or not torch.equal(parameter, expected):
                different.append(name)
    partitioned = all(parameter.numel() == 0 for name, parameter in model.named_parameters() if "lora_" not in name)
    return {
        "rank": torch.distributed.get_rank(),
        "partitioned": partitioned,
        "different": different,
        "left": sorted(plain),
    }


sections, tokens, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
require_programs("g++", "ninja", reason="DeepSpeed on a CPU compiles its communication")
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
plain_models = [dict(build(section, tokens).named_parameters()) for section in sections]
arguments = TrainingArguments(
    output_dir=folder,
    bf16=run_dtype == torch.bfloat16,
    per_device_train_batch_size=1,
    use_cpu=True,
    report_to="none",
    deepspeed=DS_CONFIG,
)
for section, plain in zip(sections, plain_models, strict=True):
    model = build(section, tokens)
    count_parameters(model.config)  # must neither partition nor communicate
    os.write(1, (json.dumps(compare(plain, model)) + "\n").encode())  # in one piece: the two processes share the pipe
leave_processes()
