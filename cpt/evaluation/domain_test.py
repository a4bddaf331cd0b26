"""Make questions by rules from the user's held-out documents: fill in the right term, continue with the right
sentence.

No manual labels are needed: the right answer is in the document. The wrong ones are of the same kind and come from
other documents, so a model that knows the language but not the domain has to guess. The same documents give the same
questions. A document gives at most one question of each kind, so questions are independent, as confidence intervals
require.
"""

import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from cpt.data.readers.example import MARK, PART
from cpt.data.store.tokenization import adds_bos
from cpt.errors import DataError
from cpt.evaluation.scoring import batches, evaluation_mode, score_tokens, sum_over_processes
from cpt.evaluation.sets import HeldOutText
from cpt.evaluation.tasks import FEWEST_QUESTIONS, LONGEST_QUESTION

KINDS = ("cloze", "continuation")
CHOICES = 4
MOST_QUESTIONS = 1000  # interval of about 3 points; more cost time for little precision
CONTEXT_CHARACTERS = 1000
SHORTEST_CONTEXT = 80
# letters; a term occurs in at most this share of documents
SHORTEST_WORD = 4
COMMON_SHARE = 0.2
SENTENCE_LENGTHS = range(20, 301)  # characters
NEIGHBOURS = 40  # wrong terms are drawn from this many, closest in frequency

SENTENCE = re.compile(r"[^\n]+?(?:[.!?。！？](?=\s|$|[^\x00-\x7f])|(?=\n)|$)")
WORD = re.compile(r"[^\W\d_]\w*(?:-\w+)*")


@dataclass(frozen=True)
class Question:
    kind: str
    where: str
    context: str
    choices: tuple[str, ...]
    answer: int

    def __str__(self) -> str:
        """`manuals.jsonl:7: the end of the question, with its answer`"""
        text = self.context + self.choices[self.answer]
        return f"{self.where}: {text[-LONGEST_QUESTION:]}"


def domain_test(documents: Iterable[HeldOutText], *, most: int = MOST_QUESTIONS) -> list[Question]:
    """Make at most `most` questions of each kind from held-out documents that no compared model was trained on. Raises
    DataError if they give fewer than `FEWEST_QUESTIONS`, or are conversations or pairs."""
    given = list({document.text: document for document in documents}.values())
    unique = [document for document in given if not document.text.startswith((PART, MARK))]
    if given and not unique:
        raise DataError(
            f"questions are made from plain texts, but the {len(given)} documents are conversations or pairs"
        )
    if len(unique) > 2 * most:
        unique = random.Random(0).sample(unique, 2 * most)
    # Split into sentences, or into lines if there are none, as in code.
    sentences = [
        [one for one in SENTENCE.finditer(document.text) if one.group().strip()]
        for document in unique
    ]
    questions = [*cloze(unique, sentences)[:most], *continuations(unique, sentences)[:most]]
    counts = Counter(question.kind for question in questions)
    fewest = min(FEWEST_QUESTIONS, most)
    for kind in KINDS:
        if counts[kind] < fewest:
            needed = "longer documents"
            if counts[kind]:
                needed = f"about {-(-fewest * len(unique) // counts[kind]):,} documents like these"
            raise DataError(
                f"the domain test needs {fewest} {kind} questions, but {len(unique)} held-out document(s) give"
                f" {counts[kind]}: at most one each, and only from two consecutive sentences or lines. Hold out"
                f" {needed} (`evaluation.held_out_share`, or a larger file)."
            )
    return questions


def cloze(
    documents: Sequence[HeldOutText], sentences: Sequence[Sequence[re.Match[str]]]
) -> list[Question]:
    """The last term of a sentence among terms of the same form and similar frequency. None of the terms occurs in the
    context, so the answer cannot be copied."""
    counts = Counter(word for document in documents for word in set(WORD.findall(document.text)))
    most = max(2, int(COMMON_SHARE * len(documents)))
    by_form: dict[str, list[tuple[int, str]]] = {}
    for count, word in sorted((count, word) for word, count in counts.items()):
        if len(word) >= SHORTEST_WORD and count <= most:
            by_form.setdefault(form(word), []).append((count, word))
    questions = []
    for document, parts in zip(documents, sentences, strict=True):
        draw = random.Random(f"0 cloze {document.text}")
        for sentence in draw.sample(parts, len(parts)):
            question = gap(document, sentence, by_form, counts, draw)
            if question is not None:
                questions.append(question)
                break
    return questions


