import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from approved import check_approved
from threads_as_ranks import on_ranks
from tiny_checkpoints import random_llama

from cpt.errors import DataError
from cpt.evaluation.domain_test import (
    CHOICES,
    Candidate,
    Question,
    answer_questions,
    candidate,
    cloze,
    domain_test,
    form,
    nats_per_byte,
    split_sentences,
)
from cpt.evaluation.sets import HeldOutText

METALS = [
    "nickel",
    "cobalt",
    "copper",
    "silver",
    "osmium",
    "yttrium",
    "gallium",
    "thorium",
    "cerium",
    "barium",
]
PLACES = ["reactor", "furnace", "column", "vessel", "beaker", "crucible", "condenser", "autoclave"]


def document(number):
    draw = random.Random(number)
    text = (
        f"In step {draw.randint(1, 99)} the {draw.choice(PLACES)} was heated slowly until it held about"
        f" {draw.randint(100, 900)} degrees. Afterwards the mixture was cooled in the {draw.choice(PLACES)} and was"
        f" left alone for {draw.randint(2, 90)} long hours. What remained on the filter was mostly"
        f" {METALS[number % len(METALS)]}{number // len(METALS)}."
    )
    return HeldOutText(text, f"a.jsonl:{number + 1}")


DOCUMENTS = [document(number) for number in range(48)]


@pytest.fixture(scope="module")
def questions():
    return domain_test(DOCUMENTS)


def test_only_the_right_answer_is_in_the_document(questions):
    texts = {one.where: one.text for one in DOCUMENTS}
    for question in questions:
        assert len(set(question.choices)) == CHOICES
        found = [question.context + choice in texts[question.where] for choice in question.choices]
        assert found == [place == question.answer for place in range(CHOICES)]


def test_the_same_documents_give_the_same_questions(questions):
    assert domain_test(DOCUMENTS) == questions


def test_a_document_gives_one_question_of_each_kind_at_most(questions):
    for kind in ("cloze", "continuation"):
        places = [question.where for question in questions if question.kind == kind]
        assert len(places) == len(set(places)) >= 30


def test_neither_form_length_nor_place_gives_the_answer_away(questions):
    for question in questions:
        if question.kind == "cloze":
            assert len({form(choice) for choice in question.choices}) == 1
            assert not any(
                choice.lower() in question.context.lower() for choice in question.choices
            )
        else:
            lengths = [len(choice) for choice in question.choices]
            assert max(lengths) - min(lengths) < 120
    answers = [question.answer for question in questions]
    assert all(answers.count(place) > len(answers) / CHOICES / 3 for place in range(CHOICES))


def test_questions_are_as_many_as_wanted_from_twice_as_many_documents(questions):
    places = [one.where for one in DOCUMENTS]
    for most in (10, 30):
        found = domain_test(DOCUMENTS, max_questions=most)
        kinds = [question.kind for question in found]
        assert kinds == ["cloze"] * most + ["continuation"] * most
        read = [places.index(question.where) for question in found if question.kind == "cloze"]
        assert (read == sorted(read)) is (most == 30)  # 10 are of a random sample
    assert all(question in questions for question in found), "all 48 documents were read"


def test_too_few_documents_are_refused_with_the_number_needed():
    with pytest.raises(DataError, match=r"30 .* 16 .*\d+ documents"):
        domain_test(DOCUMENTS[:16])


def test_questions_are_not_made_of_conversations():
    with pytest.raises(DataError, match="plain texts"):
        domain_test([HeldOutText("\x1euser\nWhy?", "a:1"), HeldOutText("\x1dprompt\nWhy?", "a:2")])


def various(number):
    """Documents of other shapes: short and long ones, lines without an end, rare terms of many forms."""
    draw = random.Random(number)
    terms = [
        "NATO",
        "Geneva",
        "iPhone",
        "well-known",
        "log_rate",
        "B52",
        "abc",
        "Unüblich",
        "温度計",
    ]
    sentences = []
    for place in range(draw.randint(2, 40)):
        words = draw.choices(PLACES + METALS, k=draw.randint(1, 12))
        words.append(f"{draw.choice(terms)}{draw.choice(['', chr(97 + draw.randrange(26)) * 3])}")
        sentences.append(
            "  " * (place % 3) + " ".join(words) + draw.choice([". ", "!\n", "\n", "？"])
        )
    return HeldOutText("".join(sentences), f"b.jsonl:{number + 1}")


def test_questions_of_various_documents_are_those_that_a_person_has_approved():
    """One line each: kind, place, length and end of the context, begins of choices, number of the answer."""
    lines = []
    for one in domain_test([various(number) for number in range(70)], max_questions=40):
        begin = [one.kind, one.where, str(len(one.context)), repr(one.context[-12:])]
        lines.append(
            " | ".join([*begin, *(choice[:24] for choice in one.choices), str(one.answer)]) + "\n"
        )
    check_approved("".join(lines), Path(__file__).with_name("approved_questions.txt"))


