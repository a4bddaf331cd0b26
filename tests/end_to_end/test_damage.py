"""Damaged files of real runs: every file, every kind of damage; never silent, never a traceback."""

import json
import os
import re
import shutil
import signal
from importlib import import_module

import pytest
import torch
from launching import launch, losses
from resuming import differences, forget_after, recipe_of, run_to_its_end
from tiny import TINY_LLAMA, write_documents, write_recipe
from tiny_run import DAMAGES, damage, seal
from transformers import TrainerCallback

from cpt.checkpoints.manifest import read_manifest
from cpt.checkpoints.model_folder import load_data
from cpt.checkpoints.resume import choose_checkpoint
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
    """A run of 8 steps that was interrupted in the middle, with its cache; each `restore` brings both back as they
    were then."""

    def __init__(self, home, tokenizer_folder, **data):
        self.home, self.run, self.kept = home, home / "runs" / "tiny", home / "kept"
        documents = write_documents(home / "documents.jsonl", 60, seed=1)
        documents.write_text(documents.read_text() + '{"no text": 1}\n')  # listed in bad_rows.jsonl
        sections = {
            "name": "tiny",
            "stage": "pretrain",
            "output_dir": str(home / "runs"),
            "model": {"from_scratch": True, "config": TINY_LLAMA},
            "tokenizer": {"path": str(tokenizer_folder)},
            "data": {
                "sequence_length": 64,
                "on_bad_row": "skip",
                "max_bad_share": 0.5,
                "window_bytes": 15_000,
                "sources": [{"path": str(documents)}],
                **data,
            },
            "evaluation": {
                "held_out_share": 0.1,
                "perplexity": [{"path": str(write_documents(home / "held_out.jsonl", 8, seed=2))}],
                "every_tokens": 1024,
                "prompts": ["the model"],
            },
            "budget": {"tokens": 8 * 256, "global_batch_tokens": 256},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoints": {"every_steps": 2, "keep": 2},
            "training": {"per_device_train_batch_size": 2, "logging_steps": 1},
        }
        self.recipe = load_recipe(write_recipe(sections, home / "r.yaml"))
        with pytest.raises(Interrupted):
            self.start(interrupt_at=3)
        for folder in ("runs", "cache"):
            shutil.copytree(home / folder, self.kept / folder)
        self.start()
        self.straight = self.result()

    def start(self, interrupt_at=None):
        """Train to the end; how many steps were made is counted in `steps`, also where it fails."""
        load_runs.cache_clear()  # each start stands for a process of its own
        self.steps = Steps(interrupt_at)
        train(self.recipe, ready=lambda trainer: trainer.add_callback(self.steps))

    def result(self):
        """The weights, and the loss of each step that is in the log; damage may have taken lines of it."""
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return (self.run / "final" / "model.safetensors").read_bytes(), {
            line["step"]: line["loss"] for line in lines if "loss" in line
        }

    def restore(self):
        for folder in ("runs", "cache"):
            shutil.rmtree(self.home / folder, ignore_errors=True)
            shutil.copytree(self.kept / folder, self.home / folder)

    def files(self):
        """By kind: a path in which hashes and numbers are left out."""
        kinds = {}
        for path in sorted(path for path in self.kept.rglob("*") if path.is_file() and path.stat().st_size):
            name = path.relative_to(self.kept).as_posix()
            kinds.setdefault(re.sub(r"[0-9a-f]{32}(\.[0-9a-f]{8})?|\d+", "*", name), []).append(name)
        return kinds

    def outcome(self, name, how):
        """`same`, `stopped` before the first step with a sentence, or in words what else came of the damage."""
        self.restore()
        damage(self.home / name, how)
        try:
            self.start()
        except CptError as problem:
            return f"stopped after {self.steps.made} steps: {problem}" if self.steps.made else "stopped"
        except Exception as problem:  # the user would see a traceback
            return f"traceback after {self.steps.made} steps: {problem!r}"
        weights, losses = self.result()
        return (
            "same"
            if weights == self.straight[0] and losses.items() <= self.straight[1].items()
            else "other weights or losses"
        )


@pytest.fixture
def interrupted(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "cache"))
    return lambda **data: InterruptedRun(tmp_path, tokenizer_folder, **data)


REPORTED = {  # what the first users' damage did: other weights, a traceback, no export
    r"cache/tokens/.*/.*/tokens.bin": ("zeros", "bit flip"),
    r"cache/tokens/.*/.*/offsets.bin": ("bit flip",),
    r"cache/rows/.*/lengths.npy": ("empty", "bit flip"),
    r"cache/rows/.*/total.json": ("missing",),
    r"runs/tiny/inputs.json": ("truncate",),
    r"runs/tiny/held_out/step-\*.npz": ("zeros",),
    r"runs/tiny/recipe.yaml": ("empty",),
}


