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
from cpt.hf_internals import IGNORED

KINDS = ("cloze", "continuation")
CHOICES = 4
MOST_QUESTIONS = 1000  # interval of about 3 points; more cost time for little precision
CONTEXT_CHARACTERS = 1000
SHORTEST_CONTEXT = 80  # characters
SHORTEST_WORD = 4  # letters
COMMON_SHARE = 0.2  # a term occurs in at most this share of documents
SENTENCE_LENGTHS = range(20, 301)  # characters
NEIGHBOURS = 40  # wrong terms are drawn from this many, closest in frequency

SENTENCE = re.compile(r"[^\n]+?(?:[.!?。！？](?=\s|$|[^\x00-\x7f])|(?=\n)|$)")
WORD = re.compile(r"[^\W\d_]\w*(?:-\w+)*")


@dataclass(frozen=True)
class Question:
    kind: str
    where: str
    """File and line of the document."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice."""

    def __str__(self) -> str:
        """`manuals.jsonl:7: the end of the question, with its answer`"""
        text = self.context + self.choices[self.answer]
        return f"{self.where}: {text[-LONGEST_QUESTION:]}"


def domain_test(
    documents: Iterable[HeldOutText], *, max_questions: int = MOST_QUESTIONS
) -> list[Question]:
    """Make at most `max_questions` of each kind from held-out documents that no compared model was trained on. Raises
    DataError if they give fewer than `FEWEST_QUESTIONS`, or are conversations or pairs."""
    distinct = list({document.text: document for document in documents}.values())
    plain = [document for document in distinct if not document.text.startswith((PART, MARK))]
    if distinct and not plain:
        raise DataError(
            f"questions are made from plain texts, but the {len(distinct)} documents are conversations or pairs"
        )
    if len(plain) > 2 * max_questions:
        plain = random.Random(0).sample(plain, 2 * max_questions)
    sentences = [split_sentences(document.text) for document in plain]
    questions = [
        *cloze(plain, sentences)[:max_questions],
        *continuations(plain, sentences)[:max_questions],
    ]
    refuse_too_few_questions(questions, len(plain), fewest=min(FEWEST_QUESTIONS, max_questions))
    return questions


def split_sentences(text: str) -> list[re.Match[str]]:
    """The sentences of a text, or its lines if it has none, as in code."""
    return [sentence for sentence in SENTENCE.finditer(text) if sentence.group().strip()]


def refuse_too_few_questions(questions: Sequence[Question], documents: int, fewest: int) -> None:
    counts = Counter(question.kind for question in questions)
    for kind in KINDS:
        count = counts[kind]
        if count >= fewest:
            continue
        needed = "longer documents"
        if count:
            needed = f"about {-(-fewest * documents // count):,} documents like these"
        raise DataError(
            f"the domain test needs {fewest} {kind} questions, but {documents} held-out document(s) give"
            f" {count}: at most one each, and only from two consecutive sentences or lines. Hold out"
            f" {needed} (`evaluation.held_out_share`, or a larger file)."
        )


def cloze(
    documents: Sequence[HeldOutText], sentences: Sequence[Sequence[re.Match[str]]]
) -> list[Question]:
    """The last term of a sentence among terms of the same form and similar frequency. None of the terms occurs in the
    context, so the answer cannot be copied."""
    counts = Counter[str]()
    for document in documents:
        counts.update(set(WORD.findall(document.text)))
    most_documents = max(2, int(COMMON_SHARE * len(documents)))
    terms_by_form: dict[str, list[tuple[int, str]]] = {}
    for count, term in sorted((count, term) for term, count in counts.items()):
        if len(term) >= SHORTEST_WORD and count <= most_documents:
            terms_by_form.setdefault(form(term), []).append((count, term))
    questions = []
    for document, own_sentences in zip(documents, sentences, strict=True):
        draw = random.Random(f"0 cloze {document.text}")
        for sentence in draw.sample(own_sentences, len(own_sentences)):
            question = gap(document, sentence, terms_by_form, counts, draw)
            if question is not None:
                questions.append(question)
                break
    return questions


def gap(
    document: HeldOutText,
    sentence: re.Match[str],
    terms_by_form: dict[str, list[tuple[int, str]]],
    counts: Counter[str],
    draw: random.Random,
) -> Question | None:
    """A question about the last term of a sentence; None if the term is common, or if too few terms share its form."""
    matches = []
    for match in WORD.finditer(sentence.group()):
        if len(match.group()) >= SHORTEST_WORD:
            matches.append(match)
    if not matches:
        return None
    term = matches[-1].group()
    end = sentence.start() + matches[-1].start()
    same_form = terms_by_form.get(form(term), [])
    index = bisect_left(same_form, (counts[term], term))
    if index >= len(same_form) or same_form[index][1] != term:
        return None
    context = document.text[max(0, end - CONTEXT_CHARACTERS) : end]
    context_lower = context.lower()
    if len(context.strip()) < SHORTEST_CONTEXT or term.lower() in context_lower:
        return None
    reach = NEIGHBOURS // 2
    wrong = []
    for _, other in same_form[max(0, index - reach) : index + reach + 1]:
        if other.lower() != term.lower() and other.lower() not in context_lower:
            wrong.append(other)
    return ask("cloze", document, context, term, wrong, draw)


def form(term: str) -> str:
    """The form of a term: case, marks, digits, and approximate length."""
    if term.isupper():
        case = "upper"
    elif term == term.lower():
        case = "lower"
    elif term[0].isupper():
        case = "capital"
    else:
        case = "inner capitals"
    marks = "".join(mark for mark in ("_", "-") if mark in term)
    digit = "1" if any(letter.isdigit() for letter in term) else ""
    return f"{case} {marks}{digit} {min(len(term) // 3, 5)}"


