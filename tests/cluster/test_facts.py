"""What a node is, is gathered without torch, and a look that hangs is named."""

import sys
import threading

import pytest
import torch
from tiny import write_recipe

from cpt.cluster import facts as gathered
from cpt.cluster.facts import Gathering
from cpt.cluster.place import place_of_node
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe

PLACE = place_of_node(0, ["host-0", "host-1"], "127.0.0.1:29500")


def test_the_facts_of_this_machine(tiny_recipe, tmp_path):
    found = Gathering(PLACE, load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))).result(20)
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["python"] == sys.version.split()[0]
    assert found["recipe"]["name"] == "tiny" and found["data.sources[0].path"]["count"] == 1
    assert "lo" in found["network"]["interfaces"] and found["room"]["output"][0] == str(tmp_path / "runs")
    assert len(found["code"]) == 32 and "hangs" not in found


def test_a_recipe_that_cannot_be_read_is_a_fact():
    assert Gathering(PLACE, RecipeError("r.yaml:3: no key `sede`")).result(20)["recipe"] == {
        "error": "r.yaml:3: no key `sede`"
    }


def test_a_look_that_hangs_is_named(monkeypatch):
    forever = threading.Event()
    monkeypatch.setattr(gathered, "room", lambda recipe: forever.wait())
    found = Gathering(PLACE, None).result(0.5)
    forever.set()
    assert found["hangs"] == "room" and found["versions"]


def test_a_look_that_fails_in_a_way_nobody_foresaw_is_a_fact_too(monkeypatch):
    monkeypatch.setattr("cpt.cluster.facts.network", lambda place: {}["gone"])
    facts = Gathering(place_of_node(0, ["a"], "a:1"), None).result(60)
    assert facts["network"] == {"error": "KeyError: 'gone'"} and "room" in facts and "hangs" not in facts


@pytest.mark.parametrize(
    "text",
    ["__version__ = '2.11.0+cu128'\ncuda = '12.8'\n", "__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\n"],
)
def test_the_version_of_torch_is_read_from_its_file(tmp_path, monkeypatch, text):
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(
        gathered.importlib.util, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    )
    monkeypatch.setattr(gathered, "nccl_package", lambda: "2.27.5")
    assert gathered.version_of_torch() == {"torch": "2.11.0+cu128", "CUDA": "12.8", "NCCL": "2.27.5"}
