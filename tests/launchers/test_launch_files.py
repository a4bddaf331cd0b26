"""The accelerate configs under launch/ are ones that accelerate reads, and that start what they say."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from cpt.launchers.lost_processes import refuse_lost_accelerate

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launch").glob("*.yaml"))


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
    assert f"`{path.name}`" in (ROOT / "launch" / "README.md").read_text()
    assert f"--config_file launch/{path.name} cpt/train.py" in path.read_text()


def test_one_gpu_loses_no_process():
    refuse_lost_accelerate(["--config_file", str(ROOT / "launch" / "one_gpu.yaml"), "cpt/train.py", "recipe.yaml"])
