"""Runs with optimizers that evaluate at other weights than they train, such as schedule-free ones."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_recipe
from tiny_trainers import losses, trainer_of, weights
from transformers import AutoModelForCausalLM, TrainerCallback

from cpt.errors import RecipeError
from cpt.export.export import export_model
from cpt.optim.build import build_optimizer, check_optimizer
from cpt.planning.gate import try_optimizer
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Optimizer

OWN = {"name": "tiny_averages:Averaging", "learning_rate": 0.1}
SCHEDULE_FREE = {"name": "pytorch_optimizer:ScheduleFreeAdamW", "learning_rate": 3e-3}
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [OWN, pytest.param(SCHEDULE_FREE, marks=pytest.mark.slow)],
    ids=["own", "schedule-free"],
)
EVALUATION = {"held_out_share": 0.3, "every_steps": 1, "prompts": ["the model"]}


class MeanOfSteps(TrainerCallback):
    """The mean of the weights after each step."""

    def __init__(self):
        self.sums, self.steps = {}, 0

    def on_step_end(self, args, state, control, model=None, **_):
        self.steps += 1
        for name, weight in model.named_parameters():
            self.sums[name] = self.sums.get(name, 0) + weight.detach().clone()

    def mean(self, name):
        return self.sums[name] / self.steps


def run(sections, folder, optimizer, *callbacks, **changes):
    pytest.importorskip(optimizer["name"].partition(":")[0])
    sections = {**sections, "optimizer": optimizer, **changes}
    return trainer_of(sections, folder, callbacks=callbacks)


@pytest.mark.heavy
@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checkpoints_and_exports_have_the_weights_of_the_evaluation(
    tiny_recipe, tmp_path, in_background
):
    seen = MeanOfSteps()
    saving = {"every_steps": 1, "in_background": in_background}
    trainer = run(tiny_recipe, tmp_path, OWN, seen, checkpoints=saving)
    trainer.train()
    final = trainer.run_folder / "final"
    export_model(trainer, trainer.recipe, trainer.processing_class, final)
    for folder in (trainer.run_folder / "checkpoint-4", final):
        stored = load_file(folder / "model.safetensors")
        for name, weight in stored.items():
            torch.testing.assert_close(weight, seen.mean(name))


@pytest.mark.heavy
@OPTIMIZERS
def test_an_evaluation_measures_the_weights_that_are_saved_and_leaves_the_training_as_it_was(
    tiny_recipe, tmp_path, optimizer
):
    plain = run(tiny_recipe, tmp_path / "plain", optimizer, evaluation={"held_out_share": 0.3})
    watched = run(tiny_recipe, tmp_path / "watched", optimizer, evaluation=EVALUATION)
    plain.train()
    watched.train()
    assert losses(plain) == losses(watched)
    assert all(torch.equal(weights(plain)[name], one) for name, one in weights(watched).items())
    last = [line for line in watched.state.log_history if "eval_domain_loss" in line][-1]
    saved = AutoModelForCausalLM.from_pretrained(watched.run_folder / "checkpoint-4")
    watched.model.load_state_dict(saved.state_dict())
    watched.optimizer = None
    assert watched.measure_held_out()["domain_loss"] == last["eval_domain_loss"]
    lines = (watched.run_folder / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {0, 4}


@pytest.mark.heavy
@OPTIMIZERS
def test_a_resumed_run_is_the_same_bit_for_bit(tiny_recipe, tmp_path, optimizer):
    options = {"checkpoints": {"every_steps": 2}, "evaluation": EVALUATION}
    straight = run(tiny_recipe, tmp_path, optimizer, **options)
    straight.train()
    resumed = run(tiny_recipe, tmp_path / "again", optimizer, **options)
    resumed.train(straight.run_folder / "checkpoint-2")
    assert losses(resumed) == losses(straight)
    assert all(torch.equal(weights(resumed)[name], one) for name, one in weights(straight).items())


@pytest.mark.parametrize("way", ["partitioned", "sharded"])
def test_sharding_engines_are_refused(way, tiny_recipe, tmp_path):
    section = load_recipe(
        write_recipe({**tiny_recipe, "optimizer": OWN}, tmp_path / "r.yaml")
    ).optimizer
    with pytest.raises(RecipeError, match=r"`optimizer.name`: tiny_averages:Averaging .*adamw"):
        build_optimizer(section, torch.nn.Linear(2, 2), **{way: True})


def test_a_check_finds_that_fsdp_is_refused(tiny_recipe, tmp_path):
    tiny_recipe["training"] |= {"fsdp": True}
    recipe = load_recipe(write_recipe({**tiny_recipe, "optimizer": OWN}, tmp_path / "r.yaml"))
    with pytest.raises(RecipeError, match="`optimizer.name`"):
        try_optimizer(recipe, None)


@pytest.mark.parametrize(
    "name", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"]
)
def test_the_remedy_for_a_name_of_hugging_face_works(name):
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(RecipeError) as refused:
        check_optimizer(Optimizer(name=name))
    other = re.findall(r"Write `([\w:]+)`", str(refused.value))[0]
    check_optimizer(Optimizer(name=other))
