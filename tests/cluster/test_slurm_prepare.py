"""`launch/slurm_prepare.sbatch` as an array in a real SLURM, one of whose tasks is requeued on its way."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from several_hosts import several_hosts
from slurm_cluster import slurm_on
from tiny import write_documents, write_recipe
from xxhash import xxh3_128_hexdigest

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm_prepare.sbatch"


def files_of(cache):
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(cache)): xxh3_128_hexdigest(path.read_bytes()) for path in files}


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_tasks_of_an_array_make_the_store_that_one_machine_makes(tiny_recipe, tmp_path):
    for seed, name in enumerate(("domain", "general")):
        write_documents(tmp_path / f"{name}.jsonl", 25_000, seed)
    tiny_recipe["data"] |= {
        "sources": [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("domain", "general")],
        "window_bytes": 250_000,
    }
    recipe, cache = write_recipe(tiny_recipe, tmp_path / "recipe.yaml"), tmp_path / "shared"
    options = [
        "--array=1-3",
        "--cpus-per-task=1",
        "--mem=0",
        f"--output={tmp_path}/prepare-%a.log",
        f"--export=ALL,CPT_CACHE={cache}",
    ]
    with several_hosts(2, folder=tmp_path / "hosts") as hosts, slurm_on(hosts, tmp_path / "slurm") as slurm:
        job = slurm.submit(*options, str(SCRIPT), str(recipe), cwd=tmp_path)
        end = time.monotonic() + 300
        while len(list(cache.glob("tokens/*/*/description.json"))) < 4:
            assert time.monotonic() < end and slurm.run("squeue", "--noheader"), slurm.logs()
            time.sleep(0.05)
        slurm.run("scontrol", "requeue", f"{job}_1")
        while slurm.run("squeue", "--noheader").strip():
            assert time.monotonic() < end, slurm.logs()
            time.sleep(0.5)
    told = "".join((tmp_path / f"prepare-{task}.log").read_text() for task in (1, 2, 3))
    assert "tokens of 50,000 documents are ready" in told, told
    subprocess.run(
        [sys.executable, "-m", "cpt", "prepare", str(recipe), "--cache", str(tmp_path / "one")],
        check=True,
        capture_output=True,
    )
    assert files_of(cache) == files_of(tmp_path / "one"), told
    counts = [json.loads(path.read_text())["documents"] for path in cache.glob("tokens/*/description.json")]
    assert counts == [25_000, 25_000]
