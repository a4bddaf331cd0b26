"""The whole check with two nodes on this machine, in threads; the all-reduce is made up, but for the slow test."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cpt.cluster.check import DEFAULT_SECONDS, SECONDS, Fit, check_nodes, seconds_allowed
from cpt.cluster.complaint import Unfit
from cpt.cluster.place import place_of_node
from cpt.cluster.ports import listen_at
from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe

ANSWERS = """#!/bin/bash
read first; case "$first" in *'"holds_store": true'*) echo '{"port": 7}';; esac
read part; echo '{"bytes": 67108864, "seconds": 0.1, "pairs": {}, "world_size": 2}'; read end
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "a.txt").write_text("the model reads")
    data = {"sources": [{"path": str(tmp_path / "a.txt")}]}
    return Recipe.model_validate(
        {
            "name": "r",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": "owner/name"},
            "data": data,
            "budget": {"epochs": 1},
        }
    )


@pytest.fixture
def made_up_all_reduce(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(ANSWERS)
    program.chmod(0o755)
    monkeypatch.setattr("cpt.cluster.timing.sys.executable", str(program))


def free_port() -> int:
    with listen_at(0, "host-0") as listening:
        return listening.getsockname()[1]


def check(*recipes) -> list[Fit | Unfit]:
    """What each of as many nodes finds."""
    names, master = [f"host-{node}" for node in range(len(recipes))], f"127.0.0.1:{free_port()}"

    def one(node: int):
        try:
            return check_nodes(place_of_node(node, names, master), recipes[node])
        except Unfit as unfit:
            return unfit

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, range(len(recipes))))


def test_equal_nodes_fit_together(recipe, made_up_all_reduce, tmp_path):
    first, second = check(recipe, recipe)
    assert (
        str(first)
        == str(second)
        == "2 nodes fit together: host-0, host-1; an all-reduce of 67 MB over gloo takes 100.0 ms (0.67 GB/s for each"
        " process)."
    )
    assert not (tmp_path / "runs").exists()  # it was made for the tokens, and taken away again


def test_all_nodes_hear_what_differs(recipe, made_up_all_reduce):
    first, second = check(recipe, recipe.model_copy(update={"seed": 7}))
    assert str(first) == str(second)
    assert str(first).startswith("host-1: has another recipe: seed is 7, elsewhere 42 (host-0).")


def test_a_recipe_that_one_node_cannot_read_is_its_complaint(recipe, made_up_all_reduce):
    first, _ = check(recipe, RecipeError("no such file: r.yaml"))
    assert [(complaint.host, complaint.cause) for complaint in first.complaints if complaint.fatal] == [
        ("host-1", "`recipe`: no such file: r.yaml")
    ]


def test_of_three_nodes_the_one_that_differs_is_named(recipe, made_up_all_reduce):
    found = check(recipe.model_copy(update={"seed": 7}), recipe, recipe)
    assert all(
        str(unfit).startswith("host-0: has another recipe: seed is 7, elsewhere 42 (host-1, host-2)")
        for unfit in found
    )


def test_an_all_reduce_that_fails_on_a_node_is_told_on_all(recipe, made_up_all_reduce, tmp_path):
    (tmp_path / "python").write_text(ANSWERS.replace('"bytes": 67108864', '"error": "Connection refused"'))
    first, second = check(recipe, recipe)
    assert "host-1: an all-reduce over gloo fails: Connection refused." in str(first) == str(second)


def test_a_torch_that_cannot_be_imported_is_told(recipe, made_up_all_reduce, tmp_path):
    (tmp_path / "python").write_text("#!/bin/bash\necho 'ImportError: libcudart.so' >&2\nexit 1\n")
    first, second = check(recipe, recipe)
    assert "host-0: cannot import torch: ImportError: libcudart.so" in str(first) == str(second)


@pytest.mark.slow
def test_a_torch_that_takes_long_to_import_is_given_more_time(recipe, made_up_all_reduce, tmp_path, monkeypatch):
    monkeypatch.setenv(SECONDS, "6")
    (tmp_path / "python").write_text("#!/bin/bash\nexec sleep 30\n")
    first, second = check(recipe, recipe)
    assert "host-0: has not imported torch within 6 s. A file system that is slow" in str(first) == str(second)


def test_a_process_that_only_waits_gets_the_verdict(recipe, made_up_all_reduce):
    names, port = ["host-0", "host-1"], free_port()
    nodes = [replace(place_of_node(node, names, f"127.0.0.1:{port}"), world_size=3) for node in (0, 1)]
    waiting = replace(nodes[1], rank=2, local_rank=1)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda place: check_nodes(place, recipe), [*nodes, waiting]))
    assert str(found[0]) == str(found[1]) and found[2] is None


def test_the_time_it_may_take_is_set_by_a_variable(monkeypatch):
    monkeypatch.delenv(SECONDS, raising=False)
    assert seconds_allowed() == DEFAULT_SECONDS
    monkeypatch.setenv(SECONDS, "300")
    assert seconds_allowed() == 300
    monkeypatch.setenv(SECONDS, "soon")
    with pytest.raises(RecipeError, match="expected a number of seconds"):
        seconds_allowed()


@pytest.mark.slow
def test_two_nodes_time_a_real_all_reduce(recipe):
    first, second = check(recipe, recipe)
    assert str(first) == str(second) and first.gigabytes_per_second > 0.001
