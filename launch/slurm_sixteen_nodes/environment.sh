#!/usr/bin/env bash
# Environment of the run `production-multi-gpu`, read by node.sh on each node. A value that is set already counts.
GPUS=${GPUS_PER_NODE:-8} # processes of a node
# The network interface that leads to the other nodes. Where this finds the wrong one, write its name: INTERFACE=eth0
interface_to() {
    local address
    address=$(getent ahosts "$1" | awk 'NR == 1 { print $1 }') || return 0
    ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p' || true
}
other=${CPT_NODES%%,*}
[ "$NODE_RANK" != 0 ] || other=$(cut -d, -f2 <<< "$CPT_NODES")
INTERFACE=${INTERFACE:-$(interface_to "$other")}
HAS_RTX_40=$(nvidia-smi -L 2>/dev/null | grep -m 1 'RTX 40' || true)

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

# Compute nodes often have no way to the Internet, and all processes at once would ask the Hub about files that are here. Fetch them first,
# on a node that has one: hf download NAME. Set it to 0 to let the run fetch them.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

# Tokenised documents. On a shared disk one process tokenises for all nodes; on disks of their own each node does it again.
export CPT_CACHE="${CPT_CACHE:-$HOME/.cache/cpt}"

# Memory that torch has freed can be used for pieces of another size: fewer runs end for lack of memory that is there.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# NCCL's first meeting, and its traffic where there is no InfiniBand, goes over the interface that leads to the other nodes and not over the
# first one it finds (docker0, a management network). `=`: exactly this name.
if [ -n "$INTERFACE" ]; then export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$INTERFACE}"; fi

# gloo carries what lies in host memory, also beside NCCL. It takes the address of the host's own name, which many systems map to 127.0.1.1:
# the others would wait for it in vain.
if [ -n "$INTERFACE" ]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"; fi

# Cards of the RTX 40 series have no peer-to-peer; NCCL hangs or fails where it tries.
if [ -n "$HAS_RTX_40" ]; then export NCCL_P2P_DISABLE="${NCCL_P2P_DISABLE:-1}"; fi

# The same cards cannot read each other's memory over InfiniBand either.
if [ -n "$HAS_RTX_40" ]; then export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-1}"; fi

# NCCL says why it fails. INFO also says which links it uses: look at it once on a new cluster.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# A failed or late collective ends the process, and leaves no GPU waiting. torchrun sets it, DeepSpeed's launcher does not.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# When a collective takes longer than `training.ddp_timeout` (1800 s), each process writes down its last ones: who was missing, and where.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"

# That goes here, the ranks of all nodes side by side, not to the /tmp of each.
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$PWD/launch/slurm_sixteen_nodes/collectives_of_rank_}"

# Where torchrun itself is told to end, as by SLURM, it kills its processes after 30 s: less than a large model needs to be saved. (torch
# 2.13 reads this; one that does not know it keeps to 30 s.)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

# Compiled kernels are kept on each node's own disk: many nodes that write one shared folder disturb each other.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$(id -un)}"
