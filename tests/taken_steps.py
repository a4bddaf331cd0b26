"""What a run's steps computed: losses, gradients before clipping, and the weights and batches that they come from."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM


@dataclass
class Step:
    weights: dict[str, torch.Tensor]
    micro_batches: list[Any] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    loss: float = 0.0


def take_steps(trainer: Any) -> list[Step]:
    """Train to the end."""
    steps: list[Step] = []
    compute_loss, measure = trainer.compute_loss, trainer.guard.norm_of_step
    model = trainer.model

    def compute_and_note(model_of_step, inputs, *rest, **options):
        if len(steps) == trainer.state.global_step:
            steps.append(Step({name: one.clone() for name, one in model.state_dict().items()}))
        steps[-1].micro_batches.append(dict(inputs))
        return compute_loss(model_of_step, inputs, *rest, **options)

    def measure_and_note():
        found = {name: weight.grad for name, weight in model.named_parameters()}
        steps[-1].gradients = {name: grad.clone() for name, grad in found.items()}
        return measure()

    trainer.compute_loss, trainer.guard.norm_of_step = compute_and_note, measure_and_note
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for step, loss in zip(steps, logged, strict=True):
        step.loss = loss
    return steps


def move(model: torch.nn.Module, far: float = 0.1, seed: int = 1) -> None:
    """Away from the reference, where a loss would be the same whatever the formula."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter += far * torch.randn(parameter.shape, generator=generator)


def independent(config: Any, weights: dict[str, torch.Tensor], build: Any = None) -> Any:
    """transformers' own model with these weights, in float64."""
    model = (build or AutoModelForCausalLM.from_config)(config).double().eval()
    model.load_state_dict(weights, strict=False)
    # The run's model was built before TRL wrote the padding token into its config.
    model.get_input_embeddings().padding_idx = None
    return model


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
    assert step.loss == pytest.approx(loss.item(), rel=rel)
    for name, weight in model.named_parameters():
        expected = weight.grad
        apart = (step.gradients[name].double() - expected).norm() / expected.norm()
        assert apart < rel, f"the gradient of {name} differs by {apart:.1e} of its norm"
