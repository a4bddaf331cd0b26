"""Questions made by rules from the user's own held-out documents: fill in the right term, continue with the right
sentence.

Nobody writes or labels anything: the right answer is in the document. The wrong ones are of the same kind and come
from other documents, so that a model that knows the language but not the domain has to guess. The same documents and
seed give the same questions. A document gives at most one question of each kind, so that questions are independent, as
intervals need.
"""

import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpt.data.readers.example import MARK, PART
from cpt.errors import DataError
from cpt.evaluation.judged_sets import HeldOutText

KINDS = ("cloze", "continuation")
CHOICES = 4
FEWEST_QUESTIONS = 30  # of a kind; with so many the interval of an accuracy reaches about 17 points to each side
MOST_QUESTIONS = 1000  # about 3 points; more cost time and tell little
CONTEXT_CHARACTERS = 1000
SHORTEST_CONTEXT = 80
SHORTEST_WORD, COMMON_SHARE = 4, 0.2  # letters; a term stands in no more than this share of the documents
SENTENCE_LENGTHS = range(20, 301)  # characters
NEIGHBOURS = 40  # among which wrong terms are drawn: those whose frequency is closest

SENTENCE = re.compile(r"[^\n]+?(?:[.!?。！？](?=\s|$|[^\x00-\x7f])|(?=\n)|$)")
WORD = re.compile(r"[^\W\d_]\w*(?:-\w+)*")


@dataclass(frozen=True)
class Question:
    """A text and what may follow it."""

    kind: str
    """cloze or continuation."""
    where: str
    """The document's file and line."""
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Sentence:
    """A part of a document."""

    start: int
    text: str


def domain_test(
    documents: Iterable[HeldOutText], *, seed: int = 0, fewest: int = FEWEST_QUESTIONS, most: int = MOST_QUESTIONS
) -> list[Question]:
    """The questions of a held-out set.

    Args:
        documents: that no compared model was trained on.
        seed: decides which of the possible questions are used, and the wrong answers.
        fewest: questions of each kind that are needed.
        most: questions of each kind, at most.

    Raises:
        DataError: the documents give fewer, or are conversations or pairs.
    """
    given = list({document.text: document for document in documents}.values())
    unique = [document for document in given if not document.text.startswith((PART, MARK))]
    if given and not unique:
        raise DataError(
            f"its questions are made of plain texts, and the {len(given)} documents are conversations or pairs"
        )
    if len(unique) > 2 * most:
        unique = random.Random(seed).sample(unique, 2 * most)
    sentences = [split(document.text) for document in unique]
    questions = [*cloze(unique, sentences, seed)[:most], *continuations(unique, sentences, seed)[:most]]
    counts, fewest = Counter(question.kind for question in questions), min(fewest, most)
    for kind in KINDS:
        if counts[kind] < fewest:
            needed = (
                f"about {-(-fewest * len(unique) // counts[kind]):,} documents like these"
                if counts[kind]
                else "longer documents"
            )
            raise DataError(
                f"the domain test needs {fewest} {kind} questions, but {len(unique)} held-out document(s) give"
                f" {counts[kind]}: one each at most, and only where two sentences or lines follow each other. Hold out"
                f" {needed} (`evaluation.held_out_share`, or a larger file)."
            )
    return questions


def split(text: str) -> list[Sentence]:
    """The sentences of a text, in order, or its lines if it has none, as in code."""
    return [Sentence(found.start(), found.group()) for found in SENTENCE.finditer(text) if found.group().strip()]


def cloze(documents: Sequence[HeldOutText], sentences: Sequence[Sequence[Sentence]], seed: int) -> list[Question]:
    """The last term of a sentence among terms of the same form and about the same frequency.

    None of them is in the context, so that nothing can be copied.
    """
    counts = Counter(word for document in documents for word in set(WORD.findall(document.text)))
    most = max(2, int(COMMON_SHARE * len(documents)))
    by_form: dict[str, list[tuple[int, str]]] = {}
    for word, count in counts.items():
        if len(word) >= SHORTEST_WORD and count <= most:
            by_form.setdefault(form(word), []).append((count, word))
    for words in by_form.values():
        words.sort()
    questions = []
    for document, parts in zip(documents, sentences, strict=True):
        draw = random.Random(f"{seed} cloze {document.text}")
        for sentence in draw.sample(parts, len(parts)):
            question = gap(document, sentence, by_form, counts, draw)
            if question is not None:
                questions.append(question)
                break
    return questions


