import os
import signal
import subprocess
import sys
import time

import pytest
from tiny import write_documents, write_recipe
from typer.testing import CliRunner
from xxhash import xxh3_128_hexdigest

from cpt.cli import application
from cpt.data.store.shares import Done, Share
from cpt.errors import DataError, ResourceError
from cpt.prepare.on_ray import environment, imported, tell_end, work_of
from cpt.recipe.load import load_recipe


def test_without_ray_the_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[ray\]'"):
        imported()


def test_workers_elsewhere_are_told_where_the_store_is(monkeypatch):
    monkeypatch.setenv("CPT_STORE", "s3://bucket/tokens")
    assert environment()["CPT_STORE"] == "s3://bucket/tokens"


def test_a_worker_hands_back_what_it_met(tiny_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CPT_WORKERS", "0")
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "tiny.yaml"))
    here = os.getcwd()
    ended = work_of(recipe, Share(1, 1), tmp_path / "cache", here)
    assert ended == (Share(1, 1), Done(2, 2, 0))
    tell_end(ended)
    assert "worker 1/1: made 2 of 2 shards" in capsys.readouterr().out
    recipe.data.sources[0] = recipe.data.sources[0].model_copy(update={"path": str(tmp_path / "nowhere.jsonl")})
    with pytest.raises(DataError, match="nowhere.jsonl"):
        tell_end(work_of(recipe, Share(1, 1), tmp_path / "cache", here))


def files_of(cache):
    return {
        str(path.relative_to(cache)): xxh3_128_hexdigest(path.read_bytes())
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


@pytest.mark.slow
@pytest.mark.long
def test_a_real_ray_whose_worker_is_killed_makes_the_same_bytes(tiny_recipe, tmp_path):
    pytest.importorskip("ray")
    for name in ("domain", "general"):
        write_documents(tmp_path / f"{name}.jsonl", 20_000, 1)
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("domain", "general")]
    tiny_recipe["data"]["window_bytes"] = 300_000
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    words = [
        sys.executable,
        "-m",
        "cpt",
        "prepare",
        str(path),
        "--ray",
        "--workers",
        "2",
        "--cache",
        str(tmp_path / "ray"),
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while len(done := list((tmp_path / "ray").glob("tokens/*/*/description.json"))) < 3:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    assert len(done) < 40
    claim = next((tmp_path / "ray").glob("tokens/*/claims/*"))
    workers = subprocess.run(["pgrep", "-f", "ray::work_of"], capture_output=True, text=True).stdout.split()
    assert claim and workers
    os.kill(int(workers[0]), signal.SIGKILL)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert "worker 1/2" in printed and "worker 2/2" in printed and "tokens of 40,000 documents are ready" in printed
    one = CliRunner().invoke(application("prepare"), ["prepare", str(path), "--cache", str(tmp_path / "one")])
    assert one.exit_code == 0
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
