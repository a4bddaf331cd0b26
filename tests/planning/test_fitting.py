"""What is changed so that it fits: the least, and nothing where it fits already."""

from dataclasses import replace
from functools import lru_cache

import pytest
from planned_setups import PLAIN

from cpt.hardware import GIB
from cpt.models.config import config_from
from cpt.planning.activations import count_activations
from cpt.planning.fitting import (
    PROFILES,
    cheapest_that_fits,
    fits,
    shipped_profiles,
    with_all_parameters,
    with_small_states,
)
from cpt.planning.model_sizes import sizes_of_model
from cpt.planning.speed import find_target

LLAMA_1B = config_from(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
)


@lru_cache
def cached(weights_bytes, lora):
    setup = replace(PLAIN, sequence_length=4096, weights_bytes=weights_bytes, lora=dict(lora) if lora else None)
    return sizes_of_model(LLAMA_1B, setup.lora, 4096), count_activations(LLAMA_1B, setup)


def count(setup):
    return cached(setup.weights_bytes, tuple(sorted((setup.lora or {}).items())))


def setup_for(**changes):
    return replace(PLAIN, sequence_length=4096, weights_bytes=4, **changes)


def proposal_for(gpu, gpus=1, host=64.0, **changes):
    setup = setup_for(gpus=gpus, **changes)
    return cheapest_that_fits(setup, find_target(gpu, gpus, host), count, mfu=0.35)


def test_a_small_card_gets_all_that_keeps_all_parameters():
    found = proposal_for("RTX 4080", micro_batch=4)
    assert found is not None and "model.lora" not in found.changes
    assert found.changes["training.deepspeed"].endswith(("ds_config_prototype.json", "ds_config_8b_24gb.json"))
    assert found.changes.get("training.bf16", found.setup.half)
    assert fits(found.plan, find_target("RTX 4080", 1, 64.0))


SMALL_STATES = {"model.dtype": "bfloat16", "optimizer.name": "paged_adamw_8bit", "optimizer.release_gradients": True}


def test_where_no_profile_fits_adapters_and_smaller_states_are_both_offered_the_cheaper_one_first():
    found = proposal_for("RTX 4080", host=8.0, accumulation=2)
    ways = (found, *found.others)
    adapters, small = sorted(ways, key=lambda way: "model.lora" not in way.changes)
    assert adapters.changes["model.lora"] == {"r": 16} and len(ways) == 2 and found.slower <= found.others[0].slower
    assert (
        small.changes["model.dtype"] == "bfloat16"
        and "8bit" in small.changes["optimizer.name"]
        and "model.lora" not in small.changes
    )
    assert all(fits(way.plan, find_target("RTX 4080", 1, 8.0)) for way in ways)


def test_where_only_an_unknown_host_is_large_enough_the_ways_that_need_none_are_told_too():
    unknown = replace(find_target("RTX 4080", 1, None), host_memory_gib=8.0)
    first = cheapest_that_fits(setup_for(), unknown, count, mfu=0.35)
    assert first.setup.zero.offload_optimizer and first.plan.host.size > 8 * GIB
    assert [way.changes.get("model.lora") is not None for way in first.others].count(True) == 1 and len(
        first.others
    ) == 2
    known = proposal_for("RTX 4080", host=64.0)
    assert known.changes == first.changes and not known.others


@pytest.mark.parametrize("given", [True, False])
def test_gradients_that_are_released_make_a_step_of_one_micro_batch_in_the_recipes_own_words(given):
    zero = dict(shipped_profiles())[f"{PROFILES.name}/ds_config_8b_24gb.json"]
    setup = setup_for(micro_batch=2, accumulation=4, batch_is_given=given, zero=zero)
    ways = [
        changes for changed, changes in with_small_states(setup, find_target("RTX 4080", 1, 64.0)) if changed.releases
    ]
    ways = [
        changes for changes in ways if SMALL_STATES.items() <= changes.items() and "model.fused_loss" not in changes
    ]
    step = {"budget.global_batch_tokens": 2 * 4096} if given else {"training.gradient_accumulation_steps": 1}
    assert SMALL_STATES | step | {"training.max_grad_norm": 0, "training.deepspeed": None} in ways
    halved = next(changes for changes in ways if changes.get("training.per_device_train_batch_size") == 1)
    assert halved.items() >= dict.fromkeys(step, 4096 if given else 1).items()


def test_what_fits_nowhere_has_no_proposal():
    assert proposal_for("RTX 4080", host=8.0, micro_batch=1, lora={"r": 16}) is not None
    tiny = find_target("thing", 1, 64.0, memory=2.0, peak_tflops=10.0)
    assert cheapest_that_fits(setup_for(), tiny, count, mfu=0.35) is None


def test_several_gpus_may_divide_the_run_with_fsdp2_and_keep_compiled_layers():
    setup = setup_for(gpus=4, fused_loss=True, compiles=True, accumulation=4)
    found = cheapest_that_fits(setup, find_target("mine", 4, 64.0, memory=24, peak_tflops=100), count, mfu=0.35)
    assert found is not None and found.changes["training.fsdp"] is True and found.setup.compiles
    assert not any(
        "training.fsdp" in changes
        for _, changes in with_all_parameters(replace(setup, gpus=1), find_target("RTX 4090", 1, 64.0))
    )


def test_layers_are_not_compiled_under_a_proposed_zero3_profile_or_recomputed_under_fsdp2():
    target = find_target("RTX 4090", 4, 64.0)
    for changed, changes in with_all_parameters(setup_for(gpus=4, compiles=True), target):
        breaks_graphs = (
            changed.zero is not None
            and changed.zero.stage == 3
            and (changed.checkpointing or not changed.zero.is_fsdp)
        )
        assert (
            changed.compiles is not breaks_graphs and (changes.get("training.torch_compile") is False) is breaks_graphs
        )
