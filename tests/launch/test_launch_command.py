"""What `cpt launch` writes, and the shipped files of launch/."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from cpt.cli import main
from cpt.launch.launch_command import LAUNCHERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "launch" / "README.md").read_text()
LINES = {
    line.rsplit("/", 1)[1]: shlex.split(line)
    for line in README.splitlines()
    if line.startswith("cpt launch ")
}
CONFIGS = sorted((ROOT / "launch").glob("*.yaml"))
ZERO = "training.deepspeed={zero_optimization: {stage: 2}}"


@pytest.fixture
def launch(cpt, with_recipe):
    """`cpt launch recipe.yaml WORDS`: the exit code, and what it prints."""
    return lambda *words: cpt("launch", "recipe.yaml", *words)


@pytest.mark.heavy
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_files_are_complete_and_one_command_starts_them(launch, tmp_path, launcher, nodes):
    hosts = ["--hosts", "b,a"] if launcher != "slurm" else []
    several = ["--nodes", "2", *hosts] if nodes == 2 else []
    words = [
        ZERO,
        "--lora",
        "--launcher",
        launcher,
        "--gpus-per-node",
        "4",
        "--output",
        "there",
        *several,
    ]
    code, printed = launch(*words)
    script = "job.sbatch" if launcher == "slurm" else "start.sh" if nodes == 2 else "node.sh"
    assert code == 0 and printed.rstrip().endswith(f"there/{script}")
    for path in (tmp_path / "there").iterdir():
        assert not re.search(r"@[A-Z]+@", path.read_text()), path
        if path.suffix != ".yaml" and path.name != "hostfile":
            subprocess.run(["bash", "-n", str(path)], check=True)
    assert (
        f"python -m cpt train recipe.yaml {shlex.quote(ZERO)} --lora "
        in (tmp_path / "there/node.sh").read_text()
    )
    if several and hosts:
        assert (tmp_path / "there/hostfile").read_text() == "b slots=4\na slots=4\n"


def test_existing_files_are_overwritten_with_force_only(launch, tmp_path):
    launch("--output", "there")
    (tmp_path / "there/node.sh").write_text("mine")
    code, printed = launch("--output", "there")
    assert (
        code == 2
        and "there/node.sh" in printed
        and (tmp_path / "there/node.sh").read_text() == "mine"
    )
    assert (
        launch("--output", "there", "--force")[0] == 0
        and (tmp_path / "there/node.sh").read_text() != "mine"
    )


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--launcher", "torchrunn"], "`torchrun`"),
        (["--nodes", "2"], "--hosts"),
        (["--hosts", "a"], "--nodes"),
        (["--nodes", "2", "--hosts", "a,a"], "--hosts a,a"),
        (["--nodes", "2", "--launcher", "slurm", "--hosts", "a,b"], "--nodelist"),
        (["--sbatch=--partition=gpu"], "--partition=gpu"),
        (["--launcher", "slurm", "--sbatch", "qos=high"], "--sbatch qos=high"),
        (["--nodes", "3", "--hosts", "a,b,c"], "divides 32"),
        (
            ["--nodes", "3", "--hosts", "a,b,c", "training.per_device_train_batch_size=auto"],
            "4032 or 4224",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(launch, tmp_path, words, cause):
    before = sorted(tmp_path.rglob("*"))
    code, printed = launch(*words)
    assert code == 2 and cause in " ".join(printed.split()), printed
    assert sorted(tmp_path.rglob("*")) == before


SHARED = "training.parallelism_config={sp_size: 2}"


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus-per-node", "3"],
        ["--gpus-per-node", "5", "training.per_device_train_batch_size=auto"],
        ["--gpus-per-node", "32", "training.per_device_train_batch_size=4"],
        ["--gpus-per-node", "10", SHARED],
        ["--gpus-per-node", "200"],
    ],
    ids=["3", "5 auto", "32", "10 sharing rows", "more than rows"],
)
def test_each_remedy_for_a_global_batch_that_cannot_be_divided_works(launch, words):
    code, printed = launch(*words)
    text = " ".join(printed.split())
    batches = re.search(r"Write ([\d or]+)", text)
    assert code == 2 and batches, printed
    remedies = [f"budget.global_batch_tokens={batch}" for batch in batches[1].split(" or ")]
    remedies += [remedy.replace(": ", "=") for remedy in re.findall("set `(.+?)`", text)]
    for number, remedy in enumerate(remedies):
        assert launch(*words, remedy, "--output", f"there/{number}")[0] == 0, remedy


# --- launch/ ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_for_accelerate_starts_the_processes_that_it_names(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type != DistributedType.MULTI_CPU and config.use_cpu is False
    assert (config.num_processes > 1) == (config.distributed_type != DistributedType.NO)
    assert config.mixed_precision in (None, "no")
    if config.distributed_type == DistributedType.DEEPSPEED:
        assert (ROOT / config.deepspeed_config["deepspeed_config_file"]).is_file()
    assert f"`{path.name}`" in README


@pytest.mark.parametrize(
    "name", sorted({path.parent.name for path in (ROOT / "launch").glob("*/node.sh")})
)
def test_an_example_is_what_its_line_in_the_readme_writes(name, tmp_path, monkeypatch):
    for folder in ("recipes", "deepspeed_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(LINES[name][1:])
    assert ended.value.code == 0
    written = {path.name: path.read_text() for path in (tmp_path / "launch" / name).iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "launch" / name).iterdir()}
    assert written == kept, f"type the line of {name} in launch/README.md"
