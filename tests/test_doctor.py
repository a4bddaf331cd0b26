"""The doctor names each missing piece with its cost and its remedy, and fails only where nothing can run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from cpt import doctor
from cpt.cluster.complaint import Complaint
from cpt.errors import CptError
from cpt.hardware import Gpu, describe_machine

GPU = Gpu("NVIDIA H100 80GB HBM3", memory_gib=79.6, free_gib=79.0, driver="580.95", compute_capability="9.0")


@pytest.fixture
def machine():
    found = {"g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja", "nvcc": None}
    return replace(describe_machine(), gpus=[], programs=found, shared_memory_gib=16.0, free_disk_gib=500.0)


def rows(machine) -> dict[str, doctor.Finding]:
    return {finding.part: finding for finding in doctor.examine(machine)}


def test_this_machine_can_run_cpt(capsys):
    assert doctor.run_doctor() == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("torch", "host memory", "shared memory", "g++", "deepspeed"))


def test_a_missing_compiler_has_its_cost_and_install_line(machine):
    found = rows(replace(machine, programs={"g++": None, "ninja": None, "nvcc": None}))
    assert found["g++"].remedy == "apt-get install g++"
    assert "DeepSpeed" in found["g++"].costs
    assert "nvcc" not in found  # of no use without a GPU


def test_without_a_gpu_kernels_for_gpus_are_not_asked_for(machine):
    assert "flash_attn" not in rows(machine)
    assert "CPU" in rows(machine)["GPU"].costs


def test_a_gpu_that_torch_cannot_use_is_an_error(machine):
    found = rows(replace(machine, gpus=[GPU]))
    assert "H100 80GB HBM3, 79.6 GiB" in found["GPU 0"].here
    if not doctor.importlib.import_module("torch").cuda.is_available():
        assert found["torch"].broken and "the GPU is not used" in found["torch"].costs


def test_what_a_gpu_lacks_is_listed(machine):
    missing = [f for f in rows(replace(machine, gpus=[GPU])).values() if f.part in doctor.FOR_GPUS and f.here == "missing"]
    assert all(finding.costs and finding.remedy for finding in missing)


def test_little_shared_memory_is_told(machine):
    assert "--shm-size" in rows(replace(machine, shared_memory_gib=0.0625))["shared memory"].remedy
    assert rows(machine)["shared memory"].costs == ""


def test_little_disk_is_told(machine):
    assert "checkpoint" in rows(replace(machine, free_disk_gib=3.0))["free disk here"].costs


def test_a_stack_that_is_too_old_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["transformers>=99", "no-such-package>=1", "ruff>=9; extra == 'dev'"])
    found = {finding.part: finding for finding in doctor.examine_stack()}
    assert found["transformers"].broken and found["transformers"].remedy == "pip install 'transformers>=99'"
    assert found["no-such-package"].broken
    assert "ruff" not in found


def test_an_optional_package_shows_its_version():
    assert re.match(r"\d+\.", doctor.examine_package("yaml", "", "").here)
    assert doctor.examine_package("no_such_package", "speed", "pip install it").costs == "speed"


def test_square_brackets_are_printed_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda machine: [doctor.Finding("x", "missing", "speed", "pip install a[b]")])
    doctor.run_doctor()
    assert "a[b]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"recipe": Path("r.yaml")}, "cpt doctor RECIPE --nodes host-0,host-1"),
        ({"node_rank": 0}, "cpt doctor RECIPE --nodes host-0,host-1"),
        ({"nodes": "a,b", "master": "a:29500"}, "add --node-rank"),
        ({"nodes": "a,b", "node_rank": 2}, "numbers 0 to 1"),
        ({"nodes": "a"}, "one node has nothing to be compared with"),
        ({"nodes": "a,b", "recipe": Path("no_such.yaml")}, "no_such.yaml"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(words, complaint):
    with pytest.raises(CptError, match=complaint):
        doctor.command(**words)


def test_one_node_meets_the_others_where_it_is_told(monkeypatch):
    started = []
    monkeypatch.setattr(doctor, "check_this_node", lambda place, *words, report: started.append((place, words)) or 2)
    with pytest.raises(typer.Exit) as ended:
        doctor.command(nodes="a,b", node_rank=1, port=29501)
    (place, _), *_ = started
    assert (place.node, place.master, place.port, ended.value.exit_code) == (1, "a", 29501, 2)


@pytest.mark.parametrize(("complaints", "fits", "code"), [([Complaint("b", "torch is old")], "", 2), ([], "2 nodes fit together", 0)])
def test_several_nodes_are_asked_by_ssh(monkeypatch, capsys, complaints, fits, code):
    wishes = []
    monkeypatch.setattr(doctor, "check_over_ssh", lambda wish: wishes.append(wish) or (complaints, fits))
    with pytest.raises(typer.Exit) as ended:
        doctor.command(nodes="a,b", folder=Path("/shared"))
    assert ended.value.exit_code == code and wishes[0].folder == Path("/shared") and wishes[0].nodes == ("a", "b")
    assert (fits or "torch is old") in capsys.readouterr().out
