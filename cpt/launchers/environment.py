"""The variables that a run's processes find, each with its reason: `environment.sh`, and what DeepSpeed's launcher
passes on."""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

from cpt.launchers.launch import Launch
from cpt.launchers.script_text import filled

SHUTDOWN_SECONDS = 600
WIDTH = 140


@dataclass(frozen=True)
class Variable:
    """One variable of the environment."""

    name: str
    value: str
    """As bash reads it between double quotes."""
    reason: str
    needed: Callable[[Launch], bool] = lambda launch: True
    when: str = ""
    """A condition in bash, for what a node finds out about itself."""
    is_own: bool = True
    """A value that is there already counts."""


def has_gpus(launch: Launch) -> bool:
    """The run trains on GPUs."""
    return not launch.on_cpu


def has_several_nodes(launch: Launch) -> bool:
    """The nodes speak over a network."""
    return launch.nodes > 1


def has_several_gpus(launch: Launch) -> bool:
    """NCCL is used at all."""
    return has_gpus(launch) and launch.processes > 1


VARIABLES = (
    Variable(
        "PATH",
        "@VENV@/bin:$PATH",
        "ssh and SLURM start programs with a bare PATH; DeepSpeed also looks there for ninja when it compiles.",
        is_own=False,
    ),
    Variable("PYTHONUNBUFFERED", "1", "What a process prints before it dies is in the log, and in order."),
    Variable(
        "OMP_NUM_THREADS",
        "$(( ($(nproc) + GPUS - 1) / GPUS ))",
        "A node's cores are shared by its processes. torchrun would give each of them 1 thread, DeepSpeed's launcher"
        " all the cores; an optimizer that is offloaded to the CPU needs its share.",
    ),
    Variable(
        "TOKENIZERS_PARALLELISM",
        "false",
        "Data workers are forks of a process that has used the tokenizer, whose threads would deadlock them.",
    ),
    Variable(
        "HF_HOME",
        "$HOME/.cache/huggingface",
        "Models and datasets of the Hub. With several nodes it must be on a disk that all of them see, or be filled on"
        " each.",
    ),
    Variable(
        "HF_HUB_OFFLINE",
        "1",
        "Compute nodes often have no way to the Internet, and all processes at once would ask the Hub about files that"
        " are here. Fetch them first, on a node that has one: hf download NAME. Set it to 0 to let the run fetch"
        " them.",
        has_several_nodes,
    ),
    Variable(
        "CPT_CACHE",
        "$HOME/.cache/cpt",
        "Tokenised documents. On a shared disk one process tokenises for all nodes; on disks of their own each node"
        " does it again.",
    ),
    Variable(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "Memory that torch has freed can be used for pieces of another size: fewer runs end for lack of memory that is"
        " there.",
        has_gpus,
    ),
    Variable(
        "NCCL_SOCKET_IFNAME",
        "=$INTERFACE",
        "NCCL's first meeting, and its traffic where there is no InfiniBand, goes over the interface that leads to the"
        " other nodes and not over the first one it finds (docker0, a management network). `=`: exactly this name.",
        lambda launch: has_several_nodes(launch) and has_gpus(launch),
        when='[ -n "$INTERFACE" ]',
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "$INTERFACE",
        "gloo carries what lies in host memory, also beside NCCL. It takes the address of the host's own name, which"
        " many systems map to 127.0.1.1: the others would wait for it in vain.",
        has_several_nodes,
        when='[ -n "$INTERFACE" ]',
    ),
    Variable(
        "NCCL_P2P_DISABLE",
        "1",
        "Cards of the RTX 40 series have no peer-to-peer; NCCL hangs or fails where it tries.",
        has_several_gpus,
        when='[ -n "$HAS_RTX_40" ]',
    ),
    Variable(
        "NCCL_IB_DISABLE",
        "1",
        "The same cards cannot read each other's memory over InfiniBand either.",
        has_several_gpus,
        when='[ -n "$HAS_RTX_40" ]',
    ),
    Variable(
        "NCCL_DEBUG",
        "WARN",
        "NCCL says why it fails. INFO also says which links it uses: look at it once on a new cluster.",
        has_several_gpus,
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "1",
        "A failed or late collective ends the process, and leaves no GPU waiting. torchrun sets it, DeepSpeed's"
        " launcher does not.",
        has_several_gpus,
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "When a collective takes longer than `training.ddp_timeout` (1800 s), each process writes down its last ones:"
        " who was missing, and where.",
        has_several_gpus,
    ),
    Variable(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "$PWD/@FOLDER@/collectives_of_rank_",
        "That goes here, the ranks of all nodes side by side, not to the /tmp of each.",
        has_several_gpus,
    ),
    Variable(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        str(SHUTDOWN_SECONDS),
        "Where torchrun itself is told to end, as by SLURM, it kills its processes after 30 s: less than a large model"
        " needs to be saved. (torch 2.13 reads this; one that does not know it keeps to 30 s.)",
        lambda launch: launch.engine != "deepspeed",
    ),
    Variable(
        "TORCH_EXTENSIONS_DIR",
        "/tmp/torch_extensions-$(id -un)",
        "What DeepSpeed compiles is built once on each node: on a shared disk the nodes wait for each other's lock,"
        " after a crash for ever.",
        lambda launch: launch.uses_deepspeed and has_several_nodes(launch),
    ),
    Variable(
        "TRITON_CACHE_DIR",
        "/tmp/triton-$(id -un)",
        "Compiled kernels are kept on each node's own disk: many nodes that write one shared folder disturb each"
        " other.",
        lambda launch: has_several_nodes(launch) and has_gpus(launch),
    ),
    Variable(
        "DS_ACCELERATOR",
        "cpu",
        "The recipe trains on the CPU; DeepSpeed's launcher otherwise looks for GPUs.",
        lambda launch: launch.on_cpu,
    ),
)

