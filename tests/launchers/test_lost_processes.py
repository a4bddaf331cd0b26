"""accelerate really starts one process where two were asked for, and cpt says so."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cpt.errors import LaunchError
from cpt.hardware import scripts_folder
from cpt.launchers.lost_processes import arguments_of_accelerate, refuse_lost_processes

ROOT = Path(__file__).parents[2]
ON_CPU = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "use_cpu": True, "distributed_type": "MULTI_CPU"}
CHILD = """
import sys
from cpt.errors import LaunchError
from cpt.launchers.lost_processes import refuse_lost_processes
try:
    refuse_lost_processes()
except LaunchError as problem:
    sys.exit(str(problem))
print("nothing lost")
"""


def accelerate(folder: Path, *options: str, config: dict | None = None, default: dict | None = None) -> str:
    """What a run says that was started by `accelerate launch` with these options."""
    (folder / "child.py").write_text(CHILD)
    command = [f"{scripts_folder()}/accelerate", "launch", *options]
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        command += ["--config_file", str(folder / "config.yaml")]
    if default:
        (folder / "accelerate").mkdir()
        (folder / "accelerate" / "default_config.yaml").write_text(yaml.safe_dump(default))
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(folder / "child.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    return result.stdout + result.stderr


@pytest.mark.long
def test_multi_cpu_is_refused_with_what_works(tmp_path):
    said = accelerate(tmp_path, config=ON_CPU)
    assert f"accelerate was told to start 2 processes ({tmp_path}/config.yaml), but started one" in said
    assert "`distributed_type: MULTI_GPU` with `use_cpu: false`" in said


@pytest.mark.slow
def test_a_number_of_processes_on_the_command_line_counts(tmp_path):
    assert "told to start 3 processes, but started one" in accelerate(tmp_path, "--cpu", "--num_processes=3")


@pytest.mark.long
def test_accelerates_default_config_counts(tmp_path):
    said = accelerate(tmp_path, default={**ON_CPU, "num_processes": 4})
    assert f"told to start 4 processes ({tmp_path}/accelerate/default_config.yaml)" in said


@pytest.mark.slow
def test_deepspeed_that_is_not_in_effect_is_refused(tmp_path):
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "num_processes": 1,
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 2},
    }
    assert "told to use DeepSpeed" in accelerate(tmp_path, "--cpu", config=config)


@pytest.mark.slow
def test_one_process_that_was_asked_for_is_fine(tmp_path):
    said = accelerate(tmp_path, config={**ON_CPU, "num_processes": 1, "distributed_type": "NO"})
    assert "nothing lost" in said


@pytest.mark.slow
def test_a_run_without_a_launcher_is_fine(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}
    )
    assert result.stdout == "nothing lost\n"


@pytest.mark.parametrize(
    ("variable", "starter"), [("OMPI_COMM_WORLD_SIZE", "mpirun"), ("SLURM_STEP_NUM_TASKS", "srun")]
)
def test_processes_that_do_not_know_each_other_are_refused(monkeypatch, variable, starter):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(LaunchError, match=f"{starter} started 4 processes"):
        refuse_lost_processes()
    monkeypatch.setenv("RANK", "0")
    refuse_lost_processes()


@pytest.mark.parametrize(
    "words",
    [
        ["/venv/bin/python", "/venv/bin/accelerate", "launch", "train.py"],
        ["/venv/bin/accelerate", "launch", "train.py"],
        ["python", "/venv/bin/accelerate-launch", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "train.py"],
        ["python", "/venv/lib/accelerate/commands/launch.py", "train.py"],
    ],
)
def test_every_way_to_write_accelerate_launch_is_known(words):
    assert arguments_of_accelerate(words) == ["train.py"]


def test_other_command_lines_are_not_accelerates():
    assert arguments_of_accelerate(["python", "accelerate", "config"]) == []
    assert arguments_of_accelerate(["bash", "-c", "ls"]) == []
