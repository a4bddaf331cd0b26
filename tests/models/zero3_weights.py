"""Run by test_zero3.py under torchrun: build the same model as plain and under ZeRO-3, and compare every weight.

    torchrun --nproc_per_node 2 zero3_weights.py '<model section as JSON>' <tokens> <file for the plain weights>
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
import torch
from conftest import make_tokenizer
from transformers import TrainingArguments

from cpt.models.build import build_model
from cpt.models.inventory import count_parameters
from cpt.recipe.schema import Model

section, num_tokens, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
plain = dict(build_model(Model.model_validate(section), make_tokenizer(num_tokens), seed=7).named_parameters())

ds_config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "train_batch_size": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=1, use_cpu=True, report_to="none", deepspeed=ds_config)
model = build_model(Model.model_validate(section), make_tokenizer(num_tokens), seed=7)
partitioned = all(parameter.numel() == 0 for name, parameter in model.named_parameters() if "lora_" not in name)
count_parameters(model.config)  # must not partition anything
different = []
for name, parameter in model.named_parameters():
    with deepspeed.zero.GatheredParameters([parameter]):
        if not torch.equal(parameter, plain.pop(name)):
            different.append(name)
print(json.dumps({"rank": torch.distributed.get_rank(), "partitioned": partitioned, "different": different, "left": sorted(plain)}))
