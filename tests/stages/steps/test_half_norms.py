import pytest
import torch
from tiny import TINY_LLAMA
from tiny_faults import STEPS, at_steps, events, losses, trainer_of
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from cpt.optim.clipping import gradient_norm

SLOW_KERNEL = {"optimizer": {"name": "sgd", "learning_rate": 1e-3}}  # clipped by hand


@pytest.mark.parametrize(
    "guard", [pytest.param({"loss_guard": None}, id="alone", marks=pytest.mark.slow), pytest.param({}, id="guarded")]
)
def test_bfloat16_gradients_are_clipped_by_their_norm_in_fp32(tiny_recipe, tmp_path, guard):
    model = {**tiny_recipe["model"], "dtype": "bfloat16"}
    training = {**tiny_recipe["training"], "max_grad_norm": 0.25}
    trainer = trainer_of(tiny_recipe, tmp_path, model=model, training=training, safety=guard, **SLOW_KERNEL)
    seen = []
    step = trainer.create_optimizer().step

    def look(*arguments, **options):
        seen.append(gradient_norm([p.grad for p in trainer.model.parameters()]).item())
        return step(*arguments, **options)

    trainer.optimizer.step = look
    trainer.train()
    logged = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert seen and max(seen) <= 0.25 * 1.01 < min(logged)
    assert any(torch.tensor(norm).bfloat16().item() != norm for norm in logged), "more digits than a bfloat16 has"


