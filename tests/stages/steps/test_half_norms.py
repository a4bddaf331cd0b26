import pytest
import torch
from tiny_faults import at_steps, events, trainer_of
from transformers import TrainerCallback

from cpt.optim.clipping import gradient_norm

SLOW_KERNEL = {"optimizer": {"name": "sgd", "learning_rate": 1e-3}}  # clipped by hand


@pytest.mark.parametrize("guard", [pytest.param({"loss_guard": None}, id="alone", marks=pytest.mark.slow), pytest.param({}, id="guarded")])
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
def test_a_bad_step_leaves_bfloat16_weights_and_their_states_alone_and_large_gradients_are_clipped(tiny_recipe, tmp_path, name):
    model, training = {**tiny_recipe["model"], "dtype": "bfloat16"}, {**tiny_recipe["training"], "max_grad_norm": 0.25}
    settings = {"optimizer": {"name": name, "learning_rate": 3e-3}, "model": model, "training": training}
    watcher = States()
    trainer = trainer_of(tiny_recipe, tmp_path, callbacks=[watcher], faults=at_steps(9, change=lambda loss: loss * torch.nan), **settings)
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
        kept = [value for one in optimizer.optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
        self.after[state.global_step] = [tensor.clone() for tensor in (*model.state_dict().values(), *kept)]
        self.moments = [one["exp_avg"] for one in optimizer.optimizer.state.values() if one["exp_avg"].dtype == torch.float32]

    def same(self, one, other):
        return all(torch.equal(*pair) for pair in zip(self.after[one], self.after[other], strict=True))
