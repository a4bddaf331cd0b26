"""What lies under launch/: configs that accelerate reads and that start what they say, and folders that `cpt launch`
still writes so."""

import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from cpt.cli import main
from cpt.launchers.lost_processes import refuse_lost_accelerate

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launch").glob("*.yaml"))
README = (ROOT / "launch" / "README.md").read_text()
LINES = {line.rsplit("/", 1)[1]: shlex.split(line) for line in README.splitlines() if line.startswith("cpt launch ")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it_and_starts_its_processes(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type != DistributedType.MULTI_CPU and config.use_cpu is False
    assert (config.num_processes > 1) == (config.distributed_type != DistributedType.NO)
    assert config.mixed_precision in (None, "no")
    if config.distributed_type == DistributedType.DEEPSPEED:
        assert (ROOT / config.deepspeed_config["deepspeed_config_file"]).is_file()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_named_and_explained(path):
    assert f"`{path.name}`" in README
    assert f"--config_file launch/{path.name} cpt/train.py" in path.read_text()


def test_one_gpu_loses_no_process():
    refuse_lost_accelerate(["--config_file", str(ROOT / "launch" / "one_gpu.yaml"), "cpt/train.py", "recipe.yaml"])


def test_every_folder_has_its_row_and_its_line():
    folders = sorted(path.parent.name for path in (ROOT / "launch").glob("*/node.sh"))
    assert folders == sorted(LINES)
    for folder in folders:
        started = next(
            name for name in ("job.sbatch", "start.sh", "node.sh") if (ROOT / "launch" / folder / name).exists()
        )
        assert f"launch/{folder}/{started}` |" in README


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_is_what_its_line_writes(folder, tmp_path, monkeypatch):
    """When it is not: type the line in launch/README.md."""
    for name in ("recipes", "deepspeed_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    kept = {
        path.name: path.read_text()
        for path in (ROOT / "launch" / folder).iterdir()
        if path.suffix not in (".log", ".pid")
    }
    if "hostfile" in kept:
        (tmp_path / "launch" / folder).mkdir(parents=True)
        (tmp_path / "launch" / folder / "hostfile").write_text(kept["hostfile"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cpt.launchers.launch.TRAIN", tmp_path / "cpt" / "train.py")
    with pytest.raises(SystemExit) as ended:
        main(LINES[folder][1:])
    assert ended.value.code == 0
    assert {path.name: path.read_text() for path in (tmp_path / "launch" / folder).iterdir()} == kept
