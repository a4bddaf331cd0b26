"""Facts of nodes with made-up values: each difference names its node, equal ones say nothing."""

from copy import deepcopy

import pytest

from cpt.cluster.comparing import compare

FILES = {"count": 2, "bytes": 30, "hash": "aa", "path": "/data", "files": {"a.jsonl": "10:1", "b.jsonl": "20:2"}}
GOOD = {
    "versions": {
        "python": "3.11.9",
        "torch": "2.13.0+cu130",
        "CUDA": "13.0",
        "NCCL": "2.29.1",
        "transformers": "5.23.0",
    },
    "code": "c0ffee00c0ffee",
    "hardware": {"gpus": ["NVIDIA H100 80GB HBM3"] * 8, "driver": "580.95", "processes": None},
    "network": {
        "interfaces": ["eth0", "ib0", "lo"],
        "asked": {"GLOO_SOCKET_IFNAME": "eth0"},
        "own_name": {"host": ["10.0.0.1"]},
        "interface": "eth0",
        "links": {},
        "variables": {"NCCL_IB_HCA": "mlx5"},
        "port": None,
        "meets_at": 29500,
    },
    "room": {"output": ["/runs", 900.0], "store": ["/cache", 900.0], "shared_memory": 64.0},
    "recipe": {"seed": 42, "optimizer": {"learning_rate": 1e-5}},
    "data.sources[0].path": FILES,
    "clock": 0.0,
}


def found(*changes: tuple[int, str, object], nodes: int = 3) -> list[tuple[str, str, bool]]:
    """Complaints about nodes that are equal but for `(node, dotted path, value)`; "." in a key of the facts is written
    ":"."""
    facts = {f"host-{number}": deepcopy(GOOD) for number in range(nodes)}
    for number, path, value in changes:
        *above, last = [key.replace(":", ".") for key in path.split("/")]
        place = facts[f"host-{number}"]
        for key in above:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return [(complaint.host, complaint.cause, complaint.fatal) for complaint in compare(facts)]


def test_equal_nodes_say_nothing():
    assert found() == []


@pytest.mark.parametrize(
    ("path", "value", "cause"),
    [
        ("versions/torch", "2.11.0", "torch is 2.11.0, elsewhere 2.13.0+cu130 (host-0, host-2)"),
        ("versions/NCCL", "2.28.3", "NCCL is 2.28.3, elsewhere 2.29.1 (host-0, host-2)"),
        ("versions/transformers", None, "transformers is not installed, elsewhere 5.23.0 (host-0, host-2)"),
        ("code", "badc0de0", "has other source files of cpt (badc0de0) than host-0, host-2 (c0ffee00)"),
        ("hardware/gpus", ["NVIDIA H100 80GB HBM3"] * 7, "has 7 GPUs, elsewhere 8 (host-0, host-2)"),
        ("recipe/seed", 7, "has another recipe: seed is 7, elsewhere 42 (host-0, host-2)"),
        ("recipe", {"error": "no such file: r.yaml"}, "`recipe`: no such file: r.yaml"),
        (
            "data:sources[0]:path",
            {"error": "/data: no such file or folder"},
            "`data.sources[0].path`: /data: no such file or folder",
        ),
        (
            "data:sources[0]:path",
            {**FILES, "hash": "bb", "files": {"a.jsonl": "10:9", "c.jsonl": "1:1"}},
            (
                "`data.sources[0].path`: /data has not b.jsonl; only here c.jsonl; with other content a.jsonl (host-0,"
                " host-2)"
            ),
        ),
        (
            "data:sources[0]:path",
            {"count": 9000, "bytes": 5, "hash": "bb", "path": "/data"},
            (
                "`data.sources[0].path`: /data has 9,000 files of 5 bytes, elsewhere 2 of 30, or other content"
                " (host-0, host-2)"
            ),
        ),
        (
            "network/asked",
            {"NCCL_SOCKET_IFNAME": "ens,enp"},
            "NCCL_SOCKET_IFNAME=ens,enp, and there is no such interface: it has eth0, ib0",
        ),
        (
            "network/asked",
            {"GLOO_SOCKET_IFNAME": "eth"},
            "GLOO_SOCKET_IFNAME=eth, and there is no such interface: it has eth0, ib0",
        ),
        ("network/port", "29511", "its own environment sets MASTER_PORT=29511, the run meets at 29500"),
        ("hangs", "data.sources[0].path", "hangs where it looks at data.sources[0].path"),
    ],
)
def test_what_keeps_nodes_apart_is_fatal_and_named(path, value, cause):
    assert found((1, path, value)) == [("host-1", cause, True)]