def gap(
    document: HeldOutText,
    sentence: re.Match[str],
    by_form: dict[str, list[tuple[int, str]]],
    counts: Counter[str],
    draw: random.Random,
) -> Question | None:
    """A question about the last term of a sentence; None if the term is common, or if too few terms share its form."""
    words = [
        found for found in WORD.finditer(sentence.group()) if len(found.group()) >= SHORTEST_WORD
    ]
    if not words:
        return None
    term = words[-1].group()
    end = sentence.start() + words[-1].start()
    alike = by_form.get(form(term), [])
    place = bisect_left(alike, (counts[term], term))
    if place >= len(alike) or alike[place][1] != term:
        return None
    context = document.text[max(0, end - CONTEXT_CHARACTERS) : end]
    if len(context.strip()) < SHORTEST_CONTEXT or term.lower() in context.lower():
        return None
    near = alike[max(0, place - NEIGHBOURS // 2) : place + NEIGHBOURS // 2 + 1]
    wrong = [
        word
        for _, word in near
        if word.lower() != term.lower() and word.lower() not in context.lower()
    ]
    return ask("cloze", document, context, term, wrong, draw)


def form(word: str) -> str:
    """The form of a term: case, marks, digits, and approximate length."""
    case = "upper" if word.isupper() else "lower" if word == word.lower() else "inner capitals"
    case = "capital" if case == "inner capitals" and word[0].isupper() else case
    marks = "".join(mark for mark in ("_", "-") if mark in word)
    digit = "1" if any(letter.isdigit() for letter in word) else ""
    return f"{case} {marks}{digit} {min(len(word) // 3, 5)}"


def continuations(
    documents: Sequence[HeldOutText], sentences: Sequence[Sequence[re.Match[str]]]
) -> list[Question]:
    """The next sentence among sentences of other documents."""
    usable = [
        [one for one in parts if len(one.group().strip()) in SENTENCE_LENGTHS]
        for parts in sentences
    ]
    pool = [(number, parts) for number, parts in enumerate(usable) if parts]
    questions = []
    for number, (document, parts) in enumerate(zip(documents, usable, strict=True)):
        draw = random.Random(f"0 continuation {document.text}")
        later = [one for one in parts if one.start() >= SHORTEST_CONTEXT]
        if not later:
            continue
        chosen = draw.choice(later)
        start = chosen.start()
        sentence = chosen.group()
        context = document.text[max(0, start - CONTEXT_CHARACTERS) : start]
        right = sentence.strip()
        own = {one.group().strip() for one in parts}
        # One per document, like the right answer: otherwise most would come from long documents of one kind.
        others = [
            some
            for other, some in draw.sample(pool, min(len(pool), 20 * CHOICES))
            if other != number
        ]
        drawn = [draw.choice(some).group().strip() for some in others]
        candidates = [text for text in drawn if text not in own]
        candidates.sort(
            key=lambda text: abs(len(text) - len(right))
        )  # so that length is not a hint
        indent = sentence[: len(sentence) - len(sentence.lstrip())]
        question = ask(
            "continuation", document, context + indent, right, candidates[: 5 * CHOICES], draw
        )
        if question is not None:
            questions.append(question)
    return questions


def ask(
    kind: str,
    document: HeldOutText,
    context: str,
    right: str,
    wrong: Sequence[str],
    draw: random.Random,
) -> Question | None:
    """Put the right answer among wrong ones in random order; None if there are too few."""
    others = sorted(set(wrong) - {right})
    if len(others) < CHOICES - 1:
        return None
    choices = [right, *draw.sample(others, CHOICES - 1)]
    draw.shuffle(choices)
    return Question(kind, document.where, context, tuple(choices), choices.index(right))


IGNORED = -100


class Candidate(NamedTuple):
    ids: list[int]
    first: int  # index of the first token of the choice
    num_bytes: int


def answer_questions(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    batch_size: int,
    longest: int,
) -> NDArray[np.bool_]:
    """Whether the model gives the right choice of each question the highest likelihood; every process gets the same
    result. The log-likelihood is divided by the bytes of the choice, as in lm-eval's acc_norm, so that neither long
    choices nor small tokens are a disadvantage. Texts of more than `longest` tokens are truncated at the start."""
    pairs = [(question.context, choice) for question in questions for choice in question.choices]
    candidates = [candidate(tokenizer, *pair, longest) for pair in pairs]
    # Batch texts of similar length to reduce padding.
    by_length = sorted(range(len(candidates)), key=lambda number: -len(candidates[number].ids))
    device = next(model.parameters()).device
    scores = torch.zeros(len(candidates), dtype=torch.float64, device=device)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with evaluation_mode(model):
        for places, counts in batches(len(candidates), batch_size):
            numbers = [by_length[place] for place in places]
            ids = []
            labels = []
            for some in (candidates[number] for number in numbers):
                ids.append(torch.tensor(some.ids))
                labels.append(torch.tensor([IGNORED] * some.first + some.ids[some.first :]))
            # Texts are padded on the right, which a causal model does not attend to.
            logits = inner(
                input_ids=pad_sequence(ids, batch_first=True).to(device), use_cache=False
            ).logits
            nats, _, _ = score_tokens(
                logits, pad_sequence(labels, batch_first=True, padding_value=IGNORED).to(device)
            )
            if counts:
                sizes = torch.tensor(
                    [candidates[number].num_bytes for number in numbers], device=device
                )
                scores[torch.tensor(numbers, device=device)] = nats.sum(1) / sizes
    sum_over_processes(scores)
    ends = np.cumsum([len(question.choices) for question in questions])
    chosen = [int(part.argmin()) for part in np.split(scores.cpu().numpy(), ends[:-1])]
    return np.array(
        [one == question.answer for one, question in zip(chosen, questions, strict=True)], bool
    )


def candidate(
    tokenizer: PreTrainedTokenizerBase, context: str, choice: str, longest: int
) -> Candidate:
    """The ids of a context with a choice. Spaces between them count to the choice, as in most tokenizers."""
    space = context[len(context.rstrip()) :]
    before = tokenizer(context.rstrip(), add_special_tokens=False)["input_ids"]
    whole = tokenizer(context + choice, add_special_tokens=False)["input_ids"]
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    ids = [*begin, *whole]
    # A token across the boundary counts to the choice: otherwise a choice that merges into the context would cost
    # nothing.
    differ = (
        place for place, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]
    )
    shared = next(differ, len(before))
    first = len(begin) + min(shared, len(whole) - 1)
    cut = max(0, len(ids) - longest)
    return Candidate(ids[cut:], max(1, first - cut), len((space + choice).encode()))
