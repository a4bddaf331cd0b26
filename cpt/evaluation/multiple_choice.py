"""Which of several continuations a model finds most likely."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from cpt.data.store.tokenization import adds_bos
from cpt.evaluation.domain_test import Question
from cpt.evaluation.perplexity import batches, evaluation_mode, score_tokens, sum_over_processes

IGNORED = -100


class Candidate(NamedTuple):
    """The ids of a question with one of its choices."""

    ids: list[int]
    first: int
    """Where the choice begins."""
    num_bytes: int
    """Of the choice."""


def answer_questions(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    batch_size: int,
    longest: int,
) -> NDArray[np.bool_]:
    """Whether the model finds the right choice of each question the most likely; every process gets the same result.

    The log-likelihood is divided by the bytes of the choice, as in lm-eval's acc_norm, so that neither long choices
    nor small tokens are a disadvantage.

    Args:
        batch_size: questions with one choice each in one forward pass.
        longest: tokens of a text, at most; the beginning of longer ones is cut off.
    """
    candidates = [
        candidate(tokenizer, question.context, choice, longest)
        for question in questions
        for choice in question.choices
    ]
    # Texts of similar length share a batch: little padding.
    by_length = sorted(range(len(candidates)), key=lambda number: -len(candidates[number].ids))
    device = next(model.parameters()).device
    scores = torch.zeros(len(candidates), dtype=torch.float64, device=device)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with evaluation_mode(model):
        for places, counts in batches(len(candidates), batch_size):
            numbers = [by_length[place] for place in places]
            ids, labels = (part.to(device) for part in stack([candidates[number] for number in numbers]))
            # Padding stands behind each text, where a causal model does not look.
            nats, _, _ = score_tokens(inner(input_ids=ids, use_cache=False).logits, labels)
            if counts:
                sizes = torch.tensor([candidates[number].num_bytes for number in numbers], device=device)
                scores[torch.tensor(numbers, device=device)] = nats.sum(1) / sizes
    sum_over_processes(scores)
    ends = np.cumsum([len(question.choices) for question in questions])
    chosen = [int(part.argmin()) for part in np.split(scores.cpu().numpy(), ends[:-1])]
    return np.array([one == question.answer for one, question in zip(chosen, questions, strict=True)], bool)


def candidate(tokenizer: PreTrainedTokenizerBase, context: str, choice: str, longest: int) -> Candidate:
    """The ids of a context with a choice. Spaces between them belong to the choice, as in most tokenizers."""
    space = context[len(context.rstrip()) :]
    before = tokenizer(context.rstrip(), add_special_tokens=False)["input_ids"]
    whole = tokenizer(context + choice, add_special_tokens=False)["input_ids"]
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    ids = [*begin, *whole]
    # A piece that reaches over the boundary is the choice's: otherwise a choice that melts into the context would cost
    # nothing.
    shared = next(
        (place for place, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), len(before)
    )
    first = len(begin) + min(shared, len(whole) - 1)
    cut = max(0, len(ids) - longest)
    return Candidate(ids[cut:], max(1, first - cut), len((space + choice).encode()))


def stack(candidates: Sequence[Candidate]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of a batch, padded; only the choices have labels."""
    longest = max(len(one.ids) for one in candidates)
    ids = [F.pad(torch.tensor(one.ids), (0, longest - len(one.ids))) for one in candidates]
    wanted = [[IGNORED] * one.first + one.ids[one.first :] for one in candidates]
    labels = [F.pad(torch.tensor(line), (0, longest - len(line)), value=IGNORED) for line in wanted]
    return torch.stack(ids), torch.stack(labels)