def gap(
    document: HeldOutText,
    sentence: Sentence,
    by_form: dict[str, list[tuple[int, str]]],
    counts: Counter[str],
    draw: random.Random,
) -> Question | None:
    """A question about the last term of a sentence; None if the term is common, or has no others of its form."""
    words = [found for found in WORD.finditer(sentence.text) if len(found.group()) >= SHORTEST_WORD]
    if not words:
        return None
    term, end = words[-1].group(), sentence.start + words[-1].start()
    alike = by_form.get(form(term), [])
    place = bisect_left(alike, (counts[term], term))
    if place >= len(alike) or alike[place][1] != term:
        return None
    context = document.text[max(0, end - CONTEXT_CHARACTERS) : end]
    if len(context.strip()) < SHORTEST_CONTEXT or term.lower() in context.lower():
        return None
    near = alike[max(0, place - NEIGHBOURS // 2) : place + NEIGHBOURS // 2 + 1]
    wrong = [word for _, word in near if word.lower() != term.lower() and word.lower() not in context.lower()]
    return ask("cloze", document, context, term, wrong, draw)


def form(word: str) -> str:
    """The form of a term: upper and lower case, marks, and about its length."""
    case = (
        "upper"
        if word.isupper()
        else "capital"
        if word[0].isupper()
        else "inner capitals"
        if word != word.lower()
        else "lower"
    )
    marks = "".join(mark for mark in ("_", "-") if mark in word) + (
        "1" if any(letter.isdigit() for letter in word) else ""
    )
    return f"{case} {marks} {min(len(word) // 3, 5)}"


def continuations(
    documents: Sequence[HeldOutText], sentences: Sequence[Sequence[Sentence]], seed: int
) -> list[Question]:
    """The next sentence among sentences of other documents."""
    usable = [[one for one in parts if len(one.text.strip()) in SENTENCE_LENGTHS] for parts in sentences]
    pool = [(number, parts) for number, parts in enumerate(usable) if parts]
    questions = []
    for number, (document, parts) in enumerate(zip(documents, usable, strict=True)):
        draw = random.Random(f"{seed} continuation {document.text}")
        later = [one for one in parts if one.start >= SHORTEST_CONTEXT]
        if not later:
            continue
        chosen = draw.choice(later)
        context, right = document.text[max(0, chosen.start - CONTEXT_CHARACTERS) : chosen.start], chosen.text.strip()
        own = {one.text.strip() for one in parts}
        # One of each document, as the right one is: else long documents, which are of a kind, would give most of them.
        others = [some for other, some in draw.sample(pool, min(len(pool), 20 * CHOICES)) if other != number]
        candidates = [draw.choice(some).text.strip() for some in others]
        candidates = [text for text in candidates if text not in own]
        candidates.sort(key=lambda text: abs(len(text) - len(right)))  # so that length tells nothing
        indent = chosen.text[: len(chosen.text) - len(chosen.text.lstrip())]
        question = ask("continuation", document, context + indent, right, candidates[: 5 * CHOICES], draw)
        if question is not None:
            questions.append(question)
    return questions


def ask(
    kind: str, document: HeldOutText, context: str, right: str, wrong: Sequence[str], draw: random.Random
) -> Question | None:
    """The right answer among wrong ones in random order; None if there are too few."""
    others = sorted(set(wrong) - {right})
    if len(others) < CHOICES - 1:
        return None
    choices = [right, *draw.sample(others, CHOICES - 1)]
    draw.shuffle(choices)
    return Question(kind, document.where, context, tuple(choices), choices.index(right))
