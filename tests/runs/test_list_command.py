import json
import subprocess
import sys

import pytest
from run_folders import write_run

from cpt.cli import main


def listed(capsys, *words):
    with pytest.raises(SystemExit):
        main(["runs", *map(str, words)])
    return capsys.readouterr().out


def test_the_table_has_a_line_for_each_run_and_no_empty_column(tmp_path, capsys):
    write_run(tmp_path / "one")
    write_run(
        tmp_path / "two[red]", lambda recipe, status, **others: status.update(state="running", pid=2**22 + 1, step=3)
    )
    heading, *lines = listed(capsys, tmp_path).splitlines()
    assert heading.split()[:5] == ["run", "stage", "state", "step", "tokens"]
    (one,) = (line for line in lines if line.startswith("one"))
    assert one.split()[:8] == ["one", "cpt", "finished", "20", "20,480", "3.0000", "1.2500", "1,020"]
    assert any(line.startswith("two[red]") and "died" in line for line in lines)


def test_json_is_for_programs_and_nothing_found_is_said(tmp_path, capsys):
    write_run(tmp_path / "one")
    (run,) = json.loads(listed(capsys, tmp_path, "--json", "--where", "state=finished"))
    assert run["folder"] == str(tmp_path / "one") and run["loss"] == pytest.approx(3)
    assert f"No runs below {tmp_path} with tag=x." in listed(capsys, tmp_path, "--where", "tag=x")


def test_neither_runs_nor_compare_import_torch(tmp_path):
    folders = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    for words in (["runs", str(tmp_path)], ["compare", *folders]):
        code = f"import sys; from cpt.cli import main\ntry: main({words!r})\nexcept SystemExit: pass\n"
        code += "assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()"
        assert "one" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
