"""A run that was changed and killed, then damaged: whatever is lost of its record, it trains the same steps."""

import itertools
import json
import os
import random
import shutil
import signal
from dataclasses import dataclass

import pytest
from tiny import write_recipe
from tiny_run import DAMAGES, damage
from transformers import TrainerCallback

from cpt.errors import CptError, Interrupted, RestartNeeded
from cpt.recipe.load import load_recipe
from cpt.train import train
from cpt.training.restart import remember_micro_batch

CHANGE = ("optimizer.learning_rate=1e-3", "data.sources.0.weight=0.4")
FREE = ("", "description=x")
MOVED = (False, True)
RECORD = ("record.json", "recipe.yaml", "history.jsonl", "inputs.json", "learned.json")
OTHERS = (
    *("status.json", "environment.json", "starts.jsonl", "events.jsonl", "metrics.jsonl"),
    *("plan.json", ".input_hashes.json"),
)


class InterruptAfter(TrainerCallback):
    """The run stops at the end of the next step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Case:
    damage: str
    free: str = ""
    is_moved: bool = False

    def __str__(self):
        words = [self.damage, self.free, "moved" if self.is_moved else ""]
        return ", ".join(word for word in words if word)


class ChangedRun:
    """8 steps with checkpoints of steps 2, 4 and 6; its learning rate and mixture changed after step 4."""

    def __init__(self, sections, home):
        self.home, self.kept = home, home / "kept"
        sections["output_dir"] = str(home / "runs")
        sections["checkpoints"] = {"every_steps": 2, "keep": None}
        self.file = write_recipe(sections, home / "r.yaml")
        (home / "runs/tiny").mkdir(parents=True)
        remember_micro_batch(home / "runs/tiny", 1, 1)
        with pytest.raises(Interrupted):
            self.start(interrupt_after=3)
        with pytest.raises(Interrupted):
            self.start(*CHANGE, change=True, interrupt_after=5)
        shutil.copytree(home / "runs", self.kept)
        saved = sorted(path.name for path in self.kept.glob("tiny/checkpoint-*"))
        (line,) = (self.kept / "tiny/history.jsonl").read_text().splitlines()
        assert saved == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert json.loads(line)["step"] == 4
        self.start(*CHANGE)
        self.straight = self.result(home / "runs/tiny")

    def start(self, *words, change=False, interrupt_after=None):
        """Start until the run needs no other start, as `cpt train` does."""

        def interrupt(trainer):
            trainer.add_callback(InterruptAfter(interrupt_after))

        for _ in range(4):
            recipe = load_recipe(self.file, [word for word in words if word])
            try:
                return train(recipe, change=change, ready=interrupt)
            except RestartNeeded:
                continue
        raise AssertionError("the run restarts without an end")

    def result(self, run):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        return (run / "final/model.safetensors").read_bytes(), losses

    def outcome(self, case: Case):
        """`same`, or in words what came of it."""
        folder = self.home / ("elsewhere" if case.is_moved else "runs")
        for old in (self.home / "runs", self.home / "elsewhere"):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(self.kept, folder)
        run = folder / "tiny"
        break_run(run, case.damage)
        words = [*CHANGE, case.free, f"output_dir={folder}" if case.is_moved else ""]
        try:
            self.start(*words)
        except CptError as problem:
            return f"blocked: {problem}"
        except Exception as problem:  # the user would see a traceback
            return f"traceback: {problem!r}"
        weights, losses = self.result(run)
        is_same = weights == self.straight[0] and losses.items() <= self.straight[1].items()
        return "same" if is_same else f"other steps: {losses}"


def break_run(run, words):
    """Such as `missing recipe.yaml` or `empty checkpoint-6/optimizer.pt and checkpoint-4/optimizer.pt`."""
    how, _, names = words.partition(" of ")
    for name in names.split(" and "):
        path = run / name
        if how == "missing" and path.is_dir():
            shutil.rmtree(path)
        elif how == "other version":
            path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
        elif how == "manifest of another":
            shutil.copy(run / "checkpoint-2/manifest.json", path)
        elif path.exists() and path.stat().st_size:
            damage(path, how)


def damages():
    yield "missing of nothing"
    for name in (*RECORD, *OTHERS, "checkpoint-6/manifest.json", "checkpoint-6/record.json"):
        yield from (f"{how} of {name}" for how in DAMAGES)
    for how in ("other version", "manifest of another"):
        yield f"{how} of checkpoint-6/manifest.json"
    state = "optimizer.pt"
    yield f"empty of checkpoint-6/{state}"
    yield f"bit flip of checkpoint-6/{state} and checkpoint-4/{state}"
    yield f"empty of checkpoint-6/{state} and checkpoint-4/manifest.json"
    yield "missing of checkpoint-6"
    yield "missing of checkpoint-6 and checkpoint-4"
    for name in RECORD[:4]:  # killed between the change and the next checkpoint
        yield f"missing of checkpoint-6 and {name}"
    # Two faults at once.
    yield f"empty of checkpoint-6/{state} and checkpoint-4/{state} and recipe.yaml"
    yield f"empty of checkpoint-6/{state} and checkpoint-4/{state} and history.jsonl"
    yield f"empty of checkpoint-6/{state} and checkpoint-4/{state} and record.json"
    yield "missing of recipe.yaml and history.jsonl"
    yield "missing of record.json and history.jsonl"
    yield "missing of record.json and recipe.yaml"
    yield "missing of record.json and recipe.yaml and history.jsonl and inputs.json"


CASES = [
    Case(*values)
    for values in itertools.product(damages(), FREE, MOVED)
    if values != ("missing of nothing", "", False)
]
SAMPLE = [
    Case("empty of checkpoint-6/manifest.json", "description=x"),
    Case("bit flip of checkpoint-6/optimizer.pt and checkpoint-4/optimizer.pt", "description=x"),
    Case("missing of checkpoint-6 and checkpoint-4", "", True),
    Case("missing of history.jsonl"),
    Case("missing of recipe.yaml", "description=x", True),
    Case("bit flip of record.json"),
    Case("truncate of learned.json"),
]


@pytest.fixture
def changed(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "cache"))
    return ChangedRun(tiny_recipe, tmp_path)


def different(changed, cases):
    outcomes = {str(case): changed.outcome(case) for case in cases}
    return {case: outcome for case, outcome in outcomes.items() if outcome != "same"}


@pytest.mark.heavy
def test_a_changed_run_makes_the_same_steps_whatever_is_lost_of_its_record(changed):
    assert different(changed, SAMPLE) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_damage_with_and_without_a_free_change_and_a_move_changes_no_step(changed):
    assert different(changed, random.Random(1).sample(CASES, 30)) == {}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_any_damage_of_the_record_with_any_start_changes_no_step(changed):
    assert different(changed, CASES) == {}
