"""What compiled layers keep, compared with what `torch.compile` saves in the layers of a real model."""

from functools import partial

import pytest
import torch
from planned_setups import SHAPES, setup_for
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from cpt.models.config import config_from
from cpt.models.layers import Compiling, Recomputing, compile_layers, move_checkpoints_into_graphs
from cpt.planning import activations
from cpt.planning.activations import SavedBytes, count_activations
from cpt.planning.dry_run import computing_as, fake_row, keep_planned_attention, model_on_meta
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import sizes_of_model

GPT2_SMALL = {"model_type": "gpt2", "n_embd": 768, "n_layer": 1, "n_head": 12, "vocab_size": 512, "n_positions": 1024}
GPT2_SMALL |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}
LLAMA_1B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
SHORT = {"attention": "varlen", "sequence_length": 128, "compiles": True}


def count(shape, **changes):
    setup = setup_for(**SHORT, **changes)
    return count_activations(config_from(SHAPES[shape] if isinstance(shape, str) else shape), setup)


def saved_by_torch(shape, **changes):
    """Bytes that real tensors take which autograd saves in a forward pass, through dynamo and AOTAutograd."""
    torch._dynamo.reset()
    setup = setup_for(**SHORT, **changes)
    model = model_on_meta(config_from(SHAPES[shape]), setup).to_empty(device="cpu")
    if setup.checkpointing:
        options = {"use_reentrant": False}
        if setup.recomputing.selective:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_planned_attention)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    parts = {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
    compile_layers(
        model, Compiling(aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=lambda graph, _: graph, **parts))
    )
    move_checkpoints_into_graphs(model)
    saved = SavedBytes(model)
    with saved_tensors_hooks(saved.keep, lambda tensor: tensor), computing_as(setup):
        model.base_model(**fake_row(setup, setup.micro_batch))
    return saved.total


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("gpt2", {}),
        ("qwen3", {"weights_bytes": 4}),
        ("llama", {"micro_batch": 3}),
        ("llama", {"lora": {"r": 8}}),
        ("llama", {"checkpointing": True}),
        ("llama", {"checkpointing": True, "recomputing": Recomputing(checkpoints=True, selective=True)}),
    ],
)
def test_they_keep_what_torch_saves(shape, changes):
    setup = setup_for(**SHORT, **changes)
    planned, _ = count(shape, **changes).of_rows(setup.micro_batch).kept_with(setup)
    assert planned == pytest.approx(saved_by_torch(shape, **changes), rel=0.01)


@pytest.mark.parametrize(("shape", "expected"), [(GPT2_SMALL, 24_633), (LLAMA_1B, 76_169)])
def test_bytes_of_a_token_in_a_layer_are_those_of_a_compiled_run(shape, expected):
    both, outside = count(shape), count({**shape, "n_layer" if "n_layer" in shape else "num_hidden_layers": 2})
    assert (outside.one.kept - both.one.kept) / SHORT["sequence_length"] == pytest.approx(expected, rel=0.01)


def test_a_layer_that_cannot_be_traced_is_counted_without_the_compiler(monkeypatch):
    eager = count_activations(config_from(SHAPES["llama"]), setup_for(attention="varlen", sequence_length=128))
    assert count("llama").one.kept < 0.8 * eager.one.kept

    def fail(*_, **__):
        raise RuntimeError("no graph")

    monkeypatch.setattr(activations, "count_compiled", fail)
    found = count("llama")
    assert found == eager
    plan = plan_memory(sizes_of_model(config_from(SHAPES["llama"]), None, 128), setup_for(**SHORT), found)
    notes = [term.note for moment in plan.moments for term in moment.terms if term.name == "activations"]
    assert all("not compiled" in note for note in notes)
