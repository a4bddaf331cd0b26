import json

import pytest
from run_folders import write_run

from cpt.cli import main


def ended(*words):
    with pytest.raises(SystemExit) as code:
        main(["compare", *map(str, words)])
    return code.value.code


def test_two_runs_are_compared_and_written_in_each_form(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lambda recipe, **others: recipe.update(seed=5))]
    files = {kind: tmp_path / f"x.{kind}" for kind in ("markdown", "html")}
    assert ended(*runs, *(word for kind, path in files.items() for word in (f"--{kind}", path))) == 0
    assert "1 difference (recipe 1)" in capsys.readouterr().out
    assert ended(*runs, "--json") == 0
    assert json.loads(capsys.readouterr().out)["differences"] == [
        {"topic": "Recipe", "name": "seed", "values": ["1", "5"]}
    ]
    assert files["markdown"].read_text().startswith("# a and b\n") and files["html"].read_text().startswith(
        "<!DOCTYPE html>"
    )


def test_what_cannot_be_compared_is_refused_with_what_to_write(tmp_path, capsys):
    run = write_run(tmp_path / "first")
    assert ended(run) == 2 and "one run has nothing to be compared with" in capsys.readouterr().err
    assert ended(run, tmp_path / "firts") == 2 and f"Did you mean {run}?" in capsys.readouterr().err
    assert ended(run, run, "--html", tmp_path / "no" / "x.html") == 2
    assert "x.html cannot be written: No such file or directory" in capsys.readouterr().err
