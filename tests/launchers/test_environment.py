import importlib.util
import subprocess
from pathlib import Path

import pytest
from tiny_launch import environment_with, launch_of, write_programs

from cpt.launchers.environment import OF_THE_NODES, VARIABLES, deepspeed_environment, environment_script

DEEPSPEED = ("training.deepspeed={zero_optimization: {stage: 2}}",)


def values(launch, tmp_path, *, rank=0, nodes="node-0,node-1", programs=None, **own):
    """The environment after the script, in a shell that began with nothing."""
    launch.folder.mkdir(parents=True, exist_ok=True)
    (launch.folder / "environment.sh").write_text(environment_script(launch))
    bodies = {
        "nvidia-smi": "exit 1",
        "getent": "echo 10.0.0.9 x",
        "ip": 'echo "10.0.0.9 dev ib0 src 10.0.0.1"',
        **(programs or {}),
    }
    path = environment_with(write_programs(tmp_path / "bin", **bodies))["PATH"]
    start = {"PATH": path, "HOME": "/home/me", "NODE_RANK": str(rank), "CPT_NODES": nodes, **own}
    script = f"set -euo pipefail; source {launch.folder}/environment.sh; env -0"
    shown = subprocess.run(
        ["bash", "-c", script], env=start, cwd=launch.work, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in shown.stdout.split("\0") if line)


def test_each_variable_stands_under_its_reason(tmp_path):
    for launch in (launch_of(tmp_path), launch_of(tmp_path, nodes=2, overrides=DEEPSPEED)):
        script = environment_script(launch)
        for variable in VARIABLES:
            assert (f"export {variable.name}=" in script) == variable.needed(launch)
        assert max(map(len, script.splitlines())) <= 140


def test_several_nodes_speak_over_the_interface_that_leads_to_the_others(tmp_path):
    asked = {"getent": 'echo "$2" >> asked; echo 10.0.0.9 x'}
    for rank in (0, 1):
        found = values(launch_of(tmp_path, nodes=2), tmp_path, rank=rank, programs=asked)
        assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")
    assert (tmp_path / "asked").read_text().split() == ["node-1", "node-0"]


@pytest.mark.parametrize("broken", [{"getent": "exit 2"}, {"ip": "exit 1"}])
def test_where_the_interface_is_not_found_nothing_is_said_about_it(tmp_path, broken):
    assert "GLOO_SOCKET_IFNAME" not in values(launch_of(tmp_path, nodes=2), tmp_path, programs=broken)


def test_an_interface_that_was_named_is_taken(tmp_path):
    found = values(launch_of(tmp_path, nodes=2, interface="eth7"), tmp_path, programs={"getent": "exit 9"})
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=eth7", "eth7")


def test_cards_without_peer_to_peer_are_recognised(tmp_path):
    has = values(
        launch_of(tmp_path), tmp_path, programs={"nvidia-smi": "echo 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: x)'"}
    )
    assert has["NCCL_P2P_DISABLE"] == has["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in values(
        launch_of(tmp_path), tmp_path, programs={"nvidia-smi": "echo 'GPU 0: NVIDIA H100 80GB HBM3'"}
    )


def test_cores_are_shared_by_the_processes(tmp_path):
    nproc = {"nproc": "echo 15"}
    assert values(launch_of(tmp_path, gpus_per_node=4), tmp_path, programs=nproc)["OMP_NUM_THREADS"] == "4"
    assert values(launch_of(tmp_path, gpus_per_node=32), tmp_path, programs=nproc)["OMP_NUM_THREADS"] == "1"
    edited = values(launch_of(tmp_path, gpus_per_node=4), tmp_path, programs=nproc, GPUS_PER_NODE="2")  # in node.sh
    assert edited["OMP_NUM_THREADS"] == "8"


def test_ones_own_values_count(tmp_path):
    found = values(
        launch_of(tmp_path, nodes=2),
        tmp_path,
        HF_HUB_OFFLINE="0",
        CPT_CACHE="/scratch",
        INTERFACE="eth3",
        NCCL_DEBUG="INFO",
    )
    assert (found["HF_HUB_OFFLINE"], found["CPT_CACHE"], found["NCCL_DEBUG"]) == ("0", "/scratch", "INFO")
    assert found["GLOO_SOCKET_IFNAME"] == "eth3"


def test_the_virtual_environment_comes_first(tmp_path):
    assert values(launch_of(tmp_path), tmp_path)["PATH"].startswith(f"{tmp_path}/venv/bin:")


def test_a_run_on_the_cpu_hears_nothing_of_gpus(tmp_path):
    script = environment_script(launch_of(tmp_path, nodes=2, overrides=("training.use_cpu=true",)))
    assert (
        "export NCCL" not in script
        and "PYTORCH_ALLOC_CONF" not in script
        and 'DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"' in script
    )


def test_deepspeed_passes_on_what_is_the_same_everywhere(tmp_path):
    lines = deepspeed_environment(launch_of(tmp_path, nodes=2, overrides=DEEPSPEED)).splitlines()
    known = dict(line.split("=", 1) for line in lines)
    assert (
        known["CPT_NODES"] == "node-0,node-1" and known["NCCL_DEBUG"] == "WARN" and "GLOO_SOCKET_IFNAME" not in known
    )
    assert not any("$" in line or "#" in line for line in lines)


@pytest.mark.slow
def test_torch_knows_the_variables_that_are_said_to_be_its_own():
    torch = Path(importlib.util.find_spec("torch").origin).parent  # without the seconds of importing it
    places = [torch / "lib" / name for name in ("libtorch_cpu.so", "libtorch_python.so", "libc10.so")]
    places += [
        torch / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
        torch / "distributed/launcher/api.py",
    ]
    own = [
        variable.name
        for variable in VARIABLES
        if variable.name.startswith(("TORCH_NCCL", "TORCH_ELASTIC", "PYTORCH", "GLOO"))
    ]
    known = subprocess.run(
        ["grep", "-o", "-a", "-h", "-w", "-E", "|".join(own), *places], capture_output=True, text=True
    ).stdout.split()
    assert set(own) <= set(known)


def test_the_docs_have_every_variable_with_its_reason():
    rows = [f"| `{variable.name}` | `{variable.value}` | {variable.reason} |" for variable in VARIABLES]
    rows += [f"| `{name}` | by the scripts | {reason} |" for name, reason in OF_THE_NODES.items()]
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
