import shutil
import signal
import subprocess
import sys
import time

import pytest
from launching import ROOT, environment_of_a_run, launch, zero_profile
from rehearsing import findings_of, judged_recipe, rehearse

from cpt.checkpoints.manifest import hash_file
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.rehearsal.rehearse import remove_scratch, scratch_folder

WRONG = "tests.rehearsal.wrong_runs"


def failed(findings):
    return {step for step, finding in findings.items() if finding["verdict"] == "FAILED"}


def test_what_an_earlier_rehearsal_left_is_removed_and_the_folder_of_runs_stays_if_others_use_it(
    tiny_recipe, tmp_path
):
    recipe = load_recipe(judged_recipe(tiny_recipe, tmp_path))
    with scratch_folder(recipe) as folder:
        (folder / "first-steps" / "checkpoint-2").mkdir(parents=True)
        (folder / "resumed.log").touch()
    with scratch_folder(recipe) as folder:
        assert [path.name for path in folder.iterdir()] == [".lock"]
        (folder.parent / "other").mkdir()
        remove_scratch(folder)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_folder_that_cannot_be_made_is_named(tiny_recipe, tmp_path):
    (tmp_path / "runs").touch()
    with (
        pytest.raises(RecipeError, match="`output_dir`"),
        scratch_folder(load_recipe(judged_recipe(tiny_recipe, tmp_path))),
    ):
        pass


@pytest.mark.long
def test_each_thing_that_is_wrong_is_found_in_one_rehearsal_and_all_else_is_tried(tiny_recipe, tmp_path):
    recipe = judged_recipe(
        tiny_recipe,
        tmp_path,
        stage=WRONG,
        optimizer={"name": f"{WRONG}:noting", "learning_rate": 1e-2},
        checkpoints={"every_steps": 2, "archive": "/proc/nowhere", "weights_every_steps": 3, "in_background": True},
    )
    findings, code = findings_of(recipe)
    assert code == 2 and failed(findings) == {"archive", "longest rows", "evaluation", "resume"}
    assert "1 at a time fit" in findings["longest rows"]["figure"]
    assert findings["longest rows"]["error"] == findings["archive"]["error"] == "ResourceError"
    assert findings["evaluation"]["error"] == "KeyError" and "bleu" in findings["evaluation"]["figure"]
    assert "would call tests.rehearsal.wrong_runs.Note" in findings["resume"]["figure"]
    assert {findings[step]["verdict"] for step in ("first steps", "save", "verify", "export", "disk")} == {"ok"}
    assert (tmp_path / "runs" / ".tiny.rehearsal" / "first_steps.log").exists()


@pytest.mark.long
def test_a_state_that_no_checkpoint_holds_is_found_by_its_losses(tiny_recipe, tmp_path):
    recipe = judged_recipe(tiny_recipe, tmp_path, optimizer={"name": f"{WRONG}:counting", "learning_rate": 1e-2})
    findings, _ = findings_of(recipe)
    assert failed(findings) == {"resume"} and "should be the same bit for bit" in findings["resume"]["figure"]


@pytest.mark.long
def test_zero_3_on_two_processes_is_rehearsed_as_it_will_run(tiny_recipe, tmp_path):
    training = {**tiny_recipe["training"], "deepspeed": zero_profile(tmp_path, 3)}
    findings, code = findings_of(judged_recipe(tiny_recipe, tmp_path, training=training), "--processes", "2")
    assert code == 0, findings
    assert findings["resume"]["figure"].endswith("the same losses and weights, bit for bit")
    assert findings["longest rows"]["figure"].endswith("on each of 2 processes")


@pytest.mark.long
def test_a_kept_rehearsal_of_two_processes_touches_nothing_of_a_run_of_that_name(tiny_recipe, tmp_path):
    recipe = judged_recipe(tiny_recipe, tmp_path)
    assert launch(recipe).returncode == 0
    run = tmp_path / "runs" / "tiny"

    def files():
        return {path: hash_file(path) for path in run.rglob("*") if path.is_file()}

    before = files()
    ended = rehearse(recipe, "--processes", "2", "--keep")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].endswith(f"cpt train {recipe} --supervise --processes 2")
    assert files() == before and (tmp_path / "runs" / ".tiny.rehearsal" / "first-steps" / "checkpoint-2").is_dir()


@pytest.mark.long
def test_a_disk_without_room_for_a_checkpoint_is_found(tiny_recipe, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk]).returncode
    ):
        pytest.skip("needs the right to mount")
    try:
        findings, code = findings_of(judged_recipe(tiny_recipe, tmp_path, output_dir=str(disk / "runs")))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert code == 2 and failed(findings) == {"save"}
    assert findings["save"]["error"] == "ResourceError" and "`output_dir`" in findings["save"]["figure"]


@pytest.mark.slow
def test_a_rehearsal_that_is_stopped_ends_its_processes_and_removes_its_folder(tiny_recipe, tmp_path):
    recipe = judged_recipe(tiny_recipe, tmp_path)
    words = [sys.executable, "-m", "cpt.cli", "rehearse", str(recipe)]
    child = subprocess.Popen(
        words, cwd=ROOT, env=environment_of_a_run(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    scratch = tmp_path / "runs" / ".tiny.rehearsal"
    deadline = time.monotonic() + 300
    while not (scratch / "longest_rows.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130 and "Interrupted" in said and not scratch.exists()
