"""Sums that can be checked with a pencil: 1,000 numbers, of which 100 are the head's."""

from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.activations import Activations, Counted
from cpt.planner.logits import logits_of
from cpt.planner.memory import buffers_of, gradient_bytes, moments_of_step, plan_memory, states_of, update_of
from cpt.planner.setup import Zero
from cpt.planner.terms import GIB

ACTIVATIONS = Activations(kept=10_000, largest_layer=2_000, layer_inputs=500, backward=300, again=2_300)
COUNTED = Counted(
    ACTIVATIONS, Activations(kept=20_000, largest_layer=4_000, layer_inputs=1_000, backward=600, again=4_600)
)
AUTOCAST = replace(PLAIN, weights_bytes=4, sequence_length=8)


def sizes(terms):
    return {term.name: term.size for term in terms}


@pytest.mark.parametrize(
    ("zero", "weights", "optimizer", "gradients"),
    [
        (None, 4000, 8000, 0),
        (Zero(1), 2000, 3000, 2000),
        (Zero(2), 2000, 3000, 500),
        (Zero(3, prefetch_bucket=0, max_live=0, max_reuse_distance=0), 500, 3000, 500),
        (Zero(2, offload_optimizer=True), 2000, None, 0),
        (
            Zero(
                3, offload_optimizer=True, offload_parameters=True, prefetch_bucket=0, max_live=0, max_reuse_distance=0
            ),
            0,
            None,
            0,
        ),
    ],
)
def test_states_of_four_gpus(zero, weights, optimizer, gradients):
    setup = replace(AUTOCAST, gpus=4, zero=zero, weights_bytes=4 if zero is None else 2)
    there = sizes(states_of(FACTS, setup))
    assert there["weights"] == weights and gradient_bytes(FACTS, setup) == gradients
    assert there.get("optimizer", there.get("optimizer and fp32 weights")) == optimizer


def test_zero3_has_its_largest_layer_whole():
    zero = Zero(3, prefetch_bucket=50, max_live=0, max_reuse_distance=0)
    assert sizes(states_of(FACTS, replace(AUTOCAST, gpus=4, zero=zero, weights_bytes=2)))["layers in use"] == 2 * 350


def test_adapters_have_states_and_the_model_only_weights():
    there = sizes(states_of(replace(FACTS, trained=10), replace(AUTOCAST, lora={"r": 1}, weights_bytes=2)))
    assert there == {"weights": 2 * 1000 + 4 * 10, "optimizer": 80}


def test_logits_are_there_three_times_in_fp32_and_a_cast_head_beside():
    assert sizes(logits_of(FACTS, AUTOCAST)) == {"logits": 12 * 8 * 50, "half-precision head": 200}
    fused = sizes(logits_of(FACTS, replace(AUTOCAST, fused_loss=True)))["logits"]
    assert (
        fused == 2 * 8 * 50 + 2 * 8 * 2 + 4 * 100
    )  # logits in half precision, the gradients of the head's inputs and of the head


def test_accumulated_gradients_are_there_at_the_loss():
    def at_the_loss(accumulation):
        return sizes(moments_of_step(FACTS, replace(AUTOCAST, accumulation=accumulation), ACTIVATIONS)[0].terms)

    assert "gradients" not in at_the_loss(1) and at_the_loss(2)["gradients"] == 4000


def test_gradients_of_half_precision_weights_accumulate_in_fp32():
    def of(**changes):
        setup = replace(AUTOCAST, weights_bytes=2, **changes)
        return gradient_bytes(FACTS, setup), sizes(buffers_of(FACTS, setup)), sizes(update_of(FACTS, setup))

    assert of() == (2000, {}, {})
    assert of(accumulation=4) == (4000, {}, {})
    assert of(accumulation=4, optimizer="sgd") == (2000, {}, {})
    assert of(gpus=2)[:2] == (0, {"gradient buckets": 2000}), "views of DDP's buckets"
    assert of(gpus=2, accumulation=4)[:2] == (4000, {"gradient buckets": 2000})


def test_the_table_adds_up_and_its_peak_is_the_largest():
    plan = plan_memory(FACTS, replace(AUTOCAST, gpus=2), COUNTED)
    assert plan.peak.size == max(sum(term.size for term in moment.terms) for moment in plan.moments)
    assert sizes(plan.peak.terms)["gradient buckets"] == 4000  # DDP's, with all gradients


def test_checkpointing_keeps_inputs_and_one_layer():
    moments = {
        m.name: sizes(m.terms) for m in moments_of_step(FACTS, replace(AUTOCAST, checkpointing=True), ACTIVATIONS)
    }
    assert moments["the loss"]["activations"] == 500
    assert moments["the backward pass begins"]["one layer's backward pass"] == 2_300


def test_the_host_holds_what_is_offloaded_and_the_rounding_of_pinned_blocks():
    zero = Zero(3, offload_optimizer=True, offload_parameters=True, sub_group=100)
    host = sizes(plan_memory(FACTS, replace(AUTOCAST, zero=zero, weights_bytes=2), COUNTED).host.terms)
    assert host["optimizer and fp32 weights"] == 12_000 and host["gradients"] == 2000 and host["processes"] == 3 * GIB
    assert host["rounding of pinned blocks"] == pytest.approx(4000 * (512 / 400 - 1)) and host[
        "weights"
    ] == pytest.approx(2000 * 256 / 200)


def test_on_the_cpu_all_processes_share_one_memory():
    one, two = (plan_memory(FACTS, replace(AUTOCAST, on_cpu=True, gpus=gpus), COUNTED).peak.size for gpus in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.01)
