"""A few steps of a tiny model, for optimizers: whether they learn, and whether they go on exactly from a saved
state."""

import copy

import torch
from tiny_models import tiny_model

from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Optimizer


def tiny_llama(dtype="auto"):
    return tiny_model("llama", seed=42, dtype=dtype)


def steps(trained, optimizer, count):
    """Losses on the same rows."""
    ids = torch.randint(
        4, trained.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(0)
    )
    losses = []
    for _ in range(count):
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def learns_and_resumes(section: Optimizer, dtype="auto") -> None:
    """The loss falls by a tenth, and a second optimizer goes on from the first one's state bit for bit."""
    trained = tiny_llama(dtype)
    optimizer = build_optimizer(section, trained)
    losses = steps(trained, optimizer, 12)
    assert losses[-1] < 0.9 * losses[0]
    weights, state = copy.deepcopy(trained.state_dict()), copy.deepcopy(optimizer.state_dict())
    straight = steps(trained, optimizer, 4)
    again = tiny_llama(dtype)
    again.load_state_dict(weights)
    resumed = build_optimizer(section, again)
    resumed.load_state_dict(state)
    assert steps(again, resumed, 4) == straight
