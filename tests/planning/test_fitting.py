"""What is changed so that a recipe fits (the least, and nothing where it fits already), and values for `auto`."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from planned_setups import PLAIN, SHAPES
from transformers import AutoConfig

from cpt.errors import RecipeError
from cpt.hardware import GIB
from cpt.planning import fitting
from cpt.planning.activations import count_activations
from cpt.planning.fitting import (
    cheapest_that_fits,
    fits,
    with_all_parameters,
    with_chosen_values,
    with_placeholders,
)
from cpt.planning.model_sizes import sizes_of_model
from cpt.planning.speed import find_target
from cpt.planning.workload import read_setup
from cpt.recipe.schema import Model, Recipe

LLAMA_1B = AutoConfig.for_model(
    "llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


# --- a recipe that does not fit -----------------------------------------------------------------------------------


@lru_cache
def cached(weights_bytes, lora):
    setup = replace(
        PLAIN, sequence_length=4096, weights_bytes=weights_bytes, lora=dict(lora) if lora else None
    )
    return sizes_of_model(LLAMA_1B, setup.lora, 4096), count_activations(LLAMA_1B, setup)


def count(setup):
    return cached(setup.weights_bytes, tuple(sorted((setup.lora or {}).items())))


def setup_for(**changes):
    return replace(PLAIN, sequence_length=4096, weights_bytes=4, **changes)


def proposal_for(host=64.0, **changes):
    return cheapest_that_fits(
        setup_for(**changes), find_target("RTX 4080", 1, host), count, mfu=0.35
    )


@pytest.mark.slow
def test_without_room_on_the_host_adapters_and_smaller_states_are_both_offered_the_cheaper_first():
    found = proposal_for(host=8.0, accumulation=2)
    both = (found, *found.others)
    adapters, small = sorted(both, key=lambda way: "model.lora" not in way.changes)
    assert adapters.changes["model.lora"] == {"r": 16} and found.slower <= found.others[0].slower
    assert small.changes["model.dtype"] == "bfloat16" and "8bit" in small.changes["optimizer.name"]
    assert all(fits(way.plan, find_target("RTX 4080", 1, 8.0)) for way in both)


@pytest.mark.slow
def test_where_the_hosts_memory_is_unknown_changes_that_need_no_host_are_offered_too():
    unknown = replace(find_target("RTX 4080", 1, None), host_memory_gib=8.0)
    first = cheapest_that_fits(setup_for(), unknown, count, mfu=0.35)
    assert first.setup.zero.offload_optimizer and first.plan.host.size > 8 * GIB
    assert ["model.lora" in way.changes for way in first.others].count(True) == 1 and len(
        first.others
    ) == 2
    known = proposal_for()
    assert known.changes == first.changes and not known.others


@pytest.mark.slow
def test_a_run_that_fits_nowhere_has_no_proposal():
    assert proposal_for(host=8.0, micro_batch=1, lora={"r": 16}) is not None
    tiny = find_target("thing", 1, 64.0, memory=2.0, peak_tflops=10.0)
    assert cheapest_that_fits(setup_for(), tiny, count, mfu=0.35) is None


@pytest.mark.slow
def test_several_gpus_may_divide_the_run_with_fsdp2_and_keep_compiled_layers():
    setup = setup_for(gpus=4, fused_loss=True, compiles=True, accumulation=4)
    target = find_target("mine", 4, 64.0, memory=24, peak_tflops=100)
    found = cheapest_that_fits(setup, target, count, mfu=0.35)
    assert found is not None and found.changes["training.fsdp"] is True and found.setup.compiles
    on_one = with_all_parameters(replace(setup, gpus=1), find_target("RTX 4090", 1, 64.0))
    assert not any("training.fsdp" in changes for _, changes in on_one)


def test_layers_are_compiled_under_a_proposed_fsdp2_and_not_under_a_zero3_profile():
    target = find_target("RTX 4090", 4, 64.0)
    for changed, changes in with_all_parameters(setup_for(gpus=4, compiles=True), target):
        breaks_graphs = (
            changed.zero is not None and changed.zero.stage == 3 and not changed.zero.is_fsdp
        )
        assert changed.compiles is not breaks_graphs
        assert (changes.get("training.torch_compile") is False) is breaks_graphs


# --- auto ---------------------------------------------------------------------------------------------------------


def recipe(tokens=1_000_000, safety=None, **training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"from_scratch": True, "config": SHAPES["llama"]},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}]},
            "budget": {"tokens": tokens, "global_batch_tokens": 512 * 48},
            "safety": safety or {},
            "training": training,
        }
    )


def card(gib, gpus=1):
    return find_target("mine", gpus, 64.0, memory=gib, peak_tflops=100)


def test_auto_becomes_numbers_for_this_machine(capsys):
    written = recipe(
        per_device_train_batch_size="auto", gradient_accumulation_steps="auto", logging_steps=7
    )
    chosen = with_chosen_values(written).training
    assert 48 % chosen["per_device_train_batch_size"] == 0
    assert chosen.keys() == {"per_device_train_batch_size", "logging_steps"}
    assert written.training["per_device_train_batch_size"] == "auto", (
        "the run is known by the recipe as written"
    )
    assert (
        f"per_device_train_batch_size: auto is {chosen['per_device_train_batch_size']}"
        in capsys.readouterr().out
    )


@pytest.mark.heavy
@pytest.mark.parametrize("gib", [1.2, 3, 16])
def test_auto_recomputes_layers_only_if_that_helps(gib):
    both = {"per_device_train_batch_size": "auto", "gradient_checkpointing": "auto"}
    written = recipe(**both, bf16=True, torch_compile=False)
    chosen = with_chosen_values(written, target=card(gib), processes=1).training
    assert (
        chosen["gradient_checkpointing"] is (gib < 2)
        and 48 % chosen["per_device_train_batch_size"] == 0
    )


@pytest.mark.heavy
def test_auto_fills_only_the_share_of_the_card_that_the_recipe_allows():
    def micro_batch(gib, share=None):
        written = recipe(
            safety={"max_gpu_memory": share},
            per_device_train_batch_size="auto",
            torch_compile=False,
        )
        chosen = with_chosen_values(written, target=card(gib), processes=1).training
        return chosen["per_device_train_batch_size"]

    assert micro_batch(8, share=0.25) == micro_batch(2) < micro_batch(8)


def test_a_cpu_has_no_limit():
    assert (card(8).usable_share(0.8), card(8).usable_share(None)) == (0.8, 1.0)
    assert find_target("cpu", 1, 64.0).usable_share(0.8) == 1.0


def test_a_model_that_cannot_be_planned_needs_a_number(monkeypatch):
    def fails(*_):
        raise KeyError("no layers")

    monkeypatch.setattr(fitting, "count_model", fails)
    with pytest.raises(RecipeError, match="gradient_checkpointing: auto"):
        with_chosen_values(recipe(gradient_checkpointing="auto"))


@pytest.fixture
def fallbacks(monkeypatch, caplog):
    """Choose values on a machine with a GPU; return the recipe, and details of what falls back, by key."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def choose(asked, **options):
        chosen = with_chosen_values(asked, **options)
        details = [
            record.details for record in caplog.records if vars(record).get("event") == "fallback"
        ]
        return chosen, {detail["key"]: detail for detail in details}

    return choose


