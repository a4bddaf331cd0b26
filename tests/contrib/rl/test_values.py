"""Losses and gradients of steps of PPO and SPO, by the formulas of papers."""

import math

import pytest
import torch
from stages import formulas
from taken_steps import assert_computed
from tiny_generations import LONGEST, generate, samples_of

pytestmark = pytest.mark.heavy
BETA, LOW, HIGH = 0.04, 0.1, 0.25
GAMMA, LAM, CLIP, SPEED, COEFFICIENT = 0.9, 0.7, 0.05, 3.0, 0.4
ONES = {"steps_per_generation": 4, "num_iterations": 2}
ONES |= {"beta": BETA, "epsilon": LOW, "epsilon_high": HIGH}
PPO = {"gamma": GAMMA, "lam": LAM, "value_clip": CLIP, "value_speed": SPEED}
PPO |= {"value_coefficient": COEFFICIENT}


def values_of(sample, model, head):
    """Of the states before each token of the answer: [T]."""
    ids = torch.tensor([[*sample.prompt, *sample.answer]])
    hidden = model.model(input_ids=ids).last_hidden_state[0, len(sample.prompt) - 1 : -1]
    return SPEED * (hidden @ head["value_head.weight"][0] + head["value_head.bias"])


def policy_losses(new, old, reference, advantages):
    """Clipped, with DeepSeek-V3.2's estimate of the divergence to the reference (arXiv 2512.02556)."""
    ratio = (new - old).exp()
    divergence = formulas.divergence_of_tokens(new, reference) * ratio
    return formulas.clipped_policy(ratio, advantages, LOW, HIGH) + BETA * divergence
