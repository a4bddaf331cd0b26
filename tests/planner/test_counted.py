"""The same bytes, kept, computed again in some layers, or waiting on the host."""

from dataclasses import replace

import pytest
from planned_setups import SHAPES, setup_for

from cpt.models.config import config_from
from cpt.models.recomputing import Recomputing
from cpt.planner.activations import count_activations
from cpt.planner.counted import Activations
from cpt.planner.dry_run import dry_run
from cpt.planner.facts import facts_of
from cpt.planner.memory import plan_memory

EIGHT = Activations(
    kept=8_000, largest_layer=1_000, layer_inputs=800, backward=300, again=1_300, attention=160, layers=8
)
ON = Recomputing(checkpoints=True)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (ON, 800),
        (replace(ON, selective=True), 960),
        (replace(ON, every_n_layers=2), 4_400),
        (replace(ON, every_n_layers=3), 5_300),
    ],
)
def test_layers_that_are_not_computed_again_keep_all(how, kept):
    assert EIGHT.kept_with(checkpointing=True, how=how) == pytest.approx(kept)
    assert EIGHT.kept_with(checkpointing=False, how=how) == 8_000


def test_two_layers_of_what_is_offloaded_are_on_their_way():
    assert EIGHT.offloaded_with(checkpointing=True, how=ON) == 0
    assert EIGHT.offloaded_with(checkpointing=True, how=replace(ON, offload=True)) == 600
    assert EIGHT.offloaded_with(checkpointing=False, how=replace(ON, offload=True)) == 6_000


def test_rows_and_their_length_multiply_attention_too():
    two = replace(EIGHT, kept=16_000, attention=320)
    assert (
        EIGHT.of_rows(3, two).attention == 480
        and EIGHT.of_rows(3, two).kept == 24_000
        and EIGHT.times(2).attention == 320
    )


def plan(**changes):
    config, setup = config_from(SHAPES["llama"]), setup_for(**changes)
    return plan_memory(
        facts_of(config, setup.lora, setup.sequence_length), setup, count_activations(config, setup)
    ), dry_run(config, setup)


@pytest.mark.parametrize(
    "how", [replace(ON, selective=True), replace(ON, every_n_layers=2)], ids=["selective", "every second"]
)
def test_the_sum_is_that_of_a_dry_run(how):
    found, exact = plan(
        on_cpu=True, half=False, weights_bytes=4, checkpointing=True, micro_batch=8, fused_loss=True, recomputing=how
    )
    assert found.model_alone == pytest.approx(exact.peak, rel=0.05)


def test_what_leaves_the_gpu_is_on_the_host():
    here, _ = plan(micro_batch=8)
    away, _ = plan(micro_batch=8, recomputing=Recomputing(offload=True))
    (waiting,) = (term.size for term in away.host.terms if term.name == "activations")
    assert waiting > 0 and not any(term.name == "activations" for term in here.host.terms)
    named = [next(t.size for m in found.moments for t in m.terms if t.name == "activations") for found in (here, away)]
    assert named[0] - named[1] == pytest.approx(waiting)
