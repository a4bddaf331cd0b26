import pickle
import random
import time

import numpy as np
import pytest

from cpt.data.checking.decontamination import Judged, decontaminate, key_options, load_runs, read_runs, words_of
from cpt.data.filters import build_filters, reason_to_drop
from cpt.errors import DataError
from cpt.recipe.schema import Component

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.fixture
def runs():
    return read_runs(Judged("exam", f"exam.jsonl:{number}", text(number)) for number in range(1, 41))


def view(of_text):
    return {"text": of_text, "source": "s", "where": "w"}


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
    book = read_runs([Judged("book", "1", text(1, 5000))])
    part = " ".join(text(1, 5000).split()[400:460])
    assert (
        book.find(f"{part} {text(2, 50)}").is_contaminated and not book.find(f"{part} {text(2, 70)}").is_contaminated
    )


@pytest.mark.parametrize(("count", "is_found"), [(12, False), (13, True)])
def test_the_part_has_thirteen_words_at_least(count, is_found):
    book = read_runs([Judged("book", "1", text(1, 5000))])
    assert book.find(" ".join(text(1, 5000).split()[400 : 400 + count])).is_contaminated == is_found


def test_light_edits_do_not_hide_a_copy(runs):
    words = text(17).split()
    edited = [f"other{place}" if place % 12 == 11 else word for place, word in enumerate(words)]
    assert runs.find(" ".join([text(900), *edited])).is_contaminated
    assert (
        runs.find(
            " ".join([text(900), *(f"other{place}" if place % 8 == 7 else word for place, word in enumerate(words))])
        )
        is None
    )


def test_what_is_shared_with_several_documents_is_told_of_the_one_that_it_covers_most():
    runs = read_runs([Judged("a", "1", text(1, 200)), Judged("a", "2", " ".join(text(1, 200).split()[:40]))])
    assert (
        found := runs.find(f"{text(5, 300)} {' '.join(text(1, 200).split()[:40])}")
    ).where == "2" and found.share == 1


def test_the_same_words_in_another_order_are_not_found(runs):
    assert runs.find(" ".join(text(17).split()[::-1])) is None


def test_case_and_punctuation_do_not_hide_it(runs):
    planted = ",\n".join(f'"{word.upper()}!"' for word in text(17).split()[:40])
    assert (found := runs.find(planted)).where == "exam.jsonl:17" and found.is_contaminated


def test_an_evaluation_document_among_the_sources_is_held_out_and_not_contaminated(runs):
    assert runs.find(text(17)) is None and runs.find(text(17) + " and more").where == "exam.jsonl:17"


def test_a_text_that_nobody_holds_out_has_no_copy_of_its_own():
    runs = read_runs([Judged("quiz", "1", text(1), is_held_out=False)])
    assert runs.find(text(1)).is_contaminated


def test_of_a_short_question_all_words_are_looked_for():
    runs = read_runs([Judged("quiz", "1", text(1, 9)), Judged("quiz", "2", text(2, 5))])
    assert runs.too_short == 1
    assert runs.find(text(50) + " " + text(1, 9)).is_contaminated
    assert not runs.find(" ".join([text(50), *text(1, 9).split()[:8], "no"])).is_contaminated
    assert runs.find(text(2, 5) + " so short a text may stand anywhere in any of the documents") is None


def test_what_many_evaluation_documents_share_tells_nothing():
    header = text(999, 30)
    runs = read_runs(Judged("code", str(number), f"{header} {text(number)}") for number in range(100))
    assert runs.find(f"{header} {text(2000)}") is None
    copy = runs.find(f"{text(2000, 200)} {' '.join(text(3).split()[:35])}")
    assert copy.is_contaminated and copy.share == pytest.approx(35 / 67), (
        "a header's last words make runs with a document's first ones"
    )


def test_what_two_share_is_still_looked_for():
    runs = read_runs([Judged("a", "1", text(1)), Judged("b", "2", text(1) + " with a line at its end that is new")])
    assert runs.find(text(1) + " copied").where == "1"


def test_equal_documents_count_once():
    runs = read_runs([*(Judged("a", str(number), text(1)) for number in range(50)), Judged("b", "x", text(2))])
    assert runs.find(text(1) + " copied").where == "0" and len(runs.documents) == 2


@pytest.mark.parametrize("words", ["It's 3.5 kg_of X-rays\t\x00(and\x1f so on)", "".join(map(chr, range(128)))])
def test_words_are_the_same_with_and_without_letters_beyond_ascii(words):
    assert words_of(words) == words_of(words + " é")[:-1] and words_of("É") == ["é".encode()]


def test_chinese_is_compared_by_characters():
    runs = read_runs([Judged("zh", "1", "催化剂是一种能加快化学反应速度而本身不被消耗的物质")])
    assert runs.find("他写道:催化剂是一种能加快化学反应速度而本身不被消耗").is_contaminated
    assert runs.find("催化剂是一种很贵的金属,大多数工厂都不愿意购买它") is None


def test_stored_runs_are_the_same_and_their_name_tells_what_is_in_them(runs, tmp_path):
    path = runs.save(tmp_path)
    assert runs.save(tmp_path) == path and list(tmp_path.iterdir()) == [path]
    loaded = load_runs(str(path))
    assert loaded.find(text(900) + " " + text(17)) == runs.find(text(900) + " " + text(17))
    assert loaded.find(text(17)) is None and loaded.too_short == 0
    other = read_runs([Judged("exam", "exam.jsonl:1", text(1))])
    assert other.save(tmp_path) != path


def test_where_the_documents_lie_is_not_in_what_tokens_are_found_by(tmp_path):
    here, there = (
        read_runs([Judged("exam", f"{folder}/exam.jsonl:1", text(1))]).save(tmp_path / folder) for folder in "ab"
    )
    options = [key_options("decontaminate", {"index": str(path)}) for path in (here, there)]
    assert here.name != there.name and options[0] == options[1] and "/" not in options[0]["index"]
    renamed = read_runs([Judged("other", "a/exam.jsonl:1", text(1))]).save(tmp_path)
    assert key_options("decontaminate", {"index": str(renamed)}) != options[0]


def test_damaged_runs_are_told(runs, tmp_path):
    path = runs.save(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        load_runs(str(path))


def test_the_filter_names_the_set_and_travels_to_workers(runs, tmp_path):
    filters = build_filters({"data.filters": [Component(name="decontaminate", index=str(runs.save(tmp_path)))]})
    filters = pickle.loads(pickle.dumps(filters))
    assert reason_to_drop(view(text(900) + " " + text(17)), filters) == "contaminated: exam"
    assert reason_to_drop(view(text(900)), filters) is None


def test_the_filter_reads_files_of_the_users_own(tmp_path):
    (tmp_path / "exam.txt").write_text(text(5))
    assert decontaminate(view(text(5) + " copied"), against=[str(tmp_path / "exam.txt")]) == "contaminated: exam"
    assert decontaminate(view(text(6)), against=[str(tmp_path / "exam.txt")]) is None


def test_a_search_is_fast_enough_for_a_corpus(runs):
    """10 MB a second and core were measured on an idle machine; a busy one has a tenth of the time."""
    large = [text(number, 1000) for number in range(10_000, 10_100)]
    start = time.perf_counter()
    assert not any(runs.find(one) for one in large)
    assert sum(map(len, large)) / (time.perf_counter() - start) > 1e6


def test_no_run_of_random_words_collides():
    many = read_runs(Judged("a", str(number), text(number, 200)) for number in range(200))
    assert len(many.hashes) == 200 * 193 == len(np.unique(many.hashes))
