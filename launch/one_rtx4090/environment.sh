#!/usr/bin/env bash
# Environment of the run `prototype-rtx4090`, read by node.sh on each node. A value that is set already counts.
GPUS=${GPUS_PER_NODE:-1} # processes of a node

# ssh and SLURM start programs with a bare PATH; DeepSpeed also looks there for ninja when it compiles.
export PATH="$PWD/.venv/bin:$PATH"

# What a process prints before it dies is in the log, and in order.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"

# A node's cores are shared by its processes. torchrun would give each of them 1 thread, DeepSpeed's launcher all the cores; an optimizer
# that is offloaded to the CPU needs its share.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( ($(nproc) + GPUS - 1) / GPUS ))}"

# Data workers are forks of a process that has used the tokenizer, whose threads would deadlock them.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

# Models and datasets of the Hub. With several nodes it must be on a disk that all of them see, or be filled on each.
export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"

# Tokenised documents. On a shared disk one process tokenises for all nodes; on disks of their own each node does it again.
export CPT_CACHE="${CPT_CACHE:-$HOME/.cache/cpt}"

# Memory that torch has freed can be used for pieces of another size: fewer runs end for lack of memory that is there.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# Where torchrun itself is told to end, as by SLURM, it kills its processes after 30 s: less than a large model needs to be saved. (torch
# 2.13 reads this; one that does not know it keeps to 30 s.)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
