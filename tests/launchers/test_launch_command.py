import subprocess
import sys

import pytest
from tiny_launch import RECIPE, write_programs

from cpt.cli import main
from cpt.launchers.launch_command import ENGINES


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The folder that a user types in."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(capsys, *words):
    """What is said, and the code."""
    with pytest.raises(SystemExit) as ended:
        main(["launch", "recipe.yaml", *words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


ZERO = "training.deepspeed={zero_optimization: {stage: 2}}"
COMMANDS = {
    "accelerate": "bash {0}/node.sh",
    "torchrun": "bash {0}/node.sh",
    "deepspeed": "bash {0}/node.sh",
    "slurm": "sbatch {0}/job.sbatch",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_one_node_is_one_command(work, capsys, engine):
    code, said = launch(capsys, ZERO, "--launcher", engine, "--gpus-per-node", "4")
    assert code == 0 and said.rstrip().endswith("    " + COMMANDS[engine].format(f"launch/tiny-{engine}-1x4"))
    for path in (work / f"launch/tiny-{engine}-1x4").iterdir():
        assert "@" not in path.read_text().replace('"$@"', "").replace("[@]", "").replace("USR1@300", ""), path


def test_several_nodes_are_one_command_too(work, capsys):
    code, said = launch(
        capsys, "--nodes", "2", "--gpus-per-node", "8", "--hosts", "b,a", "--no-ssh", "--output", "there"
    )
    assert (
        code == 0
        and said.startswith("16 process(es) on 2 node(s), with torchrun.")
        and said.rstrip().endswith("    bash there/start.sh")
    )
    assert (work / "there" / "hostfile").read_text().splitlines()[1:] == ["b slots=8", "a slots=8"]


def test_ones_own_hostfile_is_kept_as_it_is(work, capsys):
    (work / "hosts").write_text("# rack 2\n  # good ones\nb slots=8 # new\n\na slots=8\nspare slots=8\n")
    assert (
        launch(capsys, "--nodes", "2", "--gpus-per-node", "8", "--hostfile", "hosts", "--no-ssh", "--output", "there")[
            0
        ]
        == 0
    )
    assert (work / "there" / "hostfile").read_text() == (work / "hosts").read_text()
    assert (
        launch(
            capsys,
            "--nodes",
            "2",
            "--gpus-per-node",
            "8",
            "--hostfile",
            "there/hostfile",
            "--no-ssh",
            "--output",
            "there",
            "--force",
        )[0]
        == 0
    )
    assert (work / "there" / "hostfile").read_text() == (work / "hosts").read_text()


def test_the_hosts_are_asked_by_ssh_before_anything_is_written(work, capsys, monkeypatch):
    programs = write_programs(work / "bin", ssh='echo "Permission denied (publickey)." >&2; exit 255')
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    code, said = launch(capsys, "--nodes", "2", "--hosts", "a,b")
    assert (
        code == 2
        and "  a: Permission denied (publickey).\n  b: Permission denied" in said
        and not (work / "launch").exists()
    )


def test_existing_files_may_have_been_edited(work, capsys):
    launch(capsys, "--output", "there")
    (work / "there" / "node.sh").write_text("mine")
    code, said = launch(capsys, "--output", "there")
    assert (
        code == 2
        and "there/environment.sh, there/node.sh exist(s) already" in said
        and (work / "there" / "node.sh").read_text() == "mine"
    )
    assert (
        launch(capsys, "--output", "there", "--force")[0] == 0 and (work / "there" / "node.sh").read_text() != "mine"
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--nodes", "0"], "--nodes 0: a run has at least one"),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1"),
        (["--launcher", "torchrunn"], "--launcher torchrunn: there is no such launcher. Did you mean `torchrun`?"),
        (["--launcher", "ray"], "There are: accelerate, torchrun, deepspeed, slurm."),
        (["--port", "80"], "--port 80: take one from 1024"),
        (["--nodes", "2"], "--nodes 2: name them, --hosts node-a,node-b or --hostfile FILE"),
        (["--hosts", "a"], "one node needs no --hosts"),
        (["--nodes", "2", "--hosts", "a,b", "--hostfile", "x"], "--hostfile and --hosts both name the nodes"),
        (["--nodes", "2", "--launcher", "slurm", "--hosts", "a,b"], "SLURM chooses the nodes by itself"),
        (["--partition", "gpu"], "--partition=gpu is an option of SLURM, but this is --launcher torchrun"),
        (["--launcher", "slurm", "--sbatch", "qos=high"], "--sbatch qos=high: expected an option of sbatch"),
        (["--nodes", "2", "--hostfile", "gone"], "--hostfile gone cannot be read"),
        (["--output", "/elsewhere"], "the files belong into a folder below this one"),
        (["--output", "."], "the files belong into a folder below this one"),
        (["--output", "my files"], "take a name of letters"),
        (["--launcher", "deepspeed"], "names no DeepSpeed profile"),
        (["--nodes", "3", "--hosts", "a,b,c"], "does not divide into 3 node(s)"),
        (["budget.tokenz=3"], "Did you mean `tokens`"),
        (["--output", "recipe.yaml/x"], "Not a directory"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(work, capsys, words, complaint):
    before = sorted(work.rglob("*"))
    code, said = launch(capsys, *words)
    assert code == 2 and complaint in said and "Traceback" not in said
    assert sorted(work.rglob("*")) == before


def test_a_recipe_that_is_not_there_is_named(work, capsys):
    (work / "recipe.yaml").unlink()
    code, said = launch(capsys)
    assert code == 2 and "recipe.yaml" in said


def test_it_needs_no_torch(work):
    code = (
        "import sys; from cpt.cli import main\ntry: main(['launch', 'recipe.yaml'])\nexcept SystemExit as e: assert"
        " not e.code\n"
    )
    code += "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
