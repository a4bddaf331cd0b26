import pytest
import torch
from planned_setups import SHAPES

from cpt.errors import RecipeError
from cpt.planning import fitting
from cpt.planning.fitting import with_chosen_values, with_placeholders
from cpt.planning.speed import find_target
from cpt.recipe.schema import Budget, Recipe


def recipe(**training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"from_scratch": True, "config": SHAPES["llama"]},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}]},
            "budget": {"tokens": 1_000_000, "global_batch_tokens": 512 * 48},
            "training": training,
        }
    )


def test_numbers_take_the_place_of_auto_on_this_machine(capsys):
    written = recipe(per_device_train_batch_size="auto", gradient_accumulation_steps="auto", logging_steps=7)
    chosen = with_chosen_values(written)
    assert 48 % chosen.training["per_device_train_batch_size"] == 0
    assert chosen.training.keys() == {"per_device_train_batch_size", "logging_steps"}
    assert written.training["per_device_train_batch_size"] == "auto", (
        "the run is known by the recipe as it was written"
    )
    said = capsys.readouterr().out
    assert f"per_device_train_batch_size: auto is {chosen.training['per_device_train_batch_size']} here" in said


def test_the_machine_that_is_meant_decides_and_so_does_the_number_of_processes():
    written = recipe(per_device_train_batch_size="auto", bf16=True)
    sizes = {
        (gpu, processes): with_chosen_values(
            written, target=find_target(gpu, processes, 64.0, memory=memory, peak_tflops=100), processes=processes
        ).training["per_device_train_batch_size"]
        for gpu, memory, processes in (("small", 3.0, 1), ("large", 80.0, 1), ("large", 80.0, 4))
    }
    assert sizes["small", 1] < sizes["large", 1] == 48
    assert sizes["large", 4] == 12


def test_a_model_that_cannot_be_planned_asks_for_a_number(monkeypatch):
    def fails(*_):
        raise KeyError("no layers")

    monkeypatch.setattr(fitting, "count_model", fails)
    with pytest.raises(RecipeError, match=r"gradient_checkpointing: auto.*Write a number"):
        with_chosen_values(recipe(gradient_checkpointing="auto"))


def on_an_h100(written, **options):
    return with_chosen_values(written, target=find_target("H100", 1, 64.0), **options).training.get("torch_compile")


def long_recipe(**training):
    return recipe(bf16=True, **training).model_copy(
        update={"budget": Budget(tokens=10**9, global_batch_tokens=512 * 48)}
    )


@pytest.mark.parametrize(
    ("training", "expected"), [({}, True), ({"torch_compile": "auto"}, True), ({"torch_compile": False}, False)]
)
def test_on_a_gpu_layers_are_compiled_unless_the_recipe_says_no(training, expected, capsys):
    assert on_an_h100(long_recipe(**training)) is expected
    assert capsys.readouterr().out.count("torch_compile") == (training.get("torch_compile") is not False)


def test_a_machine_without_a_compiler_runs_uncompiled(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    assert with_chosen_values(long_recipe()).training["torch_compile"] is False
    assert "g++" in capsys.readouterr().out


def test_on_a_cpu_auto_is_off_and_not_worth_a_line(capsys):
    assert with_chosen_values(long_recipe()).training.keys() == {"bf16"}
    assert with_chosen_values(long_recipe(torch_compile="auto")).training["torch_compile"] is False
    assert with_placeholders(long_recipe(torch_compile="auto")).training["torch_compile"] is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("gib", [1.2, 3, 16])
def test_the_largest_micro_batch_that_fits_is_chosen_and_layers_are_recomputed_only_if_that_helps(gib):
    both = {"per_device_train_batch_size": "auto", "gradient_checkpointing": "auto"}
    card = find_target("mine", 1, 64.0, memory=gib, peak_tflops=100)
    chosen = with_chosen_values(recipe(**both, bf16=True, torch_compile=False), target=card, processes=1).training
    assert chosen["gradient_checkpointing"] is (gib < 2) and 48 % chosen["per_device_train_batch_size"] == 0
    least = find_target("mine", 1, 64.0, memory=0.7, peak_tflops=100)
    smallest = with_chosen_values(recipe(**both, torch_compile=False), target=least, processes=1).training
    assert smallest["per_device_train_batch_size"] == 1 and smallest["gradient_checkpointing"]
