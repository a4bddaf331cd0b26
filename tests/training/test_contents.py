"""What a checkpoint holds, and how exactly its run repeats an uninterrupted one."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_folders import write_lines
from tiny_run import manifest_of
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.snapshot import NotFiniteError
from cpt.checkpoints.transaction import Contents
from cpt.recipe.schema import Recipe
from cpt.training import contents as module
from cpt.training.contents import (
    add_training_states,
    contents_of,
    engine_weights,
    exactness_of_run,
    random_states,
    random_states_file,
    refuse_broken_weights,
    set_random_states,
    trainer_state,
)

CPU = torch.device("cpu")


# --- exactness ---


def exactness(folder, *, device="cpu", rows=4, requested=4, changed=(), before="bit-exact"):
    """Of a run that resumes from step 4, with changes of these keys."""
    recipe = Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "some/model"},
            "data": {"sources": [{"path": "a.txt"}]},
            "budget": {"tokens": 10_000},
            "training": {} if requested is None else {"per_device_train_batch_size": requested},
        }
    )
    lines = [{"step": 4, "changes": [{"key": key} for key in keys]} for keys in changed]
    write_lines(folder / "history.jsonl", lines)
    point = ResumePoint(folder / "checkpoint-4", manifest_of({}, 4, exactness=before))
    arguments = SimpleNamespace(device=torch.device(device), per_device_train_batch_size=rows)
    return exactness_of_run(point, recipe, arguments, folder)


@pytest.mark.parametrize(
    ("how", "begin"),
    [
        ({}, "bit-exact"),
        ({"before": "elastic: before"}, "elastic: before"),
        ({"device": "cuda"}, "rounding: GPU kernels"),
        ({"rows": 3}, "rounding: 3 rows at a time instead of 4 after out-of-memory"),
        ({"rows": 4, "requested": 3}, "bit-exact"),
        ({"rows": 8, "requested": None}, "bit-exact"),
        ({"rows": 7, "requested": None}, "rounding: 7 rows at a time instead of 8"),
        ({"changed": [["optimizer.learning_rate", "checkpoints.keep"]]}, "bit-exact"),
        (
            {
                "changed": [
                    ["seed", "training.use_liger_kernel"],
                    ["model.attention", "training.use_liger_kernel"],
                ]
            },
            "rounding: training.use_liger_kernel, model.attention changed during the run",
        ),
    ],
)
def test_a_run_is_bit_exact_unless_sums_are_in_another_order(how, begin, tmp_path):
    written = exactness(tmp_path, **how)
    assert written.startswith(begin) and (":" in begin or written == begin)


def test_a_gpu_with_deterministic_kernels_repeats_a_run(tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        assert exactness(tmp_path, device="cuda") == "bit-exact"
    finally:
        torch.use_deterministic_algorithms(False)


# --- the model ---


def test_only_trained_weights_must_be_finite():
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 5, bias=False))
    frozen = model[0].weight
    trained = model[1].weight
    frozen.requires_grad_(False)
    frozen.data[0] = torch.nan
    refuse_broken_weights(model, None)
    refuse_broken_weights(model, {"0.weight": frozen.data, "other": frozen.data})
    trained.data[0] = torch.nan
    for weights in (None, {"1.weight": trained.data}):
        with pytest.raises(NotFiniteError, match="1.weight$"):
            refuse_broken_weights(model, weights)
    refuse_broken_weights(model, {"1.weight": torch.ones(5, 3)})


@pytest.mark.parametrize(
    ("stage", "has_fsdp", "gathered"),
    [(3, False, "zero"), (2, False, None), (None, False, None), (None, True, "fsdp")],
)
def test_weights_are_gathered_where_no_process_has_them_all(stage, has_fsdp, gathered, monkeypatch):
    monkeypatch.setattr(
        module, "gather_zero3_weights", lambda model, only_trained: ("zero", model, only_trained)
    )
    monkeypatch.setattr(
        module, "full_weights", lambda model, only_trained: ("fsdp", model, only_trained)
    )
    trainer = SimpleNamespace(model="whole", model_wrapped="wrapped", is_fsdp_enabled=has_fsdp)
    section = None if stage is None else {"stage": stage}
    written = engine_weights(trainer, SimpleNamespace(zero_section=section))
    expected = {"zero": ("zero", "wrapped", False), "fsdp": ("fsdp", "whole", False), None: None}
    assert written == expected[gathered]


# --- the states ---


class MovesWeights(torch.optim.SGD):
    """Evaluates at weights that are twice those that it trains."""

    def eval(self):
        self.scale(2)

    def train(self):
        self.scale(1 / 2)

    @torch.no_grad()
    def scale(self, factor):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(factor)


class Counts(ExportableState):
    def __init__(self, steps):
        self.steps = steps

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


class Control(Counts):
    pass


def trainer_of(folder, *, main=True, optimizer=torch.optim.SGD, scaler=None, **about):
    """The part of a trainer that its checkpoints read, at step 7."""
    model = nn.Linear(3, 5)
    made = optimizer(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    saved = []
    fields = {
        "model": model,
        "model_wrapped": model,
        "optimizer": made,
        "lr_scheduler": schedule,
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
        "accelerator": SimpleNamespace(scaler=scaler),
        "args": SimpleNamespace(
            output_dir=str(folder),
            should_save=main,
            process_index=0 if main else 2,
            world_size=3,
            device=CPU,
            parallel_mode=ParallelMode.DISTRIBUTED,
        ),
        "callback_handler": SimpleNamespace(callbacks=[]),
        "control": object(),
        "state": TrainerState(global_step=7, stateful_callbacks={}),
        "saved": saved,
        "_save": lambda *arguments: saved.append(arguments),
    }
    return SimpleNamespace(**fields | about)


ENGINE = SimpleNamespace(updates_at_any_time=False, zero_section=None, reshard=lambda: None)
PARTS = [
    SimpleNamespace(file="safety.json", state_dict=lambda: {"left_out": [[4, 8]]}),
    SimpleNamespace(file="data_position.json", state_dict=lambda: {"row": 28}),
]


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("kind", ["full", "weights"])
def test_each_process_has_its_files_of_a_checkpoint(kind, main, tmp_path):
    trainer = trainer_of(tmp_path, main=main)
    manifest = manifest_of({}, 7, kind=kind)
    taken = contents_of(
        trainer, ENGINE, manifest, parts=PARTS, stage_states={"completions.pt": [main]}
    )
    assert taken.manifest is manifest and taken.model is trainer.model
    states = set()
    texts = {}
    if kind == "full":
        states = {"completions.pt", f"rng_state_{0 if main else 2}.pth"}
    if kind == "full" and main:
        states |= {"optimizer.pt", "scheduler.pt"}
        texts = {"safety.json": {"left_out": [[4, 8]]}, "data_position.json": {"row": 28}}
    assert taken.states.keys() == states
    for name, content in texts.items():
        assert json.loads(taken.texts[name]) == content
    others = {"trainer_state.json", "record.json"} if texts else set()
    assert taken.texts.keys() == texts.keys() | others
    assert taken.model_bytes == (4 * 20 if main else 0)
    assert (taken.write_model is not None, taken.check is not None) == (main, main)
    if main:
        own = dict(trainer.model.state_dict())
        taken.write_model(tmp_path / "model", own)
        taken.write_model(tmp_path / "model", None)
        (folder, given), (_, none) = trainer.saved
        assert folder == str(tmp_path / "model") and none is None
        assert given == own and given is not own, "the Trainer empties what it gets"


def test_a_checkpoint_has_the_weights_of_the_evaluation_and_of_the_training(tmp_path):
    trainer = trainer_of(tmp_path, optimizer=MovesWeights)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    taken = contents_of(trainer, ENGINE, manifest_of({}, 7))
    for name, weight in before.items():
        assert torch.equal(taken.weights[name], 2 * weight)
        assert torch.equal(trainer.model.state_dict()[name], weight)
        assert torch.equal(taken.states["training_point.pt"][name], weight)


def states_of(folder, **about):
    trainer = trainer_of(folder, **about)
    taken = Contents(manifest_of({}, 7), trainer.model)
    add_training_states(taken, trainer, SimpleNamespace(optimizer=trainer.optimizer))
    return taken, trainer


def test_the_main_process_saves_optimizer_schedule_and_loss_scale(tmp_path):
    scaler = SimpleNamespace(state_dict=lambda: {"scale": 1024.0})
    taken, trainer = states_of(tmp_path, scaler=scaler)
    assert taken.states.keys() == {"optimizer.pt", "scheduler.pt", "scaler.pt"}
    assert taken.states["scaler.pt"] == {"scale": 1024.0}
    assert taken.states["optimizer.pt"]["param_groups"][0]["momentum"] == 0.9
    assert taken.states["scheduler.pt"] == trainer.lr_scheduler.state_dict()
    assert states_of(tmp_path, scaler=scaler, main=False)[0].states == {}


@pytest.mark.parametrize("main", [True, False])
def test_each_process_of_fsdp_saves_its_part_and_the_main_one_the_schedule(main, tmp_path):
    taken, trainer = states_of(tmp_path, is_fsdp_enabled=True, main=main)
    part = taken.states.pop(f"fsdp/part_{0 if main else 2}_of_3.pt")
    assert torch.equal(part["weights"]["bias"]["rows"], trainer.model.bias)
    assert taken.states.keys() == ({"scheduler.pt"} if main else set())


@pytest.mark.heavy
@pytest.mark.parametrize("main", [True, False])
def test_deepspeeds_states_and_programs_are_saved_with_the_name_of_its_folder(main, tmp_path):
    asked = []

    class DeepSpeed:
        checkpoint_engine = None
        global_steps = 9

        def _copy_recovery_script(self, folder):
            raise AssertionError("it would write")

        def save_checkpoint(self, folder, **options):
            asked.append(options)
            self.checkpoint_engine.save({"step": 9}, f"{folder}/global_step9/states.pt")

    taken, _ = states_of(tmp_path, is_deepspeed_enabled=True, model_wrapped=DeepSpeed(), main=main)
    assert asked == [{"save_latest": False, "exclude_frozen_parameters": False}]
    assert taken.states.pop("global_step9/states.pt") == {"step": 9}
    assert taken.states.keys() == ({"scheduler.pt"} if main else set())
    programs = {"latest", "zero_to_fp32.py", "zero_to_torch.py"} if main else set()
    assert taken.texts.keys() == programs
    if main:
        assert taken.texts["latest"] == "global_step9"
    assert list(tmp_path.iterdir()) == []


def test_the_states_of_callbacks_are_by_class_and_several_of_one_are_a_list(tmp_path):
    callbacks = [Counts(3), object(), Counts(5)]
    handler = SimpleNamespace(callbacks=callbacks)
    trainer = trainer_of(tmp_path, callback_handler=handler, control=Control(1))
    written = json.loads(trainer_state(trainer))
    assert written["global_step"] == 7
    of_counts = [{"args": {}, "attributes": {"steps": steps}} for steps in (3, 5)]
    assert written["stateful_callbacks"] == {
        "Counts": of_counts,
        "Control": {"args": {}, "attributes": {"steps": 1}},
    }


# --- random numbers ---


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_python_numpy_and_torch_draw_the_same_after_a_resume(tmp_path):
    arguments = trainer_of(tmp_path).args
    states = random_states(arguments)
    first = draw()
    assert draw() != first
    set_random_states(arguments, states)
    second = draw()
    assert second == first


class Gpus:
    """Random states of three GPUs, of which this process uses the second."""

    def __init__(self):
        self.set = []

    def current_device(self):
        return 1

    def get_rng_state(self):
        return "state of one"

    def get_rng_state_all(self):
        return ["state 0", "state 1", "state 2"]

    def set_rng_state(self, state):
        self.set.append(state)


@pytest.mark.parametrize(
    ("mode", "saved"),
    [
        (ParallelMode.DISTRIBUTED, ["state 0", "state 1", "state 2"]),
        (ParallelMode.NOT_DISTRIBUTED, "state of one"),
    ],
)
def test_a_process_restores_the_state_of_its_own_gpu(mode, saved, tmp_path, monkeypatch):
    gpus = Gpus()
    monkeypatch.setattr(module, "devices_with_random_states", lambda arguments: {"cuda": gpus})
    arguments = SimpleNamespace(parallel_mode=mode, device=CPU)
    states = random_states(arguments)
    assert states["cuda"] == saved
    set_random_states(arguments, states)
    assert gpus.set == ["state 1" if mode == ParallelMode.DISTRIBUTED else "state of one"]
    gpus.set.clear()
    set_random_states(arguments, states | {"cuda": ["state 0"]})
    del states["cuda"]
    set_random_states(arguments, states)
    assert gpus.set == []


def test_each_of_several_processes_has_its_own_file_of_random_states(tmp_path):
    arguments = trainer_of(tmp_path, main=False).args
    assert random_states_file(arguments) == "rng_state_2.pth"
    arguments.world_size = 1
    assert random_states_file(arguments) == "rng_state.pth"
