from dataclasses import replace

import pytest
from planned_setups import PLAIN, SHAPES, setup_for

from cpt.models.config import config_from
from cpt.models.layers import Recomputing
from cpt.planning.activations import Activations, count_activations
from cpt.plugins import import_user_module


def count(shape, **changes):
    return count_activations(config_from(SHAPES[shape] if isinstance(shape, str) else shape), setup_for(**changes)).one


def test_rows_multiply_them_and_copies_of_weights_stay():
    both = count_activations(config_from(SHAPES["llama"]), setup_for(weights_bytes=4))
    copies = 2 * both.one.kept - both.two.kept
    in_layers = 4 * (512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1408)
    assert copies == pytest.approx(2 * in_layers, rel=0.1)
    assert (
        both.of_rows(1) == both.one
        and both.of_rows(2) == both.two
        and both.of_rows(5).kept == 5 * both.one.kept - 4 * copies
    )


def test_rows_of_several_documents_bring_a_mask_for_each_layer_unless_attention_is_flashs():
    packed, flash = count("llama"), count("llama", attention="flash_attention_2")
    mask = 2 * 512 * 512
    assert packed.kept - flash.kept >= 4 * mask
    assert count("llama", packed=False).kept == flash.kept == count("llama", attention="varlen").kept
    assert count("llama", attention="varlen", on_cpu=True) == count("llama", on_cpu=True)


def test_a_router_whose_code_needs_values_is_estimated():
    config = {"model_type": "jetmoe", "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2, "kv_channels": 16}
    found = count(config)
    assert not found.is_counted and 0 < found.again < 2 * found.kept


@pytest.mark.long
def test_a_recurrent_model_is_counted_on_a_short_row_and_grows_with_its_length():
    mamba = {"model_type": "mamba", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    short, long = count(mamba, packed=False, sequence_length=256), count(mamba, packed=False, sequence_length=4096)
    assert long.kept == 16 * short.kept


def test_a_model_whose_documents_decide_its_shapes_is_counted_as_if_each_row_were_one():
    import_user_module("examples.lstm.lstm_language_model")
    config = {"model_type": "lstm_lm", "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2}
    packed, alone = (count(config, on_cpu=True, packed=packed) for packed in (True, False))
    assert (packed.kept, packed.layers) == (alone.kept, 2) and packed.is_counted
    tokens, width = 512, 64
    assert packed.kept > 2 * tokens * width * 4 * 2  # each layer keeps its gates at least


ON = Recomputing(checkpoints=True)
EIGHT = Activations(kept=8_000, layer_inputs=800, backward=300, again=1_300, attention=160, layers=8)


@pytest.mark.parametrize(
    ("how", "kept"), [(ON, 800), (replace(ON, selective=True), 960), (replace(ON, every_n_layers=3), 5_300)]
)
def test_layers_that_are_not_computed_again_keep_all(how, kept):
    assert EIGHT.kept_with(replace(PLAIN, checkpointing=True, recomputing=how)) == (pytest.approx(kept), 0)
    assert EIGHT.kept_with(replace(PLAIN, recomputing=how)) == (8_000, 0)


def test_two_layers_of_what_is_offloaded_are_on_their_way():
    offloads = replace(PLAIN, recomputing=replace(ON, offload=True))
    assert EIGHT.kept_with(replace(offloads, checkpointing=True)) == (800, 600)
    assert EIGHT.kept_with(offloads) == (8_000, 6_000)
