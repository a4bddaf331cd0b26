import os
import random

import pytest

from cpt.data.readers.decontamination import EvaluationDocument, read_runs, runs_of_files
from cpt.data.readers.filters import build_components, reason_to_drop
from cpt.data.rows.contamination import find_contamination, with_decontamination
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut, Source

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


# Runs of words


@pytest.fixture(scope="module")
def runs():
    return read_runs(
        EvaluationDocument("exam", f"exam.jsonl:{number}", text(number)) for number in range(1, 41)
    )


@pytest.mark.parametrize("begin", [0, 7, 30])
def test_half_a_document_is_found_whatever_is_around_it(runs, begin):
    planted = text(17).split()[begin : begin + 30]
    found = runs.find(f"{text(900, 500)} {' '.join(planted)} {text(901)}")
    assert (found.set_name, found.where, found.words) == (
        "exam",
        "exam.jsonl:17",
        " ".join(planted[:8]),
    )
    assert found.is_contaminated and found.share == 0.5


def test_less_than_half_is_a_phrase_and_no_contamination(runs):
    words = text(17).split()
    found = runs.find(f"{text(900)} {' '.join(words[5:34])} {text(901)}")
    assert (
        found.where == "exam.jsonl:17"
        and not found.is_contaminated
        and found.share == pytest.approx(29 / 60)
    )
    assert runs.find(f"{text(900)} {' '.join(words[5:12])} {text(901)}") is None


def test_a_part_of_a_document_is_found_where_it_is_half_of_what_is_trained_on():
    book = read_runs([EvaluationDocument("book", "1", text(1, 2000))])
    part = " ".join(text(1, 2000).split()[400:460])
    found = book.find(f"{part} {text(2, 50)}")
    assert found.is_contaminated
    assert (found.share, found.own_share) == (60 / 2000, 60 / 110)
    assert not book.find(f"{part} {text(2, 70)}").is_contaminated


def test_case_and_punctuation_do_not_hide_it(runs):
    planted = ",\n".join(f'"{word.upper()}!"' for word in text(17).split()[:40])
    assert (found := runs.find(planted)).where == "exam.jsonl:17" and found.is_contaminated


def test_words_that_many_evaluation_documents_share_are_ignored():
    header = text(999, 30)
    runs = read_runs(
        EvaluationDocument("code", str(number), f"{header} {text(number)}") for number in range(100)
    )
    assert runs.find(f"{header} {text(2000)}") is None
    copy = runs.find(f"{text(2000, 200)} {' '.join(text(3).split()[:35])}")
    # The header's last 7 words make runs with a document's first ones.
    assert copy.is_contaminated and copy.share == pytest.approx(35 / 67)


def test_chinese_is_compared_by_characters():
    runs = read_runs(
        [EvaluationDocument("zh", "1", "催化剂是一种能加快化学反应速度而本身不被消耗的物质")]
    )
    assert runs.find("他写道:催化剂是一种能加快化学反应速度而本身不被消耗").is_contaminated
    assert runs.find("催化剂是一种很贵的金属,大多数工厂都不愿意购买它") is None


# In the sources of a recipe


@pytest.fixture
def exam(source):
    return Evaluation(
        perplexity=[HeldOut(path=source("exam", [text(n) for n in range(40)]).path, name="exam")]
    )


def test_a_document_that_is_held_out_of_its_source_is_no_copy_of_itself(source, tmp_path):
    data = Data(sources=[source("a", [text(number) for number in range(60)])])
    found = find_contamination(data, Evaluation(held_out_share=0.3))
    assert (
        found.num_exact_copies == 0
        and found.evaluated > 5
        and found.documents == {"a": 60 - found.evaluated}
    )


@pytest.mark.heavy
def test_workers_find_what_one_process_finds(source, exam, tmp_path, monkeypatch):
    texts = [text(1000 + n, 40) + (f" {text(n % 40)} " if n % 50 == 0 else "") for n in range(600)]
    texts[101] = texts[501] = text(3)
    data = Data(sources=[source("a", texts)])
    alone = find_contamination(data, exam)
    monkeypatch.setattr("cpt.data.store.parallel.POOL_BYTES", 1)
    monkeypatch.setattr("cpt.data.rows.contamination.PIECE_BYTES", 60_000)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert find_contamination(data, exam) == alone
    assert (alone.num_contaminated, alone.num_exact_copies) == (12, 2)


