import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from tiny_launch import launch_of, write_all

from cpt.launchers.with_accelerate import accelerate_files


def read(launch):
    write_all(launch, accelerate_files(launch))
    return load_config_from_file(str(launch.folder / "accelerate.yaml"))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 1), (3, 8)])
def test_accelerate_reads_as_many_processes_as_were_asked_for(tmp_path, nodes, gpus):
    config = read(launch_of(tmp_path, nodes=nodes, gpus_per_node=gpus))
    assert (config.num_machines, config.num_processes) == (nodes, nodes * gpus)
    assert config.distributed_type == (DistributedType.MULTI_GPU if nodes * gpus > 1 else DistributedType.NO)
    assert config.use_cpu is False and config.mixed_precision == "no"


def test_a_recipe_on_the_cpu_starts_as_many_too(tmp_path):
    assert (
        read(launch_of(tmp_path, overrides=("training.use_cpu=true",))).distributed_type == DistributedType.MULTI_GPU
    )


def test_each_node_has_its_own_rank_and_the_address_of_the_first(tmp_path):
    launch = launch_of(tmp_path, nodes=2)
    read(launch)
    line = (
        accelerate_files(launch)["node.sh"]
        .split("start accelerate launch ")[1]
        .split("\nexit")[0]
        .replace("\\\n", " ")
    )
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29511"}.items():
        line = line.replace(f'"${name}"', value)
    words = line.replace("launch/x", str(launch.folder)).split()
    taken, config, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (int(taken.machine_rank), taken.main_process_ip, int(taken.main_process_port)) == (1, "node-0", 29511)
    assert (taken.num_machines, taken.num_processes, taken.training_script_args) == (2, 4, ["recipe.yaml"])
