import subprocess
import sys

import pytest
from tiny_launch import launch_of, write_all

from cpt.launchers.with_deepspeed import deepspeed_files

ZERO = ("training.deepspeed={zero_optimization: {stage: 2}}",)
READ = """
import sys
from deepspeed.launcher.runner import fetch_hostfile, parse_args
taken = parse_args(sys.argv[1:])
print(fetch_hostfile(taken.hostfile), taken.no_ssh, taken.node_rank, taken.num_gpus, taken.user_args)
"""


def test_one_node_needs_no_hosts(tmp_path):
    launch = launch_of(tmp_path, engine="deepspeed", overrides=ZERO)
    files = deepspeed_files(launch)
    write_all(launch, files)
    assert (
        set(files) == {"environment.sh", "node.sh"}
        and 'deepspeed --num_gpus "$GPUS_PER_NODE" --master_port 29500' in files["node.sh"]
    )


def test_several_nodes_have_a_hostfile_and_what_is_passed_on(tmp_path):
    launch = launch_of(tmp_path, engine="deepspeed", nodes=2, overrides=ZERO)
    files = deepspeed_files(launch)
    write_all(launch, files)
    assert set(files) == {"environment.sh", "node.sh", "hostfile", ".deepspeed_env", "start.sh"}
    assert (
        "DS_ENV_FILE=$PWD/launch/x/.deepspeed_env deepspeed --hostfile launch/x/hostfile --num_nodes 2"
        in files["start.sh"]
    )


@pytest.mark.slow
def test_deepspeed_takes_its_words(tmp_path):
    launch = launch_of(tmp_path, engine="deepspeed", nodes=2, overrides=(*ZERO, "seed=3"))
    files = deepspeed_files(launch)
    write_all(launch, files)
    line = (
        files["node.sh"].split("start deepspeed ")[1].split("\nexit")[0].replace("\\\n", " ").split("train.py")[0]
        + "train.py recipe.yaml"
    )
    for name, value in {
        "NODE_RANK": 1,
        "NODES": 2,
        "GPUS_PER_NODE": 2,
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": 29500,
    }.items():
        line = line.replace(f'"${name}"', str(value))
    shown = subprocess.run(
        [sys.executable, "-c", READ, *line.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "node-0" in shown and shown.rstrip().endswith("True 1 2 ['recipe.yaml']")
