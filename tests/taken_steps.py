"""What a run's steps computed: losses, gradients before clipping, and the weights and batches that they come from."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from example_runs import build_run


@dataclass
class Step:
    weights: dict[str, torch.Tensor]  # before it
    micro_batches: list[Any] = field(default_factory=list)  # of all processes
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    loss: float = 0.0


@dataclass
class Taken:
    """All steps of a run that began away from its reference."""

    config: Any
    build: Any  # the class of the model
    before: dict[str, torch.Tensor]  # weights of the reference
    steps: list[Step] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)  # of the stage, at the end

    def model(self, weights: dict[str, torch.Tensor]) -> Any:
        """transformers' own model with these weights, in float64."""
        model = self.build(self.config).double().eval()
        model.load_state_dict(weights, strict=False)
        # The run's model was built before TRL wrote the padding token into its config.
        model.get_input_embeddings().padding_idx = None
        return model

    @property
    def reference(self) -> Any:
        return self.model(self.before)


def take_steps(trainer: Any, seed: int = 1) -> Taken:
    """Move the model away from its reference, where a loss would be the same whatever the formula, and train it."""
    model = trainer.model
    taken = Taken(model.config, type(model), copy_of(model.state_dict()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        if (head := model.get_output_embeddings()) is not None:
            # certain of where to end, so that sampled lengths differ
            head.weight[trainer.processing_class.eos_token_id] *= 6
    compute_loss, measure = trainer.compute_loss, trainer.checked_step.norm_of_step

    def compute_and_note(model_of_step, inputs, *rest, **options):
        if len(taken.steps) == trainer.state.global_step:
            taken.steps.append(Step(copy_of(model.state_dict())))
        taken.steps[-1].micro_batches.append(dict(inputs))
        return compute_loss(model_of_step, inputs, *rest, **options)

    def measure_and_note():
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        taken.steps[-1].gradients = copy_of(gradients)
        return measure()

    trainer.compute_loss, trainer.checked_step.norm_of_step = compute_and_note, measure_and_note
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for step, loss in zip(taken.steps, logged, strict=True):
        step.loss = loss
    taken.states = trainer.stage_states()
    return taken


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


SIZES = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}


def steps_on_examples(stage, folder, rows, *, data=None, seed=1, **training) -> Taken:
    """One step on six rows."""
    training = {**SIZES, **training}
    trainer = build_run(stage, folder, steps=1, rows=rows, data=data, training=training)
    taken = take_steps(trainer, seed)
    assert len(taken.steps) == 1
    return taken


def log_probabilities(
    model: Any, ids: list[int], *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T - 1] of a sequence's tokens but the first, and of all tokens there [T - 1, V]."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    every = logits.log_softmax(-1)
    return every.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0], every


def assert_computed(step: Step, loss: torch.Tensor, model: Any, *, rel: float = 2e-5) -> None:
    """The step has this loss of the model, and the gradients of its weights."""
    loss.backward()
    assert step.loss == pytest.approx(loss.item(), rel=rel, abs=1e-6)
    for name, weight in model.named_parameters():
        expected = weight.grad
        apart = (step.gradients[name].double() - expected).norm() / expected.norm()
        assert apart < rel, f"the gradient of {name} differs by {apart:.1e} of its norm"