OF_THE_NODES = {
    "CPT_NODES": (
        "The names of all nodes in the order of their ranks: the check of the cluster names the one that did not come."
    ),
    "MASTER_ADDR": "The node where all processes meet: the first one.",
    "MASTER_PORT": "The port there. Two runs that begin on one node need two of them.",
}
"""Variables that the scripts work out for each start."""

HEAD = """
#!/usr/bin/env bash
# Environment of the run `@NAME@`, read by node.sh on each node. A value that is set already counts.
GPUS=${GPUS_PER_NODE:-@GPUS@} # processes of a node
@FINDINGS@"""
FIND_INTERFACE = """
# The network interface that leads to the other nodes. Where this finds the wrong one, write its name: INTERFACE=eth0
interface_to() {
    local address
    address=$(getent ahosts "$1" | awk 'NR == 1 { print $1 }') || return 0
    ip -o route get "$address" | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' || true
}
other=${CPT_NODES%%,*}
[ "$NODE_RANK" != 0 ] || other=$(cut -d, -f2 <<< "$CPT_NODES")
INTERFACE=${INTERFACE:-$(interface_to "$other")}
"""
NAMED_INTERFACE = """
# The network interface that leads to the other nodes, as `cpt launch --interface` named it.
INTERFACE=${INTERFACE:-@INTERFACE@}
"""
FIND_RTX_40 = """
HAS_RTX_40=$(nvidia-smi -L 2>/dev/null | grep -m 1 'RTX 40' || true)
"""


def environment_script(launch: Launch) -> str:
    """The content of `environment.sh`."""
    findings = ""
    if has_several_nodes(launch):
        findings += (
            filled(NAMED_INTERFACE, interface=launch.interface) if launch.interface else FIND_INTERFACE.lstrip("\n")
        )
    if has_several_gpus(launch):
        findings += FIND_RTX_40.lstrip("\n")
    return filled(HEAD, name=launch.recipe.name, gpus=launch.gpus_per_node, findings=findings) + "".join(
        f"\n{told(variable, launch)}" for variable in needed(launch)
    )


def needed(launch: Launch) -> list[Variable]:
    """The variables of this launch."""
    return [variable for variable in VARIABLES if variable.needed(launch)]


def told(variable: Variable, launch: Launch) -> str:
    """A variable in bash, under its reason."""
    value = value_of(variable, launch)
    export = (
        f'export {variable.name}="${{{variable.name}:-{value}}}"'
        if variable.is_own
        else f'export {variable.name}="{value}"'
    )
    reason = "\n".join(
        wrap(variable.reason, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    )
    return f"{reason}\n{f'if {variable.when}; then {export}; fi' if variable.when else export}\n"


def value_of(variable: Variable, launch: Launch) -> str:
    """A variable's value for this launch."""
    venv = launch.shown(launch.venv)
    return filled(
        variable.value,
        venv=venv if venv.startswith("/") else f"$PWD/{venv}",
        folder=launch.shown(launch.folder),
    )


def deepspeed_environment(launch: Launch) -> str:
    """The content of `.deepspeed_env`: what is the same on all nodes, since that file knows neither comments nor
    bash."""
    fixed = [(variable.name, value_of(variable, launch)) for variable in needed(launch) if not variable.when]
    lines = [f"{name}={value}\n" for name, value in fixed if "$" not in value]
    return "".join(lines + [f"CPT_NODES={','.join(launch.hosts)}\n"])
