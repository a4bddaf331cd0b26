# The environment of the run's processes, read by node.sh on each node. A value that is already set is kept, except for PATH.
# shellcheck shell=bash disable=SC2154 # node.sh sets the names in capitals

# ssh and SLURM start programs with a bare PATH; DeepSpeed also looks there for ninja when it compiles.
PATH="$(realpath -s "$VENV")/bin:$PATH"
export PATH

# What a process prints before it dies is in the log, and in order.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"

# The processes of a node share its cores. torchrun would give each of them 1 thread, DeepSpeed's launcher all the cores; an optimizer that
# is offloaded to the CPU needs its share.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(nproc) + GPUS_PER_NODE - 1) / GPUS_PER_NODE))}"

# Data workers are forks of a process that has used the tokenizer, whose threads would deadlock them.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

# Models and datasets of the Hub. With several nodes: on a disk that all of them see, or filled on each.
export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"

# Tokenised documents. On a shared disk one process tokenises for all nodes; on its own disk each node does it again.
export CPT_CACHE="${CPT_CACHE:-$HOME/.cache/cpt}"

# Freed GPU memory can be used for blocks of another size: fewer runs end out of memory.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# NCCL reports why it fails. INFO also shows which links it uses: look at it once on a new cluster.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# When a collective takes longer than `training.ddp_timeout` (1800 s), each process writes its last ones here, the ranks of all nodes side
# by side: which rank was missing, and where.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$PWD/$FOLDER/collectives_of_rank_}"

# Where torchrun itself gets SIGTERM, as from SLURM, it kills its processes after 30 s: less than a large model needs to be saved. (torch
# 2.13 reads this; older versions keep to 30 s.)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

if [ "$NODES" -gt 1 ]; then
    # Compute nodes often have no Internet, and all processes at once would ask the Hub about files that are here. Fetch them first, on a
    # node that has one: hf download NAME. Set it to 0 to let the run fetch them.
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

    # The network interface that leads to the other nodes. If this finds the wrong one, write its name here: INTERFACE=eth0
    other=${HOSTS[$((NODE_RANK == 0))]}
    address=$(getent ahosts "$other" | awk 'NR == 1 { print $1 }') || true
    INTERFACE=${INTERFACE:-$(ip -o route get "$address" 2> /dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p' || true)}
    if [ -n "$INTERFACE" ]; then
        # NCCL connects over this interface and not over the first one that it finds (docker0, a management network). `=`: exactly this one.
        export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$INTERFACE}"
        # gloo carries what is in host memory, also when NCCL is used. By default it takes the address of the host's own name, which many
        # systems map to 127.0.1.1, where the others cannot reach it.
        export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
    fi

    # What DeepSpeed and Triton compile is on each node's own disk: on a shared one the nodes wait for each other's locks, after a crash for
    # ever.
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-/tmp/torch_extensions-$(id -un)}"
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$(id -un)}"
fi