def test_twice_as_many_documents_as_questions_are_all_read_and_one_more_is_not(monkeypatch):
    read = []

    def note(documents, sentences):
        read.append([one.where for one in documents])
        return cloze(documents, sentences)

    monkeypatch.setattr("cpt.evaluation.domain_test.cloze", note)
    for count in (48, 47):
        domain_test(DOCUMENTS[:count], max_questions=24 if count == 48 else 23)
    assert read[0] == [one.where for one in DOCUMENTS] and len(set(read[1])) == 46


@pytest.mark.parametrize(
    ("term", "other", "is_alike"),
    [
        ("reactor", "furnace", True),
        ("Geneva", "geneva", False),
        ("NATO", "Nato", False),
        ("iPhone", "iphone", False),
        ("log_rate", "log-rate", False),
        ("B52", "BAD", False),
        ("abc", "abcdef", False),  # thirds of the length
        ("abc", "abcde", True),
        ("a" * 15, "a" * 40, True),  # all long terms are alike
        ("a" * 14, "a" * 15, False),
    ],
)
def test_terms_are_alike_by_case_marks_digits_and_length(term, other, is_alike):
    assert (form(term) == form(other)) is is_alike


def test_sentences_without_a_long_word_are_no_gaps():
    text = "It is so as we do. " * 9
    assert cloze([HeldOutText(text, "a:1")], [split_sentences(text)]) == []


# Answering

QUESTIONS = [
    Question(
        "cloze", "a:1", "the model reads a document and ", ("learns", "domain", "which", "other"), 2
    ),
    Question(
        "continuation",
        "a:2",
        "the text of its domain",
        (" the other word", " a document", " in", " model"),
        0,
    ),
    Question("cloze", "a:3", "a word in ", ("the", "text", "its", "number"), 1),
]


def scores_by_hand(model, tokenizer, question):
    scores = []
    for choice in question.choices:
        one = candidate(tokenizer, question.context, choice, 999)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([one.ids]), use_cache=False).logits[0]
        wanted = torch.tensor(one.ids[one.first :])
        scores.append(
            F.cross_entropy(logits[one.first - 1 : -1], wanted, reduction="sum").item()
            / one.num_bytes
        )
    return scores


def test_the_answer_is_the_likeliest_choice_by_byte_at_any_batch_size(tokenizer):
    model = random_llama()
    by_question = [scores_by_hand(model, tokenizer, question) for question in QUESTIONS]
    expected = [
        scores.index(min(scores)) == question.answer
        for scores, question in zip(by_question, QUESTIONS, strict=True)
    ]
    candidates = [
        candidate(tokenizer, question.context, choice, 128)
        for question in QUESTIONS
        for choice in question.choices
    ]
    for batch_size in (1, 5, 100):
        found = answer_questions(model, tokenizer, QUESTIONS, batch_size=batch_size, longest=128)
        assert found.tolist() == expected
        scores = nats_per_byte(model, candidates, batch_size)
        assert scores == pytest.approx(sum(by_question, []), rel=1e-5)


def test_several_processes_have_the_answers_of_one(tokenizer):
    model, sizes = random_llama(), {"batch_size": 2, "longest": 128}
    alone = answer_questions(model, tokenizer, QUESTIONS, **sizes).tolist()
    for count in (3, 5):
        found = on_ranks(count, lambda rank: answer_questions(model, tokenizer, QUESTIONS, **sizes))
        assert [answers.tolist() for answers in found] == [alone] * count


def test_space_before_a_choice_belongs_to_the_choice(tokenizer):
    one = candidate(tokenizer, "the model ", "learns", 99)
    assert tokenizer.decode(one.ids[: one.first], skip_special_tokens=True) == "the model"
    assert tokenizer.decode(one.ids[one.first :]) == " learns" and one.num_bytes == len(" learns")


def test_of_a_long_context_the_end_is_read(tokenizer):
    whole = candidate(tokenizer, "word " * 50, "learns", 999)
    one = candidate(tokenizer, "word " * 50, "learns", 12)
    assert one.ids == whole.ids[-12:] and tokenizer.decode(one.ids).endswith("learns")
    assert tokenizer.decode(one.ids[one.first :]) == " learns"
    choice = len(whole.ids) - whole.first
    cut = candidate(tokenizer, "word " * 50, "learns", choice)
    assert (len(cut.ids), cut.first) == (choice, 1), "the first token of a text is not predicted"


def test_a_begin_token_comes_before_each_text_if_the_tokenizer_adds_one(tokenizer, monkeypatch):
    one = candidate(tokenizer, "the model ", "learns", 99)
    assert one.ids[0] == tokenizer.bos_token_id
    monkeypatch.setattr("cpt.evaluation.domain_test.adds_bos", lambda _: False)
    bare = candidate(tokenizer, "the model ", "learns", 99)
    assert bare == Candidate(one.ids[1:], one.first - 1, one.num_bytes)


@pytest.mark.parametrize("context", ["the mode", "the model", "the model "])
def test_a_choice_always_costs_something(tokenizer, context):
    one = candidate(tokenizer, context, "l", 99)
    assert one.first < len(one.ids)
