"""What a step keeps for its backward pass: the formula, whole steps on fake tensors, and real tensors."""

from dataclasses import replace

import pytest
import torch
from planned_setups import AGAIN, PLAIN, SHAPES, WAYS, setup_for
from transformers import AutoModelForCausalLM

from benchmarks.plan.dry_run import dry_run, planned_bytes
from cpt.models.config import config_from
from cpt.models.layers import Recomputing
from cpt.planning import activations
from cpt.planning.activations import ActivationCounts, Activations, count_activations
from cpt.planning.fake_model import PeakOfStorages, fake_row
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import sizes_of_model
from cpt.plugins import import_user_module


def count(shape, **changes):
    config = config_from(SHAPES[shape] if isinstance(shape, str) else shape)
    return count_activations(config, setup_for(**changes))


# --- the formula --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_documents_need_a_mask_for_each_layer_unless_attention_is_flash():
    packed = count("llama").one_row
    flash = count("llama", attention="flash_attention_2").one_row
    mask = 2 * 512 * 512
    assert packed.kept - flash.kept >= 4 * mask
    assert (
        count("llama", packed=False).one_row.kept
        == flash.kept
        == count("llama", attention="varlen").one_row.kept
    )
    assert count("llama", attention="varlen", on_cpu=True) == count("llama", on_cpu=True)


def test_a_router_whose_code_needs_values_is_estimated():
    config = {
        "model_type": "jetmoe",
        "vocab_size": 640,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "kv_channels": 16,
    }
    found = count(config).one_row
    assert not found.is_counted and 0 < found.again < 2 * found.kept


def test_a_model_of_the_users_own_is_counted():
    import_user_module("examples.lstm.lstm_language_model")
    config = {"model_type": "lstm_lm", "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2}
    packed, alone = (count(config, on_cpu=True, packed=packed).one_row for packed in (True, False))
    assert (packed.kept, packed.layers) == (alone.kept, 2) and packed.is_counted
    tokens, width = 512, 64
    assert packed.kept > 2 * tokens * width * 4 * 2  # each layer keeps its gates at least


def test_a_model_without_decoder_layers_keeps_all_to_its_backward_pass():
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 640, "dff": 96}
    counts = count({"model_type": "ctrl", **shape}, packed=False).one_row
    assert counts.kept == counts.again == counts.forward > 0
    assert (counts.layer_inputs, counts.backward, counts.layers) == (0, 0, 1)


def test_long_rows_of_a_recurrent_model_are_counted_from_short_ones():
    shape = {"vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}
    config = {"model_type": "mamba2", **shape, "head_dim": 32, "state_size": 8, "chunk_size": 64}
    short, long = (
        count(config, packed=False, sequence_length=length, compiles=True) for length in (256, 640)
    )
    for rows in ("one_row", "two_rows"):
        assert getattr(long, rows) == getattr(short, rows).times(2.5)
    assert short.one_row.kept > 256 * 64 * 2 * 2


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 1.0),
        ({"num_experts_per_tok": 3}, 1.0),
        ({"num_experts_per_tok": 3, "num_local_experts": 5}, 0.6),
        ({"num_experts": 4}, 0.25),
        ({"num_experts_per_tok": 2, "num_experts": None, "n_routed_experts": 8}, 0.25),
    ],
)
def test_an_expert_processes_its_share_of_tokens(config, share):
    assert activations.share_of_experts(config) == share


def test_any_number_of_rows_is_extrapolated_from_one_and_two():
    one_row = Activations(
        kept=100, layer_inputs=10, backward=7, again=50, attention=3, layers=5, forward=20
    )
    two_rows = Activations(
        kept=180, layer_inputs=19, backward=9, again=90, attention=6, layers=5, forward=33
    )
    of_rows = ActivationCounts(one_row, two_rows).of_rows
    assert (of_rows(1), of_rows(2)) == (one_row, two_rows)
    assert of_rows(4) == Activations(
        kept=340, layer_inputs=37, backward=13, again=170, attention=12, layers=5, forward=59
    )
    assert one_row.times(2.5) == Activations(
        kept=250, layer_inputs=25, backward=17, again=125, attention=7, layers=5, forward=50
    )


ON = Recomputing(checkpoints=True)
EIGHT = Activations(
    kept=8_000, layer_inputs=800, backward=300, again=1_300, attention=160, layers=8
)


@pytest.mark.parametrize(
    ("how", "kept"),
    [(ON, 800), (replace(ON, selective=True), 960), (replace(ON, every_n_layers=3), 5_300)],
)
def test_layers_that_are_not_recomputed_keep_all(how, kept):
    assert EIGHT.kept_with(replace(PLAIN, checkpointing=True, recomputing=how)) == (
        pytest.approx(kept),
        0,
    )
    assert EIGHT.kept_with(replace(PLAIN, recomputing=how)) == (8_000, 0)


def test_two_layers_of_offloaded_activations_are_in_transit():
    offloads = replace(PLAIN, recomputing=replace(ON, offload=True))
    assert EIGHT.kept_with(replace(offloads, checkpointing=True)) == (800, 600)
    assert EIGHT.kept_with(offloads) == (8_000, 6_000)


