"""Bad steps on examples are skipped and out-of-memory restarts, as in pre-training; what TRL cannot do is an error
that names the key."""

import pytest
import torch
from example_runs import build_run
from tiny_faults import train_to_the_end
from tiny_rewards import bandit, quiet_trainer, rewards_of
from transformers.trainer_callback import PrinterCallback

from cpt.errors import RecipeError
from cpt.planning.gate import check_reality
from cpt.recipe.schema import Recipe
from cpt.runs.events import read_events

TOO_MUCH = "CUDA out of memory (injected)"
SIZED = ("completion_ids", "prompt_input_ids", "input_ids")


def trainer_of(stage, folder, fault=None):
    """Eight steps, the loss of which a fault may change."""
    if stage == "grpo":
        trainer = quiet_trainer(bandit("grpo", folder, steps=8, training={"num_iterations": 2, "beta": 0.1}))
    else:
        trainer = build_run(stage, folder, steps=8)
        trainer.remove_callback(PrinterCallback)
    if fault is not None:
        plain = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, *rest, **named: fault(
            trainer, inputs, plain(model, inputs, *rest, **named)
        )
    return trainer


def figures(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def told(trainer, *keys):
    return [tuple(event[key] for key in keys) for event in read_events(trainer.run_folder)]


@pytest.mark.parametrize(
    "stage", ["dpo", "reward", "grpo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("kto", "orpo"))]
)
def test_a_loss_that_is_no_number_costs_its_step_alone(stage, tmp_path):
    def fault(trainer, inputs, loss):
        return loss * float("nan") if trainer.state.global_step + 1 in (3, 6) else loss

    trainer = trainer_of(stage, tmp_path, fault)
    trainer.train()
    assert told(trainer, "kind", "step") == [("nan_skipped", 3), ("nan_skipped", 6)] and trainer.state.global_step == 8
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


# ORPO's loss is a mean over the tokens of a micro-batch, so smaller ones give another step.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "rows"),
    [("dpo", 4), *(pytest.param(*case, marks=pytest.mark.long) for case in (("grpo", 8), ("reward", 4)))],
)
def test_out_of_memory_restarts_with_smaller_micro_batches_and_the_same_result(stage, rows, tmp_path):
    def fault(trainer, inputs, loss):
        size = len(next(inputs[key] for key in SIZED if key in inputs)) if isinstance(inputs, dict) else len(inputs)
        if trainer.state.global_step + 1 >= 4 and size > rows:
            raise torch.OutOfMemoryError(TOO_MUCH)
        return loss

    reference = trainer_of(stage, tmp_path / "reference")
    reference.train()
    trainer = train_to_the_end(lambda: trainer_of(stage, tmp_path / "small", fault), restarts=1)
    assert told(trainer, "kind", "step")[0] == ("out_of_memory", 4)
    assert trainer.args.per_device_train_batch_size < reference.args.per_device_train_batch_size
    assert figures(trainer) == pytest.approx(figures(reference), rel=1e-4, abs=1e-5)  # those before the restart too
    if stage == "grpo":
        assert rewards_of(trainer) == rewards_of(reference)
    pairs = zip(trainer.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def test_a_loss_that_trl_does_not_have_is_named_by_its_key(tmp_path):
    with pytest.raises(
        RecipeError, match="`training.loss_type`: Unknown loss type: sigmoidd. Should be one of .*'hinge'"
    ):
        build_run("dpo", tmp_path, training={"loss_type": ["sigmoidd"]}).train()


def test_an_adapter_on_the_head_is_refused_where_it_would_not_be_trained(tmp_path):
    with pytest.raises(RecipeError, match="stage `dpo`.*adapter to `lm_head` is not supported"):
        build_run("dpo", tmp_path, lora={"r": 4, "target_modules": ["lm_head"]})


def test_an_adapter_that_starts_in_the_base_leaves_no_reference(tmp_path):
    with pytest.raises(RecipeError, match="`model.lora.init_lora_weights: pissa`.*no reference for stage `dpo`"):
        build_run("dpo", tmp_path, lora={"r": 4, "init_lora_weights": "pissa"})
    without = Recipe.model_validate({**recipe_with("grpo", "pissa"), "rewards": ["exact_match"]})
    assert not any("pissa" in str(mistake) for mistake in check_reality(without).mistakes)
    held = Recipe.model_validate(
        {**recipe_with("grpo", "pissa"), "rewards": ["exact_match"], "training": {"beta": 0.1}}
    )
    assert any("no reference for stage `grpo`" in str(mistake) for mistake in check_reality(held).mistakes)


def recipe_with(stage, start):
    """Enough of a recipe for the gate to look at."""
    return {
        "name": "run",
        "stage": stage,
        "model": {"path": "nowhere/here", "lora": {"r": 4, "init_lora_weights": start}},
        "data": {"sources": [{"path": "gone.jsonl"}], "sequence_length": 16},
        "budget": {"tokens": 100},
        "optimizer": {"learning_rate": 1e-3},
    }
