import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_recipe

from cpt.launch.nodes import differences, facts_of_node, files_of_recipe
from cpt.process import free_port
from cpt.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nodes_that_differ_end_with_the_same_error_that_names_them(tiny_recipe, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "a few words"}) + "\n")
    changed = [
        "seed=7",
        f"data.sources[0].path={tmp_path}/other.jsonl",
        f"output_dir={tmp_path}/elsewhere",
    ]
    tiny_recipe["training"]["use_cpu"] = True
    recipe = write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    shared = {
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "LOCAL_RANK": "0",
    }
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "cpt", "doctor", str(recipe), *words],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, words in enumerate(([], changed))
    ]
    errors = [node.communicate(timeout=240)[0].partition("LaunchError: ")[2] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2] and errors[0] == errors[1]
    for cause in (
        "`output_dir`",
        "`seed` is 7",
        "`data.sources[0].path`",
        f"{socket.gethostname()} (node 1): ",
    ):
        assert cause in errors[0], errors


def test_the_node_that_differs_from_most_is_named():
    nodes = {"a": {"torch": "2.13"}, "b": {"torch": "2.11"}, "c": {"torch": "2.13"}, "d": {}}
    assert list(differences("a", nodes)) == []
    assert list(differences("b", nodes)) == [("torch", "torch is 2.11, but 2.13 on a, c")]
    assert list(differences("d", nodes)) == [("torch", "torch is missing, but 2.13 on a, c")]


def test_a_node_whose_triton_fails_is_named(tiny_recipe, tmp_path, monkeypatch):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"), ())
    nodes = {"a": facts_of_node(recipe), "b": facts_of_node(recipe)}
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    nodes["c"] = facts_of_node(recipe)
    assert list(differences("c", nodes)) == [
        ("Triton", "Triton is no C compiler, but fine on a, b")
    ]


def test_files_are_compared_by_name_and_size(tiny_recipe, tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n' * 20_000)
    tiny_recipe["data"]["sources"] = [{"path": str(folder)}]
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"), ())
    before = files_of_recipe(recipe)
    assert before["`data.sources[0].path`"].startswith("1 files")
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    changed = {key for key, value in files_of_recipe(recipe).items() if value != before[key]}
    assert changed == {"`data.sources[0].path`"}