# --- dry runs -----------------------------------------------------------------------------------------------------

FAST = {"fused loss": "qwen3", "autocast": "gpt2", "8 bit, stochastic, released": "llama"}
EACH_WAY = [
    (list(SHAPES)[number % len(SHAPES)], way) for number, way in enumerate(WAYS) if way not in FAST
]
CASES = [(shape, way) for way, shape in FAST.items() if way != "fused loss"]
CASES.append(pytest.param("qwen3", "fused loss", marks=pytest.mark.slow))
CASES += [pytest.param(*pair, marks=pytest.mark.slow) for pair in EACH_WAY]


@pytest.mark.heavy
@pytest.mark.parametrize(("shape", "way"), CASES)
def test_the_formula_is_within_5_percent_of_a_dry_run_and_hardly_below(shape, way):
    config, setup = config_from(SHAPES[shape]), setup_for(**WAYS[way])
    assert 0.97 <= planned_bytes(config, setup) / dry_run(config, setup) <= 1.05


PARTS = (["layers.2-3", "lm_head"], ["layers.2-3"], ["lm_head"], ["embed_tokens"], "new_rows")
FROZEN = [pytest.param({}, PARTS[0], marks=pytest.mark.slow)]
FROZEN += [pytest.param(AGAIN, parts, marks=pytest.mark.slow) for parts in PARTS]
FROZEN += [
    pytest.param({"weights_bytes": 4, "checkpointing": True}, parts, marks=pytest.mark.slow)
    for parts in PARTS
]


@pytest.mark.heavy
@pytest.mark.parametrize(("changes", "parts"), FROZEN)
def test_frozen_parts_need_no_gradients_and_no_activations_below_the_first_trained_one(
    changes, parts
):
    config = config_from(SHAPES["llama"])
    whole, setup = setup_for(**changes), setup_for(**changes, train_only=parts)
    assert 0.97 <= planned_bytes(config, setup) / dry_run(config, setup) <= 1.05
    assert planned_bytes(config, setup) < planned_bytes(config, whole)
    kept, of_whole = (count_activations(config, one).one_row for one in (setup, whole))
    assert kept.kept <= of_whole.kept and kept.layers == {"lm_head": 1, "embed_tokens": 4}.get(
        parts[0], kept.layers
    )


@pytest.mark.slow
def test_layers_in_8_bit_keep_their_inputs():
    plain, quantized = (
        count("llama", lora={"r": 16, **how}).one_row for how in ({}, {"quantize": "int8"})
    )
    # of attention, its output, the feed-forward layer and its output; the others are saved already
    assert quantized.kept - plain.kept > 4 * 512 * 2 * 512


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_dry_run_takes_what_a_real_step_takes(checkpointing):
    config = config_from({**SHAPES["llama"], "num_hidden_layers": 2})
    setup = setup_for(
        on_cpu=True, half=False, weights_bytes=4, packed=True, checkpointing=checkpointing
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    row = fake_row(setup)
    with PeakOfStorages() as storages:
        for tensor in (*model.parameters(), *model.buffers()):
            storages.watch(tensor.untyped_storage())
        for _ in range(2):
            storages.peak = storages.now
            model(**row, labels=row["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dry_run(config, setup) == pytest.approx(storages.peak, rel=0.01)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_is_counted_once_for_each_setup(own_cache, monkeypatch):
    counts = count("llama")

    def fail(*_):
        raise AssertionError("counted again")

    monkeypatch.setattr(activations, "model_on_meta", fail)
    assert count("llama") == count("llama", micro_batch=4, gpus=2) == counts
    for changes in ({"sequence_length": 256}, {"lora": {"r": 8}}, {"weights_bytes": 4}):
        with pytest.raises(AssertionError, match="counted again"):
            count("llama", **changes)


def test_damaged_counts_are_made_again(own_cache):
    counts = count("llama")
    (file,) = own_cache.glob("activations/*.json")
    file.write_text(file.read_text().replace("1", "2"))
    assert count("llama") == counts


@pytest.mark.heavy
def test_two_layers_of_each_kind_are_run_and_the_others_count_as_much(monkeypatch, tmp_path):
    sliding = {
        **SHAPES["llama"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 9,
        "head_dim": 64,
    }
    sliding["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    counts = count(sliding)
    monkeypatch.setenv("CPT_CACHE", str(tmp_path))
    monkeypatch.setattr(activations, "RUN_OF_EACH_KIND", 9)
    assert counts == count(sliding)


# --- compiled layers ----------------------------------------------------------------------------------------------

SHORT = {"attention": "varlen", "sequence_length": 128}


@pytest.mark.heavy
def test_a_layer_that_cannot_be_traced_is_counted_without_the_compiler(own_cache, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no graph")

    monkeypatch.setattr(activations, "saved_if_compiled", fail)
    found = count("llama", **SHORT, compiles=True)
    assert found == count("llama", **SHORT)
    sizes = sizes_of_model(config_from(SHAPES["llama"]), None, 128)
    plan = plan_memory(sizes, setup_for(**SHORT, compiles=True), found)
    notes = [
        term.note for moment in plan.moments for term in moment.terms if term.name == "activations"
    ]
    assert all("not compiled" in note for note in notes)