def continuations(
    documents: Sequence[HeldOutText], sentences: Sequence[Sequence[re.Match[str]]]
) -> list[Question]:
    """The next sentence among sentences of other documents."""
    usable = [list(filter(has_usable_length, its_sentences)) for its_sentences in sentences]
    pool = [(number, its_sentences) for number, its_sentences in enumerate(usable) if its_sentences]
    questions = []
    for number, document in enumerate(documents):
        question = continuation(number, document, usable[number], pool)
        if question is not None:
            questions.append(question)
    return questions


def has_usable_length(sentence: re.Match[str]) -> bool:
    return len(sentence.group().strip()) in SENTENCE_LENGTHS


def continuation(
    number: int,
    document: HeldOutText,
    sentences: Sequence[re.Match[str]],
    pool: Sequence[tuple[int, Sequence[re.Match[str]]]],
) -> Question | None:
    """A question about a sentence of a document; `pool` has the number and the sentences of each document."""
    draw = random.Random(f"0 continuation {document.text}")
    later = [sibling for sibling in sentences if sibling.start() >= SHORTEST_CONTEXT]
    if not later:
        return None
    sentence = draw.choice(later)
    right = sentence.group().strip()
    # One per document, like the right answer: otherwise most would come from long documents of one kind.
    wrong = []
    for other, its_sentences in draw.sample(pool, min(len(pool), 20 * CHOICES)):
        if other != number:
            wrong.append(draw.choice(its_sentences).group().strip())
    own_texts = {sibling.group().strip() for sibling in sentences}
    wrong = [text for text in wrong if text not in own_texts]
    wrong.sort(key=lambda text: abs(len(text) - len(right)))  # so that length is not a hint
    # An indent is part of the context: all choices are stripped.
    indent = len(sentence.group()) - len(sentence.group().lstrip())
    context = document.text[
        max(0, sentence.start() - CONTEXT_CHARACTERS) : sentence.start() + indent
    ]
    return ask("continuation", document, context, right, wrong[: 5 * CHOICES], draw)


def ask(
    kind: str,
    document: HeldOutText,
    context: str,
    right: str,
    wrong: Sequence[str],
    draw: random.Random,
) -> Question | None:
    """Put the right answer among wrong ones in random order; None if there are too few."""
    distinct = sorted(set(wrong) - {right})
    if len(distinct) < CHOICES - 1:
        return None
    choices = [right, *draw.sample(distinct, CHOICES - 1)]
    draw.shuffle(choices)
    return Question(
        kind=kind,
        where=document.where,
        context=context,
        choices=tuple(choices),
        answer=choices.index(right),
    )


class Candidate(NamedTuple):
    """A context with one of the choices."""

    ids: list[int]
    first: int  # index of the first token of the choice
    num_bytes: int  # of the choice


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
    candidates = []
    for question in questions:
        for choice in question.choices:
            candidates.append(candidate(tokenizer, question.context, choice, longest))
    scores = nats_per_byte(model, candidates, batch_size)
    is_right = []
    start = 0
    for question in questions:
        end = start + len(question.choices)
        is_right.append(int(scores[start:end].argmin()) == question.answer)
        start = end
    return np.array(is_right, bool)


def nats_per_byte(
    model: nn.Module, candidates: Sequence[Candidate], batch_size: int
) -> NDArray[np.float64]:
    """The negative log-likelihood of each choice, divided by its bytes."""
    # Batch texts of similar length to reduce padding.
    by_length = sorted(range(len(candidates)), key=lambda number: -len(candidates[number].ids))
    device = next(model.parameters()).device
    scores = torch.zeros(len(candidates), dtype=torch.float64, device=device)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with evaluation_mode(model):
        for indexes, are_counted in batches(len(candidates), batch_size):
            numbers = [by_length[index] for index in indexes]
            batch = [candidates[number] for number in numbers]
            ids = [torch.tensor(text.ids) for text in batch]
            labels = list(map(labels_of_choice, batch))
            # Texts are padded on the right, which a causal model does not attend to.
            input_ids = pad_sequence(ids, batch_first=True).to(device)  # (B, T)
            targets = pad_sequence(labels, batch_first=True, padding_value=IGNORED).to(device)
            logits = inner(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
            nats, _, _ = score_tokens(logits, targets)
            if are_counted:
                num_bytes = torch.tensor([text.num_bytes for text in batch], device=device)
                scores[torch.tensor(numbers, device=device)] = nats.sum(1) / num_bytes
    sum_over_processes(scores)
    return scores.cpu().numpy()


def labels_of_choice(candidate: Candidate) -> torch.Tensor:
    return torch.tensor([IGNORED] * candidate.first + candidate.ids[candidate.first :])


def candidate(
    tokenizer: PreTrainedTokenizerBase, context: str, choice: str, longest: int
) -> Candidate:
    """The ids of a context with a choice. Spaces between them count to the choice, as in most tokenizers."""
    stripped = context.rstrip()
    context_ids = tokenizer(stripped, add_special_tokens=False)["input_ids"]
    ids = tokenizer(context + choice, add_special_tokens=False)["input_ids"]
    # A token across the boundary counts to the choice: otherwise a choice that merges into the context would cost
    # nothing.
    first = 0
    while first < min(len(context_ids), len(ids) - 1) and context_ids[first] == ids[first]:
        first += 1
    if adds_bos(tokenizer):
        ids = [tokenizer.bos_token_id, *ids]
        first += 1
    cut = max(0, len(ids) - longest)
    return Candidate(
        ids=ids[cut:],
        first=max(1, first - cut),  # the first token of a text is not predicted
        num_bytes=len((context[len(stripped) :] + choice).encode()),
    )
