"""`cpt data NAME` on a recipe of good sources and a bad one."""

import pytest
from tiny import write_recipe

from cpt.cli import main


@pytest.fixture
def cpt_data(capsys):
    """`cpt_data("ingest", "--help")`: the exit code and what was printed."""

    def command(*words):
        try:
            main(["data", *map(str, words)])
        except SystemExit as ended:
            return ended.code, "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    return command


@pytest.fixture
def run(tiny_recipe, tmp_path, cpt_data):
    """`run("check", {"on_bad_row": "skip"})`: the exit code and what was printed, on one good and one bad source."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good one"}\n{"text": null}\n{"text": ""}\nnot json\n')

    def command(name, data, *options):
        tiny_recipe["data"]["sources"].append({"path": str(bad)})
        tiny_recipe["data"] |= data
        return cpt_data(name, write_recipe(tiny_recipe, tmp_path / "r.yaml"), *options)

    return command
