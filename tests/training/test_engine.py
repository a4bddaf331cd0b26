"""Gradients in half precision, autocast, FSDP2 and shared rows."""

from types import SimpleNamespace

import pytest
import torch
from one_process_group import alone_in_a_group
from tiny import TINY_LLAMA
from tiny_trainers import metrics, trainer_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.training_args import ParallelMode

from cpt.optim.gradients import gradient_norm
from cpt.training.engine import Engine
from cpt.training.trainer import CPTTrainer


def halves(sections, folder, *, rows=1, steps=2, **changes):
    """A trainer of bfloat16 weights that takes so many rows at once."""
    model = {**sections["model"], "dtype": "bfloat16"}
    training = {**sections["training"], "bf16": True, "per_device_train_batch_size": rows}
    return trainer_of(
        sections, folder, steps=steps, **{"model": model, "training": training, **changes}
    )


@pytest.mark.heavy
def test_bfloat16_gradients_are_clipped_by_their_norm_in_fp32(tiny_recipe, tmp_path):
    model = {**tiny_recipe["model"], "dtype": "bfloat16"}
    training = {**tiny_recipe["training"], "max_grad_norm": 0.25}
    # sgd has no kernel that clips
    optimizer = {"name": "sgd", "learning_rate": 1e-3}
    trainer = trainer_of(tiny_recipe, tmp_path, model=model, training=training, optimizer=optimizer)
    seen, step = [], trainer.create_optimizer().step

    def look(*arguments, **options):
        seen.append(gradient_norm([p.grad for p in trainer.model.parameters()]).item())
        return step(*arguments, **options)

    trainer.optimizer.step = look
    trainer.train()
    logged = [line["grad_norm"] for line in metrics(trainer) if "grad_norm" in line]
    assert seen and max(seen) <= 0.25 * 1.01 < min(logged)
    assert any(torch.tensor(norm).bfloat16().item() != norm for norm in logged), (
        "more digits than a bfloat16 has"
    )


class Gradients(TrainerCallback):
    """The types of all gradients before each update, and how far those of the first step are from a sum in fp64."""

    def __init__(self):
        self.dtypes, self.sums, self.error = [], {}, 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            weight.register_hook(lambda gradient, weight=weight: self.add(weight, gradient))

    def add(self, weight, gradient):
        self.sums[weight] = self.sums.get(weight, 0) + gradient.double()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.dtypes.append({weight.grad.dtype for weight in model.parameters()})
        if len(self.dtypes) == 1:
            errors = [
                (weight.grad.double() - exact).norm() / exact.norm()
                for weight, exact in self.sums.items()
            ]
            self.error = max(errors).item()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_gradients_of_many_micro_batches_accumulate_in_fp32(tiny_recipe, tmp_path, name):
    seen, budget = Gradients(), {"tokens": 16 * 64, "global_batch_tokens": 16 * 64}
    optimizer = {"name": name, "learning_rate": 1e-3}
    halves(tiny_recipe, tmp_path, callbacks=[seen], budget=budget, optimizer=optimizer).train()
    assert seen.dtypes == [{torch.float32}] and 0 < seen.error < 1e-6


@pytest.mark.heavy
def test_a_step_of_one_micro_batch_keeps_gradients_in_half_precision(tiny_recipe, tmp_path):
    seen = Gradients()
    halves(tiny_recipe, tmp_path, rows=4, callbacks=[seen]).train()
    assert seen.dtypes == [{torch.bfloat16}] * 2


# --- autocast ---


def seen_in_forward(trainer):
    """Of all modules of the model in a run: types of what they return, and whether they compute in autocast."""
    types, modes = set(), set()

    def look(module, inputs, output):
        modes.add(torch.is_autocast_enabled("cpu"))
        types.update({output.dtype} if torch.is_tensor(output) else ())

    for module in list(trainer.model.modules())[1:]:
        module.register_forward_hook(look)
    trainer.train()
    return types, modes


@pytest.mark.heavy
def test_bfloat16_weights_compute_without_autocast(tiny_recipe, tmp_path):
    assert seen_in_forward(halves(tiny_recipe, tmp_path, rows=4)) == ({torch.bfloat16}, {False})


@pytest.mark.heavy
@pytest.mark.parametrize(
    "model", [{"dtype": "float32"}, {"lora": {"r": 4}}], ids=["fp32", "adapters"]
)
def test_fp32_weights_and_adapters_compute_in_autocast(tiny_recipe, tmp_path, model):
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY_LLAMA), dtype=torch.bfloat16
    )
    base.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "dtype": "bfloat16", **model}
    _, modes = seen_in_forward(
        halves(tiny_recipe, tmp_path, rows=4, steps=1, model=model, stage="cpt")
    )
    assert True in modes


# --- FSDP2 ---


def test_a_forward_pass_alone_leaves_nothing_gathered_behind():
    with alone_in_a_group():
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(layers, reshard_after_forward=False)
        with torch.no_grad():
            layers(torch.ones(1, 4))
        assert not any(isinstance(parameter, DTensor) for parameter in layers.parameters())
        Engine(SimpleNamespace(is_fsdp_enabled=True, model=layers)).reshard()
        assert all(isinstance(parameter, DTensor) for parameter in layers.parameters())


class Dividing(nn.Linear):
    """A model that divides its loss by the step's labels, as those of transformers do."""

    def forward(self, inputs, num_items_in_batch):
        return super().forward(inputs).float().sum() / num_items_in_batch, num_items_in_batch


def test_half_precision_does_not_round_the_number_of_labels(monkeypatch):
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda *_: torch.tensor(449.0))
    counting = CPTTrainer.__new__(CPTTrainer)
    counting.args = SimpleNamespace(
        n_gpu=0,
        world_size=1,
        average_tokens_across_devices=True,
        parallel_mode=ParallelMode.NOT_DISTRIBUTED,
        device=torch.device("cpu"),
    )
    counting.shared_rows = SimpleNamespace(parts=1)
    counting.checked_step = SimpleNamespace(begin=lambda: None)
    counting.gradients = SimpleNamespace(begin_step=lambda: None)
    counting.state = SimpleNamespace(global_step=0)
    counting.engine = SimpleNamespace(begin_step=lambda: None)
    _, labels = counting.get_batch_samples(iter([]), 0, torch.device("cpu"))
    with alone_in_a_group():
        model = Dividing(2, 1)
        fully_shard(
            model,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        assert model(torch.ones(1, 2), torch.tensor(449.0))[1] == 448, "FSDP casts floats"
        assert model(torch.ones(1, 2), labels)[1] == 449
