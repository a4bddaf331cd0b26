"""What `training.torch_compile: auto` means for a recipe on a machine."""

import pytest
from tiny_models import tiny_config

from cpt.models.config import load_config
from cpt.models.inventory import build_on_meta
from cpt.planning.workload import compiles
from cpt.recipe.schema import Model, Recipe


def recipe(stage="cpt", model=None, data=None, tokens=10_000_000, **training):
    return Recipe.model_validate(
        {
            "name": "run",
            "stage": stage,
            "model": {"from_scratch": True, "config": tiny_config("llama"), **(model or {})},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}], **(data or {})},
            "budget": {"tokens": tokens, "global_batch_tokens": 512 * 48},
            "training": training,
        }
    )


def answer(written, *, zero3=False, on_cpu=False, family=None):
    model = (
        None if family is None else build_on_meta(load_config(Model(from_scratch=True, config=tiny_config(family))))
    )
    return compiles(written, zero3=zero3, on_cpu=on_cpu, model=model)[0]


@pytest.mark.parametrize(
    "written", [recipe(), recipe(torch_compile="auto"), recipe("sft"), recipe("pretrain"), recipe("distill")]
)
def test_layers_are_compiled_by_default_on_a_gpu_alone(written):
    assert answer(written) and not answer(written, on_cpu=True)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_recipe_decides_where_it_says_so(on_cpu):
    assert answer(recipe(torch_compile=True), on_cpu=on_cpu, zero3=True) and answer(
        recipe(torch_compile_mode="default"), on_cpu=on_cpu
    )
    assert not answer(recipe(torch_compile=False), on_cpu=on_cpu)


@pytest.mark.parametrize(
    "written",
    [
        recipe("dpo"),
        recipe("grpo"),
        recipe("gkd"),
        recipe(data={"packing": "token_budget"}),
        recipe(parallelism_config={"sp_size": 2}),
        recipe(tokens=512 * 48 * 99),
        recipe(model={"lora": {"r": 8, "quantize": "nf4"}}),
        recipe(model={"trust_remote_code": True}),
        recipe(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
        recipe(fsdp=True, gradient_checkpointing=True),
    ],
)
def test_it_is_off_where_it_was_not_tried_or_does_not_pay(written):
    assert not answer(written)


def test_the_model_decides_too():
    selective = recipe(gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True})
    assert answer(recipe(), family="minimind2_moe") and answer(selective, family="llama")
    assert not answer(selective, family="minimind2_moe")
    assert not answer(recipe(), family="nemotron_h")  # a state runs along its rows
