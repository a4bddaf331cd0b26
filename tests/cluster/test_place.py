"""A process knows its node, from options or from what its launcher set."""

import socket

import pytest

from cpt.cluster import place as places
from cpt.cluster.place import addresses_of, is_here, own_addresses, place_of_node, place_of_process
from cpt.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
MASTER = {"MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}


def test_a_node_of_the_command_line():
    place = place_of_node(1, ["a", "b"], "[fd00::1]:29500")
    assert (place.rank, place.num_nodes, place.local_rank, place.name, place.master, place.port) == (
        1,
        2,
        0,
        "b",
        "fd00::1",
        29500,
    )


@pytest.mark.parametrize(
    ("node", "master", "complaint"),
    [(2, "a:1", "numbers 0 to 1"), (0, "a", "expected HOST:PORT"), (0, "a:0", "HOST:PORT")],
)
def test_wrong_numbers_and_addresses_are_refused(node, master, complaint):
    with pytest.raises(LaunchError, match=complaint):
        place_of_node(node, ["a", "b"], master)


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN,
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_SIZE": "4",
            "CROSS_RANK": "1",
            "CROSS_SIZE": "2",
        },  # deepspeed
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS_PER_NODE": "4",
            "SLURM_NODEID": "1",
            "SLURM_NNODES": "2",
        },
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "SLURM_PROCID": "5",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
            "SLURM_NNODES": "2",
        },
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    ],
    ids=["torchrun", "deepspeed", "slurm", "slurm without a number of tasks", "by hand"],
)
def test_launchers_tell_the_same(environment):
    place = place_of_process({**environment, **MASTER})
    assert (place.rank, place.node, place.num_nodes, place.local_rank, place.is_launched) == (5, 1, 2, 1, True)


def test_one_node_is_no_cluster():
    assert place_of_process({}) is None
    assert place_of_process({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **MASTER}) is None
    assert (
        place_of_process({"RANK": "1", "WORLD_SIZE": "2", **MASTER}) is None
    )  # nothing says that there are two nodes
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SLURM_NNODES": "4", "SLURM_PROCID": "0"}
    assert place_of_process({**alone, **MASTER}) is None  # torchrun on one node of an allocation of four


def test_names_count_where_there_are_as_many_as_nodes():
    assert place_of_process({**TORCHRUN, **MASTER, "CPT_NODES": "a,b"}).names == ("a", "b")
    assert place_of_process({**TORCHRUN, **MASTER, "CPT_NODES": "a,b,c"}).names == ()


def test_a_launched_process_finds_its_own_name_in_the_list(monkeypatch):
    monkeypatch.setattr(places, "hostname", lambda: "b")
    place = place_of_process({**TORCHRUN, **MASTER, "GROUP_RANK": "0", "CPT_NODES": "a.invalid,b.invalid"})
    assert place.name == "b.invalid"  # torchrun numbers nodes as it likes


def test_a_name_means_this_machine_by_its_name_or_address():
    assert is_here(socket.gethostname()) and not is_here("no-such-host.invalid")
    assert all(map(is_here, list(own_addresses())[:1]))
    assert addresses_of("no-such-host.invalid") == []
