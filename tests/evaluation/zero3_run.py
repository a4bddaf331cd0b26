"""Two processes start this: the same figures and texts from a plain model and from one that ZeRO-3 keeps in parts."""

import json
import os
import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

from cpt.data.rows.held_out import HeldOutSet
from cpt.evaluation.scoring import continue_prompts, scored_batches, sum_over_processes
from cpt.hardware import require_programs

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # small parameters too
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def held_out_set(vocabulary_size):
    ids = torch.randint(3, vocabulary_size, (5, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(16)} for row in ids]
    return HeldOutSet(name="general", rows=rows, num_documents=5)


def nats(model, held_out):
    sums = sum(batch.nats.sum() for batch in scored_batches(model, held_out, 2))
    sum_over_processes(sums)
    return sums.item()


def main(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    require_programs("g++", "ninja", reason="DeepSpeed on a CPU compiles its communication")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    keep_alive = HfDeepSpeedConfig(CONFIG)  # transformers asks it whether ZeRO-3 is on
    engine, *_ = deepspeed.initialize(model=AutoModelForCausalLM.from_pretrained(folder), config=CONFIG)
    held_out = held_out_set(len(tokenizer))
    figures = [nats(model, held_out) for model in (plain, engine, engine.module)]
    texts = [
        continue_prompts(model, tokenizer, ["def", "x"], max_new_tokens=6) for model in (plain, engine, engine.module)
    ]
    parted = all(parameter.numel() == 0 for parameter in engine.module.parameters())
    loss = engine(
        **{key: torch.stack([row[key] for row in held_out.rows[:2]]) for key in ("input_ids", "labels")}
    ).loss
    engine.backward(loss)  # training still works after them
    engine.step()
    del keep_alive
    line = {"figures": figures, "texts": texts, "parted": parted, "training": engine.training}
    print("\nRESULT " + json.dumps(line), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # torch 2.13 can hang in ~ProcessGroupGloo


if __name__ == "__main__":
    main(sys.argv[1])
