"""Damaged files of a run and of its store: never other weights, never a traceback. Checkpoints: tests/promises."""

import json
import os
import re
import shutil
import signal

import pytest
from tiny import write_documents, write_recipe
from tiny_run import DAMAGES, damage
from transformers import TrainerCallback

from cpt.data.readers.decontamination import load_runs
from cpt.errors import CptError, Interrupted
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.train import train


class Steps(TrainerCallback):
    """Counts the steps of a start, and interrupts it after one of them."""

    def __init__(self, interrupt_at=None):
        self.interrupt_at, self.made = interrupt_at, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.made += 1
        if state.global_step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)


class InterruptedRun:
    """A run of 8 steps that was interrupted in the middle, with its cache; `restore` brings both back as they were."""

    def __init__(self, sections, home, **data):
        self.home, self.run, self.kept = home, home / "runs" / "tiny", home / "kept"
        documents = write_documents(home / "documents.jsonl", 60, seed=1)
        documents.write_text(documents.read_text() + '{"no text": 1}\n')  # listed in bad_rows.jsonl
        bad_rows = {"on_bad_row": "skip", "max_bad_share": 0.5, "chunk_bytes": 15_000}
        sections["data"] |= {**bad_rows, "sources": [{"path": str(documents)}], **data}
        held_out = {"path": str(write_documents(home / "held_out.jsonl", 8, seed=2))}
        sections["evaluation"] = {
            "held_out_share": 0.1,
            "perplexity": [held_out],
            "every_tokens": 1024,
        }
        sections["evaluation"]["prompts"] = ["the model"]
        sections["checkpoints"] = {"every_steps": 2, "keep": 2}
        self.recipe = load_recipe(write_recipe(sections, home / "r.yaml"))
        with pytest.raises(Interrupted):
            self.start(interrupt_at=3)
        for folder in ("runs", "cache"):
            shutil.copytree(home / folder, self.kept / folder)
        self.start()
        self.straight = self.result()

    def start(self, interrupt_at=None):
        """Train to the end; `steps` counts how many steps were made, also where it fails."""
        load_runs.cache_clear()  # each start stands for a process of its own
        self.steps = Steps(interrupt_at)
        train(self.recipe, ready=lambda trainer: trainer.add_callback(self.steps))

    def result(self):
        """The weights, and the loss of each step that is in the log; damage may have removed lines of it."""
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        return (self.run / "final" / "model.safetensors").read_bytes(), losses

    def restore(self):
        for folder in ("runs", "cache"):
            shutil.rmtree(self.home / folder, ignore_errors=True)
            shutil.copytree(self.kept / folder, self.home / folder)

    def files(self):
        """By kind: a path in which hashes and numbers are left out."""
        kinds = {}
        for path in sorted(
            path for path in self.kept.rglob("*") if path.is_file() and path.stat().st_size
        ):
            name = path.relative_to(self.kept).as_posix()
            kinds.setdefault(re.sub(r"[0-9a-f]{32}(\.[0-9a-f]{8})?|\d+", "*", name), []).append(
                name
            )
        return kinds

    def outcome(self, name, how):
        """`same`, `stopped` with an error before the first step, or in words what else came of the damage."""
        self.restore()
        damage(self.home / name, how)
        try:
            self.start()
        except CptError as problem:
            return (
                f"stopped after {self.steps.made} steps: {problem}"
                if self.steps.made
                else "stopped"
            )
        except Exception as problem:  # the user would see a traceback
            return f"traceback after {self.steps.made} steps: {problem!r}"
        weights, losses = self.result()
        is_same = weights == self.straight[0] and losses.items() <= self.straight[1].items()
        return "same" if is_same else "other weights or losses"


@pytest.fixture
def interrupted(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "cache"))
    return lambda **data: InterruptedRun(tiny_recipe, tmp_path, **data)


REPORTED = {  # what the first users' damage did: other weights, a traceback, no export
    r"cache/tokens/.*/.*/tokens.bin": "bit flip",
    r"cache/tokens/.*/.*/offsets.bin": "bit flip",
    r"cache/rows/.*/lengths.npy": "empty",
    r"cache/rows/.*/total.json": "missing",
    r"runs/tiny/inputs.json": "truncate",
    r"runs/tiny/held_out/step-\*.npz": "zeros",
    r"runs/tiny/recipe.yaml": "empty",
}


@pytest.mark.slow
def test_damage_to_what_can_be_made_again_changes_nothing_and_is_an_event(interrupted):
    run = interrupted(deduplicate="exact")
    kinds = run.files()
    for pattern, how in REPORTED.items():
        kind = next(kind for kind in kinds if re.fullmatch(pattern, kind))
        assert run.outcome(kinds[kind][0], how) == "same", (kind, how)
        assert how == "missing" or "damaged_file" in [
            event["kind"] for event in read_events(run.run)
        ], (kind, how)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("data", [{"deduplicate": "exact"}, {}], ids=["whole", "chunk by chunk"])
def test_any_damage_to_any_file_of_a_run_and_its_cache_changes_nothing_or_stops_it_first(
    interrupted, data
):
    run = interrupted(**data)
    kinds = run.files()
    names = [
        name
        for kind in kinds.values()
        for name in ((kind[:1] if data else kind[-1:]) if "cache" in kind[0] else kind)
    ]
    names = [name for name in names if "checkpoint-" not in name]
    assert len(names) > 30
    outcomes = {(name, how): run.outcome(name, how) for name in names for how in DAMAGES}
    assert {
        cell: outcome for cell, outcome in outcomes.items() if outcome not in ("same", "stopped")
    } == {}
