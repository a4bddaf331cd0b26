"""The formula against a whole step on fake tensors, and both against real tensors."""

import pytest
import torch
from planned_setups import SHAPES, WAYS, setup_for
from transformers import AutoModelForCausalLM

from cpt.models.config import config_from
from cpt.planning.activations import count_activations
from cpt.planning.dry_run import PeakOfStorages, dry_run, fake_row
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import sizes_of_model

FAST = [
    ("llama", "half"),
    ("llama", "checkpointing"),
    ("qwen3", "fused loss"),
    ("nemotron", "adapters"),
    ("gpt2", "autocast"),
    ("llama", "8 bit, stochastic, released"),
]
GRID = [(shape, way) for shape in SHAPES for way in WAYS]


SLOW = GRID[::6]  # the rest is for the long tests


def mark_of(pair):
    """When a case is run."""
    return [] if pair in FAST else [pytest.mark.slow if pair in SLOW else pytest.mark.long]


CASES = [pytest.param(*pair, id=" ".join(pair), marks=mark_of(pair)) for pair in GRID]


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_the_formula_is_within_five_per_cent_of_a_dry_run_and_hardly_below(shape, way):
    config, setup = config_from(SHAPES[shape]), setup_for(**WAYS[way])
    formula = plan_memory(
        sizes_of_model(config, setup.lora, setup.sequence_length), setup, count_activations(config, setup)
    ).model_alone
    assert 0.97 <= formula / dry_run(config, setup) <= 1.05


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_dry_run_is_a_real_step_without_its_memory(checkpointing):
    config = config_from(SHAPES["llama"])
    setup = setup_for(on_cpu=True, half=False, weights_bytes=4, packed=True, checkpointing=checkpointing)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
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
