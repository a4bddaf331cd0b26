"""A tiny model that has learned one chain of words goes on with a slightly different one, by each optimizer and at
each learning rate."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cpt.optim.adamw import adamw, fused_by_torch
from cpt.optim.build import OPTIMIZERS
from cpt.optim.groups import ParameterGroups, parameter_groups

WORDS, ROWS, LENGTH = 256, 8, 32
PEAKEDNESS = 2.5  # how far some words follow a word rather than others
MOVED = 0.2  # share of words that mean another one in the new text
BETWEEN_STREAMS = 10_000  # so many rows apart are seeds of training and of evaluation
Batches = list[torch.Tensor]
Make = Callable[[ParameterGroups, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Arm:
    """A type of weights and an optimizer over them."""

    name: str
    dtype: torch.dtype
    make: Make
    bytes_each: float
    """Of the optimizer's states, for each weight; embeddings of 8-bit ones have 6 more."""


BNB_ADAMW = OPTIMIZERS["adamw_8bit"].build
REFERENCE = Arm("fp32 weights, adamw", torch.float32, adamw, 8)
ARMS = (
    Arm("bf16, fp32 master: adamw", torch.bfloat16, adamw, 12),
    Arm(
        "bf16, torch's AdamW alone",
        torch.bfloat16,
        lambda groups, rate: adamw(groups, rate, fused_by_torch),
        4,
    ),
    Arm(
        "bf16, adamw, kahan",
        torch.bfloat16,
        lambda groups, rate: adamw(groups, rate, rounding="kahan"),
        10,
    ),
    Arm(
        "bf16, adamw, stochastic",
        torch.bfloat16,
        lambda groups, rate: adamw(groups, rate, rounding="stochastic"),
        8,
    ),
    Arm(
        "bf16, adamw_8bit, stochastic",
        torch.bfloat16,
        lambda groups, rate: BNB_ADAMW(groups, rate),
        2,
    ),
    Arm(
        "bf16, adamw_8bit alone, to nearest",
        torch.bfloat16,
        lambda groups, rate: BNB_ADAMW(groups, rate, rounding=None),
        2,
    ),
)


@dataclass(frozen=True)
class Outcome:
    loss: float
    """Of rows that it never saw."""
    moved: torch.Tensor
    """All weights, less what they were."""


def chain(seed: int) -> torch.Tensor:
    numbers = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(PEAKEDNESS * numbers, -1)


def batches(likely: torch.Tensor, first: int, count: int) -> Batches:
    found = []
    for seed in range(first, first + count):
        draw = torch.Generator().manual_seed(seed)
        row = [torch.randint(WORDS, (ROWS,), generator=draw)]
        while len(row) < LENGTH:
            row.append(torch.multinomial(likely[row[-1]], 1, generator=draw)[:, 0])
        found.append(torch.stack(row, 1))
    return found


def other_words(seed: int) -> torch.Tensor:
    """What each word becomes in the new text."""
    draw = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(WORDS, generator=draw)
    return torch.where(torch.rand(WORDS, generator=draw) < MOVED, shuffled, torch.arange(WORDS))


def base_model(seed: int, likely: torch.Tensor, steps: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        tie_word_embeddings=False,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = adamw(parameter_groups(model), 3e-3)
    for ids in batches(likely, 0, steps):
        update(model, optimizer, ids)
    return model


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def continued(
    base: PreTrainedModel, arm: Arm, rate: float, text: Batches, unseen: Batches
) -> Outcome:
    model = copy.deepcopy(base).to(arm.dtype)
    before = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = arm.make(parameter_groups(model, embeddings_apart=True), rate)
    for ids in text:
        update(model, optimizer, ids)
    model.eval()
    with torch.no_grad():
        loss = mean(model(input_ids=ids, labels=ids).loss.item() for ids in unseen)
    moved = [
        (parameter.detach().float() - start).flatten()
        for parameter, start in zip(model.parameters(), before, strict=True)
    ]
    return Outcome(loss, torch.cat(moved))


def one_seed(seed: int, rates: tuple[float, ...], steps: int) -> list[dict[str, float | str | int]]:
    """A row for each rate and arm: its loss beside that of fp32 weights, and how alike the weights moved."""
    likely, words = chain(seed), other_words(seed)
    base = base_model(seed, likely, steps)
    new = [words[ids] for ids in batches(likely, BETWEEN_STREAMS, steps)]
    unseen = [words[ids] for ids in batches(likely, 2 * BETWEEN_STREAMS, 8)]
    found: list[dict[str, float | str | int]] = []
    for rate in rates:
        whole = continued(base, REFERENCE, rate, new, unseen)
        for arm in ARMS:
            outcome = continued(base, arm, rate, new, unseen)
            alike = torch.nn.functional.cosine_similarity(outcome.moved, whole.moved, dim=0).item()
            row = {
                "seed": seed,
                "rate": rate,
                "arm": arm.name,
                "loss": outcome.loss,
                "fp32_loss": whole.loss,
                "alike": alike,
            }
            found.append(row)
    return found
