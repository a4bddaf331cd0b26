"""Files for DeepSpeed's own launcher: the hostfile, and what it passes on to other hosts."""

from cpt.launchers.environment import deepspeed_environment, environment_script
from cpt.launchers.hostfile import hostfile_text
from cpt.launchers.launch import Launch
from cpt.launchers.node_script import node_script
from cpt.launchers.ssh_script import start_script

ALONE = 'deepspeed --num_gpus "$GPUS_PER_NODE" --master_port {port} {train}'
# Without --no_ssh its launcher would start the other hosts by pdsh, and end the run there after 30 s when it is told
# to stop.
TOGETHER = """deepspeed --hostfile {folder}/hostfile --no_ssh --node_rank "$NODE_RANK" \\
    --num_nodes "$NODES" --num_gpus "$GPUS_PER_NODE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \\
    {train}"""
BY_PDSH = """Or DeepSpeed's own way, by pdsh: it passes on the variables of .deepspeed_env alone, checks nothing, and waits 30 s for a save.
  DS_ENV_FILE=$PWD/{folder}/.deepspeed_env deepspeed --hostfile {folder}/hostfile --num_nodes {nodes} --num_gpus {gpus} \\
      --master_addr {master} --master_port {port} {train}"""  # noqa: E501


def deepspeed_files(launch: Launch) -> dict[str, str]:
    """Name -> content."""
    folder = launch.shown(launch.folder)
    line = (TOGETHER if launch.nodes > 1 else ALONE).format(
        folder=folder, port=launch.port, train=launch.train_words()
    )
    files = {"environment.sh": environment_script(launch), "node.sh": node_script(launch, line)}
    if launch.nodes == 1:
        return files
    by_pdsh = BY_PDSH.format(
        folder=folder,
        nodes=launch.nodes,
        gpus=launch.gpus_per_node,
        master=launch.hosts[0],
        port=launch.port,
        train=launch.train_words(),
    )
    return {
        **files,
        "hostfile": launch.hostfile or hostfile_text(launch.hosts, launch.gpus_per_node),
        ".deepspeed_env": deepspeed_environment(launch),
        "start.sh": start_script(launch, by_pdsh),
    }
