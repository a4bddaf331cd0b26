import math
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from tiny_faults import STEPS, at_steps, events, in_rows, losses, same, trainer_of, weights

from cpt.errors import RecipeError, ResourceError
from cpt.models import fused_loss

RELEASED = {"name": "adamw_8bit", "learning_rate": 3e-3, "rounding": "stochastic", "release_gradients": True}
OPTIMIZERS = [
    pytest.param(RELEASED, id="8 bit"),
    pytest.param({"name": "adamw", "learning_rate": 3e-3}, id="master", marks=pytest.mark.slow),
]


def released_trainer(sections, folder, *, releases=True, optimizer=None, **changes):
    training = {**sections["training"], "max_grad_norm": 0, "per_device_train_batch_size": 4}
    optimizer = {**(optimizer or RELEASED), "release_gradients": releases}
    model = {**sections["model"], "dtype": "bfloat16"}
    return trainer_of(sections, folder, optimizer=optimizer, training=training, model=model, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_is_the_same_with_and_without_and_leaves_no_hooks(tiny_recipe, tmp_path, optimizer):
    ordinary, released = (
        released_trainer(tiny_recipe, tmp_path / str(releases), releases=releases, optimizer=optimizer)
        for releases in (False, True)
    )
    for trainer in (ordinary, released):
        trainer.train()
    assert losses(released) == losses(ordinary) and same(weights(released), weights(ordinary))
    norms = [
        [line["grad_norm"] for line in trainer.state.log_history if "loss" in line] for trainer in (ordinary, released)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[1]) > 0
    assert losses(released)[STEPS] < losses(released)[1]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in released.model.parameters())


@pytest.mark.slow
def test_a_loss_in_chunks_and_layers_computed_again_give_each_parameter_one_update(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(fused_loss, "tokens_at_once", lambda vocabulary: 16)  # 16 chunks in a step
    saving = {**tiny_recipe["training"], "gradient_checkpointing": True}
    recipe = {**tiny_recipe, "model": {**tiny_recipe["model"], "fused_loss": True}, "training": saving}
    ordinary, released = (
        released_trainer(recipe, tmp_path / str(releases), releases=releases) for releases in (False, True)
    )
    for trainer in (ordinary, released):
        trainer.train()
    assert same(weights(released), weights(ordinary)) and losses(released)[STEPS] < losses(released)[1]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_goes_on_from_its_checkpoint_bit_for_bit_with_and_without_release(tiny_recipe, tmp_path, optimizer):
    checkpoints = {"checkpoints": {"every_steps": 8, "keep": 4}, "optimizer": optimizer}
    straight = released_trainer(tiny_recipe, tmp_path / "straight", **checkpoints)
    straight.train()
    middle = straight.run_folder / "checkpoint-8"
    for releases in (True, False):
        again = released_trainer(tiny_recipe, tmp_path / f"again {releases}", releases=releases, **checkpoints)
        again.train(resume_from_checkpoint=middle)
        assert same(weights(again), weights(straight))


@pytest.mark.slow
def test_a_save_in_the_background_holds_the_backward_pass_back_that_would_change_its_weights(tiny_recipe, tmp_path):
    found = {}
    for in_background in (False, True):
        checkpoints = {"every_steps": 1, "keep": 99, "in_background": in_background}
        trainer = released_trainer(tiny_recipe, tmp_path / str(in_background), checkpoints=checkpoints)
        trainer.train()
        found[in_background] = [
            load_file(trainer.run_folder / f"checkpoint-{step}" / "model.safetensors") for step in range(1, STEPS + 1)
        ]
    assert all(same(one, other) for one, other in zip(found[True], found[False], strict=True))


@pytest.mark.parametrize(
    ("change", "kind"),
    [(lambda loss: loss * math.nan, "nan_skipped"), (lambda loss: loss * 1e4, "spike_skipped")],
    ids=["nan", "spike"],
)
def test_a_bad_loss_is_judged_before_the_backward_pass_and_changes_nothing(tiny_recipe, tmp_path, change, kind):
    trainer = released_trainer(tiny_recipe, tmp_path, faults=at_steps(9, change=change))
    kept = []
    end_of_step = trainer.callback_handler.on_step_end

    def keep(*arguments, **options):
        kept.append(weights(trainer))
        return end_of_step(*arguments, **options)

    trainer.callback_handler.on_step_end = keep
    trainer.train()
    assert events(trainer, "nan_skipped", "spike_skipped") == [(kind, 9)]
    assert [number for number, (one, other) in enumerate(pairwise(kept), start=2) if same(one, other)] == [9]
    assert all(math.isfinite(loss) for step, loss in losses(trainer).items() if step != 9)


def test_a_gradient_that_is_not_finite_is_kept_out_and_told(tiny_recipe, tmp_path):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * math.nan

    trainer = released_trainer(tiny_recipe, tmp_path, faults=at_steps(9, change=Broken.apply))
    trainer.train()
    assert events(trainer, "nan_skipped", "spike_skipped") == [("nan_skipped", 9)]
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


@pytest.mark.long
def test_after_many_bad_losses_it_goes_back_and_on(tiny_recipe, tmp_path):
    checkpoints = {
        "checkpoints": {"every_steps": 2, "keep": 9},
        "safety": {"loss_guard": {"name": "robust", "skips": 1}},
    }
    trainer = released_trainer(tiny_recipe, tmp_path, faults=in_rows(20, 24), **checkpoints)
    trainer.train()
    assert [kind for kind, _ in events(trainer, "nan_skipped", "rolled_back")] == [
        "nan_skipped",
        "nan_skipped",
        "rolled_back",
    ]
    assert trainer.state.global_step == STEPS and losses(trainer)[STEPS] < losses(trainer)[1]


@pytest.mark.long
def test_without_a_guard_it_trains_as_well(tiny_recipe, tmp_path):
    trainer = released_trainer(tiny_recipe, tmp_path, safety={"loss_guard": None})
    trainer.train()
    assert losses(trainer)[STEPS] < losses(trainer)[1]


def test_out_of_memory_ends_with_what_to_write(tiny_recipe, tmp_path):
    def fault(loss):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = released_trainer(tiny_recipe, tmp_path, faults=at_steps(3, change=fault))
    with pytest.raises(
        ResourceError, match="out of memory in step 3 .*splits no step.*per_device_train_batch_size: 2"
    ):
        trainer.train()
    assert not events(trainer, "out_of_memory")


def test_a_recipe_that_cannot_is_refused_before_the_first_step(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, optimizer=RELEASED)
    with pytest.raises(RecipeError, match="max_grad_norm: 0"):
        trainer.train()
