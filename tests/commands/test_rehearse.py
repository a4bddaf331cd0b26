import json
import signal
import subprocess
import sys
import time

import pytest
from launching import ROOT, environment_of_a_run
from tiny import write_documents, write_recipe

from cpt.commands.rehearse import scratch_folder
from cpt.errors import LaunchError
from cpt.recipe.load import load_recipe

WRONG = "tests.commands.wrong_runs"


def evaluated_recipe(sections, folder, **changes):
    write_documents(folder / "judged.jsonl", 40, seed=9)
    evaluation = {
        "perplexity": [{"path": str(folder / "judged.jsonl"), "name": "judged"}],
        "every_steps": 4,
    }
    sections = {
        **sections,
        "evaluation": evaluation,
        "checkpoints": {"every_steps": 2, "keep": 2},
        **changes,
    }
    return write_recipe(sections, folder / "recipe.yaml")


def rehearse(recipe, *words):
    command = [sys.executable, "-m", "cpt.cli", "rehearse", str(recipe), *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, timeout=540
    )


def verdicts(recipe, *words):
    ended = rehearse(recipe, "--json", *words)
    assert ended.stdout, ended.stderr
    found = {finding["step"]: finding for finding in json.loads(ended.stdout)["findings"]}
    return {step: finding["verdict"] for step, finding in found.items()}, found, ended.returncode


@pytest.mark.slow
def test_too_little_memory_for_the_longest_rows_is_found(tiny_recipe, tmp_path):
    found, findings, code = verdicts(evaluated_recipe(tiny_recipe, tmp_path, stage=WRONG))
    assert code == 2 and [step for step in found if found[step] == "FAILED"] == ["longest rows"]
    assert (
        "out of memory" in findings["longest rows"]["result"] and found["first steps"] == "not run"
    )


@pytest.mark.slow
def test_a_state_that_no_checkpoint_holds_is_found(tiny_recipe, tmp_path):
    recipe = evaluated_recipe(
        tiny_recipe, tmp_path, optimizer={"name": f"{WRONG}:counting", "learning_rate": 1e-2}
    )
    found, findings, _ = verdicts(recipe)
    assert [step for step in found if found[step] == "FAILED"] == ["resume"]
    assert findings["resume"]["error"] == "CheckpointError"
    assert (tmp_path / "runs" / ".tiny.rehearsal" / "resumed.log").exists()


def test_a_recipe_is_rehearsed_once_at_a_time_in_an_empty_folder(tiny_recipe, tmp_path):
    recipe = load_recipe(evaluated_recipe(tiny_recipe, tmp_path))
    with scratch_folder(recipe) as folder:
        (folder / "run" / "checkpoint-2").mkdir(parents=True)
        with pytest.raises(LaunchError), scratch_folder(recipe):
            pass
        assert (folder / "run" / "checkpoint-2").exists()
    with scratch_folder(recipe) as folder:
        assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_stopped_rehearsal_ends_its_processes_and_removes_its_folder(tiny_recipe, tmp_path):
    recipe = evaluated_recipe(tiny_recipe, tmp_path)
    words = [sys.executable, "-m", "cpt.cli", "rehearse", str(recipe)]
    child = subprocess.Popen(
        words, cwd=ROOT, env=environment_of_a_run(), stderr=subprocess.PIPE, text=True
    )
    scratch = tmp_path / "runs" / ".tiny.rehearsal"
    while not (scratch / "longest_rows.log").exists() and child.poll() is None:
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    _, printed = child.communicate(timeout=60)
    assert child.returncode == 130 and "Interrupted" in printed and not scratch.exists()
