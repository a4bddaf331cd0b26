"""Files for `accelerate launch`: its YAML, and the scripts that start it on each node."""

from cpt.launchers.environment import environment_script
from cpt.launchers.hostfile import hostfile_text
from cpt.launchers.launch import Launch
from cpt.launchers.node_script import node_script
from cpt.launchers.script_text import filled
from cpt.launchers.ssh_script import start_script

CONFIG = """
# What accelerate starts: @PROCESSES@ process(es) on @NODES@ node(s). How the model is split is said by the recipe
# (`training.deepspeed`, `training.fsdp`), which every launcher then reads the same way.
compute_environment: LOCAL_MACHINE
distributed_type: @TYPE@
num_machines: @NODES@
machine_rank: 0 # node.sh gives each node its own, and the address and port of the first one
num_processes: @PROCESSES@ # of all nodes together
use_cpu: false
main_training_function: main
rdzv_backend: static
same_network: true
mixed_precision: 'no' # the recipe decides: training.bf16
"""
SEVERAL = "MULTI_GPU # also without GPUs: with MULTI_CPU accelerate starts one process, whatever num_processes says"
ALONE = """accelerate launch --config_file {folder}/accelerate.yaml --main_process_port {port} \\
    {train}"""
TOGETHER = """accelerate launch --config_file {folder}/accelerate.yaml \\
    --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \\
    {train}"""


def accelerate_config(launch: Launch) -> str:
    """The content of `accelerate.yaml`."""
    return filled(
        CONFIG, type=SEVERAL if launch.processes > 1 else "'NO'", nodes=launch.nodes, processes=launch.processes
    )


def accelerate_files(launch: Launch) -> dict[str, str]:
    """Name -> content."""
    line = (TOGETHER if launch.nodes > 1 else ALONE).format(
        folder=launch.shown(launch.folder), port=launch.port, train=launch.train_words()
    )
    files = {
        "environment.sh": environment_script(launch),
        "accelerate.yaml": accelerate_config(launch),
        "node.sh": node_script(launch, line),
    }
    if launch.nodes > 1:
        files |= {
            "hostfile": launch.hostfile or hostfile_text(launch.hosts, launch.gpus_per_node),
            "start.sh": start_script(launch),
        }
    return files
