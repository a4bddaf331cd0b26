"""Sums that can be checked with a pencil: 1,000 numbers, of which the embedding has 100 and the head 100."""

from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.models.quantized import BYTES_OF_4_BIT
from cpt.optim.paged_states import BUFFER, BUFFERS
from cpt.planner.counted import Activations
from cpt.planner.host import host_memory
from cpt.planner.memory import gradient_bytes, moments_of_step
from cpt.planner.optimizer_terms import state_bytes, states_on_gpu, states_on_host, weight_bytes

SMALL = replace(FACTS, in_linear_layers=700, largest_in_layers=60)
ACTIVATIONS = Activations(kept=10_000, largest_layer=2_000, layer_inputs=500, backward=300, again=2_300)
SCALES = 2 * 4 / 256


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({"weights_bytes": 4}, 8),
        ({}, 12),  # moments and master
        ({"rounding": "kahan"}, 10),
        ({"rounding": "stochastic"}, 8),
        ({"lora": {"r": 1}}, 8),
        ({"optimizer": "sgd"}, 0),
    ],
)
def test_states_of_adamw(changes, each):
    assert state_bytes(SMALL, replace(PLAIN, **changes)) == each * 1000


@pytest.mark.parametrize(
    ("changes", "kahan"),
    [({}, 0), ({"rounding": "kahan"}, 2), ({"rounding": "stochastic"}, 0), ({"weights_bytes": 4}, 0)],
)
def test_states_in_8_bit_but_for_the_embedding(changes, kahan):
    found = state_bytes(SMALL, replace(PLAIN, optimizer="adamw_8bit", **changes))
    assert found == pytest.approx(8 * 100 + (2 + SCALES) * 900 + kahan * 1000)


def test_paged_states_are_on_the_host_and_two_buffers_on_the_gpu():
    setup = replace(PLAIN, optimizer="paged_adamw_8bit", rounding="stochastic")
    assert states_on_gpu(SMALL, setup).size == BUFFERS * BUFFER
    states = 8 * 100 + (2 + SCALES) * 900
    assert [term.size for term in states_on_host(SMALL, setup)] == pytest.approx([states])
    on_host = {term.name: term.size for term in host_memory(SMALL, setup, workers=0, snapshot=True).terms}
    assert on_host["optimizer"] == pytest.approx(states)
    assert on_host["copy of the checkpoint that is written"] == pytest.approx(2 * 1000 + states)
    assert not states_on_host(SMALL, replace(setup, optimizer="adamw_8bit"))


def test_released_gradients_are_one_at_a_time():
    released = replace(PLAIN, optimizer="adamw_8bit", releases=True)
    assert gradient_bytes(SMALL, released) == 2 * 100 and gradient_bytes(SMALL, PLAIN) == 2 * 1000
    moments = {
        moment.name: {term.name: term.size for term in moment.terms}
        for moment in moments_of_step(SMALL, released, ACTIVATIONS)
    }
    assert moments["the head's update"]["gradients"] == 200 and moments["a layer's update"]["gradients"] == 120
    assert "gradient of the head" not in moments["the backward pass begins"]
    tied = moments_of_step(replace(SMALL, is_tied=True), released, ACTIVATIONS)
    assert any(
        "gradient of the head" in [term.name for term in moment.terms]
        for moment in tied
        if moment.name == "a layer's update"
    )


@pytest.mark.parametrize(("double", "each"), [(True, 0.5 + 0.127 / 8), (False, 0.5 + 0.5 / 8)])
def test_weights_in_4_bit(double, each):
    setup = replace(PLAIN, lora={"r": 1, "quantize": "nf4", "double_quantize": double})
    assert BYTES_OF_4_BIT[double] == pytest.approx(each, rel=1e-3)
    found = weight_bytes(replace(SMALL, trained=10), setup)
    assert found == pytest.approx(700 * each + 300 * 2 + 10 * 4, rel=1e-3)
    terms = {
        term.name: term.size
        for moment in moments_of_step(replace(SMALL, trained=10), setup, ACTIVATIONS)
        for term in moment.terms
    }
    assert terms["a matrix in half precision"] == 2 * 60