@pytest.mark.parametrize("name", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_a_bad_step_leaves_bfloat16_weights_and_their_states_alone_and_large_gradients_are_clipped(
    tiny_recipe, tmp_path, name
):
    model, training = {**tiny_recipe["model"], "dtype": "bfloat16"}, {**tiny_recipe["training"], "max_grad_norm": 0.25}
    settings = {"optimizer": {"name": name, "learning_rate": 3e-3}, "model": model, "training": training}
    watcher = States()
    trainer = trainer_of(
        tiny_recipe,
        tmp_path,
        callbacks=[watcher],
        faults=at_steps(9, change=lambda loss: loss * torch.nan),
        **settings,
    )
    trainer.train()
    assert events(trainer, "nan_skipped") == [("nan_skipped", 9)]
    assert watcher.same(8, 9) and not watcher.same(9, 10)
    largest = max(state.norm().item() for state in watcher.moments)
    assert 0 < largest < 0.25, "a mean of gradients whose norm is at most 0.25"


class States(TrainerCallback):
    """Keeps weights and states after each step."""

    def __init__(self):
        self.after, self.moments = {}, []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        kept = [
            value for one in optimizer.optimizer.state.values() for value in one.values() if torch.is_tensor(value)
        ]
        self.after[state.global_step] = [tensor.clone() for tensor in (*model.state_dict().values(), *kept)]
        self.moments = [
            one["exp_avg"] for one in optimizer.optimizer.state.values() if one["exp_avg"].dtype == torch.float32
        ]

    def same(self, one, other):
        return all(torch.equal(*pair) for pair in zip(self.after[one], self.after[other], strict=True))


class Gradients(TrainerCallback):
    """The type of all gradients before each update, and how far those of the first step are from the sum of its
    micro-batches in fp64."""

    def __init__(self):
        self.dtypes, self.sums, self.error, self.calls = [], {}, 0.0, 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            weight.register_hook(lambda gradient, weight=weight: self.add(weight, gradient))

    def add(self, weight, gradient):
        self.calls += 1
        self.sums[weight] = self.sums.get(weight, 0) + gradient.double()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.dtypes.append({weight.grad.dtype for weight in model.parameters()})
        if len(self.dtypes) == 1:
            self.error = max(
                ((w.grad.double() - exact).norm() / exact.norm()).item() for w, exact in self.sums.items()
            )


def halves(sections, folder, *, rows=1, dtype="bfloat16", **changes):
    model, training = (
        {**sections["model"], "dtype": dtype},
        {**sections["training"], "bf16": True, "per_device_train_batch_size": rows},
    )
    return trainer_of(sections, folder, **{"model": model, "training": training, **changes})


@pytest.mark.parametrize("name", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_gradients_of_64_micro_batches_accumulate_in_fp32(tiny_recipe, tmp_path, name):
    seen = Gradients()
    batch = {"tokens": 64 * 64, "global_batch_tokens": 64 * 64}
    halves(
        tiny_recipe, tmp_path, callbacks=[seen], budget=batch, optimizer={"name": name, "learning_rate": 1e-3}
    ).train()
    assert seen.calls == 64 * len(seen.sums) and seen.dtypes == [{torch.float32}]
    assert 0 < seen.error < 1e-6


def test_a_step_of_one_micro_batch_keeps_gradients_in_half_precision(tiny_recipe, tmp_path):
    seen = Gradients()
    halves(tiny_recipe, tmp_path, rows=4, callbacks=[seen]).train()
    assert seen.dtypes == STEPS * [{torch.bfloat16}]


def test_an_optimizer_of_another_library_gets_gradients_of_the_weights_type(tiny_recipe, tmp_path):
    seen = Gradients()
    halves(tiny_recipe, tmp_path, callbacks=[seen], **SLOW_KERNEL).train()
    assert seen.dtypes == STEPS * [{torch.bfloat16}]


def test_after_out_of_memory_the_smaller_micro_batches_accumulate_in_fp32(tiny_recipe, tmp_path):
    seen, raised = Gradients(), []

    def fault(trainer, inputs, loss):
        if trainer.state.global_step == 2 and loss is not None and not raised:
            raised.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    trainer = halves(tiny_recipe, tmp_path, rows=4, callbacks=[seen], faults=fault)
    trainer.train()
    assert trainer.args.gradient_accumulation_steps == 2
    assert seen.dtypes == 2 * [{torch.bfloat16}] + (STEPS - 2) * [{torch.float32}]


def test_a_bad_step_with_accumulated_gradients_changes_nothing_and_large_gradients_are_clipped(tiny_recipe, tmp_path):
    watcher = States()
    trainer = halves(
        tiny_recipe, tmp_path, callbacks=[watcher], faults=at_steps(9, change=lambda loss: loss * torch.nan)
    )
    trainer.args.max_grad_norm = 0.25
    trainer.train()
    assert events(trainer, "nan_skipped") == [("nan_skipped", 9)]
    assert watcher.same(8, 9) and not watcher.same(9, 10)
    assert 0 < max(state.norm().item() for state in watcher.moments) < 0.25


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


def test_bfloat16_weights_compute_without_autocast_and_with_nearly_the_same_loss(tiny_recipe, tmp_path):
    trainer = halves(tiny_recipe, tmp_path / "off", rows=4)
    assert seen_in_forward(trainer) == ({torch.bfloat16}, {False})
    autocast = halves(tiny_recipe, tmp_path / "on", rows=4)
    autocast.accelerator.native_amp = True
    _, modes = seen_in_forward(autocast)
    assert True in modes
    ids = torch.arange(8).unsqueeze(0)
    assert [one.model(ids).logits.dtype for one in (trainer, autocast)] == [torch.bfloat16, torch.float32]
    off, on = losses(trainer), losses(autocast)
    assert all(abs(off[step] - on[step]) < 0.01 for step in on)


@pytest.mark.parametrize("model", [{"dtype": "float32"}, {"lora": {"r": 4}}], ids=["fp32", "adapters"])
def test_fp32_weights_and_adapters_compute_in_autocast(tiny_recipe, tmp_path, model):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_LLAMA), dtype=torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    start = {"path": str(tmp_path / "base"), "dtype": "bfloat16", **model}
    _, modes = seen_in_forward(halves(tiny_recipe, tmp_path, model=start, stage="cpt"))
    assert True in modes