# The filter


def data_of(*filters):
    return Data(
        sources=[Source(path="a.jsonl")],
        filters=[Component(name="length", min_characters=5), *filters],
    )


@pytest.fixture
def exam_text(tmp_path):
    (tmp_path / "exam.txt").write_text(text(5))
    return Evaluation(perplexity=[HeldOut(path=str(tmp_path / "exam.txt"), name="exam")])


@pytest.fixture
def dropped(tmp_path):
    """`dropped(data, evaluation, 5, 7)`: why documents with these texts are dropped."""

    def reasons(data, evaluation, *seeds):
        filters = with_decontamination(data, evaluation, tmp_path / "cache").filters
        built = build_components("filter", {"data.filters": filters})
        return [
            reason_to_drop({"text": f"{text(seed)} copied", "source": "s", "where": "w"}, built)
            for seed in seeds
        ]

    return reasons


def test_files_of_the_users_own_are_looked_for_too(exam_text, dropped, tmp_path):
    (tmp_path / "quiz.txt").write_text(text(7))
    data = data_of(Component(name="decontaminate", against=[str(tmp_path / "quiz.txt")]))
    assert dropped(data, exam_text, 5, 7, 8) == ["contaminated: exam", "contaminated: quiz", None]
    assert dropped(data_of(), exam_text, 5, 7) == ["contaminated: exam", None]


def test_documents_held_out_by_their_hash_are_looked_for_in_all_sources(build, source):
    first = source("first", [text(number) for number in range(60)])
    second = source("second", [f"{text(number)} copied" for number in range(60)])
    built = build(first, second, evaluation=Evaluation(held_out_share=0.3))
    one, other = built.sources
    assert other.dropped["contaminated: first"] + other.documents + other.held_out == 60
    held_out = built.held_out["first"].num_documents + built.held_out["second"].num_documents
    assert held_out > 20 and max(one.documents, other.documents) < 60 - held_out / 2
    assert "contaminated: second" in one.dropped


def test_the_index_is_read_again_only_when_a_file_changed(exam_text, tmp_path, monkeypatch):
    first = with_decontamination(data_of(), exam_text, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("cpt.data.rows.contamination.read_runs", None)
        assert with_decontamination(data_of(), exam_text, tmp_path / "cache") == first
    times = (tmp_path / "exam.txt").stat()
    (tmp_path / "exam.txt").write_text(text(5).replace(text(5)[:8], "other001", 1))
    os.utime(tmp_path / "exam.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (tmp_path / "exam.txt").stat().st_size == times.st_size
    assert with_decontamination(data_of(), exam_text, tmp_path / "cache") != first


def test_other_content_of_the_same_size_and_time_in_own_files_is_filtered_anew(
    build, source, tmp_path
):
    quiz, train = tmp_path / "quiz.txt", source("train", [text(100), f"{text(101)} {text(7)}"])
    quiz.write_text(text(8))
    against = Component(name="decontaminate", against=[str(quiz)])
    (before,) = build(train, filters=[against]).sources
    times = quiz.stat()
    quiz.write_text(text(7).ljust(times.st_size)[: times.st_size])
    os.utime(quiz, ns=(times.st_atime_ns, times.st_mtime_ns))
    runs_of_files.cache_clear()  # as in the next process
    (after,) = build(train, filters=[against]).sources
    assert (before.documents, after.documents) == (2, 1)


def test_the_stored_tokens_are_found_again_by_another_cache_and_place(build, source, tmp_path):
    keys = []
    for place in ("here", "there"):
        exam = tmp_path / place / "exam.txt"
        exam.parent.mkdir()
        exam.write_text(text(5))
        evaluation = Evaluation(perplexity=[HeldOut(path=str(exam), name="exam")])
        built = build(
            source("train", [text(100), f"{text(101)} {text(5)}"]),
            evaluation=evaluation,
            cache=place,
        )
        keys.append((built.chunked[0].tokenized.folder.name, built.fingerprint))
    assert keys[0] == keys[1]
