import random

import pytest

from cpt.data.readers.decontamination import EvaluationDocument, read_runs

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.fixture
def runs():
    return read_runs(EvaluationDocument("exam", f"exam.jsonl:{number}", text(number)) for number in range(1, 41))


@pytest.mark.parametrize("begin", [0, 7, 30])
def test_half_a_document_is_found_whatever_stands_around_it(runs, begin):
    planted = text(17).split()[begin : begin + 30]
    found = runs.find(f"{text(900, 500)} {' '.join(planted)} {text(901)}")
    assert (found.set_name, found.where, found.words) == ("exam", "exam.jsonl:17", " ".join(planted[:8]))
    assert found.is_contaminated and found.share == 0.5


def test_less_than_half_is_a_phrase_and_no_contamination(runs):
    words = text(17).split()
    found = runs.find(f"{text(900)} {' '.join(words[5:34])} {text(901)}")
    assert found.where == "exam.jsonl:17" and not found.is_contaminated and found.share == pytest.approx(29 / 60)
    assert runs.find(f"{text(900)} {' '.join(words[5:12])} {text(901)}") is None


def test_a_part_of_a_document_is_found_where_it_is_half_of_what_is_trained_on():
    book = read_runs([EvaluationDocument("book", "1", text(1, 5000))])
    part = " ".join(text(1, 5000).split()[400:460])
    assert (
        book.find(f"{part} {text(2, 50)}").is_contaminated and not book.find(f"{part} {text(2, 70)}").is_contaminated
    )


def test_case_and_punctuation_do_not_hide_it(runs):
    planted = ",\n".join(f'"{word.upper()}!"' for word in text(17).split()[:40])
    assert (found := runs.find(planted)).where == "exam.jsonl:17" and found.is_contaminated


def test_what_many_evaluation_documents_share_tells_nothing():
    header = text(999, 30)
    runs = read_runs(EvaluationDocument("code", str(number), f"{header} {text(number)}") for number in range(100))
    assert runs.find(f"{header} {text(2000)}") is None
    copy = runs.find(f"{text(2000, 200)} {' '.join(text(3).split()[:35])}")
    assert copy.is_contaminated and copy.share == pytest.approx(35 / 67), (
        "a header's last words make runs with a document's first ones"
    )


def test_chinese_is_compared_by_characters():
    runs = read_runs([EvaluationDocument("zh", "1", "催化剂是一种能加快化学反应速度而本身不被消耗的物质")])
    assert runs.find("他写道:催化剂是一种能加快化学反应速度而本身不被消耗").is_contaminated
    assert runs.find("催化剂是一种很贵的金属,大多数工厂都不愿意购买它") is None