@pytest.mark.parametrize(
    ("path", "value", "cause"),
    [
        ("versions/liger-kernel", "0.8.0", "liger-kernel is 0.8.0, elsewhere not installed (host-0, host-2)"),
        ("hardware/driver", "570.10", "has the GPU driver 570.10, elsewhere 580.95 (host-0, host-2)"),
        (
            "hardware/gpus",
            ["NVIDIA A100"] * 8,
            "has NVIDIA A100 as GPUs, elsewhere NVIDIA H100 80GB HBM3 (host-0, host-2)",
        ),
        ("network/variables", {}, "has NCCL_IB_HCA=not set, elsewhere mlx5 (host-0, host-2)"),
        ("clock", -42.0, "its clock is 42 s ahead of the master's"),
        ("room/output", ["/runs", 3.0], "3.0 GiB are free at /runs"),
        ("room/shared_memory", 0.0625, "/dev/shm of 0.06 GiB"),
    ],
)
def test_what_costs_time_only_is_told(path, value, cause):
    assert found((1, path, value)) == [("host-1", cause, False)]


def test_a_name_that_means_the_machine_itself_is_told():
    (told,) = found(
        (1, "network/asked", {}), (1, "network/own_name", {"host-1": ["127.0.1.1"]}), (0, "network/asked", {})
    )
    assert told[0] == "host-1" and told[1].startswith("its own name host-1 means 127.0.1.1 there")


def test_an_nccl_prefix_or_exclusion_is_no_mistake():
    assert (
        found(
            (1, "network/asked", {"NCCL_SOCKET_IFNAME": "ib"}),
            (2, "network/asked", {"NCCL_SOCKET_IFNAME": "^docker,lo"}),
        )
        == []
    )


def test_what_no_node_has_is_up_to_the_runs_own_check():
    missing = [(number, "data:sources[0]:path", {"error": "/data: no such folder"}) for number in range(3)]
    assert [fatal for _, _, fatal in found(*missing)] == [False] * 3


def test_of_two_nodes_the_master_is_the_measure():
    assert found((0, "recipe/seed", 7), nodes=2) == [
        ("host-1", "has another recipe: seed is 42, elsewhere 7 (host-0)", True)
    ]


def test_of_many_nodes_most_are_the_measure_and_few_are_listed():
    told = found((0, "versions/torch", "2.11.0"), nodes=9)
    assert told == [
        ("host-0", "torch is 2.11.0, elsewhere 2.13.0+cu130 (host-1, host-2, host-3, host-4 and 4 more)", True)
    ]


def test_fewer_gpus_than_processes_is_fatal_and_other_counts_of_a_launch_are_not():
    launched = {"gpus": ["H"] * 8, "driver": "1", "processes": 8}
    everywhere = [(number, "hardware", launched) for number in range(3)]
    assert found(*everywhere, (1, "hardware", {**launched, "gpus": ["H"] * 7})) == [
        ("host-1", "has 7 GPUs for 8 processes", True)
    ]
    assert [fatal for _, _, fatal in found(*everywhere, (1, "hardware", {**launched, "gpus": ["H"] * 10}))] == [False]
