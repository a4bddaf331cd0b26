import pytest

from cpt.errors import LaunchError
from cpt.launch.supervise import names_several_hosts, refuse_more_than_the_machine_holds


@pytest.mark.parametrize(
    ("launcher", "several"),
    [
        ("torchrun --nnodes 2 --node_rank 1", True),
        ("torchrun --nnodes=1:4 --rdzv_endpoint a:1", True),
        ("accelerate launch --num_machines=2", True),
        ("deepspeed --hostfile h --no_ssh --node_rank 1", True),
        ("deepspeed --hostfile h", False),
        ("torchrun --nnodes=1 --nproc_per_node 8", False),
        ("torchrun --standalone", False),
    ],
)
def test_a_launcher_that_starts_one_of_several_hosts_is_recognized(launcher, several):
    assert names_several_hosts(launcher) is several


def test_more_processes_than_the_machine_can_run_are_refused(monkeypatch):
    monkeypatch.setattr("cpt.launch.supervise.count_cpu_cores", lambda: 2)
    monkeypatch.setattr("cpt.launch.supervise.find_gpus", list)
    refuse_more_than_the_machine_holds(8, on_gpus=True)
    with pytest.raises(LaunchError, match="--processes 9"):
        refuse_more_than_the_machine_holds(9, on_gpus=True)
    monkeypatch.setattr("cpt.launch.supervise.find_gpus", lambda: ["one", "other"])
    with pytest.raises(LaunchError, match="--processes 3"):
        refuse_more_than_the_machine_holds(3, on_gpus=True)
    refuse_more_than_the_machine_holds(3, on_gpus=False)
