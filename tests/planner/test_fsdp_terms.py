from dataclasses import replace

import pytest
from planned_setups import PLAIN, SHAPES
from planner_facts import FACTS

from cpt.models.config import config_from
from cpt.planner.activations import count_activations
from cpt.planner.fsdp_terms import fsdp_buffers, fsdp_gradients, fsdp_states, gathered_numbers
from cpt.planner.host import checkpoint_bytes
from cpt.planner.memory import plan_memory
from cpt.planner.setup import Zero, fsdp_of

FSDP = Zero(3, is_fsdp=True)
SETUP = replace(PLAIN, gpus=4, weights_bytes=4, zero=FSDP)


def states(setup):
    return {term.name: term.size for term in fsdp_states(FACTS, setup, setup.zero)}


def test_weights_and_moments_are_divided_and_layers_computed_in_half():
    assert states(SETUP) == {"weights": 1000, "layers in use": 2 * 700, "optimizer": 2000}
    assert states(replace(SETUP, weights_bytes=2))["optimizer"] == 3000, "masters of weights that are half themselves"


def test_what_is_gathered_is_two_layers_and_the_head_or_all():
    assert gathered_numbers(FACTS, FSDP) == 2 * 300 + 100
    assert gathered_numbers(FACTS, replace(FSDP, keeps_gathered=True)) == 1000


def test_gradients_wait_whole_for_the_last_micro_batch():
    assert fsdp_gradients(FACTS, SETUP) == 1000 and fsdp_gradients(FACTS, replace(SETUP, accumulation=2)) == 4000


def test_a_layer_is_on_its_way_with_its_gradients():
    (buffers,) = fsdp_buffers(FACTS, SETUP)
    assert buffers.size == (2 + 4) * 300


@pytest.mark.slow
def test_activations_are_those_of_weights_in_half_precision():
    config = config_from(SHAPES["llama"])
    mixed, half = (count_activations(config, setup) for setup in (SETUP, replace(PLAIN, weights_bytes=2)))
    assert mixed.one.kept_with(checkpointing=False, how=SETUP.recomputing) == half.one.kept_with(
        checkpointing=False, how=SETUP.recomputing
    )


@pytest.mark.slow
def test_a_plan_of_fsdp_has_its_parts():
    activations = count_activations(config_from(SHAPES["llama"]), SETUP)
    names = {term.name for moment in plan_memory(FACTS, SETUP, activations).moments for term in moment.terms}
    assert {
        "weights",
        "layers in use",
        "optimizer",
        "gradients",
    } <= names and "optimizer and fp32 weights" not in names


def test_a_checkpoint_has_the_whole_model_and_each_processs_part_of_weights_and_moments():
    assert checkpoint_bytes(FACTS, SETUP) == (4 + 4 + 8) * FACTS.trained


def test_gradients_that_are_reduced_after_each_micro_batch_are_kept_in_parts():
    training = {"fsdp": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    reduced, whole = fsdp_of(training), fsdp_of({"fsdp": True})
    sizes = [fsdp_gradients(FACTS, replace(PLAIN, gpus=4, accumulation=2, zero=zero)) for zero in (reduced, whole)]
    assert 4 * sizes[0] == sizes[1] == 4 * FACTS.trained
