"""Runs whose layers are compiled and checkpointed as the recipe says: the same losses, also resumed, evaluated and
over processes."""

import pytest
from tiny import write_recipe
from torch import _dynamo as dynamo

from cpt.data.rows.build import build_data
from cpt.models.build import build_model
from cpt.models.layers import CompiledCall, decoder_layers
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer

ALL_ON = {
    "torch_compile_backend": "aot_eager",
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"selective": True, "every_n_layers": 2},
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def trainer_of(sections, folder, **training):
    folder.mkdir(exist_ok=True)
    sections = {**sections, "output_dir": str(folder / "runs"), "training": {**sections["training"], **training}}
    recipe = load_recipe(write_recipe(sections, folder / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    return build_trainer(recipe, build_model(recipe.model, tokenizer, seed=recipe.seed), tokenizer, data)


def logged(trainer, name="loss"):
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.slow
def test_a_run_has_the_same_losses_evaluations_and_checkpoints(tiny_recipe, tmp_path, corpus):
    sections = {
        **tiny_recipe,
        "evaluation": {"perplexity": [{"path": str(corpus / "held_out.jsonl")}], "every_steps": 3},
    }
    plain = trainer_of(sections, tmp_path / "plain")
    plain.train()
    expected, evaluated = logged(plain), logged(plain, "eval_held_out_loss")
    trainer = trainer_of({**sections, "checkpoints": {"every_steps": 5}}, tmp_path / "compiled", **ALL_ON)
    trainer.train()
    assert logged(trainer) == expected and logged(trainer, "eval_held_out_loss") == evaluated
    # Layers that are computed again and others; rows of one document, which need no mask, and others. No evaluation
    # was compiled.
    assert dynamo.utils.counters["stats"]["unique_graphs"] == dynamo.utils.counters["frames"]["total"] == 4
    assert (
        trainer.accelerator.state.dynamo_plugin.backend == "NO"
        and trainer.recipe.training["torch_compile_backend"] == "aot_eager"
    )
    assert trainer.args.gradient_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 2}
    resumed = trainer_of(sections, tmp_path / "resumed", **ALL_ON)
    resumed.train(tmp_path / "compiled" / "runs" / "tiny" / "checkpoint-5")
    assert logged(resumed)[-3:] == expected[-3:]


def test_layers_are_compiled_and_nothing_around_them(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, torch_compile=True)
    compiled = [module for module in trainer.model.modules() if isinstance(module._compiled_call_impl, CompiledCall)]
    assert compiled == decoder_layers(trainer.model) and trainer.accelerator.state.dynamo_plugin.backend == "NO"
