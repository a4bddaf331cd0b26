import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_recipe
from tiny_run import save_checkpoint
from tiny_trainers import trainer_of
from torch.nn.modules.module import _IncompatibleKeys
from transformers import TrainerState

from cpt.checkpoints.manifest import read_manifest, write_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.data.readers.comparing import COMPARISON
from cpt.data.rows.mixture import RowsOfSteps
from cpt.errors import CheckpointError, DataError, LaunchError
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.runs.record import Run
from cpt.training import resuming
from cpt.training.callbacks import StatusFile
from cpt.training.contents import exactness
from cpt.training.resuming import (
    DataPosition,
    comparison_of,
    keep_dtype,
    keep_global_batch,
    saved_on_errors,
    train_from,
)


@pytest.fixture
def point(tmp_path):
    """At step 4 of a run of one process."""
    checkpoint = save_checkpoint(tmp_path, 4)
    return ResumePoint(checkpoint, read_manifest(checkpoint))


@pytest.fixture
def trainer(tiny_recipe, tmp_path):
    return trainer_of(tiny_recipe, tmp_path)


def test_another_number_of_processes_keeps_the_rows_of_a_step(
    tiny_recipe, tmp_path, point, monkeypatch
):
    stated = load_recipe(write_recipe(tiny_recipe, tmp_path / "stated.yaml"))
    del tiny_recipe["budget"]["global_batch_tokens"]
    tiny_recipe["training"]["gradient_accumulation_steps"] = 2
    unstated = load_recipe(write_recipe(tiny_recipe, tmp_path / "unstated.yaml"))
    assert (
        keep_global_batch(unstated, point) == keep_global_batch(unstated, ResumePoint()) == unstated
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert keep_global_batch(unstated, point).budget.global_batch_tokens == 256
    assert keep_global_batch(stated, point) == stated
    del tiny_recipe["training"]["gradient_accumulation_steps"]
    of_two = load_recipe(write_recipe(tiny_recipe, tmp_path / "of two.yaml"))
    assert keep_global_batch(of_two, point) == of_two, "one micro-batch, if no number is given"
    tiny_recipe["training"]["gradient_accumulation_steps"] = 2
    tiny_recipe["training"]["parallelism_config"] = {"sp_size": 2}
    shared = load_recipe(write_recipe(tiny_recipe, tmp_path / "shared.yaml"))
    assert keep_global_batch(shared, point) == shared, "two processes that share rows read as one"


@pytest.mark.parametrize(
    ("known", "processes", "deterministic", "begin"),
    [
        ("bit-exact", 1, True, "bit-exact"),
        ("bit-exact", 1, False, "rounding: GPU kernels"),
        ("bit-exact", 3, False, "elastic: from step 4 with 3 processes instead of 1: "),
        ("rounding: of before", 3, True, "rounding: of before"),
        (None, 1, True, "unproven: resumed from "),
        ("new", 1, True, "bit-exact"),
        ("new", 1, False, "rounding: GPU kernels"),
    ],
)
def test_a_run_is_as_exact_as_its_weakest_start(
    known, processes, deterministic, begin, point, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    manifest = None if known is None else replace(point.manifest, exactness=known)
    given = ResumePoint() if known == "new" else replace(point, manifest=manifest)
    found = exactness(given, deterministic=deterministic)
    assert found.startswith(begin) and (":" in begin or found == begin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, None])
def test_a_resumed_run_keeps_the_dtype_of_its_weights(dtype, tiny_recipe, tmp_path, point):
    weights = {"a": torch.ones(3, dtype=dtype or torch.float32), "b": torch.ones(5)}
    weights["b"] = weights["b"].to(dtype or torch.bfloat16)  # None: mixed
    save_file(weights, point.checkpoint / "model.safetensors")

    def kept(given=point, *, deepspeed=False, **changes):
        sections = {**tiny_recipe, "model": {**tiny_recipe["model"], **changes.pop("model", {})}}
        recipe = load_recipe(write_recipe({**sections, **changes}, tmp_path / "r.yaml"))
        found = keep_dtype(recipe, given, deepspeed=deepspeed)
        return None if found is recipe else found.model.dtype

    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    assert kept() == names.get(dtype)
    assert kept(model={"dtype": "float32"}) is None and kept(deepspeed=True) is None
    assert kept(ResumePoint()) is None and kept(replace(point, manifest=None)) is None
    sharded = replace(point.manifest, zero_stage=3)
    assert kept(replace(point, manifest=sharded)) is None


def test_random_numbers_of_other_processes_are_replaced_the_same_way_each_time(trainer, tmp_path):
    other = save_checkpoint(tmp_path / "other", 4, world_size=2)
    draws = []
    for step in (4, 4, 5):
        torch.rand(3)
        trainer.state.global_step = step
        trainer.load_random_states(other)
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_checkpoint_of_another_engine_is_refused_with_the_command_that_starts_from_its_weights(
    trainer, point
):
    checkpoint = point.checkpoint
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, replace(point.manifest, zero_stage=2))
    with pytest.raises(
        CheckpointError, match=f"ZeRO-2.*cpt export {checkpoint} .*--new model.path="
    ):
        train_from(trainer, replace(point, manifest=read_manifest(checkpoint)))