def test_damage_to_what_can_be_made_again_changes_nothing_and_is_an_event(interrupted):
    run = interrupted(deduplicate="exact")
    kinds = run.files()
    for pattern, ways in REPORTED.items():
        kind = next(kind for kind in kinds if re.fullmatch(pattern, kind))
        for how in ways:
            assert run.outcome(kinds[kind][0], how) == "same", (kind, how)
            if how != "missing":
                assert "damaged_file" in [event["kind"] for event in read_events(run.run)], (kind, how)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("data", [{"deduplicate": "exact"}, {}], ids=["whole", "window by window"])
def test_any_damage_to_any_file_of_a_run_and_its_cache_changes_nothing_or_stops_it_first(interrupted, data):
    run = interrupted(**data)
    kinds = run.files()
    names = [
        name for kind in kinds.values() for name in ((kind[:1] if data else kind[-1:]) if "cache" in kind[0] else kind)
    ]
    names = [name for name in names if "checkpoint-" not in name]  # of these see below
    assert len(names) > 30
    outcomes = {(name, how): run.outcome(name, how) for name in names for how in DAMAGES}
    bad = {cell: outcome for cell, outcome in outcomes.items() if outcome not in ("same", "stopped")}
    assert bad == {}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_damage_to_any_file_costs_the_steps_since_the_checkpoint_before_and_nothing_else(
    tiny_recipe, tmp_path, stage
):
    processes = 2 if stage else 1
    recipe = recipe_of(tiny_recipe, tmp_path, stage=stage, every=4)
    run = tmp_path / "runs" / "tiny"
    run_to_its_end(recipe, processes=processes)
    straight = losses(run)
    sound = shutil.copytree(run / "checkpoint-8", tmp_path / "sound")
    names = [path.relative_to(sound).as_posix() for path in sound.rglob("*") if path.is_file()]
    assert len(names) >= 14
    for name in names:
        for how in DAMAGES:
            damage(run / "checkpoint-8" / name, how)
            assert choose_checkpoint(run).checkpoint == run / "checkpoint-4", (name, how)
            shutil.rmtree(run / "bad-checkpoint-8")
            shutil.copytree(sound, run / "checkpoint-8")
    assert choose_checkpoint(run).checkpoint == run / "checkpoint-8"
    for name in names[:: max(1, len(names) // 3)]:
        (run / "events.jsonl").unlink()
        forget_after(run, 8)
        damage(run / "checkpoint-8" / name, "bit flip")
        run_to_its_end(recipe, processes=processes)
        assert [event["kind"] for event in read_events(run)] == ["quarantined"], name
        assert losses(run) == straight and differences(sound, run / "checkpoint-8") == [], name
        shutil.rmtree(run / "bad-checkpoint-8")


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 1], ids=["as before", "converted"])
def test_what_is_planted_in_deepspeeds_parts_never_runs_even_with_a_forged_manifest(tiny_recipe, tmp_path, processes):
    import_module("deepspeed")  # whose classes are in its files
    recipe = recipe_of(tiny_recipe, tmp_path, stage=2, every=4)
    run_to_its_end(recipe, processes=2)
    run = tmp_path / "runs" / "tiny"
    forget_after(run, 4)
    checkpoint = run / "checkpoint-4"
    known = read_manifest(checkpoint)
    for part in checkpoint.glob("global_step4/*optim_states.pt"):
        torch.save({**load_data(part), "passenger": Planted(tmp_path / "ran")}, part)
    seal(checkpoint, 4, world_size=2, zero_stage=2, tokens=known.tokens)
    ended = launch(recipe, way="torchrun" if processes > 1 else "python", processes=processes)
    assert ended.returncode != 0 and "reading it would call posix.mkdir" in ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_deepspeeds_parts_from_elsewhere_need_the_users_word_and_then_go_on_exactly(tiny_recipe, tmp_path):
    run_to_its_end(recipe_of(tiny_recipe, tmp_path, stage=2, every=4), processes=2)
    run = tmp_path / "runs" / "tiny"
    theirs = shutil.copytree(run / "checkpoint-4", tmp_path / "theirs")
    (theirs / "manifest.json").unlink()
    other = recipe_of(tiny_recipe, tmp_path, stage=2, every=4, name="other")
    words = ("--resume", str(theirs))
    refused = launch(other, way="torchrun", processes=2, arguments=words)
    assert refused.returncode != 0 and "--trust-checkpoint" in refused.stderr
    run_to_its_end(other, processes=2, arguments=(*words, "--trust-checkpoint"))
    assert losses(tmp_path / "runs" / "other") == losses(run)[4:]
    assert read_manifest(tmp_path / "runs" / "other" / "checkpoint-8").exactness.startswith("unproven")
