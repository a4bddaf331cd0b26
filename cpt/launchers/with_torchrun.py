"""Files for torchrun: one on each node, which meet at the first one."""

from cpt.launchers.environment import environment_script
from cpt.launchers.hostfile import hostfile_text
from cpt.launchers.launch import Launch
from cpt.launchers.node_script import node_script
from cpt.launchers.ssh_script import start_script

ALONE = "torchrun --standalone --nproc-per-node {gpus} {train}"
# Ranks follow the order of the hosts (`--node-rank`), so that every start gives each node the same part of the work.
TOGETHER = """torchrun \\
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \\
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
    {train}"""


def torchrun_line(launch: Launch) -> str:
    """Starts one node's processes."""
    line = TOGETHER if launch.nodes > 1 or launch.engine == "slurm" else ALONE
    return line.format(gpus='"$GPUS_PER_NODE"', train=launch.train_words())


def torchrun_files(launch: Launch) -> dict[str, str]:
    """Name -> content."""
    files = {"environment.sh": environment_script(launch), "node.sh": node_script(launch, torchrun_line(launch))}
    if launch.nodes > 1:
        files |= {
            "hostfile": launch.hostfile or hostfile_text(launch.hosts, launch.gpus_per_node),
            "start.sh": start_script(launch),
        }
    return files