@pytest.mark.heavy
def test_the_log_names_the_checkpoint_and_only_weights_that_are_missing(
    tiny_recipe, tmp_path, caplog
):
    tiny_recipe["model"]["config"] = {
        **tiny_recipe["model"]["config"],
        "tie_word_embeddings": True,
    }
    trainer_of(tiny_recipe, tmp_path, steps=2, checkpoints={"every_steps": 2}).train()
    trainer = trainer_of(tiny_recipe, tmp_path, steps=4, checkpoints={"every_steps": 2})
    checkpoint = trainer.run_folder / "checkpoint-2"
    for name in ("cpt", "transformers", "transformers.trainer"):
        caplog.set_level("INFO", logger=name)  # a test that ran before may have set it
    logging.getLogger("transformers").addHandler(caplog.handler)  # it does not propagate
    point = ResumePoint(checkpoint, read_manifest(checkpoint))
    train_from(trainer, point)
    assert f"Resuming from {checkpoint}, after step 2." in caplog.text
    assert "missing keys" not in caplog.text
    lost = _IncompatibleKeys(["lm_head.weight", "model.norm.weight"], [])
    trainer._issue_warnings_after_load(lost)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "model.norm.weight" in caplog.text and "lm_head" not in caplog.text


# --- without a model -------------------------------------------------------------------------------------------------


class Recorded:
    """The part of a trainer that resuming uses; it records what it finds in the run's folder when it trains."""

    def __init__(self, folder, *, sharding="plain", unsaved="", callbacks=()):
        self.run_folder = folder
        self.sharding = sharding
        self.unsaved = unsaved
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))
        self.state = TrainerState(global_step=5, max_steps=9)
        self.args = self.control = None
        self.trained = []

    def train(self, **options):
        converted = sorted(path.name for path in self.run_folder.glob(".universal-*"))
        self.trained.append((options, converted))

    def save_after_error(self):
        if not self.unsaved:
            save_checkpoint(self.run_folder, 5)
        return self.unsaved


def converted(checkpoint, folder, *, trust):
    """What DeepSpeed would convert."""
    target = folder / f".universal-{checkpoint.name.rpartition('-')[2]}"
    target.mkdir()
    (target / "trusted").write_text(str(trust))
    return target


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("begins", [True, False])
def test_the_main_process_removes_what_killed_ones_had_converted(
    begins, rank, tmp_path, point, monkeypatch
):
    monkeypatch.setenv("RANK", str(rank))
    (tmp_path / ".universal-2").mkdir()
    trainer = Recorded(tmp_path)
    train_from(trainer, ResumePoint() if begins else point)
    options = {} if begins else {"resume_from_checkpoint": str(point.checkpoint)}
    assert trainer.trained == [(options, [] if rank == 0 else [".universal-2"])]
    assert read_events(tmp_path) == [] and trainer.point == (ResumePoint() if begins else point)


@pytest.mark.parametrize("processes", [1, 2])
def test_zeros_parts_are_converted_for_another_number_of_processes(
    processes, tmp_path, point, monkeypatch, caplog
):
    monkeypatch.setattr(resuming, "make_universal", converted)
    monkeypatch.setattr(resuming, "world_size", lambda: processes)
    caplog.set_level("INFO", logger="cpt")
    manifest = replace(point.manifest, world_size=2, zero_stage=2)
    (point.checkpoint / "manifest.json").unlink()
    write_manifest(point.checkpoint, manifest)
    trainer = Recorded(tmp_path, sharding="zero-2")
    train_from(trainer, replace(point, manifest=manifest, trusted=True))
    if processes == 2:
        assert trainer.trained == [({"resume_from_checkpoint": str(point.checkpoint)}, [])]
        assert read_events(tmp_path) == []
    else:
        universal = str(tmp_path / ".universal-4")
        assert trainer.trained == [({"resume_from_checkpoint": universal}, [".universal-4"])]
        (event,) = read_events(tmp_path)
        assert (event["kind"], event["step"]) == ("elastic", 4)
        assert (event["processes"], event["processes_before"]) == (1, 2)
        assert "with 1 process instead of 2 from step 4: " in event["message"]
    assert not list(tmp_path.glob(".universal-*"))
    assert f"Resuming from {point.checkpoint}, after step 4." in caplog.messages


