"""A run's processes look at their nodes where there are several, and only there."""

import socket
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from cpt.cluster import launched
from cpt.cluster.check import Fit
from cpt.cluster.complaint import Complaint, Unfit
from cpt.cluster.launched import AgentStore, check_launched_nodes
from cpt.cluster.place import place_of_process
from cpt.errors import LaunchError
from cpt.recipe.schema import Recipe

RECIPE = Recipe.model_validate(
    {"name": "r", "model": {"path": "a/b"}, "data": {"sources": [{"path": "a/c"}]}, "budget": {"epochs": 1}}
)
TWO_NODES = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def asked(monkeypatch):
    """The places that were checked; TWO_NODES is the environment."""
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CPT_PREFLIGHT_SECONDS", raising=False)
    places = []

    def check(place, recipe, **how):
        places.append((place, how))
        return Fit(["a", "b"], [Complaint("b", "small disk", fatal=False)], "gloo", 67.0, 1.0, 100.0)

    monkeypatch.setattr(launched, "check_nodes", check)
    return places


def test_two_nodes_are_looked_at_and_told(asked, capsys):
    check_launched_nodes(RECIPE, True)
    said = capsys.readouterr().out
    assert (
        "Looking whether the 2 nodes fit together" in said
        and "warning: b: small disk." in said
        and "2 nodes fit together: a, b" in said
    )
    assert asked[0][1] == {"on_cpu": True, "publish": None, "address": None}


def test_one_node_is_not_looked_at(asked, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_launched_nodes(RECIPE, True)
    assert asked == []


def test_a_user_may_leave_it_out(asked, monkeypatch):
    monkeypatch.setenv("CPT_PREFLIGHT_SECONDS", "0")
    check_launched_nodes(RECIPE, True)
    assert asked == []


def test_nodes_that_do_not_fit_end_the_run(asked, monkeypatch):
    def check(*_, **__):
        raise Unfit([Complaint("b", "torch is old", "Install it.")])

    monkeypatch.setattr(launched, "check_nodes", check)
    with pytest.raises(LaunchError, match="the nodes do not fit together:\nb: torch is old. Install it."):
        check_launched_nodes(RECIPE, True)


def test_the_agents_store_tells_where_to_meet(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    place = replace(place_of_process(TWO_NODES), port=held.port)
    first, second = AgentStore(place), AgentStore(place)
    assert second.address() is None
    first.publish(4242)
    assert second.address() == ("127.0.0.1", 4242)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert AgentStore(place).address() is None  # what the start before this one said counts no more


def test_an_agent_that_is_gone_tells_nothing(monkeypatch):
    monkeypatch.setattr(launched, "SECONDS_FOR_THE_STORE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert AgentStore(replace(place_of_process(TWO_NODES), port=port)).address() is None
