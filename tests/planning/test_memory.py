"""Sums that can be checked with a pencil: 1,000 numbers, of which the embedding has 100 and the head 100."""

from dataclasses import replace

import pytest
from planned_setups import FACTS, PLAIN

from cpt.hardware import GIB
from cpt.optim.bnb import AT_ONCE
from cpt.planning.activations import ActivationCounts, Activations
from cpt.planning.memory import plan_memory
from cpt.planning.memory_parts import state_bytes
from cpt.planning.model_sizes import TILES, StageNeeds
from cpt.planning.workload import Sharding

SMALL = replace(FACTS, in_linear_layers=700, largest_in_layers=60)
ROW = Activations(kept=10_000, layer_inputs=500, backward=300, again=2_300, forward=640, layers=8)
COUNTED = ActivationCounts(
    ROW, replace(ROW, kept=20_000, layer_inputs=1_000, backward=600, again=4_600, forward=1280)
)
AUTOCAST = replace(PLAIN, weights_bytes=4, sequence_length=8)
ZERO3 = Sharding(3, prefetch_bucket_size=0, max_live_parameters=0, max_reuse_distance=0)
ON_HOST = {"offload_optimizer": True, "offload_parameters": True}


def moments(setup, facts=SMALL):
    plan = plan_memory(facts, setup, COUNTED)
    return {moment.name: {term.name: term.size for term in moment.terms} for moment in plan.moments}


def host(setup, **options):
    return {
        term.name: term.size for term in plan_memory(SMALL, setup, COUNTED, **options).host.terms
    }


def test_a_loss_in_tiles_scores_what_the_model_wrote():
    setup = replace(AUTOCAST, half=False, micro_batch=2, needs=StageNeeds("dpo", TILES))
    tile = 4 * 16 * 32768
    assert moments(setup)["the forward pass ends"]["logits"] == tile
    assert moments(setup)["the loss"]["logits"] == tile + 4 * 16 * 2 + 4 * 100
    written = replace(setup, needs=StageNeeds("grpo", TILES, completion=3))
    assert moments(written)["the forward pass ends"]["logits"] == 4 * 6 * 32768


def test_paged_states_are_on_the_host_and_fp32_copies_of_some_weights_on_the_gpu():
    setup = replace(PLAIN, optimizer="paged_adamw_8bit", rounding="stochastic")
    assert moments(setup)["the update"]["optimizer"] == 4 * 4 * AT_ONCE
    found = host(setup, snapshot=True)
    assert found["optimizer"] == pytest.approx(state_bytes(SMALL, setup))
    assert found["copy of the checkpoint that is written"] == pytest.approx(
        2 * 1000 + state_bytes(SMALL, setup)
    )


def test_quantized_weights_are_as_small_under_zero_2():
    lora = {"r": 3, "quantize": "int8"}
    model = replace(SMALL, trained=50)
    plan = moments(replace(PLAIN, lora=lora, gpus=2, zero=Sharding(2)), model)["the update"]
    assert plan["weights"] == 700 + 2 * 300 + 2 * 50
    assert plan["a matrix in half precision"] == 2 * 60


def test_offloaded_states_are_on_the_host_in_pinned_blocks():
    zero = Sharding(3, sub_group_size=100, **ON_HOST)
    found = host(replace(AUTOCAST, zero=zero, weights_bytes=2))
    assert found["optimizer and fp32 weights"] == 12_000 and found["gradients"] == 2000
    assert found["rounding of pinned blocks"] == pytest.approx(4000 * (512 / 400 - 1))
    assert found["weights"] == pytest.approx(2000 * 256 / 200) and found["processes"] == 3 * GIB


def test_each_of_several_machines_has_its_part():
    setup = replace(
        AUTOCAST, gpus=4, weights_bytes=2, zero=Sharding(3, sub_group_size=250, **ON_HOST)
    )
    whole, each = host(setup, snapshot=True), host(replace(setup, nodes=2), snapshot=True)
    for name in ("weights", "optimizer and fp32 weights", "gradients", "processes"):
        assert each[name] == whole[name] / 2, name
    copy = "copy of the checkpoint that is written"
    assert (
        host(replace(AUTOCAST, gpus=2, nodes=2), snapshot=True)[copy] == 12_000
    )  # one machine copies all of it


def test_sharded_weights_are_loaded_by_one_process_of_a_machine():
    def loaded(**changes):
        return host(replace(AUTOCAST, gpus=4, **changes))["weights while they are loaded"]

    fsdp = Sharding(3, is_fsdp=True)
    assert (
        loaded() == 16_000
        and loaded(zero=ZERO3) == loaded(zero=fsdp) == loaded(zero=fsdp, lora={"r": 1}) == 4000
    )
    assert loaded(zero=fsdp, needs=StageNeeds("dpo", TILES, reference=True)) == 16_000
    assert loaded(zero=fsdp, lora={"init_lora_weights": "pissa"}) == 16_000, (
        "it starts from the base weights"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights_bytes": 4}, 4000),
        ({"lora": {"r": 1}}, None),
        ({"zero": ZERO3}, 500),
        ({"zero": replace(ZERO3, offload_parameters=True)}, None),
    ],
)
def test_a_reference_model_is_whole_but_under_zero_3_and_free_with_an_adapter(changes, expected):
    setup = replace(PLAIN, gpus=4, needs=StageNeeds("dpo", TILES, reference=True), **changes)
    assert moments(setup)["the loss"].get("reference model") == expected
    on_host = setup.zero is not None and setup.zero.offload_parameters
    assert host(setup).get("reference model") == (2000 if on_host else None)


def test_teachers_and_reward_models_have_their_own_sizes():
    reward_models = (
        replace(FACTS, parameters=100),
        replace(FACTS, parameters=100, weights_bytes=2),
    )
    teacher = replace(
        FACTS, parameters=5000, largest_layer=700, largest_matrix=500, hidden=4, weights_bytes=2
    )
    setup = replace(
        PLAIN,
        lora={"r": 1},
        needs=StageNeeds("distill", teacher=teacher, reward_models=reward_models),
    )
    there = moments(setup)["the update"]
    assert (there["teacher"], there["reward models"]) == (10_000, 600)
    assert moments(replace(setup, zero=ZERO3, gpus=2))["the update"]["teacher"] == 5_000


def test_sampling_takes_keys_and_values_of_whole_completions():
    setup = replace(
        AUTOCAST, half=False, sequence_length=6, micro_batch=2, accumulation=3, on_cpu=True
    )
    setup = replace(setup, needs=StageNeeds("grpo", TILES, completion=2))
    there = moments(setup, replace(SMALL, cached=10))["sampling completions"]
    assert there["generation cache"] == 6 * 8 * 10 * 4 and there["logits"] == 16 * 6 * 50
    assert there["one layer's forward pass"] == pytest.approx(6 * 640 * 6 / 8 + 4 * 6 * 2 * 6)
    assert "gradients" not in there
    often = replace(setup, needs=replace(setup.needs, steps_per_generation=2))
    assert "gradients" in moments(often)["sampling completions"]
    under_zero3 = replace(setup, zero=ZERO3, half=True, weights_bytes=2, gpus=2, on_cpu=False)
    assert moments(under_zero3)["sampling completions"]["whole weights"] == 2000


def test_of_fp32_gradients_that_are_averaged_one_bucket_is_copied():
    found = moments(replace(PLAIN, gpus=2, accumulation=4))
    assert {terms["gradient buckets"] for terms in found.values()} == {2 * 1000 + 4 * 1000}