def test_plain_checkpoints_are_not_converted(tmp_path, point, monkeypatch, caplog):
    caplog.set_level("INFO", logger="cpt")
    monkeypatch.setattr(resuming, "world_size", lambda: 3)
    trainer = Recorded(tmp_path)
    train_from(trainer, point)
    train_from(trainer, replace(point, manifest=None))
    options = {"resume_from_checkpoint": str(point.checkpoint)}
    assert trainer.trained == [(options, [])] * 2
    assert [event["kind"] for event in read_events(tmp_path)] == ["elastic"]
    assert f"Resuming from {point.checkpoint}." in caplog.messages


def fail_with(problem, trainer):
    with pytest.raises(type(problem)), saved_on_errors(trainer):
        raise problem


@pytest.mark.parametrize(
    ("problem", "unsaved", "message"),
    [
        (KeyError("x"), "", "The run failed after step 5: KeyError: 'x'. The same command resumes"),
        (KeyError("x"), "the disk", "KeyError: 'x'. Step 5 could not be saved: the disk. Nothing"),
        (DataError("a row"), "", None),
        (DataError("a row"), "the disk", None),
    ],
)
def test_an_error_saves_the_step_and_names_what_the_run_resumes_from(
    problem, unsaved, message, tmp_path, caplog
):
    status = StatusFile(Run(tmp_path))
    trainer = Recorded(tmp_path, unsaved=unsaved, callbacks=[SimpleNamespace(), status])
    fail_with(problem, trainer)
    events = read_events(tmp_path)
    if message is None:
        assert events == []
        warning = f"Step 5 could not be saved: {unsaved}. Nothing was saved yet."
        assert caplog.messages == ([warning] if unsaved else [])
    else:
        (event,) = events
        assert (event["kind"], event["step"]) == ("failed", 5) and message in event["message"]
    assert Run(tmp_path).status()["step"] == 5


@pytest.mark.parametrize("kind", [CheckpointError, LaunchError])
def test_errors_that_have_saved_what_is_good_save_nothing(kind, tmp_path):
    fail_with(kind("saved before"), Recorded(tmp_path))
    assert not list(tmp_path.iterdir())


def test_only_the_main_process_records_a_failure_and_none_that_lost_the_others(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", "1")
    fail_with(KeyError("x"), Recorded(tmp_path, unsaved="the disk"))
    monkeypatch.setattr(resuming, "lost_others", lambda problem: True)
    fail_with(RuntimeError("gloo"), Recorded(tmp_path))
    assert not list(tmp_path.iterdir())


class Ahead:
    def __init__(self, row):
        self.heard = [row]

    def start(self):
        self.heard.append("start")

    def stop(self):
        self.heard.append("stop")


@pytest.mark.parametrize(("index", "has_chunks"), [(0, True), (0, False), (1, True)])
def test_one_process_of_a_machine_prepares_the_chunks_from_the_next_row_on(index, has_chunks):
    made = []

    def read_ahead(row):
        made.append(Ahead(row))
        return made[-1] if has_chunks else None

    data = SimpleNamespace(read_ahead=read_ahead, state=lambda row: {"row": row})
    position = DataPosition(data, RowsOfSteps(3))
    assert position.state_dict() == {"row": 0}
    arguments = SimpleNamespace(local_process_index=index)
    state = TrainerState(global_step=5)
    position.on_train_begin(arguments, state, None)
    state.global_step = 7
    assert position.state_dict() == {"row": 21}
    position.on_train_end(arguments, state, None)
    expected = [[15, "start", "stop"] if has_chunks else [15]] if index == 0 else []
    assert [ahead.heard for ahead in made] == expected


def test_the_way_in_which_data_were_compared_is_that_of_the_checkpoint(point):
    position = point.checkpoint / "data_position.json"
    assert comparison_of(ResumePoint()) == comparison_of(point) == COMPARISON
    position.write_text(json.dumps({"row": 3}))
    assert comparison_of(point) == 3 != COMPARISON
    position.write_text(json.dumps({"row": 3, "comparison": 5}))
    assert comparison_of(point) == 5
