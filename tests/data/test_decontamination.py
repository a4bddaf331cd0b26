import pickle
import random
import time

import numpy as np
import pytest

from cpt.data.decontamination import Judged, decontaminate, load_runs, read_runs
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


@pytest.mark.parametrize("begin", [0, 7, 47])
def test_thirteen_words_in_a_row_are_found_whatever_stands_around_them(runs, begin):
    planted = " ".join(text(17).split()[begin : begin + 13])
    found = runs.find(f"{text(900)} {planted} {text(901)}")
    assert (found.set_name, found.where, found.words) == ("exam", "exam.jsonl:17", planted)


def test_twelve_words_in_a_row_are_not(runs):
    words = text(17).split()
    assert runs.find(f"{text(900)} {' '.join(words[5:17])} {text(901)}") is None


def test_the_same_words_in_another_order_or_with_one_changed_are_not(runs):
    words = text(17).split()[:20]
    assert runs.find(" ".join(words[::-1])) is None
    assert runs.find(" ".join([*words[:12], "another", *words[13:]])) is None


def test_case_and_punctuation_do_not_hide_it(runs):
    planted = ",\n".join(f'"{word.upper()}!"' for word in text(17).split()[:13])
    assert runs.find(planted).where == "exam.jsonl:17"


def test_an_evaluation_document_among_the_sources_is_held_out_and_not_contaminated(runs):
    assert runs.find(text(17)) is None and runs.find(text(17) + " and more").where == "exam.jsonl:17"


def test_of_a_short_question_eight_words_are_looked_for():
    runs = read_runs([Judged("quiz", "1", text(1, 9)), Judged("quiz", "2", text(2, 5))])
    assert runs.too_short == 1
    assert runs.find(text(50) + " " + text(1, 9)).where == "1"
    assert runs.find(" ".join([*text(1, 9).split()[:7], "no"])) is None
    assert runs.find(text(2, 5) + " so short a text may stand anywhere in any of the documents") is None


def test_what_many_evaluation_documents_share_tells_nothing():
    header = text(999, 30)
    runs = read_runs(Judged("code", str(number), f"{header} {text(number)}") for number in range(100))
    assert runs.find(f"{header} {text(2000)}") is None
    assert runs.find(f"{header} {text(3)}x").set_name == "code"


def test_what_two_share_is_still_looked_for():
    runs = read_runs([Judged("a", "1", text(1)), Judged("b", "2", text(1) + " with a line at its end that is new")])
    assert runs.find(text(1) + " copied").where == "1"


def test_equal_documents_count_once():
    runs = read_runs([*(Judged("a", str(number), text(1)) for number in range(50)), Judged("b", "x", text(2))])
    assert runs.find(text(1) + " copied").where == "0" and len(runs.documents) == 2


def test_chinese_is_compared_by_characters():
    runs = read_runs([Judged("zh", "1", "催化剂是一种能加快化学反应速度而本身不被消耗的物质")])
    assert runs.find("他写道:催化剂是一种能加快化学反应速度而本身不被消耗").where == "1"
    assert runs.find("催化剂是一种很贵的金属,大多数工厂都不愿意购买它") is None


def test_stored_runs_are_the_same_and_their_name_tells_what_is_in_them(runs, tmp_path):
    path = runs.save(tmp_path)
    assert runs.save(tmp_path) == path and list(tmp_path.iterdir()) == [path]
    loaded = load_runs(str(path))
    assert loaded.find(text(900) + " " + text(17)) == runs.find(text(900) + " " + text(17))
    assert loaded.find(text(17)) is None and loaded.too_short == 0
    other = read_runs([Judged("exam", "exam.jsonl:1", text(1))])
    assert other.save(tmp_path) != path


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
    assert len(many.hashes[13]) == 200 * 188 == len(np.unique(many.hashes[13]))