def test_a_machine_without_a_compiler_runs_uncompiled(fallbacks, monkeypatch):
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    chosen, details = fallbacks(recipe(10**9, bf16=True))
    assert chosen.training["torch_compile"] is False
    assert "g++" in details["training.torch_compile"]["reason"]


def test_without_triton_layers_are_not_compiled_and_the_plan_has_fp32_weights(
    fallbacks, monkeypatch
):
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    chosen, details = fallbacks(recipe(10**9, bf16=True))
    setup = read_setup(chosen, 1, None, attention="sdpa")
    assert (
        chosen.training["torch_compile"] is False
        and setup.weights_bytes == 4
        and not setup.compiles
    )
    values = {key: (detail["value"], detail["reason"]) for key, detail in details.items()}
    assert values == {
        "training.torch_compile": (False, "no C compiler"),
        "model.dtype": ("float32", "no C compiler"),
    }


@pytest.mark.parametrize("lora", [None, {"r": 8}])
def test_a_base_under_adapters_and_weights_of_another_machine_need_no_triton(
    fallbacks, monkeypatch, lora
):
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    asked = recipe(10**9, bf16=True)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"lora": lora})})
    _, details = fallbacks(asked, target=None if lora else card(24))
    assert "model.dtype" not in details and ("training.torch_compile" in details) is bool(lora)


@pytest.mark.parametrize(("gpu", "compiles"), [("RTX 5090", False), ("RTX 4090", True)])
def test_a_plan_for_another_gpu_knows_where_compiled_autocast_is_wrong(gpu, compiles):
    written = recipe(10**9, bf16=True, torch_compile="auto").model_copy(
        update={"model": Model(path="x", lora={"r": 8})}
    )
    chosen = with_chosen_values(
        written, config=LLAMA_1B, target=find_target(gpu, 1, 64.0), processes=1
    )
    assert chosen.training["torch_compile"] is compiles


def test_layers_are_not_compiled_on_a_cpu_and_nothing_is_printed(capsys):
    automatic = recipe(10**9, bf16=True, torch_compile="auto")
    assert with_chosen_values(recipe(10**9, bf16=True)).training.keys() == {"bf16"}
    assert with_chosen_values(automatic).training["torch_compile"] is False
    assert with_placeholders(automatic).training["torch_compile"] is False
    assert capsys.readouterr().out == ""
