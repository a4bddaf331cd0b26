"""Runs on a CUDA GPU: the host never waits, layers compile once, checkpoints are written during training, and memory
is as planned."""

import pytest
import torch
from gpu_device import BACKEND, ON_GPU, peak_of, raise_on_waits
from safetensors.torch import load_file
from tiny import TINY_LLAMA, write_recipe
from torch import _dynamo as dynamo
from transformers import TrainerCallback

from benchmarks.plan.dry_run import planned_bytes
from cpt.models.attention import VARLEN
from cpt.models.config import config_from
from cpt.models.fused_loss import FusedLoss
from cpt.planning.activations import count_activations
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import sizes_of_model
from cpt.planning.workload import read_setup
from cpt.recipe.load import load_recipe
from cpt.train import train

pytestmark = pytest.mark.gpu
LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
LARGEST = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "vocab_size": 16_384,
    "max_position_embeddings": 512,
}


class Watches(TrainerCallback):
    """Raises an error where one of the steps 5 to 7 makes the host wait, and keeps the weights of each step."""

    def __init__(self):
        self.weights, self.graphs = {}, []

    def attach(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 4:
            self.graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
            raise_on_waits(True)

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step == 7:
            raise_on_waits(False)
            self.graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
        self.weights[state.global_step] = {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items()
        }


def run(sections, tmp_path, watches=None, *, training=(), shape=(), **others):
    """Train the recipe with other keys, and return it."""
    sections = {
        **sections,
        **others,
        "training": {**sections["training"], "logging_steps": 100, **dict(training)},
    }
    sections["model"] = {
        "from_scratch": True,
        "config": {**TINY_LLAMA, **dict(shape)},
        **others.get("model", {}),
    }
    recipe = load_recipe(write_recipe(sections, tmp_path / "recipe.yaml"))
    try:
        train(recipe, ready=watches and watches.attach)
    finally:
        raise_on_waits(False)
    return recipe


@pytest.mark.parametrize(
    ("model", "training"),
    [({"dtype": "bfloat16"}, {}), ({"dtype": "float32"}, {"bf16": True})],
    ids=["bf16 weights", "autocast"],
)
def test_steps_over_packed_rows_compile_once_and_never_wait(tiny_recipe, tmp_path, model, training):
    dynamo.reset()
    dynamo.utils.counters.clear()
    watches = Watches()
    compiled = {"torch_compile": True, "torch_compile_backend": BACKEND, **training}
    run(tiny_recipe, tmp_path, watches, training=compiled, model={"fused_loss": True, **model})
    assert isinstance(watches.trainer.model.loss_function, FusedLoss)
    before, after = watches.graphs
    assert 0 < before == after, "rows hold another number of documents at each step"


def test_checkpoints_written_during_training_hold_the_weights_of_their_steps(tiny_recipe, tmp_path):
    watches = Watches()
    run(
        tiny_recipe,
        tmp_path,
        watches,
        shape=LARGER,
        checkpoints={"every_steps": 2, "keep": None, "in_background": True},
    )
    saved = {
        int(path.name.split("-")[1]): load_file(path / "model.safetensors")
        for path in tmp_path.glob("runs/tiny/checkpoint-*")
    }
    assert {4, 8} <= saved.keys()
    for step, tensors in saved.items():
        assert all(
            torch.equal(tensor, watches.weights[step][name].cpu())
            for name, tensor in tensors.items()
        ), step
    copies = watches.trainer.checkpointer.host_copies
    buffers = [buffer for some in copies.free.values() for buffer in some if buffer.nbytes > 2**18]
    assert buffers and all(buffer.is_pinned() == ON_GPU for buffer in buffers)


def test_a_run_takes_the_memory_that_is_planned(tiny_recipe, tmp_path):
    data = {**tiny_recipe["data"], "sequence_length": 512}
    budget = {"tokens": 6144, "global_batch_tokens": 2048}
    recipe = None

    def whole_run():
        nonlocal recipe
        recipe = run(
            tiny_recipe, tmp_path, training={"bf16": True}, shape=LARGEST, data=data, budget=budget
        )

    measured = peak_of(whole_run)
    config, setup = setup_of(recipe)
    assert 0.95 < planned_bytes(config, setup) / measured < 1.1


def setup_of(recipe):
    config = config_from(recipe.model.config)
    return config, read_setup(recipe, 1, None, attention=VARLEN, on_cpu=not ON_GPU)


def plan_of(recipe):
    config, setup = setup_of(recipe)
    sizes = sizes_of_model(config, setup.lora, setup.sequence_length)
    return plan_memory(sizes, setup, count_activations(config, setup))


def test_an_evaluation_takes_the_memory_that_is_planned(tiny_recipe, tmp_path):
    data = {**tiny_recipe["data"], "sequence_length": 512}
    budget = {"tokens": 6144, "global_batch_tokens": 2048}
    peaks = []

    class Measured(Watches):
        def attach(self, trainer):
            evaluate = trainer.evaluate
            trainer.evaluate = lambda *given, **options: peaks.append(
                peak_of(lambda: evaluate(*given, **options))
            )

    recipe = run(
        tiny_recipe,
        tmp_path,
        Measured(),
        training={"bf16": True},
        shape=LARGEST,
        data=data,
        budget=budget,
        evaluation={"held_out_share": 0.1},
    )
    moment = next(moment for moment in plan_of(recipe).moments if moment.name == "an evaluation")
    begins_with_it = (
        "one layer's forward pass",
        "logits",
        "half-precision weights",
        "half-precision head",
    )
    planned = sum(term.size for term in moment.terms if term.name in begins_with_it)
    assert len(peaks) == 2 and all(0.95 < planned / peak < 1.8 for peak in peaks)
