from dataclasses import replace
from functools import lru_cache

import pytest
from planned_setups import PLAIN, SHAPES

from cpt.models.config import config_from
from cpt.planner.activations import count_activations
from cpt.planner.advice import CAREFUL, fits
from cpt.planner.automatic import BUSY_TOKENS, chosen_values, micro_batches_of
from cpt.planner.facts import facts_of
from cpt.planner.memory import plan_memory
from cpt.planner.stages import TILES, Beside
from cpt.planner.target import find_target

LLAMA = config_from(SHAPES["llama"])
SETUP = replace(PLAIN, sequence_length=2048, weights_bytes=4)
MICRO_BATCH, CHECKPOINTING = "per_device_train_batch_size", "gradient_checkpointing"


@lru_cache
def counted():
    return facts_of(LLAMA, None, 2048), count_activations(LLAMA, SETUP)


def count(_):
    return counted()


def card(gib):
    return find_target("mine", 1, 64.0, memory=gib, peak_tflops=100)


def chosen(gib, *keys, rows=64, share=1.0, setup=SETUP):
    return chosen_values(dict.fromkeys(keys, "auto"), setup, card(gib), count, rows=rows, share=share)


def does_fit(gib, values, share=1.0):
    setup = replace(SETUP, micro_batch=values[MICRO_BATCH], checkpointing=values.get(CHECKPOINTING, False))
    facts, activations = counted()
    return fits(plan_memory(facts, setup, activations), card(gib), share * CAREFUL)


def test_a_micro_batch_divides_the_step_and_is_no_larger_than_keeps_a_gpu_busy():
    assert micro_batches_of(12, 2048) == [1, 2, 3, 4, 6, 12]
    assert max(micro_batches_of(1024, 2048)) * 2048 == BUSY_TOKENS
    assert micro_batches_of(4, 10**6) == [1]


@pytest.mark.parametrize("gib", [4, 8, 16, 40])
def test_it_is_the_largest_that_fits(gib):
    values = chosen(gib, MICRO_BATCH)
    assert does_fit(gib, values)
    larger = [size for size in micro_batches_of(64, 2048) if size > values[MICRO_BATCH]]
    assert not larger or not does_fit(gib, {MICRO_BATCH: larger[0]})


def test_more_memory_is_used_and_less_is_taken_where_less_is_allowed():
    sizes = [chosen(gib, MICRO_BATCH)[MICRO_BATCH] for gib in (4, 8, 16, 80)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 16
    assert chosen(16, MICRO_BATCH, share=0.5)[MICRO_BATCH] < chosen(16, MICRO_BATCH)[MICRO_BATCH]


def test_layers_are_computed_again_only_where_that_pays():
    assert chosen(80, MICRO_BATCH, CHECKPOINTING) == {MICRO_BATCH: 16, CHECKPOINTING: False}
    assert chosen(80, CHECKPOINTING, setup=replace(SETUP, micro_batch=4)) == {CHECKPOINTING: False}
    small = chosen(1.6, MICRO_BATCH, CHECKPOINTING)
    assert small[CHECKPOINTING] is True
    assert does_fit(1.6, small)
    assert not does_fit(1.6, {MICRO_BATCH: small[MICRO_BATCH]})


def test_where_nothing_fits_it_is_the_smallest():
    assert chosen(0.9, MICRO_BATCH, CHECKPOINTING) == {MICRO_BATCH: 1, CHECKPOINTING: True}


def test_what_follows_from_others_is_left_out_and_the_loader_is_left_to_itself():
    keys = ("gradient_accumulation_steps", "dataloader_num_workers", "dataloader_prefetch_factor")
    assert chosen(8, *keys) == {
        "gradient_accumulation_steps": None,
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
    }
    assert chosen(8) == {}


def test_a_pair_counts_twice_and_a_generation_stays_as_large_as_it_is():
    pairs = replace(SETUP, beside=Beside("dpo", TILES, sequences=2, reference=True))
    assert chosen(1000, MICRO_BATCH, setup=pairs)[MICRO_BATCH] == BUSY_TOKENS // 2048 // 2
    written = replace(SETUP, accumulation=64, beside=Beside("grpo", TILES, completion=2048))
    assert chosen(1000, MICRO_BATCH, setup=written)[MICRO_BATCH] == BUSY_TOKENS // 4096
    too_many = replace(written, accumulation=100_000)
    assert chosen(1000, MICRO_BATCH, setup=too_many) == {MICRO_BATCH: 1}, "no micro-batch makes their cache smaller"
