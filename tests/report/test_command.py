import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import CheckpointError, ResourceError


def report(*words):
    return CliRunner().invoke(application("report"), ["report", *map(str, words)])


def test_the_page_goes_into_the_runs_folder(run_folder):
    ended = report(run_folder)
    assert ended.exit_code == 0 and str(run_folder / "report.html") in ended.output
    assert (run_folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_run_is_named_as_for_compare(run_folder, monkeypatch):
    monkeypatch.chdir(run_folder.parent)
    Path("runs").symlink_to(run_folder.parent)
    assert report(run_folder.name).exit_code == 0


def test_or_where_one_wants_it(run_folder, tmp_path):
    assert report(run_folder, "--output", tmp_path / "new folder" / "page.html").exit_code == 0
    assert (tmp_path / "new folder" / "page.html").exists() and not (run_folder / "report.html").exists()


def test_what_is_no_run_is_refused(tmp_path):
    assert isinstance(report(tmp_path).exception, CheckpointError)


def test_a_place_that_takes_no_file_is_told(run_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write the page: .*--output"):
        raise report(run_folder, "--output", tmp_path / "file" / "page.html").exception
    with pytest.raises(ResourceError, match="has an empty name. Name another place"):
        raise report(run_folder, "--output=").exception


def test_no_torch_is_imported(run_folder):
    code = f"import sys; from cpt.cli import main; main(['report', {str(run_folder)!r}])"
    check = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, 'transformers' in sys.modules)); "
    )
    ended = subprocess.run([sys.executable, "-c", check + code], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "False False", ended.stderr
