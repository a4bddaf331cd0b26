import subprocess
import sys

import pytest
from rehearsing import judged_recipe, rehearse
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import LaunchError

STEPS = ["recipe", "longest rows", "first steps", "evaluation", "save", "verify", "export", "resume", "disk"]


@pytest.mark.slow
def test_a_run_that_is_all_right_is_done_once_and_leaves_nothing(tiny_recipe, tmp_path):
    recipe = judged_recipe(tiny_recipe, tmp_path)
    ended = rehearse(recipe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line[13:15] == "ok"]
    assert [row[:13].rstrip() for row in rows] == STEPS
    assert "steps 3, 4 in new processes: the same losses and weights, bit for bit" in ended.stdout
    assert "3 of 4 checkpoints" in ended.stdout
    assert ended.stdout.splitlines()[-1] == f"All that the run will do was done once. Start it: cpt train {recipe}"
    assert not (tmp_path / "runs").exists()


def test_a_rehearsal_starts_its_processes_itself(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    problem = (
        CliRunner().invoke(application("rehearse"), ["rehearse", str(judged_recipe(tiny_recipe, tmp_path))]).exception
    )
    assert isinstance(problem, LaunchError) and "--processes" in str(problem)


def test_mistakes_of_the_recipe_come_first_and_leave_nothing(tiny_recipe, tmp_path, capsys):
    held_out = {"perplexity": [{"path": str(tmp_path / "nowhere.jsonl")}]}
    recipe = judged_recipe(tiny_recipe, tmp_path, evaluation=held_out)
    ended = CliRunner().invoke(application("rehearse"), ["rehearse", str(recipe)])
    assert "recipe       FAILED  DataError" in ended.output and "`evaluation.perplexity[0].path`" in ended.output
    assert "the rest     not run" in ended.output
    assert type(ended.exception).__name__ == "RehearsalError" and not (tmp_path / "runs").exists()


def test_a_zero_3_profile_that_saves_no_weights_is_a_mistake(tiny_recipe, tmp_path):
    profile = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    training = {**tiny_recipe["training"], "deepspeed": {**profile, "gradient_clipping": "auto"}}
    recipe = judged_recipe(tiny_recipe, tmp_path, training=training)
    ended = CliRunner().invoke(application("rehearse"), ["rehearse", str(recipe)])
    assert '"stage3_gather_16bit_weights_on_model_save": true' in ended.output.replace("\n" + " " * 21, " ")


def test_two_rehearsals_of_one_recipe_do_not_share_a_folder(tiny_recipe, tmp_path):
    recipe = judged_recipe(tiny_recipe, tmp_path)
    scratch = tmp_path / "runs" / ".tiny.rehearsal"
    scratch.mkdir(parents=True)
    program = (
        "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, fcntl.LOCK_EX); print('locked',"
        " flush=True); input()"
    )
    words = [sys.executable, "-c", program, str(scratch / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        problem = CliRunner().invoke(application("rehearse"), ["rehearse", str(recipe)]).exception
        other.communicate("\n")
    assert isinstance(problem, LaunchError) and "is being rehearsed already" in str(problem)
