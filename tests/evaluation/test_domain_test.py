import random

import pytest

from cpt.errors import DataError
from cpt.evaluation.domain_test import CHOICES, domain_test, form
from cpt.evaluation.sets import HeldOutText

METALS = ["nickel", "cobalt", "copper", "silver", "osmium", "yttrium", "gallium", "thorium", "cerium", "barium"]
PLACES = ["reactor", "furnace", "column", "vessel", "beaker", "crucible", "condenser", "autoclave"]


def document(number):
    draw = random.Random(number)
    sentences = [
        (
            f"In step {draw.randint(1, 99)} the {draw.choice(PLACES)} was heated slowly until it held about"
            f" {draw.randint(100, 900)} degrees"
        ),
        (
            f"Afterwards the mixture was cooled in the {draw.choice(PLACES)} and was left alone for"
            f" {draw.randint(2, 90)} long hours"
        ),
        f"What remained on the filter was mostly {METALS[number % len(METALS)]}{number // len(METALS)}",
    ]
    return HeldOutText(". ".join(sentences) + ".", f"a.jsonl:{number + 1}")


DOCUMENTS = [document(number) for number in range(48)]


def test_the_right_answer_is_what_stands_in_the_document():
    texts = {one.where: one.text for one in DOCUMENTS}
    questions = domain_test(DOCUMENTS)
    for question in questions:
        assert question.context + question.choices[question.answer] in texts[question.where]
        assert len(set(question.choices)) == CHOICES
        wrong = [choice for place, choice in enumerate(question.choices) if place != question.answer]
        assert not any(question.context + choice in texts[question.where] for choice in wrong)


def test_the_same_documents_give_the_same_questions():
    assert domain_test(DOCUMENTS) == domain_test(DOCUMENTS)


def test_a_document_gives_one_question_of_each_kind_at_most():
    questions = domain_test(DOCUMENTS)
    for kind in ("cloze", "continuation"):
        places = [question.where for question in questions if question.kind == kind]
        assert len(places) == len(set(places)) >= 30


def test_terms_are_told_from_others_of_their_form_that_the_context_does_not_have():
    for question in domain_test(DOCUMENTS):
        if question.kind == "cloze":
            assert len({form(choice) for choice in question.choices}) == 1
            assert not any(choice.lower() in question.context.lower() for choice in question.choices)


def test_wrong_sentences_are_of_other_documents_and_as_long():
    for question in domain_test(DOCUMENTS):
        if question.kind == "continuation":
            lengths = [len(choice) for choice in question.choices]
            assert max(lengths) - min(lengths) < 120


def test_the_place_of_the_answer_tells_nothing():
    answers = [question.answer for question in domain_test(DOCUMENTS)]
    assert all(answers.count(place) > len(answers) / CHOICES / 3 for place in range(CHOICES))


def test_too_few_documents_are_told_with_the_number_needed():
    with pytest.raises(
        DataError,
        match=r"needs 30 cloze questions, but 16 held-out document\(s\) give \d+.*Hold out about \d+ documents",
    ):
        domain_test(DOCUMENTS[:16])


def test_questions_are_not_made_of_conversations():
    with pytest.raises(DataError, match="made of plain texts, and the 2 documents are conversations or pairs"):
        domain_test([HeldOutText("\x1euser\nWhy?", "a:1"), HeldOutText("\x1dprompt\nWhy?", "a:2")])
